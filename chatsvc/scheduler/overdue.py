"""Refuses runs that have waited longer than they may, when that matters: late is worth less than an honest no.

Only runs that wait: the compare-and-set in Postgres lets one that has begun meanwhile alone (L5). It costs the user
nothing, says when to try again, and leaves the places in the queue to those who can still be served in time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from chatsvc.errors import NotFound, StoreUnavailable, TooLate
from chatsvc.limits import TierName
from chatsvc.run import RunStatus
from chatsvc.scheduler.ending import end_queued
from chatsvc.store import Store
from chatsvc.streamlog.writer import LogWriter

_log = structlog.get_logger(__name__)

AT_ONCE: Final = 8


class Overdue:
    """Owns the tasks that refuse. ``aclose`` it before the store."""

    def __init__(
        self,
        *,
        store: Store,
        writer: LogWriter,
        log_ttl_s: float,
        gone: Callable[[str], object],
        refused: Counter[tuple[TierName, str]],
        ended: Counter[tuple[str, str]],
    ) -> None:
        """``gone`` is told of each run that waits no more: refused here, or ended elsewhere.

        ``refused`` counts those that are refused here by tier and code, ``ended`` by model and status.
        """
        self._store = store
        self._writer = writer
        self._log_ttl_s = log_ttl_s
        self._gone = gone
        self._refused = refused
        self._ended = ended
        self._places = asyncio.Semaphore(AT_ONCE)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def refuse(self, overdue: Mapping[str, int]) -> None:
        """Refuse these runs if they wait, beside whatever else is done; with each, when to try again, in seconds."""
        for run_id, retry_s in overdue.items():
            if run_id not in self._tasks:
                self._tasks[run_id] = asyncio.create_task(self._refuse(run_id, retry_s), name=f"refuse {run_id}")

    async def aclose(self) -> None:
        """Cancel what is under way and wait for it."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _refuse(self, run_id: str, retry_s: int) -> None:
        try:
            async with self._places:
                run = await self._store.runs.find(run_id)
                if run.status is not RunStatus.QUEUED:
                    if run.status.ended:
                        self._gone(run_id)
                    return
                message = f"So many were waiting that this was not answered in time. Try again in {retry_s} s."
                ttl_s = self._log_ttl_s
                if await end_queued(self._store, self._writer, run, TooLate, message, ttl_s, self._ended):
                    self._refused[run.tier, TooLate.code] += 1
                    self._gone(run_id)
        except NotFound:
            self._gone(run_id)  # deleted meanwhile
        except StoreUnavailable as error:
            _log.warning("overdue run not refused yet", run_id=run_id, reason=error.detail)
        except Exception as error:  # noqa: BLE001
            # It waits still, and is found again.
            _log.exception("overdue run not refused", run_id=run_id, error_type=type(error).__name__)
        finally:
            del self._tasks[run_id]
