"""Keeps this process's lease alive, and takes over the runs of workers whose lease ran out (L6).

A worker's heartbeat in Postgres is the lease of all its runs: one row a process, renewed every ``renew_s``. A run
belongs to the worker named in its row, at the attempt named there, as long as that worker's heartbeat is fresh.

Whoever finds a stale worker takes its runs over under a new attempt. What becomes of them is ``orphans.py``'s business
and happens beside this loop: however long it takes, the heartbeat does not wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence

import structlog

from chatsvc.clock import Clock
from chatsvc.errors import StoreUnavailable
from chatsvc.scheduler.active import Interrupt
from chatsvc.scheduler.dispatch import Dispatcher
from chatsvc.scheduler.orphans import Orphans
from chatsvc.store import Store

_log = structlog.get_logger(__name__)


class LeaseKeeper:
    """One loop: renew, hear of stops whose notification was lost, take over what is orphaned."""

    def __init__(
        self,
        *,
        store: Store,
        dispatcher: Dispatcher,
        orphans: Orphans,
        roles: Sequence[str],
        capacity: int,
        renew_s: float,
        ttl_s: float,
        clock: Clock,
    ) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._orphans = orphans
        self._roles = roles
        self._capacity = capacity
        self._renew_s = renew_s
        self._ttl_s = ttl_s
        self._clock = clock
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
        known = self._dispatcher.run_ids() | self._orphans.run_ids()
        beat = await self._store.workers.heartbeat(
            self._dispatcher.worker_id, roles=self._roles, capacity=self._capacity, ttl_s=self._ttl_s
        )
        self._beating_since = min(self._beating_since, self._clock.monotonic())
        for run_id in beat.stop_requested:
            self._dispatcher.interrupt(run_id, Interrupt.STOP)
        for run_id, attempt in before - set(beat.held):
            self._dispatcher.give_up(run_id, attempt)
        known |= self._dispatcher.run_ids() | self._orphans.run_ids()
        self._settle_strays({held for held in beat.held if held[0] not in known})
        if self._may_judge():
            for run in await self._store.workers.take_over(self._dispatcher.worker_id):
                self._orphans.settle(run.id)
            self._orphans.settle_unserved()

    def _settle_strays(self, strays: set[tuple[str, int]]) -> None:
        """Runs that Postgres says are ours and that nobody here works on: the answer to a claim was lost, for one.

        Strays of two beats in a row are that; those of one may have ended a moment ago.
        """
        for run_id, attempt in strays & self._strays:
            _log.warning("stray run found", run_id=run_id, attempt=attempt)
            self._orphans.settle(run_id)
        self._strays = strays

    def _may_judge(self) -> bool:
        """Only who has renewed without a break for longer than a lease lasts may call another's lease expired."""
        return self._clock.monotonic() - self._beating_since > self._ttl_s
