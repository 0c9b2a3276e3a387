"""Saves the text of running replies, so that a crash loses at most ``checkpoint_s`` seconds of it (L13).

One loop for the whole process: all replies that are due go to Postgres in one statement. A long reply's text is written
once in ten seconds, not once a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from chatsvc.clock import Clock
from chatsvc.errors import StoreUnavailable
from chatsvc.limits import Usage
from chatsvc.run import Checkpoint
from chatsvc.scheduler.active import ActiveRun, Interrupt
from chatsvc.store import Store
from chatsvc.streamlog.writer import ReplyWriter

_log = structlog.get_logger(__name__)


class _Tracked:
    __slots__ = ("active", "due", "reply", "saved_seq", "usage")

    def __init__(self, active: ActiveRun, reply: ReplyWriter, usage: Callable[[], Usage], due: float) -> None:
        self.active = active
        self.usage = usage
        self.reply = reply
        self.due = due
        self.saved_seq = 0


class Checkpointer:
    """Knows the replies being written by this process and saves them in turn."""

    def __init__(self, store: Store, clock: Clock, *, every_s: float) -> None:
        self._store = store
        self._clock = clock
        self._every_s = every_s
        self._tracked: dict[str, _Tracked] = {}

    def track(self, active: ActiveRun, reply: ReplyWriter, usage: Callable[[], Usage]) -> None:
        """Save this reply, and what it has used, from now on."""
        self._tracked[active.run.id] = _Tracked(active, reply, usage, self._clock.monotonic() + self._every_s)

    def forget(self, run_id: str) -> None:
        """The reply has ended; its final text is the store's business now."""
        self._tracked.pop(run_id, None)

    async def run(self) -> None:
        """Save what is due, until cancelled."""
        while True:
            await asyncio.sleep(self._every_s / 10)
            try:
                await self.save_due()
            except StoreUnavailable as error:
                # Everything stays due; the next round tries again with newer text.
                _log.warning("checkpoint postponed", reason=error.detail)

    async def save_due(self) -> None:
        """One round. Raises ``StoreUnavailable``."""
        now = self._clock.monotonic()
        due = [tracked for tracked in self._tracked.values() if tracked.due <= now]
        batch: list[tuple[_Tracked, Checkpoint]] = []
        for tracked in due:
            seq, text = tracked.reply.checkpoint()
            if seq > tracked.saved_seq and text:
                run = tracked.active.run
                checkpoint = Checkpoint(run_id=run.id, attempt=run.attempt, seq=seq, text=text, usage=tracked.usage())
                batch.append((tracked, checkpoint))
            else:
                tracked.due = now + self._every_s
        if not batch:
            return
        held = await self._store.runs.checkpoint([checkpoint for _, checkpoint in batch])
        for tracked, checkpoint in batch:
            tracked.due = now + self._every_s
            tracked.saved_seq = checkpoint.seq
            # Not held and still tracked: another attempt has taken over, or the run was ended behind our back.
            if checkpoint.run_id not in held and self._tracked.get(checkpoint.run_id) is tracked:
                tracked.active.interrupt(Interrupt.LOST)
