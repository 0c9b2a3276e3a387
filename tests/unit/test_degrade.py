"""The degradation ladder: free gives up first, pro last; a burst calls for nothing, and it does not swing."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatsvc.config import DegradationConfig
from chatsvc.limits import TierName
from chatsvc.scheduler.degrade import CALM, FITS, MOST_PATIENCE, TOP, Ladder, Measures, SmallModel, measures

FREE, PLUS, PRO = TierName.FREE, TierName.PLUS, TierName.PRO
CONFIG = DegradationConfig(interval_s=10, recover_s=60)
TARGETS = {FREE: 10.0, PLUS: 5.0, PRO: 3.0}


def run(ladder, delays, seconds, *, start=0.0, load_below=0.0, waiting=None):
    """The step after each second of these delays; what is given may depend on the second.

    Ten a second begin, as long as nothing else is said: so many wait.
    """
    of = delays if callable(delays) else lambda _: delays
    load = load_below if callable(load_below) else lambda _: load_below
    how_many = waiting or (lambda second: {tier: round(10 * delay_s) for tier, delay_s in of(second).items()})
    return [
        ladder.observe(start + second, of(second), how_many(second), load_below=load(second))
        for second in range(seconds + 1)
    ]


def climbs(steps):
    """After how many seconds each step was taken, by its number."""
    return {high: second for second, (low, high) in enumerate(itertools.pairwise(steps), start=1) if high > low}


def test_each_step_gives_up_one_more_thing_and_never_takes_one_back():
    for tier in TierName:
        for lower, higher in itertools.pairwise(range(TOP + 1)):
            below, above = measures(lower, tier), measures(higher, tier)
            assert not (above.background and not below.background)
            assert above.small_model.value >= below.small_model.value
            for name in ("cap_tokens", "less_history", "short_queue", "refuse_late"):
                assert getattr(above, name) >= getattr(below, name)


def test_the_order_is_background_then_free_then_plus_and_pro_last():
    nothing = Measures()
    assert all(measures(0, tier) == nothing for tier in TierName)
    assert all(measures(1, tier) == Measures(background=False) for tier in TierName)
    assert next(step for step in range(TOP + 1) if measures(step, FREE).small_model is SmallModel.ALWAYS) == 2
    firsts = [
        min(step for step in range(TOP + 1) if getattr(measures(step, FREE), name))
        for name in ("cap_tokens", "less_history", "short_queue", "refuse_late")
    ]
    assert firsts == [3, 4, 5, 6]
    only_background = Measures(background=False)
    assert [step for step in range(1, TOP + 1) if measures(step, PLUS) != only_background] == [7, 8]
    assert [step for step in range(1, TOP + 1) if measures(step, PRO) != only_background] == [8]


def test_a_model_that_a_paying_user_named_is_kept_on_every_step():
    for tier in (PLUS, PRO):
        assert all(measures(step, tier).small_model is not SmallModel.ALWAYS for step in range(TOP + 1))


def test_a_burst_that_drains_within_the_interval_calls_for_nothing():
    ladder = Ladder(CONFIG, TARGETS)
    assert set(run(ladder, lambda second: {FREE: 0.0 if second % 10 == 9 else 300.0}, 600)) == {0}


def test_a_wait_that_lasts_for_an_interval_takes_one_step_at_a_time():
    ladder = Ladder(CONFIG, TARGETS)
    steps = run(ladder, {PRO: 4.0}, 200)
    assert steps[9] == 0
    assert steps[10] == 1
    assert {high - low for low, high in itertools.pairwise(steps)} == {0, 1}
    assert steps[-1] == TOP


def test_after_a_step_that_keeps_runs_away_the_next_takes_no_longer_than_an_interval():
    ladder = Ladder(CONFIG, TARGETS)
    # As many wait as before: neither background work nor another model was enough.
    taken = climbs(run(ladder, {FREE: 40.0}, 40))
    assert (taken[1], taken[2]) == (10, 21)
    assert taken[3] - taken[2] <= 11


def test_after_a_step_that_shortens_replies_the_next_waits_until_those_begin_that_came_after_it():
    ladder = Ladder(CONFIG, TARGETS)
    taken = climbs(run(ladder, {FREE: 40.0}, 200))
    assert taken[4] - taken[3] >= 40
    assert taken[5] - taken[4] >= 40


def test_the_next_step_is_not_taken_while_ever_fewer_wait():
    ladder = Ladder(CONFIG, TARGETS)
    # On step 2 nobody comes any more, but those who came before wait ever longer.
    left = run(
        ladder, lambda s: {FREE: 20.0 + s}, 120, waiting=lambda s: {FREE: 1000 if s <= 25 else 1000 - 8 * (s - 25)}
    )
    assert left[25] == 2
    assert left[-1] == 2
    # Then they are no fewer.
    assert run(ladder, {FREE: 200.0}, 30, start=121, waiting=lambda _: {FREE: 500})[-1] > 2


def test_only_those_who_may_call_for_a_step_are_counted_for_it():
    ladder = Ladder(CONFIG, TARGETS)
    run(ladder, {FREE: 100.0, PLUS: 6.0}, 400, waiting=lambda _: {FREE: 9, PLUS: 9})
    assert ladder.step == 7
    # Pro waits too, and as many of them as before; that free users become fewer is no help for them.
    run(ladder, {PRO: 4.0}, 400, start=401, waiting=lambda s: {FREE: 1000 - 2 * s, PRO: 9})
    assert ladder.step == TOP


def test_while_as_many_wait_as_before_the_steps_of_those_who_pay_lose_no_interval_either():
    ladder = Ladder(CONFIG, TARGETS)
    delays = {FREE: 60.0, PLUS: 30.0, PRO: 15.0}
    taken = climbs(run(ladder, delays, 400, waiting=lambda _: {FREE: 100, PLUS: 20, PRO: 5}))
    # How many free users wait was no part of it.
    assert taken[7] - taken[6] == 11
    assert taken[8] - taken[7] == 16  # shorter replies show when those begin that came after it


def test_as_many_as_wait_is_compared_with_an_interval_ago_and_not_with_when_the_last_step_was_taken():
    ladder = Ladder(CONFIG, TARGETS)
    run(ladder, {FREE: 60.0, PLUS: 30.0}, 15, waiting=lambda _: {FREE: 100, PLUS: 50})
    assert ladder.step == 1
    between = {FREE: 7.0}
    run(ladder, between, 500, start=16, waiting=lambda _: {FREE: 10})
    assert ladder.step == 1
    # Far fewer than there were once, and ever more.
    taken = climbs(run(ladder, {FREE: 11.0}, 15, start=517, waiting=lambda s: {FREE: 10 + s}))
    assert taken[2] == 10


def test_a_step_is_not_given_back_while_what_it_keeps_away_would_not_fit():
    ladder = Ladder(CONFIG, TARGETS)
    run(ladder, {FREE: 11.0}, 25)
    before = ladder.step
    assert set(run(ladder, {FREE: 0.0}, 600, start=26, load_below=FITS + 0.01)) == {before}
    # It would fit now; but for all of the time of recovery.
    steps = run(ladder, {FREE: 0.0}, 150, start=627, load_below=lambda s: FITS + 1 if s == 40 else FITS)
    assert climbs([-step for step in steps]) == {1 - before: 100}


def test_what_is_expected_to_fit_is_tried_all_the_same_after_a_very_long_calm():
    ladder = Ladder(CONFIG, TARGETS)
    run(ladder, {FREE: 11.0}, 25)
    before = ladder.step
    steps = run(ladder, {FREE: 0.0}, MOST_PATIENCE * 60, start=26, load_below=9.9)
    assert (steps[-2], steps[-1]) == (before, before - 1)


def test_no_tier_gives_up_anything_because_one_below_it_waits():
    ladder = Ladder(CONFIG, TARGETS)
    assert max(run(ladder, {FREE: 1000.0}, 5000)) == 6
    assert max(run(Ladder(CONFIG, TARGETS), {FREE: 1000.0, PLUS: 1000.0}, 5000)) == 7


def test_plus_gets_back_what_it_gave_up_though_free_still_waits():
    ladder = Ladder(CONFIG, TARGETS)
    run(ladder, {FREE: 100.0, PLUS: 6.0}, 400)
    assert ladder.step == 7
    run(ladder, {FREE: 100.0, PLUS: 0.5}, 100, start=401)
    assert ladder.step == 6


def test_a_step_is_given_back_only_after_the_whole_time_of_recovery():
    ladder = Ladder(CONFIG, TARGETS)
    run(ladder, {FREE: 11.0}, 25)
    before = ladder.step
    steps = run(ladder, {FREE: 1.0}, 60, start=26)
    assert steps[59] == before
    assert steps[60] == before - 1


def test_between_calm_and_too_long_nothing_changes():
    ladder = Ladder(CONFIG, TARGETS)
    run(ladder, {FREE: 11.0}, 25)
    before = ladder.step
    assert set(run(ladder, {FREE: 10.0 * (CALM + 1) / 2}, 1000, start=26)) == {before}


def test_a_tier_nobody_of_which_waits_counts_as_calm():
    ladder = Ladder(CONFIG, TARGETS)
    run(ladder, {FREE: 11.0, PRO: 5.0}, 200)
    run(ladder, {}, 60 * (TOP + 1), start=201)
    assert ladder.step == 0


class Queue:
    """Free and pro before one engine, as a fluid: pro is served first, what is left goes to free."""

    SHARE = (1.0, 0.95, 0.6, 0.45, 0.4, 0.35, 0.3, 0.3, 0.3)
    """What is left of free's load on each step."""

    def __init__(self, free_load, pro_load):
        self.load = {FREE: free_load, PRO: pro_load}
        self.backlog = {FREE: 0.0, PRO: 0.0}

    def second(self, capacity, step):
        """Delays and how many wait; and the load without the step, by what is asked for."""
        below = self.load[FREE] * self.SHARE[max(step - 1, 0)] + self.load[PRO]
        room = capacity
        delays = {}
        for tier in (PRO, FREE):
            work = self.backlog[tier] + self.load[tier] * (self.SHARE[step] if tier is FREE else 1.0)
            done = min(work, room)
            self.backlog[tier] = work - done
            delays[tier] = self.backlog[tier] / max(room, 1e-9)
            room -= done
        return delays, {tier: round(backlog) for tier, backlog in self.backlog.items()}, below / capacity


def simulate(ladder, queue, capacity_at, seconds, *, told=True):
    steps, delays = [], []
    for second in range(seconds):
        now, waiting, below = queue.second(capacity_at(second), ladder.step)
        delays.append(now)
        steps.append(ladder.observe(float(second), now, waiting, load_below=below if told else 0.0))
    return steps, delays


def turns(steps):
    """How often the direction changed."""
    moves = [later - earlier for earlier, later in itertools.pairwise(steps) if later != earlier]
    return sum(a != b for a, b in itertools.pairwise(moves))


def test_capacity_halved_and_back_is_followed_up_and_down_without_swinging():
    ladder = Ladder(CONFIG, TARGETS)
    steps, delays = simulate(ladder, Queue(80, 10), lambda s: 50 if 300 <= s < 1200 else 100, 6000)
    assert steps[299] == 0
    assert max(steps[300:1200]) in {2, 3, 4}  # enough, and nothing of what the paying tiers have
    assert max(delay[PRO] for delay in delays) == 0
    assert delays[1199][FREE] < TARGETS[FREE]
    # Meanwhile nothing is given back that would be taken again.
    assert turns(steps[:1200]) == 0, steps
    # What is given back when capacity is back is never taken again.
    assert all(later <= earlier for earlier, later in itertools.pairwise(steps[1200:]))
    assert steps[-1] == 0


def test_where_the_load_is_not_known_giving_back_is_tried_ever_more_rarely():
    ladder = Ladder(CONFIG, TARGETS)
    steps, _ = simulate(ladder, Queue(80, 10), lambda s: 50 if 300 <= s < 2100 else 100, 6000, told=False)
    # After one, two, four, eight times the time of recovery.
    assert 0 < turns(steps[:2100]) <= 2 * 4, steps
    assert all(later <= earlier for earlier, later in itertools.pairwise(steps[2100:]))
    assert steps[-1] == 0


def test_under_a_load_that_lies_between_two_steps_changes_become_rare():
    ladder = Ladder(CONFIG, TARGETS)
    # On step 2 it is more than enough, on step 1 it is too little: for ever.
    steps, _ = simulate(ladder, Queue(90, 0), lambda _: 70, 40_000, told=False)
    changed = [second for second, (a, b) in enumerate(itertools.pairwise(steps)) if a != b]
    late = [second for second in changed if second > 20_000]
    assert len(late) <= 2 * (20_000 // (MOST_PATIENCE * CONFIG.recover_s)) + 2
    assert len(late) < len([second for second in changed if second <= 20_000])


def test_after_a_long_calm_the_first_step_is_given_back_as_fast_as_ever():
    ladder = Ladder(CONFIG, TARGETS)
    simulate(ladder, Queue(90, 0), lambda _: 70, 10_000, told=False)
    run(ladder, {}, 5_000, start=10_001)
    assert ladder.step == 0
    run(ladder, {FREE: 11.0}, 10, start=20_000)
    assert ladder.step == 1
    assert run(ladder, {}, 61, start=20_011)[-1] == 0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0.01, 30),
            st.dictionaries(st.sampled_from(TierName), st.floats(0, 1000)),
            st.integers(0, 100),
            st.floats(0, 3),
        ),
        max_size=200,
    )
)
def test_whatever_waits_the_ladder_moves_by_one_step_and_not_before_its_time(seen):
    ladder = Ladder(CONFIG, TARGETS)
    now, changed = 0.0, float("-inf")
    for gap, delays, waiting, load in seen:
        now += gap
        before = ladder.step
        step = ladder.observe(now, delays, dict.fromkeys(delays, waiting), load_below=load)
        assert 0 <= step <= TOP
        assert abs(step - before) <= 1
        if step != before:
            assert now - changed >= (CONFIG.interval_s if step > before else CONFIG.recover_s) or changed < 0
            changed = now


@pytest.mark.parametrize("tier", TierName)
def test_nothing_is_given_up_while_a_tier_is_at_its_target(tier):
    assert set(run(Ladder(CONFIG, TARGETS), {tier: TARGETS[tier]}, 1000)) == {0}
