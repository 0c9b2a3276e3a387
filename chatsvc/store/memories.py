"""What a user wants to be known in all their conversations: written by them, and gone when they say so.

A conversation is shown what was there, and unchanged since, at its ``memory_as_of``: its beginning, or its last fold.
So adding something leaves the prompts of running conversations as they are (L11). What is changed or deleted is shown
nowhere any more, from the next message on; the new wording comes with the next fold, or conversation. Nothing is
copied anywhere, so nothing has to be removed but the entry.
"""

from __future__ import annotations

from typing import Any, Final

from chatsvc.conversation import Memory
from chatsvc.errors import MemoryFull, NotFound
from chatsvc.events import clean_text
from chatsvc.limits import Principal
from chatsvc.store.pool import Connection, Database, fetch
from chatsvc.store.records import memory_of, statement
from chatsvc.store.users import TOUCH

MOST: Final = 50
MOST_CHARS: Final = 4_000
"""Of all of a user's entries together."""

_LIST: Final = statement("SELECT {memory:m} FROM memories m WHERE m.user_id = %(user_id)s ORDER BY m.created_at, m.id")
_ADD: Final = statement("""
    INSERT INTO memories AS m (id, user_id, text) VALUES (%(id)s, %(user_id)s, %(text)s) RETURNING {memory:m}
""")
_CHANGE: Final = statement("""
    UPDATE memories m SET text = %(text)s, updated_at = clock_timestamp()
    WHERE m.id = %(id)s AND m.user_id = %(user_id)s RETURNING {memory:m}
""")
_DELETE: Final = "DELETE FROM memories WHERE id = %(id)s AND user_id = %(user_id)s RETURNING id"
_ROOM: Final = """
    SELECT count(*) AS entries, coalesce(sum(length(text)), 0) AS chars FROM memories
    WHERE user_id = %(user_id)s AND id <> %(id)s
"""
_ENABLED: Final = "SELECT memory_enabled AS enabled FROM users WHERE id = %(user_id)s"
_ENABLE: Final = "UPDATE users SET memory_enabled = %(enabled)s WHERE id = %(user_id)s"

AS_OF: Final = """
    CASE WHEN NOT {temporary} AND EXISTS (SELECT 1 FROM users u WHERE u.id = {user_id} AND u.memory_enabled)
    THEN clock_timestamp() END
"""
"""What a conversation's ``memory_as_of`` becomes at its beginning and at a fold."""
SHOWN: Final = """
    CASE WHEN c.memory_as_of IS NULL THEN '[]'::jsonb ELSE (
        SELECT coalesce(jsonb_agg(m.text ORDER BY m.created_at, m.id), '[]'::jsonb)
        FROM users u JOIN memories m ON m.user_id = u.id
        WHERE u.id = c.user_id AND u.memory_enabled AND m.updated_at <= c.memory_as_of
    ) END AS memory
"""
"""The column of a conversation ``c`` that its prompts need."""


class Memories:
    """See the module's docstring."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def enabled(self, user_id: str) -> bool:
        """Whether the user wants it; not, unless they said so."""
        rows = await self._db.query(_ENABLED, {"user_id": user_id})
        return bool(rows and rows[0]["enabled"])

    async def enable(self, principal: Principal, *, enabled: bool) -> None:
        """Turn it on, for conversations from now on and after their next fold; or off, at once and everywhere."""

        async def work(connection: Connection) -> None:
            await fetch(connection, TOUCH, _touched(principal))
            await fetch(connection, _ENABLE, {"user_id": principal.user_id, "enabled": enabled})

        await self._db.transaction(work)

    async def list(self, user_id: str) -> tuple[Memory, ...]:
        """All entries, oldest first."""
        return tuple(map(memory_of, await self._db.query(_LIST, {"user_id": user_id})))

    async def add(self, principal: Principal, memory_id: str, text: str) -> Memory:
        """Raises ``MemoryFull``."""
        return await self._write(principal, _ADD, memory_id, text)

    async def change(self, principal: Principal, memory_id: str, text: str) -> Memory:
        """Another wording. Raises ``NotFound``, ``MemoryFull``."""
        return await self._write(principal, _CHANGE, memory_id, text)

    async def delete(self, user_id: str, memory_id: str) -> None:
        """Raises ``NotFound``."""
        if not await self._db.query(_DELETE, {"user_id": user_id, "id": memory_id}):
            raise NotFound("There is no such memory.")

    async def _write(self, principal: Principal, sql: str, memory_id: str, text: str) -> Memory:
        params: dict[str, Any] = {"user_id": principal.user_id, "id": memory_id, "text": one_line(text)}

        async def work(connection: Connection) -> Memory:
            # The lock on the user's row makes the count that of one moment.
            await fetch(connection, TOUCH, _touched(principal))
            (room,) = await fetch(connection, _ROOM, params)
            rows = await fetch(connection, sql, params)
            if not rows:
                raise NotFound("There is no such memory.")
            entries, chars = room["entries"] + 1, room["chars"] + len(params["text"])
            if entries > MOST or chars > MOST_CHARS:
                raise MemoryFull(
                    f"With this there would be {entries} memories of {chars} characters; at most {MOST} are kept, of"
                    f" {MOST_CHARS} characters together. Shorten or delete some.",
                    field="text",
                    entries=entries,
                    characters=chars,
                    limit=MOST,
                    characters_limit=MOST_CHARS,
                )
            return memory_of(rows[0])

        return await self._db.transaction(work)


def one_line(text: str) -> str:
    """As it is kept: each entry is one line of the prompt."""
    return " ".join(clean_text(text).split())


def _touched(principal: Principal) -> dict[str, Any]:
    return {"user_id": principal.user_id, "tier": principal.tier}
