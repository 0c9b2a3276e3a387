"""Messages of a burst are taken in one after the other rather than all at once.

Side by side, thirty messages take every step of their way together, and the first of them is through hardly before the
last. In turn, the first one's reply is begun while the others come: an engine that was idle has work at once, and all
that follows is as much earlier. Nobody waits long for a turn: whoever is held up, by a lock on a row say, holds up
others for a moment only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

ABREAST: Final = 4
"""Enough to keep Postgres and the processor busy with what waits for the other."""
PATIENCE_S: Final = 0.05


class Turnstile:
    """See the module's docstring."""

    def __init__(self, abreast: int = ABREAST, patience_s: float = PATIENCE_S) -> None:
        self._places = asyncio.Semaphore(abreast)
        self._patience_s = patience_s

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, first come, first served, and hold it for the length of a block.

        After ``patience_s`` seconds the block is entered without one.
        """
        has_place = False
        try:
            try:
                async with asyncio.timeout(self._patience_s):
                    await self._places.acquire()
                    has_place = True
            except TimeoutError:
                pass
            yield
        finally:
            if has_place:
                self._places.release()
