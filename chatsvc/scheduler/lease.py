"""Keeps this worker's lease alive, and takes over the runs of workers whose lease ran out (L6).

A worker's heartbeat in Postgres is the lease of all its runs: one row a process, renewed every ``renew_s``. A run
belongs to the worker named in its row, at the attempt named there, as long as that worker's heartbeat is fresh.

Whoever finds a stale worker takes its runs over under a new attempt, which fences the log; then each is ended or queued
again by what its log and its checkpoint hold: nothing that was shown is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from typing import Final

import structlog

from chatsvc.clock import Clock
from chatsvc.errors import LogUnavailable, StoreUnavailable, WorkerLost
from chatsvc.run import Outcome, Run, RunStatus
from chatsvc.scheduler.active import Interrupt
from chatsvc.scheduler.dispatch import Dispatcher
from chatsvc.scheduler.ending import terminal_event
from chatsvc.store import Store
from chatsvc.streamlog.base import Fenced, StreamLog
from chatsvc.streamlog.snapshot import text_through
from chatsvc.streamlog.writer import LogWriter

_log = structlog.get_logger(__name__)

MAX_ENTRIES: Final = 1_000_000
"""More than any reply has: the log of an orphan is read whole."""
LOST_MESSAGE: Final = "The server working on this reply went away. What it had written is kept. Try again."


class LeaseKeeper:
    """One loop: renew, hear of stops whose notification was lost, take over what is orphaned."""

    def __init__(
        self,
        *,
        store: Store,
        log: StreamLog,
        writer: LogWriter,
        dispatcher: Dispatcher,
        roles: Sequence[str],
        capacity: int,
        renew_s: float,
        ttl_s: float,
        log_ttl_s: float,
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._store = store
        self._streamlog = log
        self._writer = writer
        self._dispatcher = dispatcher
        self._roles = roles
        self._capacity = capacity
        self._renew_s = renew_s
        self._ttl_s = ttl_s
        self._log_ttl_s = log_ttl_s
        self._beating_since = math.inf
        self._soon = asyncio.Event()
        self._strays: set[tuple[str, int]] = set()

    def beat_soon(self) -> None:
        """Renew now instead of when it is time."""
        self._soon.set()

    async def run(self) -> None:
        """Renew until cancelled."""
        while True:
            try:
                await self.beat()
            except StoreUnavailable as error:
                # Nobody can take our runs over while Postgres is away. When it is back everybody renews before
                # anybody judges: see ``_may_judge``.
                self._beating_since = math.inf
                _log.warning("lease not renewed", reason=error.detail)
            self._soon.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._renew_s):
                    await self._soon.wait()

    async def beat(self) -> None:
        """One round. Raises ``StoreUnavailable``."""
        before = self._dispatcher.attempts()
        beat = await self._store.workers.heartbeat(
            self._dispatcher.worker_id, roles=self._roles, capacity=self._capacity, ttl_s=self._ttl_s
        )
        self._beating_since = min(self._beating_since, self._clock.monotonic())
        for run_id in beat.stop_requested:
            self._dispatcher.interrupt(run_id, Interrupt.STOP)
        for run_id, attempt in before - set(beat.held):
            self._dispatcher.give_up(run_id, attempt)
        await self._settle_strays(set(beat.held) - before - self._dispatcher.attempts())
        if self._may_judge():
            for run in await self._store.workers.take_over(self._dispatcher.worker_id):
                await self._settle_orphan(run)

    async def _settle_strays(self, strays: set[tuple[str, int]]) -> None:
        """Runs that Postgres says are ours and that nobody here works on: the answer to a claim was lost, for one.

        Strays of two beats in a row are that; those of one may have been claimed a moment ago.
        """
        for run_id, attempt in strays & self._strays:
            _log.warning("stray run found", run_id=run_id, attempt=attempt)
            await self._settle_orphan((await self._store.runs.reply(run_id)).run)
        self._strays = strays

    def _may_judge(self) -> bool:
        """Only who has renewed without a break for longer than a lease lasts may call another's lease expired."""
        return self._clock.monotonic() - self._beating_since > self._ttl_s

    async def _settle_orphan(self, run: Run) -> None:
        stored = await self._store.runs.reply(run.id)
        text, last_seq = stored.text, stored.text_seq
        try:
            # Opening fences the old worker off before its log is read: what is read is all there will ever be.
            reply = await self._writer.open(run.id, run.attempt)
        except Fenced:
            return
        try:
            logged = await self._streamlog.read(run.id, 0, limit=MAX_ENTRIES)
            shown = text_through(logged.entries) or text_through(logged.entries, seq=last_seq, text=text)
            if shown is not None and shown[0] >= last_seq:
                last_seq, text = shown
        except LogUnavailable as error:
            _log.warning("orphan settled from its checkpoint alone", run_id=run.id, reason=error.detail)
        if not text and not run.stop_requested:
            requeued = await self._store.runs.requeue(run.id, run.attempt, reply.last_seq)
            await reply.close(None)
            _log.info("orphan queued again", run_id=run.id, lost_race=not requeued)
            return
        stopped = run.stop_requested
        outcome = Outcome(
            status=RunStatus.STOPPED if stopped else RunStatus.FAILED,
            text=text,
            last_seq=last_seq + 1,
            finish_reason="stopped" if stopped else None,
            usage=run.usage,
            error_code=None if stopped else WorkerLost.code,
            error_message=None if stopped else LOST_MESSAGE,
        )
        if await self._store.runs.finish(run.id, run.attempt, outcome):
            reply.event(
                terminal_event(
                    message_id=run.message_id,
                    finish_reason=outcome.finish_reason,
                    usage=outcome.usage,
                    error_code=outcome.error_code,
                    error_message=outcome.error_message,
                )
            )
            await reply.close(self._log_ttl_s)
            _log.warning("orphan ended", run_id=run.id, status=outcome.status.value)
        else:
            reply.discard()
