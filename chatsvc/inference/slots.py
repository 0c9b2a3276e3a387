"""Places in a batch: a fixed number, handed out by priority, then in order of arrival."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from chatsvc.errors import EngineUnavailable


class Slots:
    """For engines whose own queue knows no priorities. Used from one event loop."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._count = count
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = 0
        self.waiting = 0
        """Generations that wait for a slot."""

    @property
    def held(self) -> int:
        """Slots in use."""
        return self._count - self._free

    @asynccontextmanager
    async def hold(self, priority: int) -> AsyncIterator[None]:
        """Wait for a slot and hold it. Raises ``EngineUnavailable`` when ``close`` is called while waiting."""
        if self._free > 0:
            self._free -= 1
        else:
            await self._wait(priority)
        try:
            yield
        finally:
            self._release()

    def close(self, reason: str) -> None:
        """End every wait with ``EngineUnavailable``. Slots that are held stay held."""
        queue, self._queue = self._queue, []
        for _, _, granted in queue:
            if not granted.done():
                granted.set_exception(EngineUnavailable(reason))

    async def _wait(self, priority: int) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arrivals += 1
        heapq.heappush(self._queue, (priority, self._arrivals, granted))
        self.waiting += 1
        try:
            await granted
        except asyncio.CancelledError:
            # The slot may have been handed over in the same moment; then it goes to the next.
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self._release()
            raise
        finally:
            self.waiting -= 1

    def _release(self) -> None:
        while self._queue:
            granted = heapq.heappop(self._queue)[2]
            if not granted.done():
                granted.set_result(None)
                return
        self._free += 1
