"""Removes the logs of what was deleted. Those that cannot be reached now are removed once they can.

What waits here is lost with the process; then the logs' own time to live removes them, and no route leads to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import structlog

from chatsvc.errors import LogUnavailable
from chatsvc.streamlog.base import StreamLog

_log = structlog.get_logger(__name__)

RETRY_S: Final = 1.0


class LogForgetter:
    """``run`` is its loop."""

    def __init__(self, log: StreamLog) -> None:
        self._streamlog = log
        self._left: dict[str, None] = {}
        self._some_left = asyncio.Event()

    async def forget(self, response_ids: Sequence[str]) -> None:
        """Remove these logs: now, or when Redis is back."""
        try:
            await self._streamlog.delete(response_ids)
        except LogUnavailable as error:
            _log.warning("logs of deleted replies wait to be removed", count=len(response_ids), reason=error.detail)
            self._left |= dict.fromkeys(response_ids)
            self._some_left.set()

    async def run(self) -> None:
        """Remove what is left, until cancelled."""
        while True:
            await self._some_left.wait()
            await asyncio.sleep(RETRY_S)
            left = list(self._left)
            try:
                await self._streamlog.delete(left)
            except LogUnavailable:
                continue
            for response_id in left:
                del self._left[response_id]
            if not self._left:
                self._some_left.clear()
            _log.info("logs of deleted replies removed", count=len(left))
