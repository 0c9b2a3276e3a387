"""Conversations and their trees. Every method that takes a ``user_id`` sees that user's rows only (L10).

Only ``parent_id`` is stored; a branch is walked from its leaf to the root. Lists are paged by key, so a page never
repeats or skips what was there when the first one was read, however many rows are added meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from chatsvc.conversation import Branch, BranchView, Conversation, Message
from chatsvc.errors import InvalidCursor, NotFound, TooManyPins, UnknownParent
from chatsvc.events import clean_text
from chatsvc.limits import Principal
from chatsvc.store.memories import AS_OF, SHOWN
from chatsvc.store.pool import Connection, Database, Row, fetch
from chatsvc.store.records import (
    ConversationPatch,
    Deleted,
    NewConversation,
    Page,
    conversation_of,
    decode_cursor,
    encode_cursor,
    message_of,
    statement,
)
from chatsvc.store.signals import NOTIFY, NOTIFY_PREFIX, PREFIX_CHANGED
from chatsvc.store.users import TOUCH
from chatsvc.store.views import VIEW, view_of

_CREATE: Final = statement(
    """
    INSERT INTO conversations AS c (id, user_id, title, system_prompt, model, temporary, memory_as_of)
    VALUES (%(id)s, %(user_id)s, %(title)s, %(system_prompt)s, %(model)s, %(temporary)s,
    """,
    AS_OF.format(temporary="%(temporary)s", user_id="%(user_id)s"),
    """
    ) RETURNING {conversation:c}
    """,
)
GET_CONVERSATION: Final = statement(
    "SELECT {conversation:c},", SHOWN, "FROM conversations c WHERE c.id = %(id)s AND c.user_id = %(user_id)s"
)
_LIST: Final = statement("""
    SELECT {conversation:c} FROM conversations c
    WHERE c.user_id = %(user_id)s AND NOT c.temporary
    ORDER BY c.updated_at DESC, c.id DESC LIMIT %(limit)s
""")
_LIST_AFTER: Final = statement("""
    SELECT {conversation:c} FROM conversations c
    WHERE c.user_id = %(user_id)s AND NOT c.temporary AND (c.updated_at, c.id) < (%(at)s, %(after)s)
    ORDER BY c.updated_at DESC, c.id DESC LIMIT %(limit)s
""")
_GIVEN_UP: Final = "coalesce(r.degraded, '{}') AS degraded"
_ITS_RUN: Final = "LEFT JOIN runs r ON r.id = m.response_id"
_MESSAGES: Final = statement(
    "SELECT {message:m},",
    _GIVEN_UP,
    "FROM messages m",
    _ITS_RUN,
    "WHERE m.conversation_id = %(id)s ORDER BY m.created_at, m.id",
)
# The walk carries ids only; texts are fetched once for what it found.
_BRANCH: Final = statement(
    """
    WITH RECURSIVE up (id, parent_id, depth) AS (
        SELECT id, parent_id, 1 FROM messages WHERE id = %(leaf)s
        UNION ALL
        SELECT m.id, m.parent_id, up.depth + 1 FROM up JOIN messages m ON m.id = up.parent_id
        WHERE up.depth < %(limit)s
    )
    SELECT {message:m},
    """,
    _GIVEN_UP,
    "FROM up JOIN messages m USING (id)",
    _ITS_RUN,
    "ORDER BY up.depth",
)
TURN: Final = statement("""
    WITH RECURSIVE up (id, parent_id, depth) AS (
        SELECT m.id, m.parent_id, 1 FROM conversations c JOIN messages m ON m.conversation_id = c.id
            AND m.id = CASE WHEN %(at_head)s THEN c.head_message_id ELSE %(leaf)s END
        WHERE c.id = %(id)s AND c.user_id = %(user_id)s
        UNION ALL
        SELECT m.id, m.parent_id, up.depth + 1 FROM up JOIN messages m ON m.id = up.parent_id
    )
    SELECT {message:m} FROM up JOIN messages m USING (id) ORDER BY up.depth
""")
"""The branch that ends in a conversation's head or in ``leaf``, leaf first; nothing for a leaf of another one."""
_CAN_LEAD: Final = """
    SELECT 1 FROM messages WHERE id = %(leaf)s AND conversation_id = %(id)s AND role IN ('assistant', 'system')
"""
_IN_CONVERSATION: Final = "SELECT 1 FROM messages WHERE id = %(leaf)s AND conversation_id = %(id)s"
_OWN_MESSAGE: Final = statement(
    "SELECT {message:m},", _GIVEN_UP, "FROM messages m", _ITS_RUN, "WHERE m.id = %(id)s AND m.user_id = %(user_id)s"
)
MOST_PINS: Final = 50
"""Of a conversation: a turn looks for those that are folded, and reads them."""
# What pins one message after another: rows are not locked for it, since others lock them in an order of their own.
_PIN_IN_TURN: Final = """
    SELECT pg_advisory_xact_lock(hashtextextended(conversation_id, 0)) FROM messages
    WHERE id = %(id)s AND user_id = %(user_id)s
"""
_PIN: Final = statement(
    """
    WITH changed AS (
        UPDATE messages m SET pinned = %(pinned)s
        WHERE m.id = %(id)s AND m.user_id = %(user_id)s AND m.pinned <> %(pinned)s AND (NOT %(pinned)s OR %(most)s > (
            SELECT count(*) FROM messages p WHERE p.conversation_id = m.conversation_id AND p.pinned
        ))
        RETURNING {message:m}, m.user_id
    )
    SELECT changed.*, coalesce((SELECT r.degraded FROM runs r WHERE r.id = changed.response_id), '{}') AS degraded,
    """,
    NOTIFY_PREFIX,
    "FROM changed",
)
_UPDATE: Final = statement("""
    UPDATE conversations c SET
        title = CASE WHEN %(set_title)s THEN %(title)s ELSE c.title END,
        system_prompt = CASE WHEN %(set_system_prompt)s THEN %(system_prompt)s ELSE c.system_prompt END,
        model = CASE WHEN %(set_model)s THEN %(model)s ELSE c.model END,
        pinned = CASE WHEN %(set_pinned)s THEN %(pinned)s ELSE c.pinned END,
        head_message_id = CASE WHEN %(set_head_message_id)s THEN %(head_message_id)s ELSE c.head_message_id END
    WHERE c.id = %(id)s AND c.user_id = %(user_id)s
    RETURNING {conversation:c}
""")
# Locks are taken in the order user, runs, conversation everywhere, so that a delete and a finish cannot deadlock. The
# user's lock keeps new runs out (submit takes it first).
_LOCK_OWNER: Final = """
    SELECT 1 FROM users u JOIN conversations c ON c.user_id = u.id
    WHERE u.id = %(user_id)s AND c.id = %(id)s FOR NO KEY UPDATE OF u
"""
_LOCK_RUNS: Final = """
    SELECT id, model, status IN ('queued', 'streaming') AS running FROM runs
    WHERE conversation_id = %(id)s ORDER BY id FOR UPDATE
"""
_DELETE: Final = "DELETE FROM conversations WHERE id = %(id)s AND user_id = %(user_id)s RETURNING id"
_SWEEP: Final = """
    WITH idle AS (
        SELECT c.id FROM conversations c
        WHERE c.temporary AND c.updated_at < now() - %(older_than)s::interval
          AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.conversation_id = c.id AND r.status IN ('queued', 'streaming'))
        ORDER BY c.updated_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED
    ), doomed AS (
        SELECT r.id FROM runs r JOIN idle ON r.conversation_id = idle.id
    ), gone AS (
        DELETE FROM conversations USING idle WHERE conversations.id = idle.id
    )
    SELECT id FROM doomed ORDER BY id
"""
_NO_CONVERSATION: Final = "There is no such conversation."
_NO_MESSAGE: Final = "There is no such message."


class Conversations:
    """See the module's docstring."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def create(self, principal: Principal, new: NewConversation) -> Conversation:
        """Make an empty conversation, and its owner's row if need be."""

        async def work(connection: Connection) -> Conversation:
            await fetch(connection, TOUCH, msgspec.structs.asdict(principal))
            rows = await fetch(
                connection,
                _CREATE,
                {
                    "id": new.id,
                    "user_id": principal.user_id,
                    "title": _clean(new.title),
                    "system_prompt": _clean(new.system_prompt),
                    "model": _clean(new.model),
                    "temporary": new.temporary,
                },
            )
            return conversation_of(rows[0])

        return await self._db.transaction(work)

    async def list(self, user_id: str, *, cursor: str | None, limit: int) -> Page[Conversation]:
        """A page of the user's conversations, newest activity first; temporary ones are left out.

        One that becomes active while a client pages moves to the front, so it may be missing from later pages. Raises
        ``InvalidCursor``.
        """
        params: dict[str, Any] = {"user_id": user_id, "limit": limit + 1}
        if cursor is None:
            rows = await self._db.query(_LIST, params)
        else:
            at, after = decode_cursor(cursor, (datetime, str))
            rows = await self._db.query(_LIST_AFTER, params | {"at": at, "after": after})
        page = tuple(map(conversation_of, rows[:limit]))
        more = len(rows) > limit
        return Page(page, encode_cursor(page[-1].updated_at, page[-1].id) if more else None)

    async def get(self, user_id: str, conversation_id: str) -> Conversation:
        """Raises ``NotFound``."""
        return _conversation(await self._db.query(GET_CONVERSATION, {"user_id": user_id, "id": conversation_id}))

    async def tree(self, user_id: str, conversation_id: str) -> tuple[Conversation, tuple[Message, ...]]:
        """The conversation and all its messages as of one moment, oldest first, so parents before children.

        Raises ``NotFound``.
        """
        params = {"user_id": user_id, "id": conversation_id}

        async def work(connection: Connection) -> tuple[Conversation, tuple[Message, ...]]:
            conversation = _conversation(await fetch(connection, GET_CONVERSATION, params))
            return conversation, tuple(map(message_of, await fetch(connection, _MESSAGES, params)))

        return await self._db.transaction(work, snapshot=True)

    async def branch_page(
        self, user_id: str, conversation_id: str, *, leaf: str | None, cursor: str | None, limit: int
    ) -> Page[Message]:
        """A page of the branch that ends in ``leaf`` (None: the head), newest first.

        Raises ``NotFound`` for an unknown conversation or leaf, and ``InvalidCursor``.
        """
        start = decode_cursor(cursor, (str,))[0] if cursor is not None else leaf
        missing = InvalidCursor("The cursor is not one that this list gave out.") if cursor else NotFound(_NO_MESSAGE)

        async def work(connection: Connection) -> Branch:
            conversation = _conversation(
                await fetch(connection, GET_CONVERSATION, {"user_id": user_id, "id": conversation_id})
            )
            first = start or conversation.head_message_id
            params = {"leaf": first, "id": conversation_id, "limit": limit + 1}
            if start is not None and not await fetch(connection, _IN_CONVERSATION, params):
                raise missing
            return tuple(map(message_of, await fetch(connection, _BRANCH, params)))

        found = await self._db.transaction(work, snapshot=True)
        return Page(found[:limit], encode_cursor(found[limit].id) if len(found) > limit else None)

    async def turn(self, user_id: str, conversation_id: str, leaf: str) -> tuple[Conversation, Branch]:
        """The conversation and the whole path from its root to ``leaf``, in one round trip.

        Raises ``NotFound`` for an unknown conversation, and for a leaf that is not in it.
        """
        params = {"user_id": user_id, "id": conversation_id, "at_head": False, "leaf": leaf}
        rows, branch = await self._db.batch((GET_CONVERSATION, params), (TURN, params))
        conversation = _conversation(rows)
        if not branch:
            raise NotFound(_NO_MESSAGE)
        return conversation, branch_of(branch)

    async def view(
        self, user_id: str, conversation_id: str, leaf: str, *, leaf_may_be_folded: bool = False
    ) -> tuple[Conversation, BranchView]:
        """The conversation and the branch that ends in ``leaf``, as far as it is not folded, in one round trip.

        A leaf that is to be answered, or gone on with, is not folded itself. Raises ``NotFound`` as ``turn`` does.
        """
        params = {"user_id": user_id, "id": conversation_id, "at_head": False, "leaf": leaf}
        rows, branch = await self._db.batch(
            (GET_CONVERSATION, params), (VIEW, params | {"leaf_may_be_folded": leaf_may_be_folded})
        )
        conversation = _conversation(rows)
        found = view_of(branch)
        if found is None:
            raise NotFound(_NO_MESSAGE)
        return conversation, found.branch

    async def pin(self, user_id: str, message_id: str, *, pinned: bool) -> Message:
        """Pin a message, or let it go. It is no activity. Raises ``NotFound`` and ``TooManyPins``."""
        params = {"user_id": user_id, "id": message_id, "pinned": pinned, "most": MOST_PINS}

        async def work(connection: Connection) -> list[Row]:
            await fetch(connection, _PIN_IN_TURN, params)
            # What is so already is not changed; it is read while nobody else can change it.
            return await fetch(connection, _PIN, params) or await fetch(connection, _OWN_MESSAGE, params)

        rows = await self._db.transaction(work)
        if not rows:
            raise NotFound(_NO_MESSAGE)
        message = message_of(rows[0])
        if message.pinned != pinned:
            raise TooManyPins(
                f"{MOST_PINS} messages of this conversation are pinned, as many as may be. Let one go first.",
                field="pinned",
                limit=MOST_PINS,
            )
        return message

    async def update(self, user_id: str, conversation_id: str, patch: ConversationPatch) -> Conversation:
        """Change what the patch sets. It is no activity: ``updated_at`` stays.

        Raises ``NotFound``, and ``UnknownParent`` for a head that is not a message of this conversation.
        """
        given = {name: value for name, value in msgspec.structs.asdict(patch).items() if value is not msgspec.UNSET}
        params: dict[str, Any] = {"user_id": user_id, "id": conversation_id}
        for name in patch.__struct_fields__:
            value = given.get(name)
            params[name] = _clean(value) if isinstance(value, str) else value
            params[f"set_{name}"] = name in given
        head = given.get("head_message_id")

        async def work(connection: Connection) -> Conversation:
            _conversation(await fetch(connection, GET_CONVERSATION, params))
            if head is not None and not await fetch(connection, _CAN_LEAD, params | {"leaf": head}):
                # The next message goes below the head, and a message goes below a reply only.
                raise UnknownParent("The head must be a reply of this conversation.", field="head_message_id")
            if "system_prompt" in given:
                await fetch(connection, PREFIX_CHANGED, {"user_id": user_id, "conversation_id": conversation_id})
            return _conversation(await fetch(connection, _UPDATE, params))

        return await self._db.transaction(work)

    async def delete(self, user_id: str, conversation_id: str) -> Deleted:
        """Remove the conversation and all that hangs on it; workers of its running replies are told. ``NotFound``."""
        params = {"user_id": user_id, "id": conversation_id}

        async def work(connection: Connection) -> Deleted:
            if not await fetch(connection, _LOCK_OWNER, params):
                raise NotFound(_NO_CONVERSATION)
            runs = await fetch(connection, _LOCK_RUNS, params)
            if not await fetch(connection, _DELETE, params):
                raise NotFound(_NO_CONVERSATION)
            running = [run for run in runs if run["running"]]
            for run in running:
                await fetch(connection, NOTIFY, {"kind": "gone", "response_id": run["id"], "model": run["model"]})
            return Deleted(tuple(run["id"] for run in runs), tuple(run["id"] for run in running))

        return await self._db.transaction(work)

    async def owner_of_message(self, user_id: str, message_id: str) -> Message:
        """The message, if it is this user's. Raises ``NotFound``."""
        rows = await self._db.query(_OWN_MESSAGE, {"user_id": user_id, "id": message_id})
        if not rows:
            raise NotFound(_NO_MESSAGE)
        return message_of(rows[0])

    async def sweep_temporary(self, older_than: timedelta, limit: int = 100) -> Sequence[str]:
        """Delete up to ``limit`` temporary conversations that were idle for so long. Returns their response ids."""
        rows = await self._db.query(_SWEEP, {"older_than": older_than, "limit": limit})
        return [row["id"] for row in rows]


def branch_of(rows: list[Row]) -> Branch:
    """The rows of ``TURN``, root first."""
    return tuple(map(message_of, reversed(rows)))


def _conversation(rows: list[Row]) -> Conversation:
    if not rows:
        raise NotFound(_NO_CONVERSATION)
    return conversation_of(rows[0])


def _clean(text: str | None) -> str | None:
    return None if text is None else clean_text(text)
