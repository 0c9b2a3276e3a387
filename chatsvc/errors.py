"""The error tree. One class per thing that can go wrong in a way a caller must tell apart.

An error carries what every door needs to report it: a stable ``code``, a hint for the HTTP status, whether the
same request may succeed later, and after how many seconds. ``api/errors.py`` turns it into
``application/problem+json``; the runner turns it into an ``error`` event. Texts name what is wrong, the limit and
what to do, and never hold message text or secrets.

    ChatError
    ├── InvalidInput ─ InvalidCursor · UnknownParent · UnknownModel · CannotContinue · MessageTooLong
    │               · SystemPromptTooLong · SummaryEmpty · SummaryTooLong · MemoryFull · TooManyPins · PayloadTooLarge
    │               · HeadTooLarge
    ├── NotAuthenticated · NotAllowed
    ├── NotFound
    ├── ConversationBusy · IdempotencyMismatch · SummaryChanged
    ├── NothingLeft ─ TooManyReplies · QuotaExceeded
    ├── Unavailable ─ StoreUnavailable (─ StoreFull) · LogUnavailable · EngineUnavailable · Draining · QueueFull
    │               · TooLate
    ├── EngineFailed ─ WorkerLost
    ├── EngineRefused
    ├── Abandoned
    └── ConfigError
"""

from __future__ import annotations

from typing import Any, ClassVar, Final


class ChatError(Exception):
    """Base of all errors that chatsvc raises on purpose.

    ``extra`` holds members that the problem document carries beside the standard ones (RFC 9457 §3.2).
    """

    code: ClassVar[str] = "internal_error"
    title: ClassVar[str] = "Something went wrong on the server"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, detail: str, *, retry_after: float | None = None, **extra: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.retry_after = retry_after
        self.extra = extra


class InvalidInput(ChatError):
    """A value the caller sent is not acceptable; ``field`` (in ``extra``) names it where one is to blame."""

    code = "invalid_input"
    title = "The request is not valid"
    status = 400


class InvalidCursor(InvalidInput):
    """A cursor that is not of the form the list or the stream gave out."""

    code = "invalid_cursor"
    title = "The cursor is not valid"


class UnknownParent(InvalidInput):
    """``parent_id`` is no message of this conversation that can be answered to."""

    code = "unknown_parent"
    title = "The parent message does not exist in this conversation"
    status = 422


class UnknownModel(InvalidInput):
    """The named model is not served here."""

    code = "unknown_model"
    title = "This model is not served here"
    status = 422


class CannotContinue(InvalidInput):
    """The reply is not one that can be gone on with: it still runs, or it came to its own end."""

    code = "cannot_continue"
    title = "This reply cannot be continued"
    status = 422


class MessageTooLong(InvalidInput):
    """The prompt and its reply cannot fit the model's window. ``extra`` has the numbers, in tokens."""

    code = "message_too_long"
    title = "The conversation does not fit the model's context window"
    status = 422


class SystemPromptTooLong(InvalidInput):
    """A system prompt that would leave too little of the model's window. ``extra`` has the numbers, in tokens."""

    code = "system_prompt_too_long"
    title = "The system prompt is too long for the model's context window"
    status = 422


class MemoryFull(InvalidInput):
    """More than is kept for one user. ``extra`` has the numbers."""

    code = "memory_full"
    title = "There is no room for this memory"
    status = 422


class SummaryEmpty(InvalidInput):
    """A summary that says nothing cannot stand for anything."""

    code = "summary_empty"
    title = "The summary is empty"
    status = 422


class SummaryTooLong(InvalidInput):
    """A summary that would take more of a prompt than summaries may. ``extra`` has the numbers, in tokens."""

    code = "summary_too_long"
    title = "The summary is too long"
    status = 422


class TooManyPins(InvalidInput):
    """A conversation has as many pinned messages as it may have."""

    code = "too_many_pins"
    title = "Too many messages are pinned"
    status = 422


class PayloadTooLarge(InvalidInput):
    """The body is larger than the server reads."""

    code = "payload_too_large"
    title = "The request body is too large"
    status = 413


class HeadTooLarge(InvalidInput):
    """What comes before a request's body, or behind it, is more than the server reads."""

    code = "head_too_large"
    title = "The request's headers are too large"
    status = 431


class NotAuthenticated(ChatError):
    """Nobody vouches for the caller."""

    code = "not_authenticated"
    title = "Sign in first"
    status = 401


class NotAllowed(ChatError):
    """The caller is known, or is a browser on a foreign site, and may not do this."""

    code = "not_allowed"
    title = "This is not allowed"
    status = 403


class NotFound(ChatError):
    """No such thing for this user. An id that never was, was deleted, or is another user's: alike (L10)."""

    code = "not_found"
    title = "Not found"
    status = 404


class ConversationBusy(ChatError):
    """A reply is still running on this branch; ``extra['response_id']`` names it."""

    code = "conversation_busy"
    title = "A reply is still running on this branch"
    status = 409
    retryable = True


class IdempotencyMismatch(ChatError):
    """A ``client_msg_id`` came again with another request (L8)."""

    code = "idempotency_mismatch"
    title = "This client_msg_id was used for a different request"
    status = 409


class SummaryChanged(ChatError):
    """A summary has a newer version than the one that was read; ``extra['version']`` is its number."""

    code = "summary_changed"
    title = "The summary was changed meanwhile"
    status = 409


class NothingLeft(ChatError):
    """The user has all they may have; ``allowance``, a ``limits.Allowance``, is how much that is."""

    code = "rate_limited"
    title = "You have all that you may have for now"
    status = 429
    retryable = True

    def __init__(
        self, detail: str, *, retry_after: float | None = None, allowance: object = None, **extra: Any
    ) -> None:
        super().__init__(detail, retry_after=retry_after, **extra)
        self.allowance = allowance


class TooManyReplies(NothingLeft):
    """The user has as many open replies as allowed; ``extra['open']`` lists their response ids."""

    code = "too_many_replies"
    title = "Too many replies are open"


class QuotaExceeded(NothingLeft):
    """The user's budget does not cover this request now; ``extra`` has the numbers, in units of service."""

    code = "quota_exceeded"
    title = "Your budget is used up for now"


class Unavailable(ChatError):
    """A part that the request needs is away; nothing was written."""

    code = "unavailable"
    title = "The service cannot take this request now"
    status = 503
    retryable = True

    def __init__(self, detail: str, *, retry_after: float | None = 2.0, **extra: Any) -> None:
        super().__init__(detail, retry_after=retry_after, **extra)


class StoreUnavailable(Unavailable):
    """Postgres cannot be reached, or refuses work for now."""

    code = "store_unavailable"
    title = "The database is not reachable"


class StoreFull(StoreUnavailable):
    """Postgres has no room left on its disk. Reading goes on, and so does writing once there is room."""

    code = "store_full"
    title = "The database's disk is full"

    def __init__(self, detail: str, *, retry_after: float | None = 10.0, **extra: Any) -> None:
        super().__init__(detail, retry_after=retry_after, **extra)


class LogUnavailable(Unavailable):
    """Redis cannot be reached, or refuses work for now."""

    code = "log_unavailable"
    title = "The stream log is not reachable"


class EngineUnavailable(Unavailable):
    """No engine can take work: still loading, dead, or restarting."""

    code = "engine_unavailable"
    title = "The model is not available"


class Draining(Unavailable):
    """This process is shutting down and takes no new work."""

    code = "draining"
    title = "This server is shutting down"


class QueueFull(Unavailable):
    """As many replies of this tier wait as may."""

    code = "queue_full"
    title = "Too many people are waiting"

    def __init__(self, detail: str, *, retry_after: float | None = 10.0, **extra: Any) -> None:
        super().__init__(detail, retry_after=retry_after, **extra)


class TooLate(Unavailable):
    """There is so much to do that the reply would begin, or would have begun, after its deadline."""

    code = "too_late"
    title = "This could not be answered in time"


class EngineFailed(ChatError):
    """The engine ended a generation with an error of its own. The reply is failed and may be tried again."""

    code = "engine_failed"
    title = "The model failed to finish this reply"
    retryable = True


class EngineRefused(ChatError):
    """A healthy engine will not take this prompt; it would not the next time either."""

    code = "engine_refused"
    title = "The model does not take this request"
    status = 502


class WorkerLost(EngineFailed):
    """The worker that held the run's lease is gone (L6)."""

    code = "worker_lost"
    title = "The server working on this reply went away"


class Abandoned(ChatError):
    """The reply was stopped since nobody read it: no failure, and it may be gone on with."""

    code = "abandoned"
    title = "Nobody was reading, so it was stopped"
    retryable = True


class ConfigError(ChatError):
    """The configuration cannot be used. ``problems`` has every fault, one line each."""

    code = "config_error"
    title = "The configuration is not valid"

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def _tree(kind: type[ChatError]) -> dict[str, type[ChatError]]:
    found = {kind.code: kind}
    for child in kind.__subclasses__():
        found |= _tree(child)
    return found


_BY_CODE: Final = _tree(ChatError)


def kind_of(code: str) -> type[ChatError]:
    """The class with this code; ``ChatError`` itself for codes that are not of this tree (an older version's, say)."""
    return _BY_CODE.get(code, ChatError)
