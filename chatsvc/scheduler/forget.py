"""Removes the logs of what was deleted. Those that cannot be reached now are removed once they can.

The store keeps the names of deleted runs, so nothing is lost with this process, whenever it dies. They are kept for a
while after their logs were removed, and those are then removed once more: a worker that had not heard yet may have
begun one anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import structlog

from chatsvc.errors import LogUnavailable, StoreUnavailable
from chatsvc.store.deleted import DeletedRuns
from chatsvc.streamlog.base import StreamLog

_log = structlog.get_logger(__name__)

RETRY_S: Final = 1.0
EVERY_S: Final = 60.0
SETTLED: Final = timedelta(seconds=60)
"""So long after its deletion every worker has heard of it: a lease that is not renewed has run out by then."""
_AT_ONCE: Final = 1000


class LogForgetter:
    """``run`` is its loop."""

    def __init__(
        self, log: StreamLog, deleted: DeletedRuns, *, settled: timedelta = SETTLED, every_s: float = EVERY_S
    ) -> None:
        self._streamlog = log
        self._deleted = deleted
        self._settled = settled
        self._every_s = every_s
        self._some_left = asyncio.Event()

    async def forget(self, response_ids: Sequence[str]) -> None:
        """Remove the logs of runs that were deleted: now, or when Redis is back."""
        try:
            await self._streamlog.delete(response_ids)
        except LogUnavailable as error:
            _log.warning("logs of deleted replies wait to be removed", count=len(response_ids), reason=error.detail)
            self._some_left.set()

    async def run(self) -> None:
        """Remove what is left, by this process and by those before it, until cancelled."""
        self._some_left.set()
        while True:
            everything = self._some_left.is_set()
            self._some_left.clear()
            try:
                await self._remove(timedelta() if everything else self._settled)
            except (LogUnavailable, StoreUnavailable):
                # Whoever put something here has said so, and /readyz tells how the two are.
                await asyncio.sleep(RETRY_S)
                self._some_left.set()
                continue
            try:
                async with asyncio.timeout(self._every_s):
                    await self._some_left.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(RETRY_S)

    async def _remove(self, older_than: timedelta) -> None:
        last = ""
        while found := await self._deleted.after(last, older_than, _AT_ONCE):
            await self._streamlog.delete(found)
            await self._deleted.done(found, self._settled)
            last = found[-1]
