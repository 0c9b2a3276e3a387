"""Leases, news between processes, and shared secrets."""

import asyncio
import contextlib

import psycopg
import pytest
from store_world import ALICE, WORKER, World, checkpoint, complete, stopped
from streaming import soon

from chatsvc.errors import StoreUnavailable
from chatsvc.run import RunStatus, waiting
from chatsvc.store import open_store
from chatsvc.store.records import Signal

LONG = {"roles": ["api", "worker"], "capacity": 8, "ttl_s": 60}


@pytest.fixture
def world(store):
    return World(store)


async def expire(url, worker_id):
    """Let a lease run out without waiting for it."""
    async with await psycopg.AsyncConnection.connect(url) as connection:
        await connection.execute(
            "UPDATE workers SET expires_at = clock_timestamp() - interval '1 ms' WHERE id = %s", [worker_id]
        )


async def test_a_heartbeat_tells_what_is_held_and_what_is_to_stop(world, store):
    kept, unwanted = await world.streaming(), await world.streaming()
    await world.streaming(owner="worker-2")
    await store.runs.request_stop("alice", unwanted.id)
    beat = await store.workers.heartbeat(WORKER, **LONG)
    assert sorted(beat.held) == sorted([(kept.id, 1), (unwanted.id, 1)])
    assert beat.stop_requested == (unwanted.id,)


async def test_a_heartbeat_tells_how_long_ago_the_one_before_was(store, postgres_url):
    assert (await store.workers.heartbeat(WORKER, **LONG)).gap_s is None
    assert 0 <= (await store.workers.heartbeat(WORKER, **LONG)).gap_s < 30
    await expire(postgres_url, WORKER)
    assert 60 <= (await store.workers.heartbeat(WORKER, **LONG)).gap_s < 90


async def test_a_lease_is_renewed_while_nobody_can_read_the_runs(world, store, postgres_url):
    await store.workers.heartbeat(WORKER, **LONG)
    await expire(postgres_url, WORKER)
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        await connection.execute("LOCK TABLE runs")
        with pytest.raises(StoreUnavailable):
            await store.workers.heartbeat(WORKER, **LONG)
        rows = await connection.execute("SELECT expires_at > clock_timestamp() FROM workers")
        assert await rows.fetchall() == [(True,)]


async def test_runs_of_a_living_worker_are_left_alone(world, store):
    run = await world.streaming()
    await store.workers.heartbeat(WORKER, **LONG)
    await store.workers.heartbeat("worker-2", **LONG)
    assert await store.workers.take_over("worker-2") == []
    assert await store.runs.holds(run.id, 1)


async def test_who_has_no_valid_lease_judges_nobody(world, store, postgres_url):
    run = await world.streaming()
    assert await store.workers.take_over("worker-2") == []
    await store.workers.heartbeat("worker-2", **LONG)
    await expire(postgres_url, "worker-2")
    assert await store.workers.take_over("worker-2") == []
    await store.workers.heartbeat("worker-2", **LONG)
    assert [taken.id for taken in await store.workers.take_over("worker-2")] == [run.id]


async def test_others_are_those_that_live_and_have_the_role(store, postgres_url):
    await store.workers.heartbeat(WORKER, **LONG)
    assert not await store.workers.has_others(WORKER, "api")
    await store.workers.heartbeat("worker-2", **LONG | {"roles": ["worker"]})
    assert not await store.workers.has_others(WORKER, "api")
    assert await store.workers.has_others(WORKER, "worker")
    await store.workers.heartbeat("worker-3", **LONG)
    assert await store.workers.has_others(WORKER, "api")
    await expire(postgres_url, "worker-3")
    assert not await store.workers.has_others(WORKER, "api")


@pytest.mark.parametrize("gone", ["expired", "left", "never seen"])
async def test_runs_of_a_worker_that_is_gone_go_to_another_under_a_new_attempt(world, store, postgres_url, gone):
    run = await world.streaming()
    waiting = await world.queued()
    await store.runs.checkpoint([checkpoint(run, "so far", 5)])
    if gone != "never seen":
        await store.workers.heartbeat(WORKER, **LONG)
    if gone == "expired":
        await expire(postgres_url, WORKER)
    if gone == "left":
        await store.workers.leave(WORKER)
    await store.workers.heartbeat("worker-2", **LONG)

    [taken] = await store.workers.take_over("worker-2")

    assert (taken.id, taken.attempt, taken.owner, taken.last_seq) == (run.id, 2, "worker-2", 5)
    assert taken.status is RunStatus.STREAMING
    assert (await store.runs.reply(run.id)).text == "so far"
    assert (await store.runs.get("alice", waiting.id)).status is RunStatus.QUEUED
    await store.workers.heartbeat("worker-3", **LONG)
    assert await store.workers.take_over("worker-3") == []


async def test_the_old_workers_last_words_come_too_late(world, store, postgres_url):
    run = await world.streaming()
    await store.workers.heartbeat(WORKER, **LONG)
    await expire(postgres_url, WORKER)
    await store.workers.heartbeat("worker-2", **LONG)
    await store.workers.take_over("worker-2")
    beat = await store.workers.heartbeat(WORKER, **LONG)
    assert beat.held == ()
    assert await store.runs.checkpoint([checkpoint(run, "late")]) == set()
    assert not await store.runs.finish(run.id, 1, complete())
    assert not await store.runs.requeue(run.id, 1)
    assert await store.runs.finish(run.id, 2, stopped())


async def test_racing_workers_share_the_orphans_among_them(world, store, postgres_url):
    others = [f"worker-{number}" for number in range(4)]
    conversation = await world.conversation()
    for each in others:
        await store.workers.heartbeat(each, **LONG)
    async with open_store(postgres_url, pool_size=10, timeout_s=5) as replica:
        for _ in range(25):
            orphans = [(await world.streaming(conversation, owner="dead")).id for _ in range(6)]
            takers = [(each, worker) for worker in others for each in (store, replica)]
            taken = await asyncio.gather(*(each.workers.take_over(worker, limit=4) for each, worker in takers))
            ids = [run.id for runs in taken for run in runs]
            assert sorted(ids) == sorted(orphans)
            assert max(len(runs) for runs in taken) <= 4
            for run in (run for runs in taken for run in runs):
                assert await store.runs.finish(run.id, 2, complete())


async def test_a_worker_row_long_expired_is_removed(world, store, postgres_url):
    await store.workers.heartbeat(WORKER, **LONG)
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        await connection.execute("UPDATE workers SET expires_at = now() - interval '2 hours'")
        await connection.commit()
        await store.workers.take_over("worker-2")
        assert await (await connection.execute("SELECT count(*) FROM workers")).fetchone() == (0,)


@contextlib.asynccontextmanager
async def listening(store):
    """Signals as they come, and an event that is set on every connect."""
    heard, connected = asyncio.Queue(), asyncio.Event()
    task = asyncio.create_task(store.signals.listen(heard.put_nowait, connected.set))
    try:
        await soon(connected.wait())
        yield heard, connected
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def next_of(heard):
    return await soon(heard.get())


async def test_whoever_listens_hears_of_waiting_stopped_and_deleted_runs(world, store, postgres_url):
    async with open_store(postgres_url, pool_size=2, timeout_s=5) as replica, listening(replica) as (heard, _):
        run = await world.streaming()
        assert await next_of(heard) == Signal("queued", run.id, "small", waiting(run))
        await store.runs.request_stop("alice", run.id)
        assert await next_of(heard) == Signal("stop", run.id, "small")
        await store.conversations.delete("alice", run.conversation_id)
        assert await next_of(heard) == Signal("gone", run.id, "small")
        again = await world.streaming()
        await store.runs.requeue(again.id, 1)
        assert await next_of(heard) == Signal("queued", again.id, "small", waiting(again))
        back = await next_of(heard)
        assert back == Signal("queued", again.id, "small", waiting(again, back.waiting.age_s))
        assert back.waiting.age_s > 0
        await store.runs.request_stop("alice", again.id)
        assert await next_of(heard) == Signal("stop", again.id, "small")
        assert heard.empty()


async def test_a_refused_submission_is_not_heard_of(world, store):
    async with listening(store) as (heard, _):
        run = await world.queued(client_msg_id="one")
        await next_of(heard)
        with pytest.raises(Exception, match="client_msg_id"):
            await world.queued(client_msg_id="one", request_hash=b"other")
        await store.runs.request_stop("alice", run.id)
        assert (await next_of(heard)).kind == "stop"


async def test_a_lost_listener_connects_again_and_says_so(world, store, postgres_url):
    async with listening(store) as (heard, connected):
        for _ in range(3):
            connected.clear()
            async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
                await connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"
                    " AND datname = current_database()"
                )
            await soon(connected.wait())
            run = await world.queued()
            assert (await next_of(heard)).response_id == run.id


async def test_other_peoples_words_on_the_channel_are_passed_over(world, store, postgres_url):
    async with listening(store) as (heard, _):
        async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
            for payload in ("", "hello", "[]", '{"kind": 3}', '{"kind": "stop"}'):
                await connection.execute("SELECT pg_notify('chatsvc', %s)", [payload])
        run = await world.queued()
        assert (await next_of(heard)).response_id == run.id


async def test_a_secret_is_the_same_for_everybody_who_asks(store, postgres_url):
    async with open_store(postgres_url, pool_size=5, timeout_s=5) as replica:
        found = await asyncio.gather(
            *(each.secrets.get_or_create("stream") for _ in range(10) for each in (store, replica))
        )
    assert len(set(found)) == 1
    assert len(found[0]) == 32
    other = await store.secrets.get_or_create("other", nbytes=16)
    assert len(other) == 16
    assert other not in found[0]


async def test_a_tier_is_brought_up_to_date(store, postgres_url):
    await store.users.touch(ALICE)
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        row = await (await connection.execute("SELECT tier, seen_at IS NOT NULL FROM users")).fetchone()
    assert row == ("plus", True)
