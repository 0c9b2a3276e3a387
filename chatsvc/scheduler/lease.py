"""Keeps this process's lease alive, and takes over the runs of workers whose lease ran out (L6).

A worker's heartbeat in Postgres is the lease of all its runs: one row a process, renewed every ``renew_s``. A run
belongs to the worker named in its row, at the attempt named there, as long as that worker's heartbeat is fresh.

Whoever finds a stale worker takes its runs over under a new attempt. What becomes of them is ``orphans.py``'s business
and happens beside this loop: however long it takes, the heartbeat does not wait for it.

A database that was away, or a machine that slept, makes every lease look stale. So only he may judge who has renewed
his own without a gap, by the database's clock, for longer than a lease lasts: the others had that time to renew theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from typing import Final

import structlog

from chatsvc.clock import Clock
from chatsvc.errors import StoreUnavailable
from chatsvc.scheduler.active import Interrupt
from chatsvc.scheduler.dispatch import Dispatcher
from chatsvc.scheduler.orphans import Orphans
from chatsvc.store import Store

_log = structlog.get_logger(__name__)

RETRY_S: Final = 0.5
"""After a heartbeat that failed, unless the next is due sooner."""


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
        # One late heartbeat is nothing; later than this, others may have come too late for their leases.
        self._longest_gap_s = (renew_s + ttl_s) / 2
        self._beating_since = math.inf
        self._soon = asyncio.Event()
        self._strays: set[tuple[str, int]] = set()

    def beat_soon(self) -> None:
        """Renew now instead of when it is time."""
        self._soon.set()

    async def run(self) -> None:
        """Renew until cancelled."""
        missed = 0
        while True:
            wait_s = self._renew_s
            # Before the beat: who asks while one is under way is not served by what it read a moment ago.
            self._soon.clear()
            try:
                await self.beat()
            except StoreUnavailable as error:
                # Nobody can take our runs over while Postgres is away. When it is back everybody renews before
                # anybody judges: see ``_may_judge``.
                self._beating_since = math.inf
                wait_s = min(wait_s, RETRY_S)
                missed += 1
                if missed == 1:
                    _log.warning("lease not renewed", reason=error.detail)
            else:
                if missed:
                    _log.info("lease renewed again", missed=missed)
                missed = 0
            if not missed and not await self._asked_within(wait_s / 2):
                # Who died a moment ago is found half a round sooner: readers wait for it.
                with contextlib.suppress(StoreUnavailable):  # the next beat will say so
                    await self._judge()
                wait_s /= 2
            await self._asked_within(wait_s)

    async def _asked_within(self, seconds: float) -> bool:
        """Wait so long, or until a beat is asked for; then True."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._soon.wait()
        return False

    async def beat(self) -> None:
        """One round. Raises ``StoreUnavailable``."""
        before = self._dispatcher.attempts()
        known = self._dispatcher.run_ids() | self._orphans.run_ids()
        beat = await self._store.workers.heartbeat(
            self._dispatcher.worker_id, roles=self._roles, capacity=self._capacity, ttl_s=self._ttl_s
        )
        if beat.gap_s is None or beat.gap_s > self._longest_gap_s:
            self._beating_since = math.inf
        self._beating_since = min(self._beating_since, self._clock.monotonic())
        for run_id in beat.stop_requested:
            self._dispatcher.interrupt(run_id, Interrupt.STOP)
        for run_id, attempt in before - set(beat.held):
            self._dispatcher.give_up(run_id, attempt)
        known |= self._dispatcher.run_ids() | self._orphans.run_ids()
        self._settle_strays({held for held in beat.held if held[0] not in known})
        await self._judge()

    async def _judge(self) -> None:
        if self._may_judge():
            # All of them at once, however many a worker had: its readers wait.
            while taken := await self._store.workers.take_over(self._dispatcher.worker_id):
                for run in taken:
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
