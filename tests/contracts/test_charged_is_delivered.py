"""L12's accounts: what users are charged is what was delivered to them, on every kind of end, a crash among them."""

import asyncio
import random

import msgspec
import pytest
from running_scheduler import FickleLog, scheduler, take_over
from store_world import ALICE, MANY, World, complete, failed, regeneration, stopped
from streaming import append, soon

from chatsvc.events import Context, Delta, Start, entry
from chatsvc.limits import ServiceCost, Usage
from chatsvc.run import Checkpoint, RunStatus

COST = ServiceCost()
BUDGET = msgspec.structs.replace(MANY, budget=1e9)


@pytest.fixture
def world(store):
    return World(store)


def units(usage):
    return COST.of_prompt(usage.prompt_tokens, usage.cached_tokens) + COST.of_output(usage.output_tokens)


def used_at_random(chance):
    prompt = chance.randint(1, 2_000)
    return Usage(prompt_tokens=prompt, cached_tokens=chance.randint(0, prompt), output_tokens=chance.randint(0, 500))


async def completes(world, run, usage):
    assert await world.store.runs.finish(run.id, run.attempt, msgspec.structs.replace(complete(), usage=usage))
    return units(usage)


async def is_stopped(world, run, usage):
    await world.store.runs.request_stop(run.user_id, run.id)
    assert await world.store.runs.finish(run.id, run.attempt, msgspec.structs.replace(stopped(), usage=usage))
    return units(usage)


async def fails(world, run, usage):
    assert await world.store.runs.finish(run.id, run.attempt, msgspec.structs.replace(failed(), usage=usage))
    return units(usage)


async def says_its_end_twice(world, run, usage):
    return await completes(world, run, usage) + 0 * await completes(world, run, usage)


async def races_a_stop(world, run, usage):
    cost = await completes(world, run, usage)
    assert not await world.store.runs.finish(run.id, run.attempt, stopped(last_seq=77))
    return cost


async def is_queued_again_and_completes(world, run, usage):
    assert await world.store.runs.requeue(run.id, run.attempt)
    [run] = await world.store.runs.claim([run.id], "worker-2")
    return await completes(world, run, usage)


async def is_queued_again_and_stopped_there(world, run, usage):
    assert await world.store.runs.requeue(run.id, run.attempt)
    await world.store.runs.request_stop(run.user_id, run.id)
    return 0.0


async def loses_its_worker(world, run, usage):
    one = Checkpoint(run_id=run.id, attempt=run.attempt, seq=4, text="so far", usage=usage)
    assert await world.store.runs.checkpoint([one])
    lost = await world.store.runs.get(run.user_id, run.id)
    return await fails(world, run, lost.usage)


async def is_deleted_while_it_runs(world, run, usage):
    await world.store.conversations.delete(run.user_id, run.conversation_id)
    await world.store.allowances.bill(run.user_id, usage)
    return units(usage)


ENDS = (
    completes,
    is_stopped,
    fails,
    says_its_end_twice,
    races_a_stop,
    is_queued_again_and_completes,
    is_queued_again_and_stopped_there,
    loses_its_worker,
    is_deleted_while_it_runs,
)


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_becomes_of_replies_the_ledger_has_what_was_delivered_and_open_ones_what_is_expected(
    world, store, seed
):
    chance = random.Random(seed)
    delivered, expected = 0.0, {}
    runs = []
    for _ in range(40):
        if len(runs) < 6 and chance.random() < 0.6:
            charge = float(chance.randint(1, 5_000))
            run = await world.streaming(charge=charge, tier=BUDGET)
            runs.append(run)
            expected[run.id] = charge
        elif runs:
            run = runs.pop(chance.randrange(len(runs)))
            delivered += await chance.choice(ENDS)(world, run, used_at_random(chance))
            del expected[run.id]
        allowance = await store.allowances.allowance(ALICE.user_id, BUDGET)
        assert allowance.used == pytest.approx(delivered + sum(expected.values()))
        assert allowance.open_used == len(expected)


async def die_after(world, log, run, *texts):
    """Its worker writes this into the log and dies before anything was saved."""
    await log.open(run.id, run.attempt)
    events = (
        Start(response_id=run.id, message_id=run.message_id, model="small", created_at=run.created_at),
        Context(condensed=False, summary_through=None, retrieved=(), prompt_tokens=300, cached_tokens=100, window=8192),
        *(Delta(text=text) for text in texts),
    )
    await log.append(
        [append(run.id, entry(event, attempt=run.attempt, seq=seq)) for seq, event in enumerate(events, start=1)]
    )


async def settled(made, store, run, text):
    """The run once it was judged, and how many tokens the text has."""
    [taken] = await take_over(store, made)
    made._orphans.settle(taken.id)
    while (ended := await store.runs.get(run.user_id, run.id)).status is not RunStatus.FAILED:
        await asyncio.sleep(0.02)
    return ended, len(await made.engine.encode(text))


async def test_a_reply_whose_worker_died_costs_what_was_shown_of_it(store, world, tmp_path):
    log = FickleLog()
    run = await world.streaming(owner="dead", charge=4_000.0)
    await die_after(world, log, run, "All that had been written ", "when the worker died.")
    async with scheduler(store, tmp_path, log) as made:
        ended, tokens = await soon(settled(made, store, run, "All that had been written when the worker died."))
    assert tokens > 5
    assert ended.usage == Usage(prompt_tokens=300, cached_tokens=100, output_tokens=tokens)
    assert (await store.allowances.allowance(run.user_id, BUDGET)).used == pytest.approx(200 + 10 + 3 * tokens)


async def test_of_a_reply_that_was_gone_on_with_only_what_was_added_is_charged_when_its_worker_dies(
    store, world, tmp_path
):
    log = FickleLog()
    first = await world.streaming()
    assert await store.runs.finish(first.id, first.attempt, stopped("It began so. "))
    again = regeneration(first.user_message_id, continues_message_id=first.message_id)
    queued = (await store.runs.regenerate(again)).run
    [run] = await store.runs.claim([queued.id], "dead")
    await die_after(world, log, run, "It began so. ", "And it went on.")
    async with scheduler(store, tmp_path, log) as made:
        ended, tokens = await soon(settled(made, store, run, "And it went on."))
    assert ended.usage.output_tokens == tokens
