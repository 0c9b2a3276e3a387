"""What users have left: charged is what was delivered, on every kind of end, on any replica, and nothing leaks."""

import asyncio
import itertools
from datetime import UTC, datetime, timedelta

import msgspec
import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_world import ALICE, BOB, MANY, World, checkpoint, complete, failed, stopped, submission

from chatsvc.errors import QueueFull, QuotaExceeded, TooManyReplies
from chatsvc.limits import Allowance, Principal, TierName, Usage
from chatsvc.store import open_store
from chatsvc.store.allowances import MAY, covered_at, tier_params

BUDGET = msgspec.structs.replace(MANY, budget=1_000, budget_window_s=3_600)


@pytest.fixture
def world(store):
    return World(store)


@pytest.fixture
async def replicas(store, postgres_url):
    """The store as three processes have it."""
    async with (
        open_store(postgres_url, pool_size=5, timeout_s=5) as second,
        open_store(postgres_url, pool_size=5, timeout_s=5) as third,
    ):
        yield store, second, third


async def used(store, user_id="alice", tier=BUDGET):
    return (await store.allowances.allowance(user_id, tier)).used


async def age(url, minutes):
    """Let what was used so far be longer ago."""
    async with await psycopg.AsyncConnection.connect(url) as connection:
        await connection.execute("UPDATE usage SET at = at - make_interval(mins => %s)", [minutes])


ENDS = {
    "complete": complete(),
    "stopped": msgspec.structs.replace(stopped(), usage=Usage(prompt_tokens=20, cached_tokens=16, output_tokens=4)),
    "failed": msgspec.structs.replace(failed(), usage=Usage(prompt_tokens=20, cached_tokens=16, output_tokens=4)),
}


@pytest.mark.parametrize("outcome", ENDS.values(), ids=ENDS)
async def test_an_open_run_costs_what_is_expected_and_an_ended_one_what_was_delivered(world, store, outcome):
    run = await world.streaming(charge=300.0)
    assert await used(store) == 300
    assert await store.runs.finish(run.id, run.attempt, outcome)
    assert await used(store) == pytest.approx(4 + 0.1 * 16 + 3 * 4)


async def test_a_run_that_is_ended_twice_is_billed_once(world, store):
    run = await world.streaming()
    assert await store.runs.finish(run.id, run.attempt, complete())
    assert await store.runs.finish(run.id, run.attempt, complete())
    assert await used(store) == pytest.approx(17.6)


async def test_a_run_that_waited_and_was_stopped_costs_nothing(world, store):
    run = await world.queued(charge=300.0)
    await store.runs.request_stop("alice", run.id)
    assert await used(store) == 0


async def test_a_run_that_is_queued_again_goes_on_costing_what_is_expected(world, store):
    run = await world.streaming(charge=300.0)
    assert await store.runs.requeue(run.id, run.attempt)
    assert await used(store) == 300


async def test_a_lost_run_costs_what_its_last_checkpoint_had(world, store):
    run = await world.streaming(charge=300.0)
    await store.runs.checkpoint([checkpoint(run, "so far")])
    lost = await store.runs.get("alice", run.id)
    await store.runs.finish(run.id, run.attempt, msgspec.structs.replace(failed("so far"), usage=lost.usage))
    assert await used(store) == 3 * 2


async def test_what_was_used_outlives_the_conversation(world, store):
    conversation = await world.conversation()
    await world.complete(conversation)
    await store.conversations.delete("alice", conversation.id)
    assert await used(store) == pytest.approx(17.6)
    await store.allowances.bill("alice", Usage(prompt_tokens=10, output_tokens=1))
    assert await used(store) == pytest.approx(17.6 + 13)


async def test_usage_counts_every_run_of_the_user_and_no_other(world, store):
    start = (await world.conversation()).created_at
    await world.complete()
    await world.complete(await world.conversation(BOB), principal=BOB)
    half = await world.streaming()
    await store.runs.checkpoint([checkpoint(half, "so far")])
    expected = Usage(prompt_tokens=20, cached_tokens=16, output_tokens=6)
    assert await store.allowances.usage("alice", start) == expected
    assert await store.allowances.usage("alice", start + timedelta(hours=1)) == Usage(output_tokens=2)
    assert await store.allowances.usage("nobody", start) == Usage()


async def test_a_request_over_the_budget_is_refused_with_the_numbers_and_nothing_is_written(world, store):
    conversation = await world.conversation()
    run = await world.streaming(charge=10.0)
    usage = Usage(prompt_tokens=600, output_tokens=100)
    await store.runs.finish(run.id, run.attempt, msgspec.structs.replace(complete(), usage=usage))
    with pytest.raises(QuotaExceeded) as refused:
        await store.runs.submit(submission(conversation, tier=BUDGET, charge=101.0))
    error = refused.value
    assert {name: error.extra[name] for name in ("limit", "used", "left", "cost")} == {
        "limit": 1_000, "used": 900, "left": 100, "cost": 101
    }  # fmt: skip
    assert 3_600 - 300 < error.retry_after <= 3_600 + 300
    assert error.extra["refills_at"] == error.allowance.refills_at
    assert (await store.conversations.tree("alice", conversation.id))[1] == ()
    submitted = await store.runs.submit(submission(conversation, tier=BUDGET, charge=100.0))
    assert submitted.allowance == Allowance(
        open_limit=1_000, open_used=1, budget=1_000, used=1_000, refills_at=error.allowance.refills_at
    )


async def test_the_budget_is_free_again_when_its_use_has_left_the_window(world, store, postgres_url):
    conversation = await world.conversation()
    run = await world.streaming()
    usage = Usage(prompt_tokens=1_000)
    await store.runs.finish(run.id, run.attempt, msgspec.structs.replace(complete(), usage=usage))
    await age(postgres_url, 59)
    with pytest.raises(QuotaExceeded):
        await store.runs.submit(submission(conversation, tier=BUDGET))
    await age(postgres_url, 7)
    assert (await store.runs.submit(submission(conversation, tier=BUDGET))).created


async def test_a_request_larger_than_the_budget_is_taken_when_nothing_was_used(world, store):
    conversation = await world.conversation()
    assert (await store.runs.submit(submission(conversation, tier=BUDGET, charge=5_000.0))).created
    with pytest.raises(QuotaExceeded) as refused:
        await store.runs.submit(submission(conversation, tier=BUDGET, charge=1.0))
    assert (refused.value.extra["left"], refused.value.extra["refills_at"]) == (0, None)


async def test_three_replicas_together_never_exceed_a_budget(world, replicas):
    conversations = [await world.conversation() for _ in range(60)]
    answers = await asyncio.gather(
        *(
            replicas[number % 3].runs.submit(submission(conversation, tier=BUDGET, charge=90.0))
            for number, conversation in enumerate(conversations)
        ),
        return_exceptions=True,
    )
    assert {type(answer) for answer in answers if isinstance(answer, Exception)} == {QuotaExceeded}
    assert sum(not isinstance(answer, Exception) for answer in answers) == 11
    assert await used(replicas[1]) == 990


async def test_three_replicas_together_never_open_more_replies_than_allowed(world, replicas):
    conversations = [await world.conversation() for _ in range(30)]
    tier = msgspec.structs.replace(MANY, max_open_replies=3)
    answers = await asyncio.gather(
        *(
            replicas[number % 3].runs.submit(submission(conversation, tier=tier))
            for number, conversation in enumerate(conversations)
        ),
        return_exceptions=True,
    )
    refused = [answer for answer in answers if isinstance(answer, Exception)]
    assert ({type(answer) for answer in refused}, len(refused)) == ({TooManyReplies}, 27)
    assert {answer.allowance.open_used for answer in refused} == {3}


async def test_a_full_line_takes_no_more_of_its_tier_and_whoever_need_not_wait_may_pass(world, store):
    short = msgspec.structs.replace(MANY, max_queued=2)
    free = [Principal(f"free-{number}", TierName.FREE) for number in range(4)]

    async def ask(principal, **changes):
        conversation = await world.conversation(principal)
        return await store.runs.submit(submission(conversation, principal=principal, tier=short, **changes))

    await ask(free[0])
    await ask(free[1])
    with pytest.raises(QueueFull):
        await ask(free[2])
    assert (await ask(ALICE)).created  # of another tier
    assert (await ask(free[3], owner="worker-1")).created


async def test_what_the_statement_takes_and_what_the_rule_takes_are_the_same(postgres_url):
    asked = ("open_used", "used", "charge", "waiting")
    cases = [
        (*numbers, budget, owner)
        for numbers in itertools.product((1, 2, 3), (0, 400, 1000), (0, 600, 601, 5000), (0, 4, 5))
        for budget in (0, 1000)
        for owner in (None, "w")
    ]
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        for *numbers, budget, owner in cases:
            tier = msgspec.structs.replace(MANY, max_open_replies=3, budget=budget, max_queued=5)
            state = dict(zip(asked, numbers, strict=True))
            # Half of what was used is still open.
            row = "(SELECT %(open_used)s AS open_used, %(used)s / 2.0 AS units, %(used)s / 2.0 AS expected,"
            sql = f"SELECT {MAY} FROM {row} %(waiting)s AS waiting) AS standing"
            cursor = await connection.execute(sql, tier_params(tier) | state | {"owner": owner})
            [taken] = await cursor.fetchone()
            assert taken is (tier.shortage(**state, must_wait=owner is None) is None), (state, budget, owner)


async def test_what_lies_in_no_window_is_forgotten(world, store, postgres_url):
    await world.complete()
    await age(postgres_url, 33 * 24 * 60)
    await world.complete()
    await store.allowances.forget()
    assert await store.allowances.usage("alice", datetime(2000, 1, 1, tzinfo=UTC)) == Usage(
        prompt_tokens=20, cached_tokens=16, output_tokens=4
    )


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@given(
    units=st.lists(st.integers(0, 100), max_size=8),
    expected=st.integers(0, 200),
    charge=st.integers(0, 300),
    budget=st.integers(1, 300),
)
def test_a_refusal_says_the_first_moment_at_which_the_budget_covers_it(units, expected, charge, budget):
    steps = [(NOON + timedelta(minutes=number), float(each)) for number, each in enumerate(units)]

    def covered(left):
        return sum(left) + expected + charge <= budget or sum(left) + expected == 0

    at = covered_at(steps, expected=expected, charge=charge, budget=budget)
    first = next((number for number in range(len(units)) if covered(units[number + 1 :])), None)
    assert at == (None if first is None else steps[first][0])
