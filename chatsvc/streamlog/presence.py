"""Says, for all replies that somebody reads in this process, that they are being read.

One command for all of them, every ``NOTE_EVERY_S``, and none while nobody reads. A worker anywhere can then tell an
abandoned reply from one whose reader merely changes trains.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from chatsvc.errors import LogUnavailable
from chatsvc.streamlog.hub import Hub

_logger = structlog.get_logger(__name__)

NOTE_EVERY_S: Final = 5.0


class Presence:
    """``run`` it wherever streams are served."""

    def __init__(self, hub: Hub, *, every_s: float = NOTE_EVERY_S) -> None:
        self._hub = hub
        self._every_s = every_s

    async def run(self) -> None:
        """Note until cancelled."""
        while True:
            read = list(self._hub.take_read())
            if read:
                try:
                    await self._hub.log.note_read(read)
                except LogUnavailable as error:
                    _logger.warning("readers not noted", reason=error.detail, replies=len(read))
            await asyncio.sleep(self._every_s)
