"""Tells waiting readers where they stand: one look at the queue a second for all of them, none when nobody waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Final

import structlog

from chatsvc.errors import StoreUnavailable
from chatsvc.events import Queued
from chatsvc.run import Run
from chatsvc.scheduler.lines import Lines
from chatsvc.store import Store

_log = structlog.get_logger(__name__)

REFRESH_S: Final = 1.0
_AT_ONCE: Final = 100

Teller = Callable[[Queued], None]


class Watch:
    """A reader's wish to be told. ``close`` it when the reader goes or its run has begun."""

    def __init__(self, run: Run, teller: Teller, watches: set[Watch]) -> None:
        self.run = run
        self.teller = teller
        self.told: Queued | None = None
        self._watches = watches

    def close(self) -> None:
        """Be told no more. Idempotent."""
        self._watches.discard(self)


class Positions:
    """Positions of queued runs, for streams and for single answers."""

    def __init__(self, store: Store, lines: Lines) -> None:
        self._store = store
        self._lines = lines
        self._watches: set[Watch] = set()
        self._wanted = asyncio.Event()
        self._surveying = asyncio.Lock()

    def watch(self, run: Run, teller: Teller) -> Watch:
        """Call ``teller`` with the position now and whenever it changes, while the run is queued."""
        watch = Watch(run, teller, self._watches)
        self._watches.add(watch)
        self._wanted.set()
        return watch

    async def run(self) -> None:
        """Refresh until cancelled."""
        while True:
            await self._wanted.wait()
            # Whoever comes while Postgres is being asked may be missing from its answer: next round.
            asked = list(self._watches)
            try:
                self._tell(asked, await self.of([watch.run for watch in asked]))
            except StoreUnavailable as error:
                _log.warning("positions not refreshed", reason=error.detail)
            await asyncio.sleep(REFRESH_S)
            if not self._watches:
                self._wanted.clear()

    def _tell(self, asked: list[Watch], positions: Mapping[str, Queued]) -> None:
        for watch in asked:
            queued = positions.get(watch.run.id)
            if queued is None:
                watch.close()
            elif queued != watch.told:
                watch.told = queued
                watch.teller(queued)

    async def of(self, runs: Collection[Run]) -> dict[str, Queued]:
        """Where those of the runs stand that wait still, among all that wait for any replica, by id.

        Of one that this process has not heard of yet only is known who came first. Raises ``StoreUnavailable``.
        """
        waiting = await self._store.runs.still_queued([run.id for run in runs])
        queued = [run for run in runs if run.id in waiting]
        async with self._surveying:
            for _ in self._lines.survey():
                await asyncio.sleep(0)
        left = {model: self._lines.left(model) for model in {run.model for run in queued}}
        standings = {}
        for number, run in enumerate(queued, start=1):
            standings[run.id] = self._lines.standing(run.model, run.id, left[run.model])
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)  # thousands may be watched: replies go on meanwhile
        by_age = {} if all(standings.values()) else await self._store.runs.positions()
        found = {}
        for run in queued:
            if here := standings[run.id]:
                standing, eta_s = here
                found[run.id] = Queued(position=standing.position, eta_s=eta_s, tier=run.tier)
            elif run.id in by_age:
                found[run.id] = Queued(position=by_age[run.id], eta_s=None, tier=run.tier)
        return found
