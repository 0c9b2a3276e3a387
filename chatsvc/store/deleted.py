"""Runs that were deleted, kept by name until their logs are known to be gone too.

A trigger writes them down, in the transaction that deletes: whoever deletes, and whatever hangs on what.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from chatsvc.store.pool import Database

_AFTER: Final = """
    SELECT response_id AS id FROM deleted_runs
    WHERE response_id > %(after)s AND deleted_at <= clock_timestamp() - %(older_than)s::interval
    ORDER BY response_id LIMIT %(limit)s
"""
_DONE: Final = """
    DELETE FROM deleted_runs
    WHERE response_id = ANY(%(ids)s) AND deleted_at <= clock_timestamp() - %(older_than)s::interval
"""


class DeletedRuns:
    """The table of deleted runs."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def after(self, response_id: str, older_than: timedelta, limit: int) -> Sequence[str]:
        """Up to ``limit`` response ids behind one ("": from the first), of runs deleted at least so long ago."""
        rows = await self._db.query(_AFTER, {"after": response_id, "older_than": older_than, "limit": limit})
        return [row["id"] for row in rows]

    async def done(self, response_ids: Sequence[str], older_than: timedelta) -> None:
        """Forget those of them that were deleted at least so long ago."""
        await self._db.query(_DONE, {"ids": list(response_ids), "older_than": older_than})
