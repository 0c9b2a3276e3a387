"""Workers and their leases: a worker holds its runs for as long as its heartbeat is fresh, by the database's clock.

L6 begins here: the runs of a worker that is gone are taken over by another, which sees to their end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from chatsvc.run import Run
from chatsvc.store import run_statements as sql
from chatsvc.store.pool import Database
from chatsvc.store.records import Beat, run_of


class Workers:
    """See the module's docstring."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def heartbeat(self, worker_id: str, *, roles: Sequence[str], capacity: int, ttl_s: float) -> Beat:
        """Be alive for ``ttl_s`` more seconds. What others took over stays theirs, and is missing from ``held``.

        Two transactions: whatever keeps the runs from being read must not keep the lease from being renewed.
        """
        params = {"id": worker_id, "roles": list(roles), "capacity": capacity, "ttl_s": float(ttl_s)}
        [renewed] = await self._db.query(sql.HEARTBEAT, params)
        runs = await self._db.query(sql.HELD, params)
        return Beat(
            stop_requested=tuple(run["id"] for run in runs if run["stop_requested"]),
            held=tuple((run["id"], run["attempt"]) for run in runs),
            gap_s=renewed["gap_s"],
        )

    async def has_others(self, worker_id: str, role: str) -> bool:
        """Whether another process that is alive has this role."""
        return bool(await self._db.query(sql.OTHERS, {"id": worker_id, "role": role}))

    async def service_id(self) -> str:
        """A name for all that share this database, and for nobody else."""
        [row] = await self._db.query(sql.SERVICE_ID)
        return hashlib.blake2b(row["name"].encode(), digest_size=8).hexdigest()

    async def leave(self, worker_id: str) -> None:
        """Be gone now: what this worker still holds may be taken over at once."""
        await self._db.query(sql.LEAVE, {"id": worker_id})

    async def take_over(self, worker_id: str, *, limit: int = 100) -> list[Run]:
        """Hold the runs of workers whose heartbeat has run out, at most ``limit`` of them, under a new attempt.

        They are still streaming: who took them over ends them, or puts them back into the queue. Any number of workers
        may do so at once; each run goes to one of them.
        """
        rows = await self._db.query(sql.TAKE_OVER, {"id": worker_id, "limit": limit})
        await self._db.query(sql.FORGET_WORKERS)
        return list(map(run_of, rows))
