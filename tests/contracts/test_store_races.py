"""L5: whatever races, a run ends exactly once, and run and message agree. Real connections, random moments."""

import asyncio
import random

import psycopg
import pytest
from store_world import WORKER, World, checkpoint, complete, failed, new_fold, stopped, submission

from chatsvc import ids
from chatsvc.errors import NotFound
from chatsvc.run import RunStatus
from chatsvc.store import Committed, Submitted, open_store

ROUNDS = 150


@pytest.fixture
async def stores(postgres_url):
    """Two replicas on one database."""
    async with (
        open_store(postgres_url, pool_size=8, timeout_s=20) as one,
        open_store(postgres_url, pool_size=8, timeout_s=20) as two,
    ):
        yield one, two


@pytest.fixture
async def watcher(postgres_url):
    """A connection that looks past the door."""
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
        yield connection


async def at_some_moment(chance, call):
    """Await after a delay of about the length of a command, so that orders vary."""
    await asyncio.sleep(chance.uniform(0, 0.004))
    return await call


async def disagreements(watcher):
    """Runs whose message says something else than they do."""
    rows = await watcher.execute(
        """
        SELECT r.id, r.status, m.status FROM runs r JOIN messages m ON m.id = r.message_id
        WHERE m.status <> r.status OR m.response_id <> r.id
           OR m.finish_reason IS DISTINCT FROM r.finish_reason OR m.error_code IS DISTINCT FROM r.error_code
        """
    )
    return await rows.fetchall()


ENDS = {
    "complete": lambda store, run: store.runs.finish(run.id, run.attempt, complete("C", last_seq=11)),
    "stopped": lambda store, run: store.runs.finish(run.id, run.attempt, stopped("S", last_seq=12)),
    "failed": lambda store, run: store.runs.finish(run.id, run.attempt, failed("F", last_seq=13)),
}
TEXT = {"complete": "C", "stopped": "S", "failed": "F"}


@pytest.mark.parametrize("seed", [1, 2])
async def test_racing_ends_of_a_streaming_run_have_one_winner(stores, watcher, seed):
    chance = random.Random(seed)
    world = World(stores[0])
    conversation = await world.conversation()
    await stores[1].workers.heartbeat("worker-2", roles=["worker"], capacity=1, ttl_s=300)
    for _ in range(ROUNDS):
        run = await world.streaming(conversation)
        names = chance.sample(sorted(ENDS), 3)
        others = [
            stores[0].runs.request_stop("alice", run.id),
            stores[1].runs.checkpoint([checkpoint(run, "half")]),
            stores[1].runs.requeue(run.id, run.attempt),
            stores[0].runs.finish_queued(run.id, failed("Q", last_seq=14)),
            stores[1].workers.take_over("worker-2"),  # the owner has no heartbeat: it is always an orphan
        ]
        calls = [ENDS[name](chance.choice(stores), run) for name in names] + others
        answers = await asyncio.gather(*(at_some_moment(chance, call) for call in calls))
        won = [name for name, answer in zip(names, answers[:3], strict=True) if answer]
        asked, saved, requeued, ended_waiting, taken = answers[3:]
        reply = await stores[0].runs.reply(run.id)

        assert len(won) + (ended_waiting is not None) <= 1
        if won:
            assert (reply.run.status, reply.text) == (won[0], TEXT[won[0]])
            assert reply.run.attempt == run.attempt
            assert not taken
        elif ended_waiting is not None or reply.run.status.ended:
            # Put back, and then ended in the queue: by finish_queued, or by the request to stop.
            assert requeued
            assert (reply.run.status, reply.run.attempt, reply.text) in [
                (RunStatus.FAILED, run.attempt + 1, "Q"), (RunStatus.STOPPED, run.attempt + 1, "")
            ]  # fmt: skip
        elif taken:
            assert (reply.run.status, reply.run.attempt) == (RunStatus.STREAMING, run.attempt + 1)
            assert not requeued
            assert reply.text == ("half" if saved else "")
        else:
            assert requeued
            assert (reply.run.status, reply.text) == (RunStatus.QUEUED, "")
        if requeued and not taken:
            assert not saved
        assert asked.id == run.id
        assert await disagreements(watcher) == []
        # Nothing is left over for the next round.
        if not reply.run.status.ended:
            for claimed in await stores[0].runs.claim([run.id], "worker-2"):
                await stores[0].runs.finish(claimed.id, claimed.attempt, complete())
            if taken:
                assert await stores[0].runs.finish(run.id, run.attempt + 1, complete())
    rows = await watcher.execute("SELECT count(*) FROM runs WHERE ended_at IS NULL")
    assert await rows.fetchone() == (0,)


async def test_a_stop_that_races_the_claim_is_never_lost(stores, watcher):
    chance = random.Random(3)
    world = World(stores[0])
    conversation = await world.conversation()
    outcomes = set()
    for _ in range(ROUNDS):
        run = await world.queued(conversation)
        claimed, asked = await asyncio.gather(
            at_some_moment(chance, stores[0].runs.claim([run.id], WORKER)),
            at_some_moment(chance, stores[1].runs.request_stop("alice", run.id)),
        )
        now = await stores[0].runs.get("alice", run.id)
        outcomes.add(now.status)
        if claimed:
            assert (now.status, now.stop_requested, asked.stop_requested) == (RunStatus.STREAMING, True, True)
            beat = await stores[0].workers.heartbeat(WORKER, roles=["worker"], capacity=1, ttl_s=60)
            assert beat.stop_requested == (run.id,)
            assert await stores[0].runs.finish(run.id, 1, stopped())
        else:
            assert (now.status, now.attempt) == (RunStatus.STOPPED, 1)
            assert asked == now
    assert outcomes == {RunStatus.STREAMING, RunStatus.STOPPED}, "both orders must have been tried"
    assert await disagreements(watcher) == []


async def test_a_conversation_can_be_deleted_at_any_moment(stores, watcher):
    """Against submit, finish, stop, checkpoint and take-over at once: no deadlock is reported, and nothing is left."""
    chance = random.Random(4)
    world = World(stores[0])
    await stores[1].workers.heartbeat("worker-2", roles=["worker"], capacity=1, ttl_s=300)
    for _ in range(ROUNDS // 2):
        conversation = await world.conversation()
        run, waiting = await world.streaming(conversation), await world.queued(conversation)
        calls = [
            stores[0].conversations.delete("alice", conversation.id),
            stores[1].conversations.delete("alice", conversation.id),
            stores[1].runs.submit(submission(conversation)),
            stores[1].runs.finish(run.id, run.attempt, complete()),
            stores[0].runs.request_stop("alice", waiting.id),
            stores[0].runs.checkpoint([checkpoint(run, "half")]),
            stores[1].workers.take_over("worker-2"),
            stores[0].runs.claim([waiting.id], WORKER),
        ]
        answers = await asyncio.gather(*(at_some_moment(chance, call) for call in calls), return_exceptions=True)
        for answer in answers:
            assert not isinstance(answer, BaseException) or isinstance(answer, NotFound), answer
        deletions = [answer for answer in answers[:2] if not isinstance(answer, NotFound)]
        assert len(deletions) == 1
        assert {run.id, waiting.id} <= set(deletions[0].response_ids)
        if isinstance(answers[2], Submitted):
            assert answers[2].run.id in deletions[0].response_ids
        for table in ("conversations", "messages", "runs"):
            rows = await watcher.execute(f"SELECT count(*) FROM {table}")
            assert await rows.fetchone() == (0,), table
    counted = await watcher.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
    assert await counted.fetchone() == (0,)


async def test_a_reply_that_ends_waits_for_its_conversation_before_it_holds_its_users_ledger(
    stores, watcher, postgres_url
):
    """As a fold does, which holds both: else the two would wait for each other until Postgres ends one of them."""
    store, _ = stores
    world = World(store)
    conversation = await world.conversation()
    await world.complete(conversation)  # the ledger's row is there
    run = await world.streaming(await world.conversation())
    async with await psycopg.AsyncConnection.connect(postgres_url) as fold:
        await fold.execute("SELECT 1 FROM conversations WHERE id = %s FOR NO KEY UPDATE", (run.conversation_id,))
        ending = asyncio.create_task(store.runs.finish(run.id, run.attempt, complete()))
        waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        while not await (await watcher.execute(waiting)).fetchall():
            await asyncio.sleep(0.005)
        await fold.execute("SELECT 1 FROM usage FOR UPDATE NOWAIT")
    assert await ending


async def test_a_fold_that_is_queued_while_another_one_ends_goes_on_from_what_that_left(stores):
    chance = random.Random(6)
    world = World(stores[0])
    for _ in range(ROUNDS // 3):
        conversation = await world.conversation()
        path = await world.turns(conversation, 3)
        _, base = await _folded(stores[0], await _fold(stores[0], new_fold(conversation, path[1])))
        fold = await _fold(stores[0], new_fold(conversation, path[3], base))
        summary = ids.new_summary_id()
        follows = new_fold(conversation, path[5], summary)

        async def commit_and_look_on(fold=fold, summary=summary, follows=follows):
            committed = await stores[0].summaries.commit(fold, summary, "Facts.", 2, complete(text=""))
            assert committed is Committed.YES
            return await stores[0].summaries.queue(follows, rest_s=600)

        looks = [
            new_fold(conversation, path[3], base),
            new_fold(conversation, path[5], base),
            new_fold(conversation, path[5], summary),
        ]
        calls = [stores[n % 2].summaries.queue(look, rest_s=600) for n, look in enumerate(looks)]
        calls.append(commit_and_look_on())
        answers = await asyncio.gather(*(at_some_moment(chance, call) for call in calls))
        [queued] = [run for run in answers if run is not None]
        assert queued.fold_base_id == summary
        [claimed] = await stores[0].runs.claim([queued.id], WORKER)
        assert (await _folded(stores[0], claimed))[0] is Committed.YES


async def _fold(store, fold):
    run = await store.summaries.queue(fold, rest_s=600)
    return (await store.runs.claim([run.id], WORKER))[0]


async def _folded(store, fold):
    summary = ids.new_summary_id()
    return await store.summaries.commit(fold, summary, "Facts.", 2, complete(text="")), summary


async def test_batches_that_overlap_in_any_order_never_deadlock(stores, watcher):
    chance = random.Random(5)
    world = World(stores[0])
    conversation = await world.conversation()
    runs = [await world.streaming(conversation) for _ in range(12)]

    async def save(store):
        batch = [checkpoint(run, "half", seq=chance.randrange(1, 9)) for run in chance.sample(runs, 8)]
        return await store.runs.checkpoint(batch)

    saved = await asyncio.gather(*(at_some_moment(chance, save(store)) for _ in range(60) for store in stores))
    assert all(len(each) == 8 for each in saved)
    counted = await watcher.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
    assert await counted.fetchone() == (0,)
