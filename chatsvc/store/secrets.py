"""Secrets that all replicas share, such as the key that signs stream tokens: made by whoever asks first."""

from __future__ import annotations

import os
from typing import Final

from chatsvc.store.pool import Connection, Database, fetch

_CREATE: Final = "INSERT INTO secrets (name, value) VALUES (%(name)s, %(value)s) ON CONFLICT DO NOTHING"
_GET: Final = "SELECT value FROM secrets WHERE name = %(name)s"


class Secrets:
    """The table of secrets."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def get_or_create(self, name: str, nbytes: int = 32) -> bytes:
        """The secret of that name, the same for everybody; ``nbytes`` random bytes the first time."""
        params = {"name": name, "value": os.urandom(nbytes)}

        async def work(connection: Connection) -> bytes:
            await fetch(connection, _CREATE, params)
            return bytes((await fetch(connection, _GET, params))[0]["value"])

        return await self._db.transaction(work)
