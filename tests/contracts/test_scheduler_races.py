"""The scheduler's rare moments, on a real store: claims under way, orphans, and a log that is away (L3, L5, L6, L9)."""

import asyncio
import time
from datetime import timedelta

import pytest
from running_scheduler import FickleLog, scheduler, take_over
from store_world import ALICE, World, checkpoint
from streaming import append, soon

from chatsvc.clock import SystemClock
from chatsvc.events import Delta, Start, entry
from chatsvc.run import RunStatus
from chatsvc.scheduler import orphans as orphans_module
from chatsvc.streamlog import reply as reply_module
from chatsvc.streamlog.snapshot import text_through

DEAD = "a-worker-that-died"
ENDED = (RunStatus.COMPLETE, RunStatus.STOPPED, RunStatus.FAILED)


class HeldClaims:
    """Lets a test act between a claim's commit and its answer."""

    def __init__(self, runs):
        self.claim = runs.claim
        self.committed = asyncio.Event()
        self.answer = asyncio.Event()
        runs.claim = self

    async def __call__(self, run_ids, owner):
        claimed = await self.claim(run_ids, owner)
        self.committed.set()
        await self.answer.wait()
        return claimed


@pytest.fixture
def world(store):
    return World(store)


async def status_of(store, run):
    return (await store.runs.get(run.user_id, run.id)).status


async def becomes(store, run, *statuses):
    while (status := await status_of(store, run)) not in statuses:
        await asyncio.sleep(0.02)
    return status


async def logged_text(log, run):
    return text_through((await log.read(run.id, 0)).entries)[1]


async def ended_text(log, run):
    """The text in the log once its end is there too: the store has it a moment before (L4)."""

    async def ends():
        while not (entries := (await log.read(run.id, 0)).entries) or not entries[-1].terminal:
            await asyncio.sleep(0.01)

    await soon(ends())
    return await logged_text(log, run)


async def test_the_worker_that_ends_a_reply_knows_its_last_event_before_anybody_can_see_it(
    store, world, tmp_path, monkeypatch
):
    """Who has seen that event and comes back is told that there is nothing more, though the worker is not done yet."""
    closing, go_on = asyncio.Event(), asyncio.Event()
    close = reply_module.ReplyWriter.close

    async def held(reply, ttl_s):
        closing.set()
        await go_on.wait()
        await close(reply, ttl_s)

    monkeypatch.setattr(reply_module.ReplyWriter, "close", held)
    async with scheduler(store, tmp_path, script="tokens=3") as made:
        run = await world.queued()
        await soon(closing.wait())
        active = made.active(run.id)
        stored = await store.runs.get(run.user_id, run.id)
        assert active.last_seq == stored.last_seq > 0
        go_on.set()
        await soon(active.ended.wait())
        assert made.active(run.id) is None


async def orphan(world, log, text=""):
    """A run whose worker wrote some text into the log and died before its first checkpoint."""
    run = await world.streaming(owner=DEAD)
    await log.open(run.id, run.attempt)
    if text:
        await log.append([append(run.id, entry(Delta(text=text), attempt=run.attempt, seq=1))])
    return run


async def test_a_stop_between_a_claim_and_its_answer_is_not_lost_l9(store, world, tmp_path):
    held = HeldClaims(store.runs)
    async with scheduler(store, tmp_path) as made:
        run = await world.queued()
        await soon(held.committed.wait())
        assert (await made.stop(ALICE.user_id, run.id)).status is RunStatus.STREAMING
        held.answer.set()
        assert await soon(becomes(store, run, RunStatus.STOPPED, RunStatus.COMPLETE)) is RunStatus.STOPPED
        assert (await store.runs.get(run.user_id, run.id)).usage.output_tokens <= 1


async def test_a_shutdown_waits_for_a_claim_under_way_and_gives_the_run_back(store, world, tmp_path):
    held = HeldClaims(store.runs)
    async with scheduler(store, tmp_path) as made:
        run = await world.queued()
        await soon(held.committed.wait())
        draining = asyncio.create_task(made.drain(10))
        await asyncio.sleep(0)
        assert not draining.done()
        held.answer.set()
        await soon(draining)
        assert await status_of(store, run) is RunStatus.QUEUED
        assert made.dispatcher.active_count == 0


async def test_what_was_shown_is_never_sampled_again_though_the_log_is_away_when_its_worker_dies_l6(
    store, world, tmp_path, monkeypatch
):
    monkeypatch.setattr(orphans_module, "LOG_PATIENCE_S", 0.0)
    log = FickleLog()
    run = await orphan(world, log, "old shown text")
    async with scheduler(store, tmp_path, log) as made:
        made.log.away = True
        [taken] = await take_over(store, made)
        made._orphans.settle(taken.id)
        assert await soon(becomes(store, run, *ENDED, RunStatus.QUEUED)) is RunStatus.FAILED
        made.log.away = False
        assert "fresh" not in await logged_text(made.log, run)


async def test_an_orphan_that_may_have_shown_something_is_not_judged_while_its_log_is_away(store, world, tmp_path):
    log = FickleLog()
    run = await orphan(world, log, "old shown text")
    async with scheduler(store, tmp_path, log) as made:
        made.log.away = True
        [taken] = await take_over(store, made)
        made._orphans.settle(taken.id)
        while made._orphans.run_ids():
            await asyncio.sleep(0.01)
        assert await status_of(store, run) is RunStatus.STREAMING
        made.log.away = False
        made._orphans.settle(taken.id)
        assert await soon(becomes(store, run, *ENDED, RunStatus.QUEUED)) is RunStatus.FAILED
        assert (await world.message(run)).content == "old shown text" == await logged_text(made.log, run)


async def test_an_orphan_that_had_shown_nothing_is_answered(store, world, tmp_path):
    log = FickleLog()
    run = await orphan(world, log)
    async with scheduler(store, tmp_path, log, text="fresh") as made:
        [taken] = await take_over(store, made)
        made._orphans.settle(taken.id)
        assert await soon(becomes(store, run, RunStatus.COMPLETE, RunStatus.FAILED)) is RunStatus.COMPLETE
        assert (await world.message(run)).content == await ended_text(made.log, run)


async def test_what_was_shown_is_never_sampled_again_though_its_log_was_lost_before_its_worker_died_l6(
    store, world, tmp_path
):
    log = FickleLog()
    run = await orphan(world, log, "old shown text")
    log.lose()
    async with scheduler(store, tmp_path, log, text="fresh") as made:
        [taken] = await take_over(store, made)
        made._orphans.settle(taken.id)
        assert await soon(becomes(store, run, *ENDED, RunStatus.QUEUED)) is RunStatus.FAILED
        # Whoever has seen event 1 is told of the end by a number that it has not seen.
        assert (await store.runs.get(run.user_id, run.id)).last_seq > 1


async def test_what_was_shown_is_never_sampled_again_though_a_replica_took_over_that_never_got_it_l6(
    store, world, tmp_path, monkeypatch
):
    monkeypatch.setattr(orphans_module, "OPENING_S", 0.0)
    log = FickleLog()
    run = await orphan(world, log)
    start = Start(response_id=run.id, message_id=run.message_id, model="small", created_at=run.created_at)
    shown = Delta(text="shown")
    await log.append([append(run.id, *(entry(e, attempt=run.attempt, seq=n) for n, e in ((1, start), (2, shown))))])
    log.lose_after(run.id, 1)
    async with scheduler(store, tmp_path, log, text="fresh") as made:
        [taken] = await take_over(store, made)
        made._orphans.settle(taken.id)
        assert await soon(becomes(store, run, *ENDED, RunStatus.QUEUED)) is RunStatus.FAILED
        # Whoever has seen event 2 is told of the end by a number that it has not seen.
        assert (await store.runs.get(run.user_id, run.id)).last_seq > 3


class SlowClock(SystemClock):
    """Of a machine that is an hour behind the database's."""

    def now(self):
        return super().now() - timedelta(hours=1)


async def test_what_was_shown_is_never_sampled_again_though_the_clocks_of_server_and_database_differ_l6(
    store, world, tmp_path
):
    log = FickleLog()
    run = await orphan(world, log, "old shown text")
    log.lose()
    async with scheduler(store, tmp_path, log, text="fresh", clock=SlowClock()) as made:
        [taken] = await take_over(store, made)
        made._orphans.settle(taken.id)
        assert await soon(becomes(store, run, *ENDED, RunStatus.QUEUED)) is RunStatus.FAILED


async def test_what_was_shown_is_never_sampled_again_though_the_process_is_paused_while_it_judges_l6(
    store, world, tmp_path, monkeypatch
):
    log = FickleLog()
    run = await orphan(world, log, "old shown text")
    log.lose()
    unbroken_s = log.unbroken_s

    async def after_a_pause(response_id):
        time.sleep(0.2)  # noqa: ASYNC251 - the whole process stands, which nothing but a real pause shows
        return await unbroken_s(response_id)

    monkeypatch.setattr(log, "unbroken_s", after_a_pause)
    async with scheduler(store, tmp_path, log, text="fresh") as made:
        [taken] = await take_over(store, made)
        made._orphans.settle(taken.id)
        assert await soon(becomes(store, run, *ENDED, RunStatus.QUEUED)) is RunStatus.FAILED


async def test_an_orphan_that_had_shown_nothing_is_answered_though_its_log_was_the_first_of_all_l6(
    store, world, tmp_path, make_new_log, monkeypatch
):
    monkeypatch.setattr(orphans_module, "OPENING_S", 60.0)  # a busy machine may take long between claim and mark
    run = await world.streaming(owner=DEAD)
    log = make_new_log()
    await log.open(run.id, run.attempt)
    async with scheduler(store, tmp_path, log, text="fresh") as made:
        [taken] = await take_over(store, made)
        made._orphans.settle(taken.id)
        assert await soon(becomes(store, run, RunStatus.COMPLETE, RunStatus.FAILED)) is RunStatus.COMPLETE
        assert (await world.message(run)).content == await ended_text(made.log, run)
    await log.aclose()


async def test_what_was_shown_is_never_sampled_again_though_a_replica_took_over_that_only_got_its_beginning_l6(
    store, world, tmp_path, monkeypatch
):
    monkeypatch.setattr(orphans_module, "OPENING_S", 0.0)
    log = FickleLog()
    run = await orphan(world, log, "old shown text")
    log.lose_after(run.id, 0)
    async with scheduler(store, tmp_path, log, text="fresh") as made:
        [taken] = await take_over(store, made)
        made._orphans.settle(taken.id)
        assert await soon(becomes(store, run, *ENDED, RunStatus.QUEUED)) is RunStatus.FAILED
        assert (await store.runs.get(run.user_id, run.id)).last_seq > 1


async def test_what_was_shown_is_never_sampled_again_though_who_began_its_lost_log_anew_to_end_it_died_as_well_l6(
    store, world, tmp_path, monkeypatch
):
    monkeypatch.setattr(orphans_module, "OPENING_S", 0.0)
    log = FickleLog()
    run = await orphan(world, log, "old shown text")
    log.lose()
    await store.workers.heartbeat("second", roles=["worker"], capacity=1, ttl_s=60)
    [taken] = await store.workers.take_over("second")
    await log.open(taken.id, taken.attempt)
    await store.workers.leave("second")
    async with scheduler(store, tmp_path, log, text="fresh") as made:
        [taken] = await take_over(store, made)
        made._orphans.settle(taken.id)
        assert await soon(becomes(store, run, *ENDED, RunStatus.QUEUED)) is RunStatus.FAILED


async def test_many_orphans_and_an_absent_log_do_not_hold_up_the_heartbeat(store, world, tmp_path, monkeypatch):
    monkeypatch.setattr(reply_module, "_LAST_FLUSH_S", 3600.0)
    runs = [await world.streaming(owner=DEAD) for _ in range(20)]
    await store.runs.checkpoint([checkpoint(run, "saved") for run in runs])
    async with scheduler(store, tmp_path) as made:
        made.log.away = True
        for run in await take_over(store, made):
            made._orphans.settle(run.id)
        await soon(made._lease.beat())
        # None could be done with: the log comes back only now.
        assert made._orphans.run_ids() >= {run.id for run in runs}
        made.log.away = False
        for run in runs:
            assert await soon(becomes(store, run, RunStatus.FAILED)) is RunStatus.FAILED
        async with asyncio.timeout(60):
            while made.writer.open_replies:
                await asyncio.sleep(0.02)


async def test_a_conversation_deleted_under_an_orphan_harms_nobody(store, world, tmp_path):
    log = FickleLog()
    run = await orphan(world, log, "text")
    async with scheduler(store, tmp_path, log) as made:
        [taken] = await take_over(store, made)
        await store.conversations.delete(run.user_id, run.conversation_id)
        made._orphans.settle(taken.id)
        while made._orphans.run_ids():
            await asyncio.sleep(0.01)
        await made._lease.beat()
        assert made.writer.open_replies == 0


async def test_a_queued_run_of_a_model_nobody_serves_any_more_is_failed(store, world, tmp_path, monkeypatch):
    unserved = store.runs.unserved
    monkeypatch.setattr(store.runs, "unserved", lambda: unserved(patience_s=0))
    async with scheduler(store, tmp_path) as made:
        await made._lease.beat()
        gone = await world.queued(model="of-yesterday")
        made._orphans.settle_unserved()
        assert await soon(becomes(store, gone, RunStatus.FAILED)) is RunStatus.FAILED
        assert (await store.runs.get(gone.user_id, gone.id)).error_code == "unknown_model"


async def test_runs_that_others_have_taken_leave_the_queue_with_the_next_sweep(store, world, tmp_path):
    held = HeldClaims(store.runs)
    async with scheduler(store, tmp_path) as made:
        await world.queued()
        await soon(held.committed.wait())  # the dispatcher waits for this answer, so the others stay in its queue
        taken = [await world.queued() for _ in range(5)]
        while made.dispatcher.waiting_count < 5:
            await asyncio.sleep(0.01)
        await held.claim([run.id for run in taken], "another-worker")
        made.dispatcher.sweep_soon()
        async with asyncio.timeout(60):
            while made.dispatcher.waiting_count:
                await asyncio.sleep(0.01)
        held.answer.set()
