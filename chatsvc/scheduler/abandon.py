"""Stops replies that nobody waits for any more, in the tiers that say so: a slot for somebody who does.

Closing a tab is never a stop by itself. A reply is abandoned when it has been without a reader, on any replica, for
the whole of its tier's ``abandon_after_s``, and its message was not sent with ``background``. Where it cannot be told
(Redis is away, or has just come back empty) nothing is abandoned: the count begins anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import structlog

from chatsvc.clock import Clock
from chatsvc.errors import LogUnavailable
from chatsvc.limits import Tier, TierName
from chatsvc.scheduler.active import ActiveRun, Interrupt
from chatsvc.scheduler.dispatch import Dispatcher
from chatsvc.streamlog.base import StreamLog

_log = structlog.get_logger(__name__)

LOOKS_PER_LIMIT: Final = 12
"""A limit of two minutes is looked at every ten seconds."""


class Abandonment:
    """Looks after this process's active runs. ``run`` is its loop."""

    def __init__(self, *, log: StreamLog, dispatcher: Dispatcher, tiers: Mapping[TierName, Tier], clock: Clock) -> None:
        self._streamlog = log
        self._dispatcher = dispatcher
        self._limits = {name: tier.abandon_after_s for name, tier in tiers.items() if tier.abandon_after_s}
        self._clock = clock
        self._unseen_since: dict[tuple[str, int], float] = {}
        self.count = 0
        """Replies stopped because nobody read them."""

    async def run(self) -> None:
        """Look until cancelled; returns at once when no tier has a limit."""
        if not self._limits:
            return
        every_s = min(self._limits.values()) / LOOKS_PER_LIMIT
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.look()
            except LogUnavailable as error:
                self._unseen_since.clear()
                _log.warning("abandoned replies not looked for", reason=error.detail)

    async def look(self) -> None:
        """One round. Raises ``LogUnavailable``."""
        candidates = [active for active in self._dispatcher.actives() if self._may_be_abandoned(active)]
        ages = await self._streamlog.unread_s([active.run.id for active in candidates])
        now = self._clock.monotonic()
        unseen: dict[tuple[str, int], float] = {}
        for active, age in zip(candidates, ages, strict=True):
            key = (active.run.id, active.run.attempt)
            # By the mark where there is one; without, from when it was first missed: it may never have had a reader,
            # or its mark was lost.
            since = self._unseen_since.get(key, now) if age is None else now - age
            if age is None:
                unseen[key] = since
            if now - since >= self._limits[active.run.tier]:
                self.count += 1
                _log.info("reply abandoned", run_id=active.run.id, tier=active.run.tier.value)
                active.interrupt(Interrupt.ABANDON)
        self._unseen_since = unseen

    def _may_be_abandoned(self, active: ActiveRun) -> bool:
        return active.run.tier in self._limits and not active.run.background and active.why is None
