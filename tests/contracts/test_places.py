"""Places in the engine, from a message's way in to its end: with room nobody waits, and no place is ever lost.

The sweep of queued rows and the look at the health of engines, which make up for nearly everything, are far off.
"""

import asyncio

import msgspec
import pytest
from running_scheduler import Held, scheduler
from store_world import ALICE, BOB, World
from streaming import soon

from chatsvc import ids
from chatsvc.errors import EngineUnavailable, NotFound, StoreUnavailable
from chatsvc.run import RunStatus, WaitingRun, waiting
from chatsvc.scheduler import NewMessage
from chatsvc.scheduler import dispatch as dispatch_module
from chatsvc.scheduler import service as service_module
from chatsvc.scheduler.active import Interrupt
from chatsvc.store import NewConversation

ONE_PLACE = "tokens_per_s=100&tokens=5&slots=1"


@pytest.fixture(autouse=True)
def nothing_is_made_up_for(monkeypatch):
    monkeypatch.setattr(dispatch_module, "SWEEP_S", 1000.0)
    monkeypatch.setattr(service_module, "HEALTH_EVERY_S", 1000.0)


@pytest.fixture
def world(store):
    return World(store)


def message(client_msg_id="m1"):
    return NewMessage(content="Hello", client_msg_id=client_msg_id)


async def conversation_of(store, principal=ALICE):
    return await store.conversations.create(principal, NewConversation(id=ids.new_conversation_id()))


async def becomes(store, run, status):
    async def comes():
        while (found := await store.runs.get(run.user_id, run.id)).status is not status:
            await asyncio.sleep(0.01)
        return found

    return await soon(comes())


async def idle(made):
    """Nothing runs, and nothing is being claimed."""
    await soon(made.dispatcher._idle.wait())


async def has_room(store, made, principal=BOB):
    """A message is begun as it is written."""
    await idle(made)
    conversation = await conversation_of(store, principal)
    run = (await made.submit(principal, conversation.id, message(ids.uuid7_hex()))).run
    assert (run.status, run.attempt, run.owner) == (RunStatus.STREAMING, 1, made.dispatcher.worker_id)
    await becomes(store, run, RunStatus.COMPLETE)


class Claims:
    """Counts claims; may be told what to do instead."""

    def __init__(self, runs):
        self.count = 0
        self.instead = []
        self._claim = runs.claim
        runs.claim = self

    async def __call__(self, run_ids, owner):
        self.count += 1
        if self.instead:
            return await self.instead.pop(0)(run_ids)
        return await self._claim(run_ids, owner)


async def test_with_room_a_message_is_begun_as_it_is_written_and_nothing_is_claimed(store, tmp_path):
    claims = Claims(store.runs)
    async with scheduler(store, tmp_path, script=ONE_PLACE) as made:
        for _ in range(3):
            await has_room(store, made)
        assert claims.count == 0


async def test_a_message_that_is_refused_gives_its_place_back(store, tmp_path):
    async with scheduler(store, tmp_path, script=ONE_PLACE) as made:
        submit, store.runs.submit = store.runs.submit, refuses
        conversation = await conversation_of(store)
        with pytest.raises(NotFound):
            await made.submit(ALICE, conversation.id, message())
        store.runs.submit = submit
        await has_room(store, made)


async def refuses(submission):
    raise NotFound("There is no such conversation.")


async def test_a_message_that_came_before_gives_its_place_back(store, tmp_path):
    async with scheduler(store, tmp_path, script="tokens_per_s=100&tokens=5&slots=8") as made:
        conversation = await conversation_of(store)
        posts = [made.submit(ALICE, conversation.id, message("same")) for _ in range(8)]
        answers = await asyncio.gather(*posts)
        assert len({submitted.run.id for submitted in answers}) == 1
        await becomes(store, answers[0].run, RunStatus.COMPLETE)
        await idle(made)
        assert not made.dispatcher._lines.line("small")._room


async def test_a_message_that_is_posted_again_while_it_is_first_written_is_no_busy_branch_l8(store, tmp_path):
    async with scheduler(store, tmp_path, script="tokens_per_s=20&tokens=200&slots=8") as made:
        conversation = await conversation_of(store)
        first = await made.submit(ALICE, conversation.id, message("same"))
        ground = store.runs.ground
        looks = []

        async def written_in_between(*args):
            looks.append(await ground(*args))
            return msgspec.structs.replace(looks[0], known=None) if len(looks) == 1 else looks[-1]

        store.runs.ground = written_in_between
        again = await made.submit(ALICE, conversation.id, message("same"))
        assert (again.run.id, again.created) == (first.run.id, False)


async def test_a_stop_that_comes_while_a_message_is_being_written_holds_l9(store, tmp_path):
    async with scheduler(store, tmp_path, script="tokens_per_s=20&tokens=200&slots=1") as made:
        submit = store.runs.submit

        async def stopped_at_once(submission):
            submitted = await submit(submission)
            # As its notification does, which may come before the answer.
            assert made.dispatcher.interrupt(submission.response_id, Interrupt.STOP)
            return submitted

        store.runs.submit = stopped_at_once
        conversation = await conversation_of(store)
        run = (await made.submit(ALICE, conversation.id, message())).run
        ended = await becomes(store, run, RunStatus.STOPPED)
        assert ended.usage.output_tokens <= 1


async def test_while_the_process_shuts_down_nothing_is_begun(store, tmp_path):
    async with scheduler(store, tmp_path, script=ONE_PLACE) as made:
        await made.drain(5)
        run = WaitingRun(id="r", user_id="alice", tier=ALICE.tier, model="small", prompt_tokens=1)
        with made.dispatcher.place(run) as place:
            assert place.owner is None


async def test_a_run_that_another_worker_has_claimed_takes_no_place(store, world, tmp_path):
    claims = Claims(store.runs)
    await store.workers.heartbeat("another-worker", roles=["worker"], capacity=1, ttl_s=600)

    async def too_late(run_ids):
        assert await claims._claim(run_ids, "another-worker")
        return []

    claims.instead = [too_late]
    await world.queued()  # before anybody listens: no notification makes it known once more
    async with scheduler(store, tmp_path, script=ONE_PLACE) as made:
        while claims.instead:
            await asyncio.sleep(0.01)
        await has_room(store, made)


async def test_a_run_whose_claim_got_no_answer_is_looked_for_at_once(store, world, tmp_path):
    claims = Claims(store.runs)

    async def no_answer(run_ids):
        raise StoreUnavailable("Postgres is away")

    claims.instead = [no_answer]
    run = await world.queued()
    async with scheduler(store, tmp_path, script=ONE_PLACE) as made:
        await becomes(store, run, RunStatus.COMPLETE)
        await has_room(store, made)


async def test_a_run_that_its_worker_put_back_is_begun_again_without_a_sweep(store, tmp_path):
    async with scheduler(store, tmp_path, script=ONE_PLACE) as made:
        generate = made.engine.generate
        refusals = 1

        async def refuses_once(*args):
            nonlocal refusals
            if refusals:
                refusals -= 1
                raise EngineUnavailable("not now")
            async for chunk in generate(*args):
                yield chunk

        made.engine.generate = refuses_once
        conversation = await conversation_of(store)
        run = (await made.submit(ALICE, conversation.id, message())).run
        ended = await becomes(store, run, RunStatus.COMPLETE)
        assert ended.attempt == 2
        await has_room(store, made)


async def test_a_run_that_was_put_back_has_waited_since_it_was_posted_and_not_at_all_once_it_is_stopped(
    store, tmp_path, monkeypatch
):
    posted = []
    async with scheduler(store, tmp_path, script=ONE_PLACE) as made:
        made.engine.generate = refuses_to_generate
        made.replicas.post_again = posted.append
        monkeypatch.setattr(dispatch_module, "RETRY_S", 0.0)
        first = (await made.submit(ALICE, (await conversation_of(store)).id, message("m1"))).run
        await soon(becomes_true(lambda: posted))
        assert posted[0].id == first.id
        assert posted[0].age_s > 0
        monkeypatch.setattr(dispatch_module, "RETRY_S", 0.5)
        while True:
            second = (await made.submit(BOB, (await conversation_of(store, BOB)).id, message(ids.uuid7_hex()))).run
            await soon(becomes_true(lambda run=second: run.id in made.dispatcher._again or run.id in of(posted)))
            assert (await made.stop(BOB.user_id, second.id)).status is RunStatus.STOPPED
            if second.id not in of(posted):
                break
            # Of a machine that was held up: it was posted again before its stop was asked for.
        # One that is put back after it: once that is posted again, the other would have been.
        third = (await made.submit(BOB, (await conversation_of(store, BOB)).id, message("m3"))).run
        await soon(becomes_true(lambda: third.id in of(posted)))
        assert second.id not in of(posted)


def of(runs):
    return {run.id for run in runs}


async def becomes_true(condition):
    while not condition():
        await asyncio.sleep(0.005)


async def test_a_sweep_that_cannot_read_all_that_wait_forgets_those_that_do_no_more(
    store, world, tmp_path, monkeypatch
):
    monkeypatch.setattr(dispatch_module, "SWEEP_LIMIT", 2)
    listens = asyncio.Event()
    listen = store.signals.listen

    def listening(handler, on_connect):
        return listen(handler, lambda: (on_connect(), listens.set()))

    monkeypatch.setattr(store.signals, "listen", listening)
    async with scheduler(store, tmp_path, script="tokens_per_s=1&tokens=500&slots=1") as made:
        lines = made.dispatcher._lines
        await soon(listens.wait())  # what is queued before is not heard of, and a sweep reads two of them
        waits = [await world.queued() for _ in range(5)]
        await soon(becomes_true(lambda: len(lines) == 4))
        lines.put(waiting(msgspec.structs.replace(waits[0], id="resp_ended_elsewhere")))
        assert len(lines) == 5
        made.dispatcher.sweep_soon()
        await soon(becomes_true(lambda: "resp_ended_elsewhere" not in lines.ids()))
        assert len(lines) == 4


async def test_a_run_that_was_put_back_has_cost_its_user_nothing(store, tmp_path):
    async with scheduler(store, tmp_path, script=ONE_PLACE) as made:
        queue = made.dispatcher._lines.line("small").queue
        ends = []
        end, refund = queue.end, queue.refund
        queue.end = lambda run_id, **how: ends.append("end") or end(run_id, **how)
        queue.refund = lambda run_id: ends.append("refund") or refund(run_id)
        made.engine.generate = refuses_to_generate
        conversation = await conversation_of(store)
        run = (await made.submit(ALICE, conversation.id, message())).run
        await becomes(store, run, RunStatus.FAILED)  # at the third attempt
        await idle(made)
        assert ends == ["refund", "refund", "end"]


async def refuses_to_generate(*args):
    raise EngineUnavailable("not now")
    yield


async def test_who_waits_is_begun_when_a_place_becomes_free(store, tmp_path):
    async with scheduler(store, tmp_path, script=ONE_PLACE) as made:
        runs, held = [], Held(made.engine)
        for number in range(4):
            principal = ALICE if number < 2 else BOB
            conversation = await conversation_of(store, principal)
            runs.append((await made.submit(principal, conversation.id, message(f"m{number}"))).run)
        assert [run.status for run in runs].count(RunStatus.STREAMING) == 1
        held.go_on.set()
        for run in runs:
            await becomes(store, run, RunStatus.COMPLETE)


async def test_only_replies_that_came_to_their_own_end_say_how_long_replies_are(store, tmp_path):
    async with scheduler(store, tmp_path, script="tokens_per_s=20&tokens=200&slots=1") as made:
        usual = made.dispatcher._lines.line("small").queue._estimator.usual
        conversation = await conversation_of(store)
        run = (await made.submit(ALICE, conversation.id, message())).run
        await made.stop(ALICE.user_id, run.id)
        await becomes(store, run, RunStatus.STOPPED)
        await idle(made)
        assert made.dispatcher._lines.line("small").queue._estimator.usual == usual
