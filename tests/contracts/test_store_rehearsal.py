"""A new connection has the plans of what every message needs, before anybody waits for it, and nothing was written."""

import psycopg
import pytest
from msgspec import UNSET
from store_world import ALICE, complete, submission

from chatsvc import ids
from chatsvc.limits import ServiceCost
from chatsvc.store.conversations import Conversations
from chatsvc.store.pool import Database
from chatsvc.store.records import NewConversation
from chatsvc.store.rehearsal import rehearse
from chatsvc.store.runs import Runs

# One statement may be prepared several times: for parameters that are given and for those that are not.
PLANNED = "SELECT name, statement FROM pg_prepared_statements WHERE statement ~ 'runs|messages'"


@pytest.fixture
async def database(postgres_url):
    opened = Database(postgres_url, size=1, timeout_s=5, prepare=rehearse)
    yield opened
    await opened.close()


async def planned(database):
    return {row["name"]: row["statement"] for row in await database.query(PLANNED)}


@pytest.mark.parametrize("wishes", [{}, {"max_tokens": 100_000, "temperature": 0.5}], ids=["no wishes", "wishes"])
async def test_a_first_message_needs_no_plan_that_was_not_made(database, wishes):
    conversation = await Conversations(database).create(ALICE, NewConversation(id=ids.new_conversation_id()))
    before = await planned(database)
    runs = Runs(database, ServiceCost())
    await runs.ground(ALICE.user_id, conversation.id, UNSET, "first", b"hash")
    message = submission(conversation, owner="worker", user_tokens=70_000, at_head=True, **wishes)
    run = (await runs.submit(message)).run
    assert await runs.finish(run.id, run.attempt, complete("All of it."))
    assert await planned(database) == before
    assert len(before) >= 4


async def test_nothing_remains_of_a_rehearsal(database):
    tables = ("users", "conversations", "messages", "runs", "usage", "deleted_runs")
    counts = ", ".join(f"(SELECT count(*) FROM {table}) AS {table}" for table in tables)
    assert await database.query(f"SELECT {counts}") == [dict.fromkeys(tables, 0)]
    assert await database.query("SHOW lock_timeout") == [{"lock_timeout": "0"}]


async def test_a_locked_table_keeps_no_connection_from_being_made(database, postgres_url):
    async with await psycopg.AsyncConnection.connect(postgres_url) as other:
        await other.execute("LOCK TABLE runs IN ACCESS EXCLUSIVE MODE")
        assert await database.query("SELECT 1 AS one") == [{"one": 1}]
