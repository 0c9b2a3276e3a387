"""A reply that takes its workers or engines down with it is failed in the end, and may be tried again by hand (L6)."""

import asyncio

import pytest
from running_scheduler import scheduler, take_over
from store_world import World, regeneration
from streaming import soon

from chatsvc.inference.factory import create_engine
from chatsvc.run import MOST_LOSSES, RunStatus
from chatsvc.scheduler import orphans as orphans_module

BREAKS = "fault=error@0&fault_on=Break"
ENDED = (RunStatus.COMPLETE, RunStatus.STOPPED, RunStatus.FAILED)


@pytest.fixture
def world(store):
    return World(store)


@pytest.fixture
async def log(make_new_log, monkeypatch):
    monkeypatch.setattr(orphans_module, "OPENING_S", 60.0)  # a busy machine may take long between claim and mark
    log = make_new_log()
    yield log
    await log.aclose()


async def ended(store, run):
    while (now := await store.runs.get(run.user_id, run.id)).status not in ENDED:
        await asyncio.sleep(0.02)
    return now


async def lost_by(store, log, run, *workers):
    """Each worker takes the run and is lost before it has shown anything, up to the last, which still holds it."""
    for number, worker in enumerate(workers, 1):
        [held] = await store.runs.claim([run.id], worker)
        await log.open(held.id, held.attempt)
        if number < len(workers):
            assert await store.runs.requeue(held.id, held.attempt, lost=True)
    return held


async def settled(store, made):
    [taken] = await take_over(store, made)
    made._orphans.settle(taken.id)


async def test_a_reply_whose_workers_were_lost_again_and_again_is_failed_and_may_be_tried_again_l6(
    store, world, tmp_path, log
):
    run = await world.queued()
    await lost_by(store, log, run, *(f"lost-{number}" for number in range(MOST_LOSSES)))
    async with scheduler(store, tmp_path, log, script="tokens=5") as made:
        await settled(store, made)
        failed = await soon(ended(store, run))
        assert (failed.status, failed.error_code, failed.attempt) == (
            RunStatus.FAILED,
            "worker_lost",
            MOST_LOSSES + 1,
        )
        assert failed.error_message.startswith(f"{MOST_LOSSES} times")
        assert (await world.message(run)).content == ""

        async def told():
            while not (entries := (await log.read(run.id, 0)).entries) or not entries[-1].terminal:
                await asyncio.sleep(0.01)
            return entries[-1]

        last = await soon(told())
        assert (last.seq, last.event) == (failed.last_seq, "error")
        again = (await store.runs.regenerate(regeneration(run.user_message_id))).run
        assert again.losses == 0
        assert (await soon(ended(store, again))).status is RunStatus.COMPLETE


async def test_one_loss_less_is_answered_l6(store, world, tmp_path, log):
    run = await world.queued()
    await lost_by(store, log, run, *(f"lost-{number}" for number in range(MOST_LOSSES - 1)))
    async with scheduler(store, tmp_path, log, script="tokens=5") as made:
        await settled(store, made)
        done = await soon(ended(store, run))
        assert (done.status, done.losses) == (RunStatus.COMPLETE, MOST_LOSSES - 1)


async def test_what_was_given_back_by_workers_that_left_is_no_loss_however_often_l6(store, world, tmp_path, log):
    run = await world.queued()
    for leaving in range(MOST_LOSSES + 1):
        [held] = await store.runs.claim([run.id], f"leaving-{leaving}")
        await log.open(held.id, held.attempt)
        assert await store.runs.requeue(held.id, held.attempt)
    await lost_by(store, log, run, "lost")
    async with scheduler(store, tmp_path, log, script="tokens=5") as made:
        await settled(store, made)
        done = await soon(ended(store, run))
        assert (done.status, done.losses) == (RunStatus.COMPLETE, 1)


async def test_a_reply_that_breaks_its_engine_again_and_again_is_failed_and_others_are_answered_l6(
    store, world, tmp_path, log
):
    engine = create_engine(f"scripted:?tokens=5&{BREAKS}", name="small", data_dir=tmp_path)
    async with scheduler(store, tmp_path, log, engine=engine):
        run = await world.queued(content="Break it, please.")
        failed = await soon(ended(store, run))
        assert (failed.status, failed.error_code, failed.attempt) == (RunStatus.FAILED, "engine_failed", MOST_LOSSES)
        assert (await soon(ended(store, await world.queued()))).status is RunStatus.COMPLETE
