"""Runs, from queued to their one end.

L5: every change of a run's status is one statement that names the status, and where it has one the attempt, that the
caller believes in. Postgres lets one of any number of racing statements find them so; the others change nothing. The
message's status is written by the same statement, so the two never differ.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from chatsvc.errors import NotFound
from chatsvc.events import clean_text
from chatsvc.limits import ServiceCost
from chatsvc.prompt import ContextReport
from chatsvc.run import Checkpoint, Outcome, Run, WaitingRun, waiting
from chatsvc.store import run_statements as sql
from chatsvc.store import submit
from chatsvc.store.conversations import GET_CONVERSATION
from chatsvc.store.pool import Database
from chatsvc.store.records import (
    Ground,
    Regeneration,
    SettledReply,
    Submission,
    Submitted,
    conversation_of,
    json_of,
    run_of,
)
from chatsvc.store.views import VIEW, view_of

_NO_RESPONSE: Final = "There is no such response."


class Runs:
    """See the module's docstring."""

    def __init__(self, database: Database, cost: ServiceCost) -> None:
        self._db = database
        self._cost = {f"cost_{name}": value for name, value in msgspec.structs.asdict(cost).items()}

    async def submit(self, submission: Submission) -> Submitted:
        """Write a user message, its answer (empty, queued) and the run, and make the answer the head.

        The same ``client_msg_id`` again gives the run that it made, ``created`` False (L8). Raises, with nothing
        written: ``IdempotencyMismatch``; ``NotFound`` for the conversation; ``UnknownParent``; ``ConversationBusy``
        with ``response_id`` and ``stop_requested``; ``TooManyReplies`` with ``open``; ``QuotaExceeded``; ``QueueFull``.
        """
        return await submit.submit(self._db, submission)

    async def regenerate(self, regeneration: Regeneration) -> Submitted:
        """Write one more answer to a user message and its run, and make it the head.

        Raises as ``submit`` does; ``NotFound`` for the message, ``UnknownParent`` when it is not a user's.
        """
        return await self._db.transaction(lambda connection: submit.regenerate(connection, regeneration))

    async def keep(self, run_id: str) -> None:
        """Return when all that was committed before this call is on the disk.

        Other processes are notified of the run if it still waits.
        """
        await self._db.query(submit.KEEP, {"id": run_id})

    async def replay(self, user_id: str, client_msg_id: str, request_hash: bytes) -> Submitted | None:
        """What ``submit`` would say to an id that came before, else None. Raises ``IdempotencyMismatch``."""
        params = {"user_id": user_id, "client_msg_id": clean_text(client_msg_id)}
        return submit.known(await self._db.query(submit.KNOWN, params), request_hash)

    async def ground(
        self,
        user_id: str,
        conversation_id: str,
        parent_id: str | UnsetType | None,
        client_msg_id: str,
        request_hash: bytes,
    ) -> Ground:
        """All that has to be known before a message is taken; ``parent_id`` UNSET is the head. One round trip.

        Raises ``IdempotencyMismatch``.
        """
        params = {"user_id": user_id, "id": conversation_id, "client_msg_id": clean_text(client_msg_id)}
        at_head = parent_id is UNSET
        leaf = {"at_head": at_head, "leaf": None if at_head else parent_id, "leaf_may_be_folded": True}
        known, conversation, branch = await self._db.batch(
            (submit.KNOWN, params), (GET_CONVERSATION, params), (VIEW, params | leaf)
        )
        return Ground(
            known=submit.known(known, request_hash),
            conversation=conversation_of(conversation[0]) if conversation else None,
            view=view_of(branch),
        )

    async def get(self, user_id: str, response_id: str) -> Run:
        """Raises ``NotFound``."""
        return await self._one(sql.GET, {"user_id": user_id, "id": response_id})

    async def find(self, response_id: str) -> Run:
        """As ``get``, but whose it is, is not asked. Raises ``NotFound``."""
        return await self._one(sql.FIND, {"id": response_id})

    async def reply(self, response_id: str) -> SettledReply:
        """The run and its text: the last checkpoint's while it runs, the final one after. Whose it is, is not asked.

        Raises ``NotFound``.
        """
        rows = await self._db.query(sql.REPLY, {"id": response_id})
        if not rows:
            raise NotFound(_NO_RESPONSE)
        run = run_of(rows[0])
        return SettledReply(run=run, text=rows[0]["content"], text_seq=run.last_seq)

    async def held_s(self, response_id: str) -> float:
        """Seconds since a worker took the run, by the database's clock alone. 0 for one that is gone."""
        rows = await self._db.query(sql.HELD_S, {"id": response_id})
        return float(rows[0]["held_s"]) if rows else 0.0

    async def kept_text(self, run: Run) -> str:
        """What the message of a run that has generated nothing says: the text that it was to go on with, or nothing."""
        if run.continues_message_id is None:
            return ""
        rows = await self._db.query(sql.REPLY, {"id": run.id})
        return str(rows[0]["content"]) if rows else ""

    async def open_runs(self, user_id: str) -> list[Run]:
        """The user's runs that have not ended, oldest first."""
        return await self._many(sql.OPEN, {"user_id": user_id})

    async def ended(self, response_ids: Collection[str]) -> set[str]:
        """Those of these runs that have ended, or exist no more."""
        rows = await self._db.query(sql.NOT_ENDED, {"ids": list(response_ids)})
        return set(response_ids) - {row["id"] for row in rows}

    async def queued(self, *, limit: int = 1000) -> list[WaitingRun]:
        """All users' waiting runs, oldest first."""
        rows = await self._db.query(sql.QUEUED, {"limit": limit})
        return [waiting(run_of(row), row["age_s"]) for row in rows]

    async def unserved(self, *, patience_s: float = 30.0) -> list[Run]:
        """Runs that wait for a model which no living worker names among its roles (``model:<name>``).

        None while no worker lives at all, and none younger than ``patience_s``: a deployment may be under way.
        """
        return await self._many(sql.UNSERVED, {"patience_s": patience_s})

    async def still_queued(self, response_ids: Collection[str]) -> set[str]:
        """Those of these runs that wait."""
        return {row["id"] for row in await self._db.query(sql.STILL_QUEUED, {"ids": list(response_ids)})}

    async def positions(self) -> dict[str, int]:
        """Every waiting run's place among those of its model, 1 for the oldest."""
        rows = await self._db.query(sql.POSITIONS)
        return {row["id"]: row["position"] for row in rows}

    async def claim(self, run_ids: Sequence[str], owner: str) -> list[Run]:
        """Take waiting runs for a worker: streaming, ``attempt`` one higher. Those no longer waiting are left out."""
        order = {run_id: place for place, run_id in enumerate(run_ids)}
        claimed = await self._many(sql.CLAIM, {"ids": list(run_ids), "owner": owner})
        return sorted(claimed, key=lambda run: order[run.id])

    async def holds(self, run_id: str, attempt: int) -> bool:
        """Whether the run is still streaming in this attempt."""
        return bool(await self._db.query(sql.HOLDS, {"id": run_id, "attempt": attempt}))

    async def checkpoint(self, batch: Sequence[Checkpoint]) -> set[str]:
        """Save the text so far of many runs in one statement. Returns those still held in the attempt that is given."""
        params = {
            "ids": [checkpoint.run_id for checkpoint in batch],
            "attempts": [checkpoint.attempt for checkpoint in batch],
            "seqs": [checkpoint.seq for checkpoint in batch],
            "texts": [clean_text(checkpoint.text) for checkpoint in batch],
            "prompts": [checkpoint.usage.prompt_tokens for checkpoint in batch],
            "cached": [checkpoint.usage.cached_tokens for checkpoint in batch],
            "outputs": [checkpoint.usage.output_tokens for checkpoint in batch],
        }
        return {row["id"] for row in await self._db.query(sql.CHECKPOINT, params)}

    async def context(self, user_id: str, response_id: str) -> ContextReport | None:
        """What the reply's prompt was made of; None while that is not known. Raises ``NotFound``."""
        rows = await self._db.query(sql.CONTEXT, {"user_id": user_id, "id": response_id})
        if not rows:
            raise NotFound(_NO_RESPONSE)
        context = rows[0]["context"]
        return None if context is None else msgspec.convert(context, ContextReport)

    async def finish(self, run_id: str, attempt: int, outcome: Outcome, context: ContextReport | None = None) -> bool:
        """End a run that is streaming in this attempt (L5). False: it was not, and nothing was changed.

        Saying the same end again gives True again, so a caller that lost the answer may ask anew: only the holder of an
        attempt can have ended the run in it, since everybody else raises ``attempt`` in doing so.
        """
        params = sql.end_params(run_id, outcome) | self._cost | {"attempt": attempt, "context": json_of(context)}
        rows = await self._db.query(sql.FINISH, params)
        return bool(rows[0]["won"])

    async def finish_queued(self, run_id: str, outcome: Outcome) -> Run | None:
        """End a run that is still waiting; ``attempt`` one higher. None: it was not, and nothing was changed."""
        rows = await self._db.query(sql.FINISH_QUEUED, sql.end_params(run_id, outcome) | self._cost)
        return run_of(rows[0]) if rows else None

    async def requeue(self, run_id: str, attempt: int, last_seq: int = 0, *, lost: bool = False) -> bool:
        """Put a run of this attempt back into the queue, if no text of it was saved and nobody wants it stopped (L6).

        ``last_seq`` is the last event in its log, where the next attempt goes on (L2). ``lost``: it had lost its worker
        or engine, and may be what broke it. Saying so again gives True again until somebody claims it.
        """
        params = {"id": run_id, "attempt": attempt, "last_seq": last_seq, "lost": lost}
        rows = await self._db.query(sql.REQUEUE, params)
        return bool(rows[0]["won"])

    async def request_stop(self, user_id: str, response_id: str) -> Run:
        """Have a run stopped: a waiting one has ended when this returns, a streaming one's worker is told.

        Returns the run as it is now; one that had ended is unchanged. Raises ``NotFound``.
        """
        params = {"user_id": user_id, "id": response_id}
        changed = await self._db.query(sql.REQUEST_STOP, params)
        return run_of(changed[0]) if changed else await self._one(sql.GET, params)

    async def _many(self, query: str, params: dict[str, Any]) -> list[Run]:
        return list(map(run_of, await self._db.query(query, params)))

    async def _one(self, query: str, params: dict[str, Any]) -> Run:
        rows = await self._db.query(query, params)
        if not rows:
            raise NotFound(_NO_RESPONSE)
        return run_of(rows[0])
