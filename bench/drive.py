"""How load is made: every stream gets its events evenly spaced, all streams out of step with each other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

TICK_S = 0.005
FILLER = " some words of a reply, as a model says them"


def event_text() -> str:
    """Text of one event: about ten words, with the time it was made."""
    return f"@{time.monotonic_ns()}@{FILLER}"


async def paced(one: Callable[[int], None], streams: int, rate: float) -> None:
    """Call ``one(number)`` ``rate`` times a second for each of ``streams`` numbers, until cancelled."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    made = 0
    while True:
        await asyncio.sleep(TICK_S)
        due = int((loop.time() - began) * streams * rate)
        # A process that cannot keep up loses events rather than owing more and more.
        made = max(made, due - streams)
        for number in range(made, due):
            one(number % streams)
        made = due
