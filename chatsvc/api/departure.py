"""Readers of a process that is going down are sent elsewhere a few at a time: they are not to come back all at once.

    SIGTERM ──▶ load balancers notice ──▶ one round after another, until nobody is left or the time is up

A reader whose reply runs in this process stays: it has nothing to gain, and the process waits for that reply anyway.
All others leave evenly over a round, those that came first before those that came later. The door is still open
meanwhile, so a reader that finds no other, because a load balancer has not noticed yet or there is none, is served
here again and goes to the end of the line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from chatsvc.api.sse import Stream, Streams

_log = structlog.get_logger(__name__)

NOTICE_SHARE: Final = 0.25
"""So much of the first round is left to load balancers to notice that ``/readyz`` says no."""
_TICK_S: Final = 0.1


class Departure:
    """Lets the readers of ``streams`` go. A round takes ``round_s`` seconds, all of it at most ``most_s``.

    ``stays`` says of a response id whether its readers are to be left alone. Rounds of no length are none.
    """

    def __init__(self, streams: Streams, stays: Callable[[str], bool], *, round_s: float, most_s: float) -> None:
        self._streams = streams
        self._stays = stays
        self._round_s = round_s
        self._most_s = most_s
        self._let_go = 0

    async def run(self, over: Callable[[], bool]) -> None:
        """Return when ``over`` is true, or its time is up, and nobody is left to go."""
        if not self._round_s:
            return
        loop = asyncio.get_running_loop()
        began = loop.time()
        until = began + self._most_s
        end = min(began + self._round_s, until)
        await asyncio.sleep(NOTICE_SHARE * (end - began))
        while True:
            await self._round(end, over)
            if over() or end >= until:
                break
            end = min(end + self._round_s, until)
        # On a busy machine the last sleep may have gone past the end of the round.
        self._send(self._streams.without(self._stays))
        _log.info("readers were sent elsewhere", count=self._let_go)

    def _send(self, leaving: list[Stream]) -> None:
        for stream in leaving:
            stream.let_go()
        self._let_go += len(leaving)

    async def _round(self, end: float, over: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        due = 0.0
        while (left := end - loop.time()) > 0:
            leaving = self._streams.without(self._stays)
            if not leaving and over():
                return
            due += len(leaving) * min(1.0, _TICK_S / left)
            self._send(leaving[: int(due)])
            due -= int(due)
            await asyncio.sleep(min(_TICK_S, left))
