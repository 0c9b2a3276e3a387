"""Workers and their leases: a worker holds its runs for as long as its heartbeat is fresh, by the database's clock.

L6: the runs of a worker that is gone are failed, keeping what text was saved, or queued again when there was none.
"""

from __future__ import annotations

from collections.abc import Sequence

from chatsvc.run import RunStatus
from chatsvc.store import run_statements as sql
from chatsvc.store.pool import Connection, Database, fetch
from chatsvc.store.records import Beat, Reaped, run_of


class Workers:
    """See the module's docstring."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def heartbeat(self, worker_id: str, *, roles: Sequence[str], capacity: int, ttl_s: float) -> Beat:
        """Be alive for ``ttl_s`` more seconds. What was reaped before stays reaped, and is missing from ``held``."""
        params = {"id": worker_id, "roles": list(roles), "capacity": capacity, "ttl_s": float(ttl_s)}

        async def work(connection: Connection) -> Beat:
            await fetch(connection, sql.HEARTBEAT, params)
            runs = await fetch(connection, sql.HELD, params)
            return Beat(
                stop_requested=tuple(run["id"] for run in runs if run["stop_requested"]),
                held=tuple((run["id"], run["attempt"]) for run in runs),
            )

        return await self._db.transaction(work)

    async def leave(self, worker_id: str) -> None:
        """Be gone now: what this worker still holds may be reaped at once."""
        await self._db.query(sql.LEAVE, {"id": worker_id})

    async def reap(self, *, error_code: str, error_message: str) -> Reaped:
        """Take the runs of workers whose heartbeat has run out. Any number of processes may do so at once.

        With saved text a run fails, with the given error; without, it is queued again. One that was to be stopped is
        stopped. Ending raises ``attempt`` (the old worker's last words come too late) and ``last_seq`` by one.
        """
        rows = await self._db.query(sql.REAP, {"error_code": error_code, "error_message": error_message})
        await self._db.query(sql.FORGET_WORKERS)
        runs = list(map(run_of, rows))
        return Reaped(
            failed=tuple(run for run in runs if run.status is RunStatus.FAILED),
            stopped=tuple(run for run in runs if run.status is RunStatus.STOPPED),
            requeued=tuple(run for run in runs if run.status is RunStatus.QUEUED),
        )
