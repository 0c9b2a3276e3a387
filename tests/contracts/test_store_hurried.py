"""A hurried run is seen by all before it is on the disk; it is there, and announced, when ``keep`` returns (ADR 11)."""

import psycopg
import pytest
from psycopg import sql
from store_world import ALICE, WORKER, World, regeneration, submission

from chatsvc import ids
from chatsvc.limits import ServiceCost
from chatsvc.run import RunStatus
from chatsvc.store.conversations import Conversations
from chatsvc.store.pool import Database
from chatsvc.store.records import NewConversation
from chatsvc.store.runs import Runs
from chatsvc.store.submit import KEEP

WRITTEN = "SELECT pg_current_wal_insert_lsn()"
IS_ON_DISK = "SELECT pg_current_wal_flush_lsn() >= %s::pg_lsn"
# Deferred: it runs as the last thing before the commit, and sees what that goes by.
NOTE_COMMITS = """
    CREATE TABLE commits (run_id text PRIMARY KEY, waits text NOT NULL);
    CREATE FUNCTION note_commit() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO commits VALUES (NEW.id, current_setting('synchronous_commit'));
        RETURN NULL;
    END $$;
    CREATE CONSTRAINT TRIGGER note_commit AFTER INSERT ON runs DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION note_commit();
"""
# A server that was hardened: the role may do with our tables as it likes, and call what everybody needs, no more.
HARDENED = """
    CREATE ROLE hardened LOGIN;
    REVOKE EXECUTE ON FUNCTION {} FROM PUBLIC;
    GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO hardened;
"""
AS_BEFORE = "GRANT EXECUTE ON FUNCTION {} TO PUBLIC; DROP OWNED BY hardened; DROP ROLE hardened"
EMITS = "SELECT oid::regprocedure::text FROM pg_proc WHERE proname = 'pg_logical_emit_message'"
HOW_COMMITTED = "SELECT waits FROM commits WHERE run_id = %s"


@pytest.fixture
async def watch(postgres_url):
    """A connection that looks, and hears notifications."""
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
        await connection.execute("LISTEN chatsvc")
        yield connection


@pytest.fixture
async def database(postgres_url, watch):
    """One connection to a database whose commits wait for the disk; those of other tests do not."""
    name = sql.Identifier(watch.info.dbname)
    await watch.execute(sql.SQL("ALTER DATABASE {} SET synchronous_commit = 'on'").format(name))
    opened = Database(postgres_url, size=1, timeout_s=5)
    yield opened
    await opened.close()


@pytest.fixture
def world(store):
    return World(store)


async def one(watch, query, *params):
    return (await (await watch.execute(query, params)).fetchone())[0]


async def heard(watch, mark):
    """All that was notified until now."""
    await watch.execute("SELECT pg_notify('chatsvc', %s)", [mark])
    found = []
    async for notify in watch.notifies(timeout=30):
        if notify.payload == mark:
            break
        found.append(notify.payload)
    return found


async def test_a_hurried_run_is_seen_and_claimed_like_any_other(store, world):
    submitted = await store.runs.submit(submission(await world.conversation(), hurried=True))
    assert (submitted.created, submitted.may_be_lost) == (True, True)
    [claimed] = await store.runs.claim([submitted.run.id], WORKER)
    assert (claimed.status, claimed.attempt) == (RunStatus.STREAMING, 1)
    again = await store.runs.regenerate(regeneration(submitted.run.user_message_id, hurried=True))
    assert (again.created, again.may_be_lost) == (True, True)


@pytest.mark.parametrize(("hurried", "waits"), [(True, "off"), (False, "on")])
async def test_the_commit_of_a_hurried_run_waits_for_no_disk_and_that_of_another_does(database, watch, hurried, waits):
    await watch.execute(NOTE_COMMITS)
    conversation = await Conversations(database).create(ALICE, NewConversation(id=ids.new_conversation_id()))
    runs = Runs(database, ServiceCost())
    submitted = (await runs.submit(submission(conversation, hurried=hurried))).run
    regenerated = (await runs.regenerate(regeneration(submitted.user_message_id, hurried=hurried))).run
    assert await one(watch, HOW_COMMITTED, submitted.id) == waits
    assert await one(watch, HOW_COMMITTED, regenerated.id) == waits


async def test_what_is_kept_is_on_the_disk_and_what_follows_waits_for_it_as_ever(database, watch):
    conversation = await Conversations(database).create(ALICE, NewConversation(id=ids.new_conversation_id()))
    runs = Runs(database, ServiceCost())
    asked = None
    for _ in range(5):
        if asked is None:
            submitted = await runs.submit(submission(conversation, hurried=True))
            asked = submitted.run.user_message_id
        else:
            submitted = await runs.regenerate(regeneration(asked, hurried=True))
        written = await one(watch, WRITTEN)
        await runs.keep(submitted.run.id)
        assert await one(watch, IS_ON_DISK, written)
        assert await database.query("SHOW synchronous_commit") == [{"synchronous_commit": "on"}]


async def test_a_role_that_may_only_read_and_write_tables_can_keep_a_run(database, watch, postgres_url):
    conversation = await Conversations(database).create(ALICE, NewConversation(id=ids.new_conversation_id()))
    emits = sql.SQL(", ".join([name async for (name,) in await watch.execute(EMITS)]))
    await watch.execute(sql.SQL(HARDENED).format(emits))
    hardened = Database(postgres_url.replace("//chatsvc@", "//hardened@"), size=1, timeout_s=5)
    try:
        assert await hardened.query("SELECT current_user AS name") == [{"name": "hardened"}]
        runs = Runs(hardened, ServiceCost())
        run = (await runs.submit(submission(conversation, hurried=True))).run
        written = await one(watch, WRITTEN)
        await runs.keep(run.id)
        assert await one(watch, IS_ON_DISK, written)
    finally:
        await hardened.close()
        await watch.execute(sql.SQL(AS_BEFORE).format(emits))


async def test_a_run_is_claimed_while_it_is_being_kept(store, world, database):
    run = (await store.runs.submit(submission(await world.conversation(), hurried=True))).run

    async def kept_but_not_on_the_disk(connection):
        await connection.execute(KEEP, {"id": run.id})
        return await store.runs.claim([run.id], WORKER)

    [claimed] = await database.transaction(kept_but_not_on_the_disk)
    assert claimed.status is RunStatus.STREAMING


async def test_a_hurried_run_is_announced_when_it_is_kept_and_waits_still(store, world, watch):
    waits = (await store.runs.submit(submission(await world.conversation(), hurried=True))).run
    begun = (await store.runs.submit(submission(await world.conversation(), hurried=True))).run
    await store.runs.claim([begun.id], WORKER)
    assert await heard(watch, "before") == []
    await store.runs.keep(begun.id)
    await store.runs.keep(waits.id)
    [told] = await heard(watch, "after")
    assert waits.id in told


async def test_a_run_that_a_repeated_request_finds_waiting_may_be_lost_and_a_claimed_one_is_not(store, world):
    wanted = submission(await world.conversation(), client_msg_id="once", hurried=True)
    run = (await store.runs.submit(wanted)).run
    replay = await store.runs.replay(ALICE.user_id, "once", b"hash")
    assert (replay.created, replay.may_be_lost) == (False, True)
    await store.runs.claim([run.id], WORKER)
    replay = await store.runs.replay(ALICE.user_id, "once", b"hash")
    assert (replay.created, replay.may_be_lost) == (False, False)
