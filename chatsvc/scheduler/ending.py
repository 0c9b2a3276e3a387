"""How an end looks: one function from how a run ended to its terminal event, for log and replay alike (L3, L5)."""

from __future__ import annotations

from collections import Counter

import structlog
from msgspec import UNSET

from chatsvc.errors import ChatError, kind_of
from chatsvc.events import Done, Error, Event
from chatsvc.limits import Usage
from chatsvc.run import Outcome, Run, RunKind, RunStatus
from chatsvc.store import Store
from chatsvc.streamlog.base import Fenced
from chatsvc.streamlog.writer import LogWriter

_log = structlog.get_logger(__name__)


def _terminal_event(
    *,
    status: RunStatus,
    message_id: str,
    finish_reason: str | None,
    usage: Usage,
    error_code: str | None,
    error_message: str | None,
) -> Event:
    """The event that ends the log of a run that ended like this. A stopped one may say why, and is no failure."""
    if status is RunStatus.FAILED:
        code = error_code or ChatError.code
        kind = kind_of(code)
        return Error(code=code, message=error_message or kind.title, retryable=kind.retryable)
    return Done(
        message_id=message_id,
        finish_reason=finish_reason or "stop",
        usage=usage,
        error_code=UNSET if error_code is None else error_code,
    )


def terminal_event_of(run: Run) -> Event | None:
    """The event that ends the log of this run; None while it has not ended."""
    if not run.status.ended:
        return None
    return _terminal_event(
        status=run.status,
        message_id=run.message_id,
        finish_reason="stopped" if run.status is RunStatus.STOPPED else run.finish_reason,
        usage=run.usage,
        error_code=run.error_code,
        error_message=run.error_message,
    )


def seq_of_end(last_seq: int, kept: str) -> int:
    """The terminal event's seq, of a run that ends in the queue: text that was kept goes before it, as one delta."""
    return last_seq + (2 if kept else 1)


def terminal_event_for(message_id: str, outcome: Outcome) -> Event:
    """The event that ends the log of a run with this outcome."""
    return _terminal_event(
        status=outcome.status,
        message_id=message_id,
        finish_reason=outcome.finish_reason,
        usage=outcome.usage,
        error_code=outcome.error_code,
        error_message=outcome.error_message,
    )


async def end_queued(
    store: Store,
    writer: LogWriter,
    run: Run,
    kind: type[ChatError],
    message: str,
    ttl_s: float,
    count: Counter[tuple[str, str]],
) -> bool:
    """End a run that waits as failed, with a plain sentence, and ``count`` it if it is a reply, by model and status.

    False: it did not wait any more, and nothing changed.
    """
    kept = await store.runs.kept_text(run)
    outcome = Outcome(
        status=RunStatus.FAILED,
        text=kept,
        last_seq=seq_of_end(run.last_seq, kept),
        error_code=kind.code,
        error_message=message,
    )
    ended = await store.runs.finish_queued(run.id, outcome)
    if ended is not None and ended.kind is RunKind.REPLY:  # nobody reads how a fold ends
        count[ended.model, ended.status.value] += 1
        await announce(writer, ended, kept, ttl_s)
    return ended is not None


async def announce(writer: LogWriter, run: Run, kept: str, ttl_s: float) -> None:
    """Append the end of a run that has ended in the store while it was queued, unless its log holds it already.

    ``kept`` is the text that the run would have gone on with: the message has it, so readers are shown it (L3).
    Readers learn of the end from the store all the same when this cannot be written.
    """
    event = terminal_event_of(run)
    if event is None:
        raise ValueError(f"run {run.id} has not ended")
    try:
        reply = await writer.open(run.id, run.attempt, after=run.last_seq - seq_of_end(0, kept))
    except Fenced:
        return
    if reply.last_seq < run.last_seq:
        reply.delta(kept, 0)
        reply.seal()
        reply.event(event)
    await reply.close(ttl_s)
    _log.info("run ended elsewhere was announced", run_id=run.id, status=run.status)
