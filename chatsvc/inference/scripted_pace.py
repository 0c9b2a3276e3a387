"""Waiting for moments, cheaply: thousands of generations share one timer.

Moments are rounded up to ticks of two milliseconds; all that fall on the same tick wake together. Nothing runs while
nobody waits.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from typing import Final

_TICK_S: Final = 0.002


class TimerWheel:
    """Wakes waiters at moments of the running loop's clock."""

    def __init__(self) -> None:
        self._waiters: dict[int, list[asyncio.Future[None]]] = {}
        self._ticks: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_tick = 0

    async def until(self, moment: float) -> None:
        """Return at ``moment`` (``loop.time()``, seconds), or earlier when ``wake_all`` is called."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        tick = math.ceil(moment / _TICK_S)
        waiters = self._waiters.get(tick)
        if waiters is None:
            self._waiters[tick] = [future]
            heapq.heappush(self._ticks, tick)
            self._arm(loop)
        else:
            waiters.append(future)
        await future

    def wake_all(self) -> None:
        """Let every waiter return now."""
        for tick in self._ticks:
            self._release(tick)
        self._ticks.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the timer set for the earliest tick that somebody waits for."""
        first = self._ticks[0]
        if self._timer is not None:
            if self._timer_tick <= first:
                return
            self._timer.cancel()
        self._timer_tick = first
        self._timer = loop.call_at(first * _TICK_S, self._run, loop)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        # The tick the timer was set for is due even where the clock, or its rounding, says a hair less.
        due = max(self._timer_tick, math.floor(loop.time() / _TICK_S))
        while self._ticks and self._ticks[0] <= due:
            self._release(heapq.heappop(self._ticks))
        if self._ticks:
            self._arm(loop)

    def _release(self, tick: int) -> None:
        for future in self._waiters.pop(tick):
            if not future.done():
                future.set_result(None)
