"""Connections: never half-used (L10), bounded in time, honest when Postgres is away."""

import asyncio
import random
import time

import psycopg
import pytest
from store_world import World, submission

from chatsvc.embedded import embedded_postgres
from chatsvc.errors import NotFound, StoreUnavailable
from chatsvc.limits import Principal, TierName
from chatsvc.store import migrate, open_store
from chatsvc.store.pool import Database, fetch


@pytest.fixture
async def database(postgres_url):
    opened = Database(postgres_url, size=4, timeout_s=30)
    yield opened
    await opened.close()


async def cancelled_at(delay, call, again=None):
    """Cancel a call after a delay, and once more while it gives up; True when it was still running."""
    task = asyncio.ensure_future(call)
    await asyncio.wait({task}, timeout=delay)
    task.cancel()
    if again is not None:
        await asyncio.wait({task}, timeout=again)
        task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False


async def test_answers_never_shift_between_callers_when_hundreds_of_calls_are_cancelled(store):
    """Each user reads only their own conversation; between them, calls are cancelled at random moments."""
    chance = random.Random(1)
    world = World(store)
    mine = {}
    for number in range(8):
        principal = Principal(f"user-{number}", TierName.FREE)
        mine[principal.user_id] = (await world.conversation(principal, title=principal.user_id)).id
    done = asyncio.Event()
    read = 0

    async def reader(user_id):
        nonlocal read
        while not done.is_set():
            found, messages = await store.conversations.tree(user_id, mine[user_id])
            assert (found.id, found.title, messages) == (mine[user_id], user_id, ())
            page = await store.conversations.list(user_id, cursor=None, limit=5)
            assert [each.user_id for each in page.items] == [user_id]
            read += 1

    async def canceller():
        cut = 0
        for _ in range(60):
            user_id = chance.choice(sorted(mine))
            calls = [
                store.conversations.tree(user_id, mine[user_id]),
                store.conversations.list(user_id, cursor=None, limit=5),
                store.conversations.get(user_id, mine[user_id]),
                store.runs.open_runs(user_id),
            ]
            twice = chance.choice([None, 0, 0.001])
            cut += sum(await asyncio.gather(*(cancelled_at(chance.uniform(0, 0.01), call, twice) for call in calls)))
        return cut

    async with asyncio.TaskGroup() as group:
        readers = [group.create_task(reader(user_id)) for user_id in mine]
        cancellers = [group.create_task(canceller()) for _ in range(2)]
        cut = sum([await each for each in cancellers])
        done.set()
    assert cut > 100
    assert read > 50
    assert all(each.done() for each in readers)


async def test_a_cancelled_submission_is_whole_or_absent(store, postgres_url):
    chance = random.Random(2)
    world = World(store)
    conversation = await world.conversation()
    for _ in range(100):
        await cancelled_at(chance.choice([0, chance.uniform(0, 0.003)]), store.runs.submit(submission(conversation)))
    # A busy machine may have let all of these come to their end: one that cannot, and one that must.
    async with await psycopg.AsyncConnection.connect(postgres_url) as other:
        await other.execute("SELECT FROM conversations WHERE id = %s FOR UPDATE", [conversation.id])
        assert await cancelled_at(0.05, store.runs.submit(submission(conversation)))
    await store.runs.submit(submission(conversation))
    _, messages = await store.conversations.tree("alice", conversation.id)
    runs = await store.runs.open_runs("alice")
    assert {run.message_id for run in runs} | {run.user_message_id for run in runs} == {each.id for each in messages}
    assert 2 * len(runs) == len(messages)
    assert 0 < len(runs) < 102


async def test_cancelling_gives_every_connection_back(database):
    for _ in range(5):
        calls = [cancelled_at(0.05, database.query("SELECT pg_sleep(60)")) for _ in range(8)]
        assert all(await asyncio.gather(*calls))
    # All four are needed, and would be refused if they were not to be had.
    await asyncio.gather(*(database.query("SELECT pg_sleep(0.1)") for _ in range(4)))


async def test_a_transaction_that_fails_is_rolled_back_and_its_connection_serves_again(database):
    async def work(connection):
        await fetch(connection, "INSERT INTO users (id, tier) VALUES ('eve', 'free')")
        raise NotFound("changed my mind")

    for _ in range(10):
        with pytest.raises(NotFound):
            await database.transaction(work)
    assert await database.query("SELECT id FROM users") == []


async def test_a_connection_left_in_a_transaction_serves_nobody_else(database, postgres_url):
    await database.query("BEGIN")
    await database.query("INSERT INTO users (id, tier) VALUES ('eve', 'free')")
    async with await psycopg.AsyncConnection.connect(postgres_url) as other:
        assert await (await other.execute("SELECT id FROM users")).fetchall() == [("eve",)]


async def test_a_command_that_takes_too_long_is_given_up(postgres_url):
    database = Database(postgres_url, size=1, timeout_s=1)
    started = time.monotonic()
    with pytest.raises(StoreUnavailable):
        await database.query("SELECT pg_sleep(60)")
    assert time.monotonic() - started < 20
    assert await database.query("SELECT 1 AS one") == [{"one": 1}]
    await database.close()


async def test_waiting_for_a_connection_ends_too(postgres_url):
    database = Database(postgres_url, size=1, timeout_s=0.2)
    async with database._connection():  # as a command that does not end
        with pytest.raises(StoreUnavailable, match="all 1 connections"):
            await database.query("SELECT 1")
    await database.close()


async def test_a_transaction_that_does_not_end_is_given_up_too(postgres_url):
    database = Database(postgres_url, size=1, timeout_s=0.2)

    async def hog(_connection):
        await asyncio.Event().wait()

    with pytest.raises(StoreUnavailable):
        await database.transaction(hog)
    await database.close()


async def test_a_serialization_failure_is_tried_again(database):
    tries = 0

    async def work(_connection):
        nonlocal tries
        tries += 1
        if tries < 3:
            raise psycopg.errors.SerializationFailure
        return "done"

    assert await database.transaction(work) == "done"
    tries = -100
    with pytest.raises(StoreUnavailable):
        await database.transaction(work)


async def test_an_error_of_our_own_is_not_called_unavailable(database):
    with pytest.raises(psycopg.errors.UndefinedTable):
        await database.query("SELECT * FROM nowhere")
    with pytest.raises(psycopg.errors.InvalidTextRepresentation):
        await database.query("SELECT 'x'::int")


async def test_connections_cut_by_the_server_are_replaced_unnoticed(database, postgres_server):
    """What an idle connection does not survive (a restart, an administrator) costs no request."""
    await database.warm(4)
    name = (await database.query("SELECT current_database() AS name"))[0]["name"]
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        cut = connection.execute(
            "SELECT count(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity WHERE datname = %s", [name]
        ).fetchone()
    assert cut == (4,)
    for _ in range(6):
        assert await database.query("SELECT 1 AS one") == [{"one": 1}]


async def test_a_connection_cut_in_the_middle_of_a_command_is_unavailable_and_then_fine(postgres_url, postgres_server):
    database = Database(postgres_url, size=4, timeout_s=60)
    name = (await database.query("SELECT current_database() AS name"))[0]["name"]
    sleeping = asyncio.create_task(database.query("SELECT pg_sleep(60)"))
    async with await psycopg.AsyncConnection.connect(postgres_server, autocommit=True) as connection:
        cut = False
        while not cut:
            rows = await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = %s AND query LIKE 'SELECT pg_sleep%%' AND state = 'active'",
                [name],
            )
            cut = bool(await rows.fetchall())
    with pytest.raises(StoreUnavailable, match="terminating"):
        await sleeping
    assert await database.query("SELECT 1 AS one") == [{"one": 1}]
    await database.close()


@pytest.fixture
def lone_url(postgres_server, postgres_url):
    """For a user with one connection at most."""
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS lone")
        connection.execute("CREATE ROLE lone LOGIN CONNECTION LIMIT 1")
    return postgres_url.replace("//chatsvc@", "//lone@")


async def test_too_many_connections_are_unavailable(lone_url, postgres_url):
    database = Database(lone_url, size=3, timeout_s=30)
    async with await psycopg.AsyncConnection.connect(lone_url):
        with pytest.raises(StoreUnavailable, match="too many connections"):
            await database.query("SELECT 1")
    # A closed connection counts until its server process has ended.
    async with asyncio.timeout(60), await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as looking:
        while await (await looking.execute("SELECT 1 FROM pg_stat_activity WHERE usename = 'lone'")).fetchone():
            await asyncio.sleep(0.01)
    assert len(await database.query("SELECT 1")) == 1
    await database.close()


async def test_where_the_server_makes_no_more_connections_those_there_are_are_shared(lone_url):
    database = Database(lone_url, size=5, timeout_s=60)
    pids = await asyncio.gather(*(database.query("SELECT pg_backend_pid() AS pid, pg_sleep(0.1)") for _ in range(10)))
    assert len({rows[0]["pid"] for rows in pids}) == 1
    await database.close()


async def test_a_burst_takes_connections_that_come_back_before_new_ones_are_made(database):
    await asyncio.gather(*(database.query("SELECT 1") for _ in range(200)))
    assert database.open <= 4
    one = (await database.query("SELECT pg_backend_pid() AS pid"))[0]["pid"]
    for _ in range(20):
        assert (await database.query("SELECT pg_backend_pid() AS pid"))[0]["pid"] == one


async def test_connections_made_beforehand_are_those_that_are_used(database):
    await database.warm(9)
    assert database.open == 4
    await asyncio.gather(*(database.query("SELECT pg_sleep(0.01)") for _ in range(20)))
    assert database.open == 4


async def test_who_is_cancelled_while_waiting_for_a_connection_leaves_it_to_others(database):
    chance = random.Random(3)
    for _ in range(50):
        calls = [cancelled_at(chance.uniform(0, 0.02), database.query("SELECT pg_sleep(0.005)")) for _ in range(12)]
        await asyncio.gather(*calls)
    assert database.open <= 4
    await asyncio.gather(*(database.query("SELECT pg_sleep(0.01)") for _ in range(20)))
    assert database.open <= 4


async def test_a_read_only_server_is_unavailable(postgres_server, postgres_url):
    """After a fail-over the old address may lead to a replica."""
    name = postgres_url.split("/")[-1].split("?")[0]
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    async with open_store(postgres_url, pool_size=2, timeout_s=30) as store:
        with pytest.raises(StoreUnavailable):
            await World(store).conversation()


async def test_a_server_that_is_not_there_is_said_so_at_once(tmp_path):
    url = f"postgresql://chatsvc:secret@/postgres?host={tmp_path}"
    started = time.monotonic()
    with pytest.raises(StoreUnavailable) as caught:
        async with open_store(url, pool_size=2, timeout_s=60, wait_s=0):
            pass
    with pytest.raises(StoreUnavailable):
        await migrate(url, wait_s=0)
    assert time.monotonic() - started < 20
    assert caught.value.retryable
    assert "secret" not in str(caught.value)


@pytest.mark.slow
async def test_the_store_lives_through_a_restart_of_the_server(data_dir):
    async with embedded_postgres(data_dir, lambda _: None) as url:
        await migrate(url)
    async with embedded_postgres(data_dir, lambda _: None) as url:
        opened = open_store(url, pool_size=4, timeout_s=30)
        store = await opened.__aenter__()
        world = World(store)
        conversation = await world.conversation()
        await asyncio.gather(*(store.ping() for _ in range(4)))
    for call in (store.ping(), store.runs.submit(submission(conversation)), store.runs.queued()):
        with pytest.raises(StoreUnavailable):
            await call
    async with embedded_postgres(data_dir, lambda _: None):
        for _ in range(5):
            await store.ping()
        assert (await world.queued(conversation)).conversation_id == conversation.id
        await opened.__aexit__(None, None, None)
