"""Runs that have waited too long: only those that wait are refused, honestly, at no cost, with all that was kept."""

import asyncio

import msgspec
import pytest
from running_scheduler import scheduler
from store_world import MANY, World, regeneration, stopped
from streaming import soon
from structlog.testing import capture_logs

from chatsvc.events import Delta, Error
from chatsvc.run import RunStatus

BUDGET = msgspec.structs.replace(MANY, budget=1e9)


@pytest.fixture
def world(store):
    return World(store)


async def refused(made, *runs):
    made._overdue.refuse({run.id: 20 for run in runs})
    while made._overdue._tasks:
        await asyncio.sleep(0.01)


async def test_a_run_that_waits_is_refused_says_when_to_come_again_and_costs_nothing(store, world, tmp_path):
    async with scheduler(store, tmp_path) as made:
        waits = await world.queued(model="elsewhere", charge=500.0, tier=BUDGET)
        await soon(refused(made, waits))
        assert made.pressure.refused == {(waits.tier, "too_late"): 1}
        assert made.ended == {("elsewhere", "failed"): 1}
        ended = await store.runs.get(waits.user_id, waits.id)
        assert (ended.status, ended.error_code) == (RunStatus.FAILED, "too_late")
        assert "in 20 s" in ended.error_message
        [end] = [entry.decode() for entry in (await made.log.read(waits.id, 0)).entries]
        assert (end.name, end.code, end.retryable, end.message) == ("error", "too_late", True, ended.error_message)
        assert (await store.allowances.allowance("alice", BUDGET)).used == 0


async def test_what_streams_or_has_ended_or_is_deleted_is_left_alone(store, world, tmp_path):
    async with scheduler(store, tmp_path) as made:
        streams = await world.streaming(model="elsewhere", owner=made.dispatcher.worker_id)
        ended = await world.complete(model="elsewhere")
        gone = await world.queued(model="elsewhere")
        await store.conversations.delete("alice", gone.conversation_id)
        left = []
        made._overdue._gone = left.append
        await soon(refused(made, streams, ended, gone))
        assert sorted(left) == sorted([ended.id, gone.id])  # nobody need look at them again
        assert not made.pressure.refused
        assert (await store.runs.get("alice", streams.id)).status is RunStatus.STREAMING
        assert (await store.runs.get("alice", ended.id)).status is RunStatus.COMPLETE


async def test_what_goes_wrong_with_one_is_said_and_the_others_are_refused(store, world, tmp_path):
    async with scheduler(store, tmp_path) as made:
        waits, other = [await world.queued(model="elsewhere") for _ in range(2)]
        find = store.runs.find

        async def broken(run_id):
            if run_id == waits.id:
                raise RuntimeError("a bug")
            return await find(run_id)

        store.runs.find = broken
        with capture_logs() as logs:
            await soon(refused(made, waits, other))
        assert [line["run_id"] for line in logs if line["event"] == "overdue run not refused"] == [waits.id]
        assert (await store.runs.get(other.user_id, other.id)).status is RunStatus.FAILED
        assert (await store.runs.get(waits.user_id, waits.id)).status is RunStatus.QUEUED


async def test_a_reply_that_was_to_be_gone_on_with_keeps_its_text_in_log_and_store(store, world, tmp_path):
    first = await world.streaming()
    assert await store.runs.finish(first.id, first.attempt, stopped("It began so. "))
    again = regeneration(first.user_message_id, continues_message_id=first.message_id, model="elsewhere")
    waits = (await store.runs.regenerate(again)).run
    async with scheduler(store, tmp_path) as made:
        await soon(refused(made, waits))
        message = await store.conversations.owner_of_message("alice", waits.message_id)
        assert (message.status, message.content) == (RunStatus.FAILED, "It began so. ")
        events = [entry.decode() for entry in (await made.log.read(waits.id, 0)).entries]
    assert [type(event) for event in events] == [Delta, Error]
    assert events[0].text == "It began so. "
