"""The door to the queue: validate, admit, then write, in one transaction (L8). Nothing is half-done behind an error.

came before? ─▶ model, content ─▶ prompt fits the window? ─▶ a free place? ─▶ store.submit: owner, parent, busy, open
replies, rows ─▶ begun at once, or offered to the queue
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import msgspec

from chatsvc.conversation import BranchView, Message
from chatsvc.errors import (
    CannotContinue,
    ConversationBusy,
    EngineUnavailable,
    InvalidInput,
    NotFound,
    StoreUnavailable,
    UnknownModel,
    UnknownParent,
)
from chatsvc.events import clean_text
from chatsvc.ids import new_message_id, new_response_id
from chatsvc.inference.base import Engine
from chatsvc.limits import Principal, ServiceCost, Tier, TierName
from chatsvc.run import RunStatus, WaitingRun, waiting
from chatsvc.scheduler.admission import EXPECTED_OUTPUT, expected_cost
from chatsvc.scheduler.dispatch import Dispatcher, Place
from chatsvc.scheduler.prompts import Prepared, Prompts, Wanted
from chatsvc.store import Moved, Regeneration, Store, Submission, Submitted

STOPPING_WAIT_S: Final = 1.0
"""A message sent right after a stop waits so long for that reply's end."""
STOPPING_POLL_S: Final = 0.02
TITLE_CHARS: Final = 60
CUT_MARKS: Final = " .,;:!?…-–—。、，；：！？"
"""Not kept before the "…" of a title that was cut: "like this.…" reads as a slip."""
MAX_CLIENT_MSG_ID_CHARS: Final = 200


class NewMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A user message to be answered. ``parent_id`` UNSET = the conversation's head, None = a new root."""

    content: str
    client_msg_id: str
    parent_id: str | msgspec.UnsetType | None = msgspec.UNSET
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    background: bool = False


class NewAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A wish to have a user message answered again."""

    client_msg_id: str
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    background: bool = False
    continues: Message | None = None
    """The reply to go on with: a stopped, failed or cut-off answer to that message."""


class Submitter:
    """Takes messages in. ``engines`` may be empty in a process without the worker role:

    the runner checks sizes then.
    """

    def __init__(
        self,
        *,
        store: Store,
        engines: Mapping[str, Engine],
        models: frozenset[str],
        default_model: str,
        tiers: Mapping[TierName, Tier],
        region: str,
        max_content_chars: int,
        is_ready: Callable[[str], bool],
        check_log: Callable[[], Awaitable[None]],
        dispatcher: Dispatcher,
        prompts: Prompts,
        cost: ServiceCost,
    ) -> None:
        self._cost = cost
        self._check_log = check_log
        self._dispatcher = dispatcher
        self._prompts = prompts
        self._store = store
        self._engines = engines
        self._models = models
        self._default_model = default_model
        self._tiers = tiers
        self._region = region
        self._max_content_chars = max_content_chars
        self._is_ready = is_ready

    async def message(self, principal: Principal, conversation_id: str, new: NewMessage) -> Submitted:
        """Store a user message and queue its reply.

        Raises ``InvalidInput`` and its kinds, ``NotFound``, ``IdempotencyMismatch``, ``ConversationBusy``,
        ``TooManyReplies``, ``QuotaExceeded``, ``Unavailable`` and its kinds.
        """
        request_hash = _hash("message", conversation_id, new)

        async def submit() -> Submitted:
            return await self._message(principal, conversation_id, new, request_hash)

        return await self._after_a_stop(submit)

    async def _message(
        self, principal: Principal, conversation_id: str, new: NewMessage, request_hash: bytes
    ) -> Submitted:
        ground = await self._store.runs.ground(
            principal.user_id, conversation_id, new.parent_id, _checked_id(new.client_msg_id), request_hash
        )
        if ground.known is not None:
            return ground.known
        await self._check_log()
        content = self._checked_content(new.content)
        conversation = ground.conversation
        if conversation is None:
            raise NotFound("There is no such conversation.")
        view = ground.view
        if new.parent_id not in {None, msgspec.UNSET} and view is None:
            raise UnknownParent("The parent is not a message of this conversation.", field="parent_id")
        if view is not None:
            await self._refuse_running(principal, view.leaf)
        model = self._checked_model(new.model or conversation.model)
        wanted = Wanted(
            model=model,
            conversation=conversation,
            view=view.branch if view else BranchView(summary=None, pinned=(), verbatim=()),
            leaf_id=view.leaf.id if view else None,
            question=content,
            max_tokens=new.max_tokens,
        )
        prepared, size, charge = await self._fitting_prompt(wanted)
        wish = self._wish(principal, model, size, new.max_tokens)
        with self._dispatcher.place(wish) as place:
            submitted = await self._store.runs.submit(
                Submission(
                    principal=principal,
                    conversation_id=conversation_id,
                    parent_id=view.leaf.id if view else None,
                    content=content,
                    title=None if conversation.title else title_from(content),
                    client_msg_id=new.client_msg_id,
                    request_hash=request_hash,
                    model=model,
                    max_tokens=new.max_tokens,
                    temperature=new.temperature,
                    background=new.background,
                    tier=self._tiers[principal.tier],
                    charge=charge,
                    prompt_tokens=size,
                    user_message_id=new_message_id(),
                    message_id=new_message_id(),
                    response_id=wish.id,
                    user_tokens=await self._tokens(model, content),
                    at_head=new.parent_id is msgspec.UNSET,
                    owner=place.owner,
                    context=prepared.report if prepared and place.owner else None,
                )
            )
            self._begin(submitted, place, prepared)
        return submitted

    async def answer_again(self, principal: Principal, user_message_id: str, new: NewAnswer) -> Submitted:
        """Queue another reply to a user message that is there already: a sibling. Raises as ``message`` does."""
        return await self._after_a_stop(lambda: self._answer_again(principal, user_message_id, new))

    async def _answer_again(self, principal: Principal, user_message_id: str, new: NewAnswer) -> Submitted:
        request_hash = _hash("answer", user_message_id, new)
        client_msg_id = _checked_id(new.client_msg_id)
        if (replay := await self._store.runs.replay(principal.user_id, client_msg_id, request_hash)) is not None:
            return replay
        await self._check_log()
        message = await self._store.conversations.owner_of_message(principal.user_id, user_message_id)
        conversation, view = await self._store.conversations.view(
            principal.user_id, message.conversation_id, user_message_id
        )
        model = self._checked_model(new.model or conversation.model)
        wanted = Wanted(
            model=model,
            conversation=conversation,
            view=view,
            leaf_id=user_message_id,
            continued=_continuable(new.continues) if new.continues is not None else None,
            max_tokens=new.max_tokens,
        )
        prepared, size, charge = await self._fitting_prompt(wanted)
        wish = self._wish(principal, model, size, new.max_tokens)
        with self._dispatcher.place(wish) as place:
            submitted = await self._store.runs.regenerate(
                Regeneration(
                    principal=principal,
                    user_message_id=user_message_id,
                    client_msg_id=client_msg_id,
                    request_hash=request_hash,
                    model=model,
                    max_tokens=new.max_tokens,
                    temperature=new.temperature,
                    background=new.background,
                    tier=self._tiers[principal.tier],
                    charge=charge,
                    prompt_tokens=size,
                    message_id=new_message_id(),
                    response_id=wish.id,
                    continues_message_id=new.continues.id if new.continues else None,
                    owner=place.owner,
                    context=prepared.report if prepared and place.owner else None,
                )
            )
            # The text that is gone on with may have grown since it was read: the runner reads it again.
            self._begin(submitted, place, prepared if new.continues is None else None)
        return submitted

    async def _refuse_running(self, principal: Principal, parent: Message) -> None:
        """A reply that is still written has no text to be answered to. Raises ``ConversationBusy`` and ``Moved``."""
        if parent.status.ended or parent.response_id is None:
            return
        run = await self._store.runs.get(principal.user_id, parent.response_id)
        if run.status.ended:
            raise Moved
        raise ConversationBusy(
            "A reply is still running on this branch. Wait for its end, or stop it.",
            response_id=run.id,
            stop_requested=run.stop_requested,
        )

    def _wish(self, principal: Principal, model: str, prompt_tokens: int, max_tokens: int | None) -> WaitingRun:
        """The run that is to be, under its id."""
        return WaitingRun(
            id=new_response_id(self._region),
            user_id=principal.user_id,
            tier=principal.tier,
            model=model,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
        )

    def _begin(self, submitted: Submitted, place: Place, prepared: Prepared | None) -> None:
        run = submitted.run
        if not submitted.created:
            return
        if place.owner is not None:
            place.take(run, prepared)
        else:
            self._dispatcher.offer(waiting(run))

    def _checked_content(self, content: str) -> str:
        content = clean_text(content)
        if not content.strip():
            raise InvalidInput("The message is empty. Write something to answer.", field="content")
        if len(content) > self._max_content_chars:
            raise InvalidInput(
                f"The message has {len(content)} characters; at most {self._max_content_chars} are taken.",
                field="content",
                limit=self._max_content_chars,
            )
        return content

    def check_model(self, model: str) -> None:
        """Raises ``UnknownModel`` when the model is not served here."""
        if model not in self._models:
            raise UnknownModel(
                f"The model {model!r} is not served here. Served: {', '.join(sorted(self._models))}.", field="model"
            )

    def _checked_model(self, wanted: str | None) -> str:
        model = wanted or self._default_model
        self.check_model(model)
        if not self._is_ready(model):
            raise EngineUnavailable(f"The model {model!r} is not ready. Try again shortly.", retry_after=5)
        return model

    async def _fitting_prompt(self, wanted: Wanted) -> tuple[Prepared | None, int, float]:
        """The prompt, by the model's own count; its tokens; and what the reply is expected to cost.

        No prompt where the model is not: there the size is a guess, and the worker's count decides. Raises
        ``MessageTooLong``.
        """
        if wanted.model not in self._engines:
            guess = self._prompts.guess(wanted)
            limit = EXPECTED_OUTPUT if wanted.max_tokens is None else wanted.max_tokens
            return None, guess, expected_cost(self._cost, prompt_tokens=guess, reply_limit=limit)
        prepared = await self._prompts.prepare(wanted)
        tokens = prepared.prompt.tokens
        return prepared, tokens, expected_cost(self._cost, prompt_tokens=tokens, reply_limit=prepared.reply_limit)

    async def _tokens(self, model: str, content: str) -> int | None:
        """The message's tokens, without template."""
        engine = self._engines.get(model)
        return None if engine is None else len(await engine.encode(content))

    async def _after_a_stop(self, submit: Callable[[], Awaitable[Submitted]]) -> Submitted:
        """Submit, and again when what the request stood on has changed meanwhile.

        When the branch is busy with a reply that is being stopped, wait for its end first.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + STOPPING_WAIT_S
        while True:
            try:
                return await submit()
            except Moved as error:
                if loop.time() >= give_up:
                    raise StoreUnavailable("The conversation is changing too fast. Try again.") from error
                continue
            except ConversationBusy as busy:
                if not busy.extra.pop("stop_requested", False) or loop.time() >= give_up:
                    raise
                response_id = str(busy.extra["response_id"])
            while not await self._store.runs.ended([response_id]):
                if loop.time() >= give_up:
                    break
                await asyncio.sleep(STOPPING_POLL_S)


def _checked_id(client_msg_id: str) -> str:
    if not 0 < len(client_msg_id) <= MAX_CLIENT_MSG_ID_CHARS or not client_msg_id.isprintable():
        raise InvalidInput(
            f"client_msg_id must be 1 to {MAX_CLIENT_MSG_ID_CHARS} printable characters, new for each message.",
            field="client_msg_id",
        )
    return client_msg_id


def title_from(content: str) -> str:
    """The first words of a message, as a conversation's title until somebody names it."""
    words = " ".join(content.split())
    if len(words) <= TITLE_CHARS:
        return words
    cut = words[:TITLE_CHARS]
    whole = cut[: cut.rfind(" ")] if " " in cut[TITLE_CHARS // 2 :] else cut
    return (whole.rstrip(CUT_MARKS) or whole) + "…"


def _continuable(reply: Message) -> Message:
    """The reply, if there is more to say. Raises ``CannotContinue``."""
    if reply.status in {RunStatus.STOPPED, RunStatus.FAILED} or reply.finish_reason == "length":
        return reply
    raise CannotContinue(
        "Only a reply that was stopped, failed, or reached its limit of tokens can be continued. "
        "To have the message answered once more, leave out 'continue'.",
        field="continue",
    )


def _hash(kind: str, target: str, new: NewMessage | NewAnswer) -> bytes:
    """A digest of all that makes the request what it is:

    the same id with another digest is a different request (L8).
    """
    if isinstance(new, NewAnswer) and new.continues is not None:
        # What it says may have grown by a late checkpoint; which one it is, is the request.
        kind, target, new = "continue", new.continues.id, msgspec.structs.replace(new, continues=None)
    body = msgspec.json.encode([kind, target, msgspec.to_builtins(new)], order="deterministic")
    return hashlib.sha256(body).digest()
