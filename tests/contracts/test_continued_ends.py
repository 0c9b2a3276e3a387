"""A reply that was to go on with another's text and came to say nothing: log and store show that text alike (L3)."""

import asyncio

import pytest
from running_scheduler import FickleLog, scheduler, take_over
from store_world import ALICE, World, regeneration, stopped
from streaming import append, soon

from chatsvc.events import Start, entry
from chatsvc.run import RunStatus

KEPT = "What was said before."
DEAD = "a-worker-that-died"


@pytest.fixture
def world(store):
    return World(store)


async def continuing(world, kept=KEPT, **changes):
    """A queued run that goes on with a stopped reply."""
    broken = await world.streaming(model="of-yesterday")  # which no scheduler here takes
    assert await world.store.runs.finish(broken.id, broken.attempt, stopped(kept))
    new = regeneration(broken.user_message_id, continues_message_id=broken.message_id, **changes)
    return (await world.store.runs.regenerate(new)).run


async def told(log, run):
    """Events in the log as (seq, name, text)."""
    return [
        (one.seq, one.event, one.data.decode().partition('"text":"')[2].partition('"')[0])
        for one in (await log.read(run.id, 0)).entries
    ]


async def ends_as(world, run, status):
    while not (now := await world.store.runs.get(run.user_id, run.id)).status.ended:
        await asyncio.sleep(0.01)
    assert now.status is status
    assert (await world.message(run)).content == KEPT
    return now


async def logged_end(log, run, last_seq):
    """The log's events, once it has the one that the store calls the last."""
    while (page := await log.read(run.id, 0)).last < last_seq:
        await asyncio.sleep(0.01)
    assert page.last == last_seq
    return await told(log, run)


async def test_stopped_in_the_queue_it_shows_the_text_it_keeps(store, world, tmp_path):
    async with scheduler(store, tmp_path, script="tokens_per_s=1&tokens=200&slots=1") as made:
        running = await world.queued()
        while (await store.runs.get(running.user_id, running.id)).status is RunStatus.QUEUED:
            await asyncio.sleep(0.01)
        run = await continuing(world)
        assert (await made.stop(ALICE.user_id, run.id)).status is RunStatus.STOPPED
        ended = await ends_as(world, run, RunStatus.STOPPED)
        assert await soon(logged_end(made.log, run, ended.last_seq)) == [(1, "delta", KEPT), (2, "done", "")]
        await made.stop(ALICE.user_id, run.id)
        assert made.ended == {(run.model, "stopped"): 1}


async def test_stopped_in_the_queue_with_nothing_kept_it_is_one_event(store, world, tmp_path):
    async with scheduler(store, tmp_path, script="tokens_per_s=1&tokens=200&slots=1") as made:
        running = await world.queued()
        while (await store.runs.get(running.user_id, running.id)).status is RunStatus.QUEUED:
            await asyncio.sleep(0.01)
        run = await continuing(world, kept="")
        ended = await made.stop(ALICE.user_id, run.id)
        assert await soon(logged_end(made.log, run, ended.last_seq)) == [(1, "done", "")]


async def test_stopped_while_its_worker_was_dead_it_shows_the_text_it_keeps(store, world, tmp_path):
    log = FickleLog()
    run = await continuing(world)
    [claimed] = await store.runs.claim([run.id], DEAD)
    await log.open(run.id, claimed.attempt)
    start = Start(response_id=run.id, message_id=run.message_id, model=run.model, created_at=run.created_at)
    await log.append([append(run.id, entry(start, attempt=claimed.attempt, seq=1))])
    await store.runs.request_stop(ALICE.user_id, run.id)
    async with scheduler(store, tmp_path, log) as made:
        [taken] = await take_over(store, made)
        made._orphans.settle(taken.id)
        ended = await soon(ends_as(world, run, RunStatus.STOPPED))
        events = await soon(logged_end(log, run, ended.last_seq))
        assert events == [(1, "start", ""), (2, "delta", KEPT), (3, "done", "")]
        assert made.ended == {(run.model, "stopped"): 1}


async def test_of_a_model_nobody_serves_any_more_it_shows_the_text_it_keeps(store, world, tmp_path, monkeypatch):
    unserved = store.runs.unserved
    monkeypatch.setattr(store.runs, "unserved", lambda: unserved(patience_s=0))
    async with scheduler(store, tmp_path) as made:
        await made._lease.beat()
        run = await continuing(world, model="of-yesterday")
        made._orphans.settle_unserved()
        ended = await soon(ends_as(world, run, RunStatus.FAILED))
        assert await soon(logged_end(made.log, run, ended.last_seq)) == [(1, "delta", KEPT), (2, "error", "")]
        assert made.ended == {("of-yesterday", "failed"): 1}


async def test_what_was_put_back_after_its_start_goes_on_counting(store, world, tmp_path):
    """The log has a start from an attempt that came to nothing; the stop in the queue follows it without a gap (L2)."""
    log = FickleLog()
    run = await continuing(world)
    [claimed] = await store.runs.claim([run.id], DEAD)
    await log.open(run.id, claimed.attempt)
    start = Start(response_id=run.id, message_id=run.message_id, model=run.model, created_at=run.created_at)
    await log.append([append(run.id, entry(start, attempt=claimed.attempt, seq=1))])
    async with scheduler(store, tmp_path, log, script="tokens_per_s=1&tokens=200&slots=1") as made:
        running = await world.queued()
        while (await store.runs.get(running.user_id, running.id)).status is RunStatus.QUEUED:
            await asyncio.sleep(0.01)
        assert await store.runs.requeue(run.id, claimed.attempt, 1)
        ended = await made.stop(ALICE.user_id, run.id)
        events = await soon(logged_end(log, run, ended.last_seq))
        assert events == [(1, "start", ""), (2, "delta", KEPT), (3, "done", "")]
        assert made.ended == {(run.model, "stopped"): 1}
