"""Starting a run: one transaction, in which everything is checked before anything is written (L8).

    lock the user ─▶ came before? ─▶ whose conversation ─▶ parent ─▶ branch busy? ─▶ allowed to? ─▶ rows

The user's row is the lock: of many racing requests of one user the first one writes, and the others see what it wrote.

A message goes in with one round trip: ``_WRITE`` checks all of this itself and writes nothing when something is wrong.
Only then is it asked, check by check, what that was.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from chatsvc.conversation import Role
from chatsvc.errors import (
    ConversationBusy,
    IdempotencyMismatch,
    NotFound,
    UnknownParent,
)
from chatsvc.events import clean_text
from chatsvc.limits import Tier
from chatsvc.run import RunStatus
from chatsvc.store.allowances import MAY, STANDING, allowance_of, refuse, tier_params
from chatsvc.store.pool import Connection, Database, Row, fetch, int4
from chatsvc.store.records import NewReply, Regeneration, Submission, Submitted, json_of, run_of, statement
from chatsvc.store.signals import NOTIFY_QUEUED
from chatsvc.store.users import TOUCH

KNOWN: Final = statement("""
    SELECT {run:r}, r.request_hash FROM runs r WHERE r.user_id = %(user_id)s AND r.client_msg_id = %(client_msg_id)s
""")
_CONVERSATION: Final = "SELECT 1 FROM conversations WHERE id = %(conversation_id)s AND user_id = %(user_id)s"
_LOCK_CONVERSATION: Final = """
    SELECT 1 FROM conversations WHERE id = %(conversation_id)s AND user_id = %(user_id)s FOR NO KEY UPDATE
"""
_PARENT: Final = """
    SELECT m.role, m.status, m.response_id, r.stop_requested
    FROM messages m LEFT JOIN runs r ON r.id = m.response_id
    WHERE m.id = %(parent_id)s AND m.conversation_id = %(conversation_id)s
"""
_ASKED: Final = """
    SELECT conversation_id, role, created_at FROM messages WHERE id = %(user_message_id)s AND user_id = %(user_id)s
"""
# The checks are the WHERE of ``moment``, on which all that is written depends. Times are read after the locks were had,
# and are never before the parent's: a child is younger than its parent. With an ``owner`` the run is born claimed.
# Of a hurried run ``KEEP`` notifies, if that is still of use then.
_WRITE: Final = statement(
    "WITH",
    STANDING,
    """
    , conversation AS MATERIALIZED (
        SELECT id FROM conversations WHERE id = %(conversation_id)s AND user_id = %(user_id)s
            AND (NOT %(at_head)s OR head_message_id IS NOT DISTINCT FROM %(parent_id)s)
        FOR NO KEY UPDATE
    ), parent AS (
        SELECT m.created_at FROM messages m
        WHERE m.id = %(parent_id)s AND m.conversation_id = %(conversation_id)s AND m.role IN ('assistant', 'system')
            AND m.status NOT IN ('queued', 'streaming')
    ), moment AS MATERIALIZED (
        SELECT greatest(clock_timestamp(),
            (SELECT created_at FROM parent) + interval '1 microsecond',
            %(after)s::timestamptz + interval '1 microsecond') AS at
        FROM conversation, standing
        WHERE (%(parent_id)s::text IS NULL OR EXISTS (SELECT 1 FROM parent))
            AND NOT EXISTS (SELECT 1 FROM runs WHERE user_id = %(user_id)s AND client_msg_id = %(client_msg_id)s)
            AND""",
    MAY,
    """
    ), asked AS (
        INSERT INTO messages (id, user_id, conversation_id, parent_id, role, content, status, tokens, created_at)
        SELECT %(user_message_id)s, %(user_id)s, %(conversation_id)s, %(parent_id)s, 'user', %(content)s, 'complete',
            %(user_tokens)s, at
        FROM moment WHERE %(content)s::text IS NOT NULL
    ), answer AS (
        INSERT INTO messages
            (id, user_id, conversation_id, parent_id, role, content, status, model, response_id, created_at)
        SELECT %(message_id)s, %(user_id)s, %(conversation_id)s, %(user_message_id)s, 'assistant',
            coalesce((SELECT content FROM messages kept WHERE kept.id = %(continues_message_id)s), ''), %(status)s,
            %(model)s, %(response_id)s, at + interval '1 microsecond'
        FROM moment
    ), head AS (
        UPDATE conversations SET head_message_id = %(message_id)s, updated_at = greatest(updated_at, at),
            title = coalesce(title, %(title)s)
        FROM moment WHERE id = %(conversation_id)s
    ), run AS (
        INSERT INTO runs AS r (id, user_id, conversation_id, user_message_id, message_id, client_msg_id, request_hash,
            continues_message_id, model, tier, status, attempt, owner, expected_prompt_tokens, max_tokens,
            temperature, background, charged, context, asked_model, degraded, created_at, started_at)
        SELECT %(response_id)s, %(user_id)s, %(conversation_id)s, %(user_message_id)s, %(message_id)s,
            %(client_msg_id)s, %(request_hash)s, %(continues_message_id)s, %(model)s, %(tier)s, %(status)s,
            %(attempt)s, %(owner)s, %(expected_prompt_tokens)s, %(max_tokens)s, %(temperature)s, %(background)s,
            %(charge)s, %(context)s::jsonb, %(asked_model)s, %(degraded)s::text[], at,
            CASE WHEN %(owner)s::text IS NOT NULL THEN at END
        FROM moment RETURNING {run:r}
    )
    SELECT run.*, standing.*, CASE WHEN run.status = 'queued' AND NOT %(hurried)s THEN
    """,
    NOTIFY_QUEUED,
    "::text END FROM run, standing",
)


# A hurried run: its transaction is over, and seen by all, before it is on the disk, so that a replica that hears of it
# may claim it meanwhile (ADR 11). ``KEEP`` commits something in the usual way: when that returns it is on the disk, and
# so is all that was committed before. That something is a lock on the message that is answered, which only its deletion
# would wait for: locks of rows are in the journal, and need no right that the run did not need. Of a message that was
# deleted the deletion is on the disk already, else it would not be seen.
_HURRY: Final = "SELECT set_config('synchronous_commit', 'off', true)"
KEEP: Final = statement(
    """
    SELECT (SELECT
    """,
    NOTIFY_QUEUED,
    """
    ::text FROM runs run WHERE run.id = %(id)s AND run.status = 'queued')
    FROM messages WHERE id = (SELECT user_message_id FROM runs WHERE id = %(id)s) FOR KEY SHARE
    """,
)


class Moved(Exception):
    """What a request stood on was not so any more when it was to be written, and now nothing speaks against it."""


async def submit(database: Database, submission: Submission) -> Submitted:
    """Write a user message, its answer and the run. For what is raised see ``Runs.submit``."""
    write, params = writing(submission)
    hurry: list[tuple[str, dict[str, Any]]] = [(_HURRY, {})] if submission.hurried else []
    *_, written = await database.batch(*hurry, (TOUCH, params), (write, params))
    if written:
        return _submitted(written[0], submission)
    return await database.transaction(lambda connection: _refuse(connection, params, submission.tier))


def writing(submission: Submission) -> tuple[str, dict[str, Any]]:
    """The statement that writes all rows of a message or, when something is wrong, none; and its parameters."""
    return _WRITE, _params(submission) | {
        "content": clean_text(submission.content),
        "parent_id": submission.parent_id,
        "at_head": submission.at_head,
        "user_tokens": int4(submission.user_tokens),
        "continues_message_id": None,
        "title": None if submission.title is None else clean_text(submission.title),
        "conversation_id": submission.conversation_id,
        "after": None,
    }


async def _refuse(connection: Connection, params: dict[str, Any], tier: Tier) -> Submitted:
    """Say why nothing was written. Raises ``Moved`` when by now there is no reason any more."""
    if came_before := known(await fetch(connection, KNOWN, params), params["request_hash"]):
        return came_before
    if not await fetch(connection, _CONVERSATION, params):
        raise NotFound("There is no such conversation.")
    if params["parent_id"] is not None:
        await _refuse_parent(connection, params)
    await refuse(connection, params, tier)
    raise Moved


async def regenerate(connection: Connection, regeneration: Regeneration) -> Submitted:
    """Write one more answer to a user message and its run. For what is raised see ``Runs.regenerate``."""
    params = _params(regeneration) | {
        "content": None,
        "parent_id": None,
        "at_head": False,
        "user_tokens": None,
        "title": None,
        "continues_message_id": regeneration.continues_message_id,
    }
    if regeneration.hurried:
        await fetch(connection, _HURRY)
    await fetch(connection, TOUCH, params)
    if came_before := known(await fetch(connection, KNOWN, params), params["request_hash"]):
        return came_before
    asked = await fetch(connection, _ASKED, params)
    if not asked:
        raise NotFound("There is no such message.")
    if asked[0]["role"] != Role.USER:
        raise UnknownParent("Only a user's message can be answered again.", field="message_id")
    params["conversation_id"] = asked[0]["conversation_id"]
    if not await fetch(connection, _LOCK_CONVERSATION, params):
        raise NotFound("There is no such message.")
    await refuse(connection, params, regeneration.tier)
    written = await fetch(connection, _WRITE, params | {"after": asked[0]["created_at"]})
    if not written:
        # The line is not under the user's lock, and a run that ends may cost more than it was expected to.
        await refuse(connection, params, regeneration.tier)
        raise Moved
    return _submitted(written[0], regeneration)


def _submitted(row: Row, request: NewReply) -> Submitted:
    allowance = allowance_of(row, request.tier, charge=request.charge, opened=1)
    return Submitted(run_of(row), created=True, allowance=allowance, hurried=request.hurried)


def known(rows: list[Row], request_hash: bytes) -> Submitted | None:
    """What an earlier request made, given the rows of ``KNOWN``. Raises ``IdempotencyMismatch``."""
    if not rows:
        return None
    if rows[0]["request_hash"] != request_hash:
        raise IdempotencyMismatch("This client_msg_id was used for a different request.", field="client_msg_id")
    return Submitted(run_of(rows[0]), created=False)


async def _refuse_parent(connection: Connection, params: dict[str, Any]) -> None:
    rows = await fetch(connection, _PARENT, params)
    if not rows or rows[0]["role"] not in (Role.ASSISTANT, Role.SYSTEM):
        raise UnknownParent(
            "The parent must be an assistant's or a system message of this conversation.", field="parent_id"
        )
    parent = rows[0]
    if not RunStatus(parent["status"]).ended:
        raise ConversationBusy(
            "A reply is still running on this branch. Wait for its end, or stop it.",
            response_id=parent["response_id"],
            stop_requested=bool(parent["stop_requested"]),
        )


def _params(request: NewReply) -> dict[str, Any]:
    """What both kinds have in common."""
    return {
        **msgspec.structs.asdict(request.principal),
        **tier_params(request.tier),
        "charge": float(request.charge),
        "client_msg_id": clean_text(request.client_msg_id),
        "request_hash": request.request_hash,
        "model": clean_text(request.model),
        "expected_prompt_tokens": int4(request.prompt_tokens),
        "max_tokens": int4(request.max_tokens),
        "temperature": request.temperature,
        "background": request.background,
        "user_message_id": request.user_message_id,
        "message_id": request.message_id,
        "response_id": request.response_id,
        "owner": request.owner,
        "hurried": request.hurried,
        "context": json_of(request.context),
        "asked_model": None if request.asked_model is None else clean_text(request.asked_model),
        "degraded": list(request.degraded),
        "status": RunStatus.QUEUED if request.owner is None else RunStatus.STREAMING,
        "attempt": 0 if request.owner is None else 1,
    }
