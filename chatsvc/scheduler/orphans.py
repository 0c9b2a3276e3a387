"""Settles runs that this process holds and nobody works on: those of dead workers, and claims whose answer was lost.

    text was shown ─▶ failed and retryable, with all that was shown (a stop that was asked for: stopped)
    nothing shown  ─▶ queued again; failed when it was lost too often: it may be what ends its workers
    cannot be told, since the log is away ─▶ looked at again for a while, then failed: nothing is sampled twice (L6)
    cannot be told, since it was lost     ─▶ failed at once

Where the log cannot tell which numbers readers have seen, the end gets one far beyond them (``LEAP``): so nobody takes
it for an event seen before, and whoever comes with such a cursor is led on by a snapshot (L7).

Each is settled in a task of its own, a few at a time. One that fails is found again by the next heartbeats, as a stray.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

import msgspec
import structlog

from chatsvc.clock import Clock
from chatsvc.errors import LogUnavailable, NotFound, StoreUnavailable, UnknownModel, WorkerLost
from chatsvc.events import Entry
from chatsvc.limits import Usage
from chatsvc.run import MOST_LOSSES, Outcome, Run, RunKind, RunStatus
from chatsvc.scheduler.ending import end_queued, terminal_event_for
from chatsvc.scheduler.lost_usage import CountTokens, usage_of_lost
from chatsvc.store import SettledReply, Store
from chatsvc.streamlog.base import Fenced, StreamLog
from chatsvc.streamlog.snapshot import text_through
from chatsvc.streamlog.writer import LogWriter, ReplyWriter

_log = structlog.get_logger(__name__)

AT_ONCE: Final = 8
LOG_PATIENCE_S: Final = 8.0
"""How long the log of a run that may have shown something is waited for."""
MAX_ENTRIES: Final = 1_000_000
"""More than any reply has: the log of an orphan is read whole."""
LEAP: Final = MAX_ENTRIES
OPENING_S: Final = 1.0
"""A log that was begun by its worker was opened this soon after that took the run; a loss before that is none of it."""
UNSERVED: Final = "unserved"
LOST_FOLD_MESSAGE: Final = "The server working on this summary went away, again and again."
LOST_MESSAGE: Final = "The server working on this reply went away. What it had written is kept. Try again."
LOST_TOO_OFTEN_MESSAGE: Final = (
    f"{MOST_LOSSES} times the server or the model working on this reply went away before it had written anything, so it"
    " is not begun again by itself. Try again."
)


class _Shown(msgspec.Struct, frozen=True):
    """The last event that readers may have seen, and the text up to it."""

    seq: int
    text: str
    certain: bool
    """The log told. Otherwise this is the last checkpoint, and readers may have seen more."""
    entries: tuple[Entry, ...] = ()
    """What the log told, where it did."""


class _LogAway(Exception):
    """What was shown cannot be told now."""


class Orphans:
    """Owns the tasks that settle. ``aclose`` it before the store."""

    def __init__(
        self,
        *,
        store: Store,
        log: StreamLog,
        writer: LogWriter,
        clock: Clock,
        log_ttl_s: float,
        count_tokens: CountTokens,
        ended: Counter[tuple[str, str]],
    ) -> None:
        """``ended`` counts the replies that are ended here, by model and status."""
        self._ended = ended
        self._count_tokens = count_tokens
        self._store = store
        self._streamlog = log
        self._writer = writer
        self._clock = clock
        self._log_ttl_s = log_ttl_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(AT_ONCE)
        self._first_seen: dict[str, float] = {}

    def run_ids(self) -> set[str]:
        """The runs being settled now."""
        return set(self._tasks)

    def settle(self, run_id: str) -> None:
        """Settle a run that this process holds, beside whatever else it does."""
        if run_id not in self._tasks:
            self._first_seen.setdefault(run_id, self._clock.monotonic())
            self._tasks[run_id] = asyncio.create_task(self._settle_safely(run_id), name=f"settle {run_id}")

    def settle_unserved(self) -> None:
        """Fail queued runs of models that no living worker serves (any more), though some worker lives."""
        if UNSERVED not in self._tasks:
            self._tasks[UNSERVED] = asyncio.create_task(self._fail_unserved(), name="settle unserved runs")

    async def aclose(self) -> None:
        """Cancel what is under way and wait for it."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _settle_safely(self, run_id: str) -> None:
        try:
            async with self._places:
                await self._settle(run_id)
            self._first_seen.pop(run_id, None)
        except (StoreUnavailable, _LogAway) as error:
            _log.warning("orphan not settled yet", run_id=run_id, reason=str(error))
        except Exception as error:  # noqa: BLE001
            # The run stays ours and is found again; the loops that keep the lease must not go down with it.
            _log.exception("orphan not settled", run_id=run_id, error_type=type(error).__name__)
        finally:
            del self._tasks[run_id]

    async def _settle(self, run_id: str) -> None:
        try:
            stored = await self._store.runs.reply(run_id)
        except NotFound:
            return  # its conversation was deleted, and its log with it
        run = stored.run
        if run.status is not RunStatus.STREAMING:
            return
        if run.kind is RunKind.FOLD:
            await self._settle_fold(run)
            return
        try:
            # Opening fences the old worker off before its log is read: what is read is all there will ever be.
            reply = await self._writer.open(run.id, run.attempt, after=run.last_seq)
        except Fenced:
            _log.warning("orphan's log is ahead of its run", run_id=run.id, attempt=run.attempt)
            return
        try:
            await self._end(run, stored, reply)
        except BaseException:
            reply.discard()
            raise

    async def _settle_fold(self, run: Run) -> None:
        """Nothing of it was seen by anybody: it is done again, unless that went wrong too often."""
        if run.losses + 1 < MOST_LOSSES and await self._store.runs.requeue(run.id, run.attempt, lost=True):
            _log.info("orphaned fold queued again", run_id=run.id)
            return
        outcome = Outcome(
            status=RunStatus.FAILED,
            text="",
            last_seq=0,
            usage=run.usage,
            error_code=WorkerLost.code,
            error_message=LOST_FOLD_MESSAGE,
        )
        if await self._store.runs.finish(run.id, run.attempt, outcome):
            _log.warning("orphaned fold ended", run_id=run.id)

    async def _end(self, run: Run, stored: SettledReply, reply: ReplyWriter) -> None:
        shown = await self._shown(run, stored)
        text = shown.text
        nothing_shown = shown.certain and not text and not run.stop_requested
        losses = run.losses + 1
        too_often = nothing_shown and losses >= MOST_LOSSES
        again = nothing_shown and not too_often
        if again and await self._store.runs.requeue(run.id, run.attempt, reply.last_seq, lost=True):
            await reply.close(None)
            _log.info("orphan queued again", run_id=run.id, losses=losses)
            return
        stopped = run.stop_requested
        usage = await self._usage(run, shown)
        # The log may have come back between the two looks at it.
        reply.last_seq = max(reply.last_seq, shown.seq) + (0 if shown.certain else LEAP)
        if not text:
            # What it goes on with is kept, though it came to say nothing: the log is to show the same (L3).
            text = stored.text
            if shown.certain:
                reply.delta(text, 0)
        outcome = Outcome(
            status=RunStatus.STOPPED if stopped else RunStatus.FAILED,
            text=text,
            last_seq=reply.seal(),
            finish_reason="stopped" if stopped else None,
            usage=usage,
            error_code=None if stopped else WorkerLost.code,
            error_message=None if stopped else LOST_TOO_OFTEN_MESSAGE if too_often else LOST_MESSAGE,
        )
        if not await self._store.runs.finish(run.id, run.attempt, outcome):
            reply.discard()
            return
        self._ended[run.model, outcome.status.value] += 1
        reply.event(terminal_event_for(run.message_id, outcome))
        await reply.close(self._log_ttl_s)
        _log.warning("orphan ended", run_id=run.id, status=outcome.status.value, losses=losses)

    async def _shown(self, run: Run, stored: SettledReply) -> _Shown:
        """By the log, else by the last checkpoint. Raises ``_LogAway`` while it is worth asking again."""
        # Before the first checkpoint the stored text is at most what the reply began with.
        saved = (stored.text_seq, stored.text) if stored.text_seq else (0, "")
        try:
            logged = await self._streamlog.read(run.id, 0, limit=MAX_ENTRIES)
            # A log that holds no more than the mark just made is that of a run that has not begun, or one that was lost
            # with all it had shown. Of one that holds an earlier attempt's mark or entry the end may be lost: with a
            # server whose replica took over, or that came back with an older copy.
            begun = bool(logged.entries) or 0 < logged.oldest_attempt < run.attempt
            lost = await self._may_be_lost(run, OPENING_S if begun else 0.0)
        except LogUnavailable as error:
            waited_s = self._clock.monotonic() - self._first_seen[run.id]
            if saved[1] or waited_s > LOG_PATIENCE_S:
                _log.warning("orphan settled without its log", run_id=run.id, reason=error.detail)
                return _Shown(*saved, certain=False)
            raise _LogAway(error.detail) from error
        shown = text_through(logged.entries) or text_through(logged.entries, seq=saved[0], text=saved[1])
        if shown is None or shown[0] < saved[0]:
            lost, shown = True, saved
        if lost:
            _log.warning("orphan's log was lost, or its end", run_id=run.id)
        return _Shown(*shown, certain=not lost, entries=tuple(logged.entries))

    async def _usage(self, run: Run, shown: _Shown) -> Usage:
        """What it had used, as far as can be told."""
        if not shown.entries:
            return run.usage
        generated = shown.text
        if run.continues_message_id is not None:
            try:
                kept = await self._store.conversations.owner_of_message(run.user_id, run.continues_message_id)
            except NotFound:
                return run.usage
            generated = generated.removeprefix(kept.content)
        return await usage_of_lost(run, shown.entries, generated, self._count_tokens)

    async def _may_be_lost(self, run: Run, slack_s: float) -> bool:
        """Whether logs were lost since ``slack_s`` after a worker took the run. Raises ``LogUnavailable``."""
        unbroken_s = await self._streamlog.unbroken_s(run.id)
        # Asked last: a pause in between makes the run older than it was, never the loss. And asked of the database,
        # which dated its beginning: this machine's clock may go otherwise.
        return unbroken_s < await self._store.runs.held_s(run.id) - slack_s

    async def _fail_unserved(self) -> None:
        try:
            for run in await self._store.runs.unserved():
                message = f"The model {run.model} is not served any more. Choose another one."
                ttl_s = self._log_ttl_s
                if await end_queued(self._store, self._writer, run, UnknownModel, message, ttl_s, self._ended):
                    _log.warning("queued run of an unserved model ended", run_id=run.id, model=run.model)
        except StoreUnavailable as error:
            _log.warning("unserved runs not looked for", reason=error.detail)
        finally:
            del self._tasks[UNSERVED]
