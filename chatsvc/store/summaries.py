"""Summaries, and the runs that write them.

A summary is bound to the last message it covers, and is never changed: another text is another version. A fold's is
written only if the branch still goes on from the summary that the fold went on from; this is read and written under
the conversation's lock, as an edit is, so that of a fold and an edit that race neither overwrites what it has not seen.

Locks are had in the order run, conversation, as everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

import msgspec
from psycopg.errors import ForeignKeyViolation

from chatsvc.conversation import Summary
from chatsvc.errors import NotFound, SummaryChanged
from chatsvc.events import clean_text
from chatsvc.limits import ServiceCost
from chatsvc.run import Outcome, Run, RunKind, RunStatus
from chatsvc.store import run_statements as sql
from chatsvc.store.memories import AS_OF
from chatsvc.store.pool import Connection, Database, fetch
from chatsvc.store.records import NewFold, run_of, statement, summary_of
from chatsvc.store.signals import NOTIFY_QUEUED, PREFIX_CHANGED

# Folds that go on from a base, that failed lately and rest, and whether for their words. What was refused for those may
# have others soon; what failed otherwise may fail what it runs on. How often it was tried is counted over eight rests:
# who comes back after months begins anew.
_RESTING: Final = """
    SELECT f.fold_through_id, (array_agg(f.error_code ORDER BY f.ended_at DESC))[1] = 'summary_refused' AS refused
    FROM runs f WHERE f.conversation_id = %(conversation_id)s AND f.fold_through_id IS NOT NULL
        AND f.fold_base_id IS NOT DISTINCT FROM %(base_id)s AND f.status = 'failed'
        AND f.ended_at > clock_timestamp() - make_interval(secs => 8 * %(rest_s)s)
    GROUP BY f.fold_through_id
    HAVING max(f.ended_at) > clock_timestamp() - make_interval(secs => %(rest_s)s * CASE
        WHEN (array_agg(f.error_code ORDER BY f.ended_at DESC))[1] = 'summary_refused'
        THEN least(1, 4.0 ^ (count(*) - 3)) ELSE 1 END)
"""
# Up from the last message to be covered, to the first that a summary covers.
_BASE: Final = """
    WITH RECURSIVE up (id, parent_id, depth, folded) AS (
        SELECT m.id, m.parent_id, 1, EXISTS (
            SELECT 1 FROM summaries s WHERE s.conversation_id = m.conversation_id AND s.through_message_id = m.id)
        FROM messages m WHERE m.conversation_id = %(conversation_id)s AND m.id = %(through_message_id)s
        UNION ALL
        SELECT m.id, m.parent_id, up.depth + 1, EXISTS (
            SELECT 1 FROM summaries s WHERE s.conversation_id = m.conversation_id AND s.through_message_id = m.id)
        FROM up JOIN messages m ON m.id = up.parent_id WHERE NOT up.folded
    )
    SELECT s.id FROM up JOIN summaries s ON s.conversation_id = %(conversation_id)s AND s.through_message_id = up.id
    WHERE up.folded ORDER BY s.version DESC LIMIT 1
"""
# All that is asked is answered as of one moment, at which a fold is open or has left its summary or failure. Were one
# that is open found by the index alone, this would wait for its end, and insert without having seen what it left.
_QUEUE: Final = statement(
    """
    WITH run AS (
        INSERT INTO runs AS r (id, user_id, conversation_id, kind, fold_through_id, fold_base_id, model, tier, status,
            expected_prompt_tokens, max_tokens, background, created_at)
        SELECT %(id)s, c.user_id, c.id, %(kind)s, %(through_message_id)s, %(base_id)s, %(model)s, %(tier)s, 'queued',
            %(prompt_tokens)s, %(max_tokens)s, true, clock_timestamp()
        FROM conversations c
        WHERE c.id = %(conversation_id)s AND c.user_id = %(user_id)s AND NOT EXISTS (
            SELECT 1 FROM runs o
            WHERE o.conversation_id = c.id AND o.kind = 'fold' AND o.status IN ('queued', 'streaming')
        ) AND NOT EXISTS (
            SELECT 1 FROM (
    """,
    _RESTING,
    """
            ) resting WHERE resting.fold_through_id = %(through_message_id)s
        ) AND %(base_id)s IS NOT DISTINCT FROM (
    """,
    _BASE,
    """
        )
        -- Of those that are queued at once the index takes one.
        ON CONFLICT DO NOTHING
        RETURNING {run:r}
    )
    SELECT run.*,
    """,
    NOTIFY_QUEUED,
    "FROM run",
)
_HOLD: Final = "SELECT status, attempt FROM runs WHERE id = %(id)s FOR UPDATE"
_LOCK: Final = """
    SELECT 1 FROM conversations WHERE id = %(conversation_id)s AND user_id = %(user_id)s FOR NO KEY UPDATE
"""
_NEWEST: Final = statement("""
    SELECT {summary:s} FROM summaries s
    WHERE s.conversation_id = %(conversation_id)s AND s.through_message_id = %(through_message_id)s
    ORDER BY s.version DESC LIMIT 1
""")
_INSERT: Final = statement("""
    INSERT INTO summaries AS s (id, user_id, conversation_id, through_message_id, version, previous_id, text, tokens,
        edited, model)
    VALUES (%(summary_id)s, %(user_id)s, %(conversation_id)s, %(through_message_id)s, %(version)s, %(previous_id)s,
        %(text)s, %(tokens)s, %(edited)s, %(model)s)
    RETURNING {summary:s}
""")
_REMEMBER: Final = statement(
    "UPDATE conversations SET memory_as_of =",
    AS_OF.format(temporary="temporary", user_id="user_id"),
    "WHERE id = %(conversation_id)s",
)
_LEAF: Final = """
    SELECT m.id FROM conversations c JOIN messages m
        ON m.conversation_id = c.id AND m.id = coalesce(%(leaf)s, c.head_message_id)
    WHERE c.id = %(conversation_id)s AND c.user_id = %(user_id)s
"""
_EXISTS: Final = "SELECT 1 FROM conversations WHERE id = %(conversation_id)s AND user_id = %(user_id)s"
_ON_BRANCH: Final = statement("""
    WITH RECURSIVE up (id, parent_id, depth) AS (
        SELECT id, parent_id, 1 FROM messages WHERE id = %(leaf)s
        UNION ALL
        SELECT m.id, m.parent_id, up.depth + 1 FROM up JOIN messages m ON m.id = up.parent_id
    ), newest AS (
        SELECT DISTINCT ON (s.through_message_id) s.* FROM summaries s
        WHERE s.conversation_id = %(conversation_id)s ORDER BY s.through_message_id, s.version DESC
    )
    SELECT {summary:n} FROM up JOIN newest n ON n.through_message_id = up.id ORDER BY up.depth
""")


class Committed(Enum):
    """What became of a fold's summary."""

    YES = "yes"
    CHANGED = "changed"
    """The branch goes on from another summary by now: the run has failed, and nothing else was changed."""
    NO = "no"
    """The run is not this worker's any more, or gone: nothing was changed."""


class Summaries:
    """See the module's docstring."""

    def __init__(self, database: Database, cost: ServiceCost) -> None:
        self._db = database
        self._cost = {f"cost_{name}": value for name, value in msgspec.structs.asdict(cost).items()}

    async def queue(self, fold: NewFold, *, rest_s: float) -> Run | None:
        """Queue a fold.

        None: another one of this conversation is open, the same one rests after it failed, or what it was planned
        from is not so any more.
        """
        try:
            rows = await self._db.query(
                _QUEUE, msgspec.structs.asdict(fold) | {"kind": RunKind.FOLD, "rest_s": float(rest_s)}
            )
        except ForeignKeyViolation:
            return None  # the conversation was deleted meanwhile
        return run_of(rows[0]) if rows else None

    async def resting(self, conversation_id: str, base_id: str | None, *, rest_s: float) -> Mapping[str, bool]:
        """The last messages of folds that go on from this base, failed and rest; whether their drafts were refused."""
        params = {"conversation_id": conversation_id, "base_id": base_id, "rest_s": float(rest_s)}
        return {row["fold_through_id"]: bool(row["refused"]) for row in await self._db.query(_RESTING, params)}

    async def commit(self, run: Run, summary_id: str, text: str, tokens: int, outcome: Outcome) -> Committed:
        """Write what a fold has come to and end its run, both or neither. Saying so again gives the same answer."""
        params = {
            "conversation_id": run.conversation_id,
            "user_id": run.user_id,
            "through_message_id": run.fold_through_id,
            "summary_id": summary_id,
            "version": 1,
            "previous_id": run.fold_base_id,
            "text": clean_text(text),
            "tokens": tokens,
            "edited": False,
            "model": run.model,
        }

        async def work(connection: Connection) -> Committed:
            held = await fetch(connection, _HOLD, {"id": run.id})
            if not held or held[0]["attempt"] != run.attempt:
                return Committed.NO
            if held[0]["status"] != RunStatus.STREAMING:
                return Committed.YES if held[0]["status"] == RunStatus.COMPLETE else Committed.NO
            if not await fetch(connection, _LOCK, params):
                return Committed.NO
            base = await fetch(connection, _BASE, params)
            if (base[0]["id"] if base else None) != run.fold_base_id:
                changed = msgspec.structs.replace(
                    outcome,
                    status=RunStatus.FAILED,
                    finish_reason=None,
                    error_code=SummaryChanged.code,
                    error_message="The summary was changed while it was being continued.",
                )
                await self._finish(connection, run, changed)
                return Committed.CHANGED
            await fetch(connection, _INSERT, params)
            # The prompt begins anew here, so what the user wants to be known may too.
            await fetch(connection, _REMEMBER, params)
            await self._finish(connection, run, outcome)
            return Committed.YES

        return await self._db.transaction(work)

    async def _finish(self, connection: Connection, run: Run, outcome: Outcome) -> None:
        params = sql.end_params(run.id, outcome) | self._cost | {"attempt": run.attempt, "context": None}
        await fetch(connection, sql.FINISH, params)

    async def on_branch(self, user_id: str, conversation_id: str, leaf: str | None) -> tuple[Summary, ...]:
        """The newest version of every summary on the branch that ends in ``leaf`` (None: the head), newest fold first.

        Raises ``NotFound`` for an unknown conversation or leaf.
        """
        params: dict[str, Any] = {"user_id": user_id, "conversation_id": conversation_id, "leaf": leaf}

        async def work(connection: Connection) -> tuple[Summary, ...]:
            found = await fetch(connection, _LEAF, params)
            if found:
                rows = await fetch(connection, _ON_BRANCH, params | {"leaf": found[0]["id"]})
                return tuple(map(summary_of, rows))
            if leaf is not None or not await fetch(connection, _EXISTS, params):
                raise NotFound("There is no such conversation, or no such message in it.")
            return ()

        return await self._db.transaction(work, snapshot=True)

    async def edit(
        self,
        user_id: str,
        conversation_id: str,
        through_message_id: str,
        *,
        version: int,
        summary_id: str,
        text: str,
        tokens: int,
    ) -> Summary:
        """Store what the user made of a summary as its next version, if ``version`` is still the newest.

        Raises ``NotFound`` where there is none, and ``SummaryChanged`` with the newest version's number.
        """
        params: dict[str, Any] = {
            "user_id": user_id,
            "conversation_id": conversation_id,
            "through_message_id": through_message_id,
        }

        async def work(connection: Connection) -> Summary:
            newest = await fetch(connection, _NEWEST, params) if await fetch(connection, _LOCK, params) else []
            if not newest:
                raise NotFound("There is no such summary.")
            before = summary_of(newest[0])
            if before.version != version:
                raise SummaryChanged(
                    f"Version {version} of the summary was to be changed, and {before.version} is the newest. Read it"
                    " again.",
                    version=before.version,
                )
            after = {
                "summary_id": summary_id,
                "version": version + 1,
                "previous_id": before.id,
                "text": clean_text(text),
                "tokens": tokens,
                "edited": True,
                "model": before.model,
            }
            await fetch(connection, PREFIX_CHANGED, params)
            return summary_of((await fetch(connection, _INSERT, params | after))[0])

        return await self._db.transaction(work)
