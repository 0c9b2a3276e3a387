"""Runs: moved along their table only, ended once (L5)."""

import asyncio

import msgspec
import pytest
from store_world import (
    WORKER,
    World,
    checkpoint,
    complete,
    failed,
    regeneration,
    stopped,
)

from chatsvc.limits import Usage
from chatsvc.run import Checkpoint, RunStatus, waiting
from chatsvc.store import open_store


@pytest.fixture
def world(store):
    return World(store)


@pytest.fixture
async def replica(postgres_url):
    """A second process' store on the same database."""
    async with open_store(postgres_url, pool_size=10, timeout_s=5) as opened:
        yield opened


async def test_a_submission_with_a_place_is_written_as_claimed(world, store):
    run = await world.queued(owner="worker-1")
    assert (run.status, run.owner, run.attempt) == (RunStatus.STREAMING, "worker-1", 1)
    assert run.started_at == run.created_at
    assert (await world.message(run)).status is RunStatus.STREAMING
    assert await store.runs.queued() == []
    assert await store.runs.claim([run.id], "worker-2") == []
    assert await store.runs.finish(run.id, 1, complete())


async def test_waiting_runs_come_oldest_first_with_their_place_among_those_of_their_model(world, store):
    runs = [await world.queued(model=model) for model in ("small", "large", "small", "small", "large")]
    await store.runs.claim([runs[2].id], WORKER)
    assert [run.id for run in await store.runs.queued()] == [runs[n].id for n in (0, 1, 3, 4)]
    oldest = await store.runs.queued(limit=2)
    assert oldest == [waiting(runs[n], one.age_s) for n, one in enumerate(oldest)]
    assert oldest[0].age_s > oldest[1].age_s > 0
    assert await store.runs.positions() == {runs[0].id: 1, runs[1].id: 1, runs[3].id: 2, runs[4].id: 2}
    assert [run.id for run in await store.runs.open_runs("alice")] == [run.id for run in runs]


async def test_claiming_gives_the_run_an_owner_and_the_next_attempt(world, store):
    run = await world.queued()
    [claimed] = await store.runs.claim([run.id], WORKER)
    assert (claimed.status, claimed.attempt, claimed.owner) == (RunStatus.STREAMING, 1, WORKER)
    assert claimed.started_at >= claimed.created_at
    assert (await world.message(run)).status is RunStatus.STREAMING
    assert await store.runs.holds(run.id, 1)
    assert not await store.runs.holds(run.id, 2)
    assert await store.runs.claim([run.id], "worker-2") == []


async def test_claiming_keeps_the_order_and_leaves_out_what_does_not_wait(world, store):
    runs = [await world.queued() for _ in range(4)]
    await store.runs.request_stop("alice", runs[1].id)
    asked = [runs[3].id, runs[1].id, "resp_none", runs[0].id]
    assert [run.id for run in await store.runs.claim(asked, WORKER)] == [runs[3].id, runs[0].id]
    assert await store.runs.claim([], WORKER) == []


async def test_racing_claims_in_any_order_share_the_runs_among_them(world, store, replica):
    runs = [(await world.queued()).id for _ in range(20)]
    claims = await asyncio.gather(
        *(
            each.runs.claim(runs if number % 2 else runs[::-1], f"worker-{number}")
            for number in range(4)
            for each in (store, replica)
        )
    )
    taken = [run.id for claim in claims for run in claim]
    assert sorted(taken) == sorted(runs)


async def test_a_checkpoint_saves_text_of_the_runs_that_are_still_held(world, store):
    held, lost, ended = await world.streaming(), await world.streaming(), await world.complete(text="final")
    stale = Checkpoint(run_id=lost.id, attempt=0, seq=5, text="stale")
    batch = [checkpoint(held, "so far", 7), stale, checkpoint(ended, "too late")]
    assert await store.runs.checkpoint(batch) == {held.id}
    reply = await store.runs.reply(held.id)
    assert (reply.text, reply.text_seq, reply.run.usage.output_tokens) == ("so far", 7, 2)
    assert (await store.runs.reply(lost.id)).text == ""
    assert (await store.runs.reply(ended.id)).text == "final"
    assert await store.runs.checkpoint([]) == set()


async def test_a_checkpoint_is_cleaned_like_the_final_text(world, store):
    run = await world.streaming()
    await store.runs.checkpoint([checkpoint(run, "a\x00\ud800")])
    assert (await store.runs.reply(run.id)).text == "a\ufffd\ufffd"


@pytest.mark.parametrize("outcome", [complete(), stopped(), failed("half")], ids=lambda outcome: outcome.status)
async def test_an_end_is_written_into_run_and_message_alike(world, store, outcome):
    run = await world.streaming()
    assert await store.runs.finish(run.id, run.attempt, outcome)
    reply, message = await store.runs.reply(run.id), await world.message(run)
    assert (reply.run.status, reply.run.attempt, reply.run.last_seq) == (outcome.status, 1, outcome.last_seq)
    assert (reply.run.usage, reply.run.finish_reason) == (outcome.usage, outcome.finish_reason)
    assert (reply.run.error_code, reply.run.error_message) == (outcome.error_code, outcome.error_message)
    assert reply.run.ended_at >= reply.run.started_at
    assert (reply.text, reply.text_seq) == (outcome.text, outcome.last_seq)
    assert (message.content, message.status, message.finish_reason) == (
        outcome.text, outcome.status, outcome.finish_reason
    )  # fmt: skip
    assert (message.error_code, message.tokens) == (outcome.error_code, outcome.usage.output_tokens)
    conversation = await store.conversations.get("alice", run.conversation_id)
    assert conversation.updated_at == reply.run.ended_at
    assert not await store.runs.holds(run.id, run.attempt)


async def test_whoever_comes_second_changes_nothing(world, store):
    run = await world.streaming()
    assert await store.runs.finish(run.id, run.attempt, complete())
    before = await store.runs.reply(run.id), await world.message(run)
    assert not await store.runs.finish(run.id, run.attempt, stopped())
    assert not await store.runs.finish(run.id, run.attempt, complete(last_seq=10))
    assert not await store.runs.finish(run.id, run.attempt + 1, failed())
    assert await store.runs.finish_queued(run.id, failed()) is None
    assert not await store.runs.requeue(run.id, run.attempt)
    assert (await store.runs.request_stop("alice", run.id)).status is RunStatus.COMPLETE
    assert await store.runs.checkpoint([checkpoint(run, "late")]) == set()
    assert (await store.runs.reply(run.id), await world.message(run)) == before


async def test_the_same_end_said_again_is_still_ours(world, store):
    """The answer to a commit can be lost with the connection; asking again must not look like a lost race."""
    run = await world.streaming()
    assert await store.runs.finish(run.id, run.attempt, complete())
    before = await store.runs.reply(run.id)
    assert await store.runs.finish(run.id, run.attempt, complete())
    assert await store.runs.reply(run.id) == before


async def test_a_stale_attempt_cannot_end_the_run(world, store):
    run = await world.streaming()
    assert await store.runs.requeue(run.id, 1)
    [again] = await store.runs.claim([run.id], "worker-2")
    assert again.attempt == 2
    assert not await store.runs.finish(run.id, 1, complete())
    assert await store.runs.finish(run.id, 2, complete())


async def test_an_end_that_is_not_known_is_false(store):
    assert not await store.runs.finish("resp_none", 1, complete())
    assert not await store.runs.holds("resp_none", 1)


async def test_a_waiting_run_can_be_ended_in_the_next_attempt(world, store):
    run = await world.queued()
    ended = await store.runs.finish_queued(run.id, failed("", last_seq=1))
    assert (ended.status, ended.attempt, ended.last_seq) == (RunStatus.FAILED, 1, 1)
    assert ended.error_code == "engine_failed"
    assert (await world.message(run)).status is RunStatus.FAILED
    assert await store.runs.finish_queued(run.id, failed()) is None
    streaming = await world.streaming()
    assert await store.runs.finish_queued(streaming.id, failed()) is None


async def test_a_run_without_text_goes_back_to_its_place_in_the_queue(world, store):
    run = await world.streaming()
    later = await world.queued()
    assert await store.runs.requeue(run.id, run.attempt)
    assert await store.runs.requeue(run.id, run.attempt)
    found = await store.runs.get("alice", run.id)
    assert (found.status, found.attempt, found.owner, found.started_at) == (RunStatus.QUEUED, 1, None, None)
    assert (await world.message(run)).status is RunStatus.QUEUED
    assert [each.id for each in await store.runs.queued()] == [run.id, later.id]


async def test_a_run_with_saved_text_or_a_wish_to_stop_is_not_put_back(world, store):
    said, unwanted, stale = [await world.streaming() for _ in range(3)]
    await store.runs.checkpoint([checkpoint(said, "so far")])
    await store.runs.request_stop("alice", unwanted.id)
    assert not await store.runs.requeue(said.id, said.attempt)
    assert not await store.runs.requeue(unwanted.id, unwanted.attempt)
    assert not await store.runs.requeue(stale.id, stale.attempt + 1)


async def test_a_checkpoint_without_text_does_not_keep_a_run_from_the_queue(world, store):
    run = await world.streaming()
    await store.runs.checkpoint([checkpoint(run, "", seq=2)])
    assert await store.runs.requeue(run.id, run.attempt)


async def test_stopping_a_waiting_run_ends_it_at_once(world, store):
    run = await world.queued()
    ended = await store.runs.request_stop("alice", run.id)
    assert (ended.status, ended.attempt, ended.last_seq) == (RunStatus.STOPPED, 1, 1)
    assert ended.finish_reason == "stopped"
    message = await world.message(run)
    assert (message.status, message.finish_reason, message.content) == (RunStatus.STOPPED, "stopped", "")
    assert await store.runs.request_stop("alice", run.id) == ended
    assert await store.runs.queued() == []


@pytest.mark.parametrize("how", ["complete", "stopped in the queue"])
async def test_a_reply_that_was_gone_on_with_counts_the_text_it_begins_with(world, store, how):
    broken = await world.streaming()
    outcome = msgspec.structs.replace(stopped("The beginning."), usage=Usage(output_tokens=3))
    assert await store.runs.finish(broken.id, broken.attempt, outcome)
    kept = (await world.message(broken)).tokens
    assert kept == 3
    new = regeneration(broken.user_message_id, continues_message_id=broken.message_id)
    run = (await store.runs.regenerate(new)).run
    if how == "complete":
        [run] = await store.runs.claim([run.id], "worker")
        outcome = complete("The beginning. The end.")
        assert await store.runs.finish(run.id, run.attempt, outcome)
        assert (await world.message(run)).tokens == kept + outcome.usage.output_tokens
    else:
        await store.runs.request_stop(run.user_id, run.id)
        assert (await world.message(run)).tokens == kept


async def test_stopping_a_streaming_run_asks_its_worker(world, store):
    run = await world.streaming()
    asked = await store.runs.request_stop("alice", run.id)
    assert (asked.status, asked.stop_requested, asked.attempt) == (RunStatus.STREAMING, True, 1)
    assert await store.runs.request_stop("alice", run.id) == asked
    assert await store.runs.finish(run.id, run.attempt, stopped())


async def test_ids_and_counts_beyond_the_usual_are_stored(world, store):
    run = await world.streaming(client_msg_id="ü" * 200, content="x" * 200_000)
    big = complete(text="y" * 1_000_000, last_seq=2**53 - 1)
    assert await store.runs.finish(run.id, run.attempt, big)
    reply = await store.runs.reply(run.id)
    assert (len(reply.text), reply.text_seq, reply.run.usage) == (1_000_000, 2**53 - 1, big.usage)
    assert reply.run.usage == Usage(prompt_tokens=20, cached_tokens=16, output_tokens=4)


async def test_ended_tells_which_runs_need_no_more_waiting(world, store):
    waiting, streaming, done = await world.queued(), await world.streaming(), await world.complete()
    asked = [waiting.id, streaming.id, done.id, "resp_none"]
    assert await store.runs.ended(asked) == {done.id, "resp_none"}
    assert await store.runs.ended([]) == set()


async def test_the_next_attempt_of_a_run_goes_on_after_what_its_log_has(world, store):
    run = await world.streaming()
    assert await store.runs.requeue(run.id, run.attempt, 2)
    assert (await store.runs.get("alice", run.id)).last_seq == 2
    assert (await store.runs.request_stop("alice", run.id)).last_seq == 3
