"""What every message needs of Postgres, done once on a new connection before anybody waits for it.

A connection is a process of the server, and its first run of a statement costs some 5 ms: it reads the catalog and
makes the plan that all later runs use. So a burst of messages after a start would pay for each on each connection.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
import psycopg
import structlog
from msgspec import UNSET

from chatsvc.ids import new_conversation_id, new_message_id, new_response_id
from chatsvc.limits import Principal, ServiceCost, Tier, TierName
from chatsvc.run import Outcome, RunStatus
from chatsvc.store import submit
from chatsvc.store.pool import Connection, Database, T
from chatsvc.store.records import Submission
from chatsvc.store.runs import Runs

_log = structlog.get_logger(__name__)

_REGION: Final = "rehearsal"
_LOCK_MS: Final = 100
"""A connection that meets a lock, on a table say, is handed out as it is."""


class _On(Database):
    """A database of the one connection."""

    def __init__(self, connection: Connection) -> None:
        self._one = connection

    async def _attempt(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        return await work(self._one)


async def rehearse(connection: Connection) -> None:
    """Take a message in, claim its run and end it, for a conversation that does not exist; so no row is written.

    What goes wrong is told in the log only: who needs the connection will see whether it serves.
    """
    runs = Runs(_On(connection), ServiceCost())
    user_id = conversation_id = new_conversation_id()
    message = Submission(
        principal=Principal(user_id, TierName.FREE),
        conversation_id=conversation_id,
        parent_id=None,
        content="rehearsal",
        client_msg_id=conversation_id,
        request_hash=b"",
        model=_REGION,
        tier=Tier(name=TierName.FREE, weight=1, max_open_replies=1),
        charge=1.0,
        prompt_tokens=1,
        user_message_id=new_message_id(),
        message_id=new_message_id(),
        response_id=new_response_id(_REGION),
        user_tokens=1,
        at_head=True,
        owner=_REGION,
    )
    try:
        async with connection.transaction():
            await connection.execute(f"SET LOCAL lock_timeout = {_LOCK_MS}")
            await runs.ground(user_id, conversation_id, UNSET, message.client_msg_id, b"")
            for one in (message, msgspec.structs.replace(message, max_tokens=1, temperature=0.5)):
                await connection.execute(*submit.writing(one))
            await runs.claim([message.response_id], _REGION)
            await runs.keep(message.response_id)
            await runs.finish(message.response_id, 1, Outcome(status=RunStatus.COMPLETE, text="", last_seq=1))
    except psycopg.Error as error:
        _log.info("a connection is not rehearsed", reason=str(error).partition("\n")[0])
