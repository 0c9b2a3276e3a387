"""The index of old passages: chunks along a branch, and what is still to be indexed.

A chunk ends with a message and continues another chunk, so the chunks of a branch up to a message are found from that
message, link by link: nothing of a sibling is ever among them, and branches share what they share. Chunks are added,
never changed but for their vectors, and go with their conversation. They are read whole: what a question is compared
with is one branch, not the whole database, so no index over vectors would help, and any Postgres will do.

What is to be indexed is one row a conversation. A worker that takes it holds it for ``HELD`` and says so again while it
goes on; after that somebody else may. Whatever is then done twice has the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from chatsvc.conversation import Role
from chatsvc.store.pool import Connection, Database, Row

HELD: Final = timedelta(seconds=60)
_FARTHEST: Final = 2_000
"""Messages that a question looks through for the last one that is indexed, at most."""
MOST_PASSAGES: Final = 50_000
"""The newest that a question is compared with. Reading them takes some 35 MB and a third of a second."""
_ANY: Final = 2_147_483_647

# Up from a message to the first that a chunk ends with; most often the very message.
_UP: Final = """
    up (id, parent_id, depth, chunk) AS (
        SELECT m.id, m.parent_id, 0, c.id FROM messages m LEFT JOIN recall_chunks c
            ON c.conversation_id = m.conversation_id AND c.through_message_id = m.id AND c.version = %(version)s
        WHERE m.id = %(through)s AND m.conversation_id = %(conversation_id)s AND m.user_id = %(user_id)s
        UNION ALL
        SELECT m.id, m.parent_id, up.depth + 1, c.id FROM up JOIN messages m ON m.id = up.parent_id
            LEFT JOIN recall_chunks c
            ON c.conversation_id = m.conversation_id AND c.through_message_id = m.id AND c.version = %(version)s
        WHERE up.chunk IS NULL AND up.depth < %(farthest)s
    )
"""
_CHAIN: Final = """
    chain (id, previous_id, depth, missing, passages) AS (
        SELECT c.id, c.previous_id, 0, up.depth, cardinality(c.message_ids)
        FROM up JOIN recall_chunks c ON c.id = up.chunk
        UNION ALL
        SELECT c.id, c.previous_id, chain.depth + 1, chain.missing, chain.passages + cardinality(c.message_ids)
        FROM chain JOIN recall_chunks c ON c.id = chain.previous_id
        WHERE chain.passages < %(most_passages)s
    )
"""
_CHUNKS: Final = f"""
    WITH RECURSIVE {_UP}, {_CHAIN}
    SELECT c.id, cardinality(c.message_ids) AS passages, c.words, chain.missing,
        CASE WHEN c.embedder = %(embedder)s THEN c.vectors END AS vectors
    FROM chain JOIN recall_chunks c USING (id) ORDER BY chain.depth DESC
"""  # noqa: S608 - no input
_PASSAGES: Final = """
    SELECT asked.place, m.id AS message_id, m.role, m.created_at AS said_at, m.pinned,
        substr(m.content, c.starts[asked.position + 1] + 1,
            c.ends[asked.position + 1] - c.starts[asked.position + 1]) AS text
    FROM unnest(%(chunks)s::bigint[], %(positions)s::int[]) WITH ORDINALITY AS asked (chunk, position, place)
    JOIN recall_chunks c ON c.id = asked.chunk AND c.user_id = %(user_id)s
    JOIN messages m ON m.id = c.message_ids[asked.position + 1]
    ORDER BY asked.place
"""
_GAP: Final = f"""
    WITH RECURSIVE {_UP}
    SELECT id, chunk FROM up ORDER BY depth DESC
"""  # noqa: S608 - no input
_CONTENTS: Final = """
    SELECT id, content, role, created_at AS said_at FROM messages WHERE id = ANY(%(ids)s::text[])
"""
_INSERT: Final = """
    WITH added AS (
        INSERT INTO recall_chunks (user_id, conversation_id, previous_id, through_message_id, version, message_ids,
            starts, ends, words)
        SELECT c.user_id, c.id, %(previous_id)s, %(through)s, %(version)s, %(message_ids)s, %(starts)s, %(ends)s,
            %(words)s
        -- A conversation that is being deleted is waited for, and then not found.
        FROM conversations c WHERE c.id = %(conversation_id)s AND c.user_id = %(user_id)s FOR KEY SHARE
        ON CONFLICT DO NOTHING
        RETURNING id
    )
    SELECT id FROM added
"""
_CHUNK_AT: Final = """
    SELECT id FROM recall_chunks
    WHERE conversation_id = %(conversation_id)s AND through_message_id = %(through)s AND version = %(version)s
"""
# What an older version of the terms made: the replicas that compare with it are on their way out.
_DROP_OLDER: Final = """
    DELETE FROM recall_chunks WHERE id IN (
        SELECT id FROM recall_chunks
        WHERE conversation_id = %(conversation_id)s AND user_id = %(user_id)s AND version < %(version)s
        FOR UPDATE SKIP LOCKED
    )
"""
_WITHOUT_VECTORS: Final = f"""
    WITH RECURSIVE {_UP}, {_CHAIN}
    SELECT c.id FROM chain JOIN recall_chunks c USING (id)
    WHERE c.embedder IS DISTINCT FROM %(embedder)s ORDER BY chain.depth
"""  # noqa: S608 - no input
_TEXTS: Final = """
    SELECT substr(m.content, part.first + 1, part.behind - part.first) AS text
    FROM recall_chunks c
    CROSS JOIN unnest(c.message_ids, c.starts, c.ends) WITH ORDINALITY AS part (message_id, first, behind, place)
    JOIN messages m ON m.id = part.message_id
    WHERE c.id = %(id)s ORDER BY part.place
"""
_VECTORS: Final = "UPDATE recall_chunks SET embedder = %(embedder)s, vectors = %(vectors)s WHERE id = %(id)s"
_ASK: Final = """
    INSERT INTO recall_due AS d (user_id, conversation_id, through_message_ids)
    SELECT c.user_id, c.id, ARRAY[%(through)s] FROM conversations c
    WHERE c.id = %(conversation_id)s AND c.user_id = %(user_id)s FOR KEY SHARE
    ON CONFLICT (conversation_id) DO UPDATE
        SET through_message_ids = d.through_message_ids || EXCLUDED.through_message_ids
        WHERE NOT d.through_message_ids @> EXCLUDED.through_message_ids
"""
_TAKE: Final = """
    UPDATE recall_due d SET due_at = clock_timestamp() + %(held)s
    FROM (
        SELECT conversation_id FROM recall_due WHERE due_at <= clock_timestamp()
        ORDER BY due_at LIMIT 1 FOR UPDATE SKIP LOCKED
    ) next
    WHERE d.conversation_id = next.conversation_id
    RETURNING d.user_id, d.conversation_id, d.through_message_ids
"""
_HOLD: Final = """
    UPDATE recall_due SET due_at = clock_timestamp() + %(held)s WHERE conversation_id = %(conversation_id)s
"""
# What was asked for meanwhile stays, and is due now.
_REST: Final = """
    UPDATE recall_due SET due_at = clock_timestamp(), through_message_ids = ARRAY(
        SELECT unnest(through_message_ids) EXCEPT SELECT unnest(%(done)s::text[]))
    WHERE conversation_id = %(conversation_id)s
"""
_DONE: Final = """
    DELETE FROM recall_due WHERE conversation_id = %(conversation_id)s AND through_message_ids = '{}'
"""


class RecallBranch(msgspec.Struct, frozen=True, kw_only=True):
    """A branch up to and including a message: ``user_id`` has to be its owner, or nothing is found (L10)."""

    user_id: str
    conversation_id: str
    through: str


class StoredChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk as it is read for a question."""

    id: int
    passages: int
    words: bytes
    vectors: bytes | None
    """None: none yet, or those of another embedder."""
    missing: int
    """Messages between the last chunk and the end of the branch, which are not indexed; the same in all chunks."""


class StoredPassage(msgspec.Struct, frozen=True, kw_only=True):
    """A passage as it is quoted."""

    place: int
    """In what was asked for, from 1."""
    message_id: str
    role: Role
    said_at: datetime
    pinned: bool
    text: str


class NewChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk to be added behind ``previous_id``; it ends with ``through``."""

    previous_id: int | None
    through: str
    message_ids: list[str]
    starts: list[int]
    ends: list[int]
    words: bytes


class Gap(msgspec.Struct, frozen=True):
    """What is not indexed of a branch: the messages behind ``previous_id``, oldest first."""

    previous_id: int | None
    message_ids: tuple[str, ...]


class RecallDue(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation that somebody has taken to index, and the messages up to which."""

    user_id: str
    conversation_id: str
    through_message_ids: tuple[str, ...]


class RecallIndex:
    """See the module's docstring. ``version`` is that of the terms; chunks of another one are not seen."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def chunks(self, branch: RecallBranch, *, version: int, embedder: str | None) -> tuple[StoredChunk, ...]:
        """The newest chunks of a branch, oldest first, as far as it is indexed: ``MOST_PASSAGES`` or a few more."""
        params = _params(branch, version) | {"embedder": embedder, "most_passages": MOST_PASSAGES}
        rows = await self._read(_CHUNKS, params)
        return tuple(msgspec.convert(row, StoredChunk) for row in rows)

    async def passages(self, user_id: str, places: Sequence[tuple[int, int]]) -> tuple[StoredPassage, ...]:
        """The passages at (chunk, position), in that order; what was deleted meanwhile is not among them."""
        params = {
            "user_id": user_id,
            "chunks": [chunk for chunk, _ in places],
            "positions": [position for _, position in places],
        }
        return tuple(msgspec.convert(row, StoredPassage) for row in await self._db.query(_PASSAGES, params))

    async def gap(self, branch: RecallBranch, *, version: int) -> Gap:
        """What is to be indexed of a branch. Empty for one that is not this user's, or gone."""
        rows = await self._db.query(_GAP, _params(branch, version) | {"farthest": _ANY})
        previous = rows[0]["chunk"] if rows else None
        return Gap(previous, tuple(row["id"] for row in (rows if previous is None else rows[1:])))

    async def contents(self, message_ids: Sequence[str]) -> dict[str, Row]:
        """``id``, ``content``, ``role`` and ``said_at`` of messages, by id."""
        return {row["id"]: row for row in await self._db.query(_CONTENTS, {"ids": list(message_ids)})}

    async def add(self, branch: RecallBranch, chunk: NewChunk, *, version: int) -> int | None:
        """Add a chunk, unless there is one with the same end: that is then as good. Its id; None: it was deleted.

        The conversation's chunks of older versions go.
        """
        params = _params(branch, version) | msgspec.structs.asdict(chunk)
        added, found, _ = await self._db.batch((_INSERT, params), (_CHUNK_AT, params), (_DROP_OLDER, params))
        return next((int(row["id"]) for row in [*added, *found]), None)

    async def without_vectors(self, branch: RecallBranch, *, version: int, embedder: str) -> tuple[int, ...]:
        """The chunks of a branch that have no vectors of this embedder, newest first."""
        params = _params(branch, version) | {"embedder": embedder, "most_passages": _ANY}
        rows = await self._db.query(_WITHOUT_VECTORS, params)
        return tuple(row["id"] for row in rows)

    async def texts(self, chunk_id: int) -> list[str]:
        """The texts of a chunk's passages."""
        return [row["text"] for row in await self._db.query(_TEXTS, {"id": chunk_id})]

    async def set_vectors(self, chunk_id: int, *, embedder: str, vectors: bytes) -> None:
        """Add the vectors of an embedder, in the place of another one's."""
        await self._db.query(_VECTORS, {"id": chunk_id, "embedder": embedder, "vectors": vectors})

    # What is to be indexed ----------------------------------------------------------------------------------------

    async def ask(self, branch: RecallBranch) -> None:
        """Have a branch indexed by whoever takes it next."""
        await self._db.query(_ASK, _params(branch, 0))

    async def take(self) -> RecallDue | None:
        """The conversation that has waited longest, for ``HELD`` this caller's; None when there is nothing to do."""
        rows = await self._db.query(_TAKE, {"held": HELD})
        return msgspec.convert(rows[0], RecallDue) if rows else None

    async def hold(self, due: RecallDue) -> None:
        """Say that it is still being worked on."""
        await self._db.query(_HOLD, {"conversation_id": due.conversation_id, "held": HELD})

    async def done(self, due: RecallDue) -> None:
        """It is indexed; what else was asked for meanwhile is due."""
        params = {"conversation_id": due.conversation_id, "done": list(due.through_message_ids)}
        await self._db.batch((_REST, params), (_DONE, params))

    async def _read(self, statement: str, params: dict[str, Any]) -> list[Row]:
        """Rows whose bytes come as bytes, not as text of twice the length."""

        async def work(connection: Connection) -> list[Row]:
            return await (await connection.execute(statement, params, binary=True)).fetchall()

        return await self._db.transaction(work)


def _params(branch: RecallBranch, version: int) -> dict[str, Any]:
    return msgspec.structs.asdict(branch) | {"version": version, "farthest": _FARTHEST}
