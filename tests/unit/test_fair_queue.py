"""The fair queue: who is next, what is charged, and what is said of the place in it."""

import pytest
from fair_line import COST, FREE, PLUS, PRO, WEIGHTS, demand, put, queue, serve, serve_all
from hypothesis import given
from hypothesis import strategies as st

from chatsvc.scheduler.fair_queue import FairQueue
from chatsvc.scheduler.fair_rules import KEPT_IDLE
from chatsvc.scheduler.output_length import OutputEstimator
from chatsvc.scheduler.virtual_time import VirtualTime

# Order ----------------------------------------------------------------------------------------------------------------


def test_users_take_turns_however_much_each_of_them_asks():
    line = queue()
    put(line, *(demand("greedy") for _ in range(50)), *(demand("modest") for _ in range(5)))
    assert serve_all(line, 10).count("modest") == 5


def test_a_users_own_runs_start_in_the_order_in_which_they_came():
    line = queue()
    runs = put(line, *(demand("u") for _ in range(5)))
    assert [one.run_id for one in line.take(5)] == [one.run_id for one in runs]


def test_weights_are_shares():
    line = queue()
    put(line, *(demand(str(tier), tier=tier) for tier in WEIGHTS for _ in range(1000)))
    users = serve_all(line, 1260)
    assert [users.count(str(tier)) for tier in WEIGHTS] == pytest.approx([960, 240, 60], abs=5)


def test_a_paying_user_is_no_worse_off_in_a_crowd_of_its_own_tier_than_a_free_one():
    line = queue()
    put(line, *(demand(f"pro{n}", tier=PRO) for n in range(60) for _ in range(10)))
    put(line, *(demand("free") for _ in range(100)))
    users = serve_all(line, 300)
    assert users.count("free") <= max(users.count(f"pro{n}") for n in range(60)) + 1


def test_in_a_crowd_of_paying_users_the_free_ones_get_a_twentieth_of_what_these_get():
    line = queue()
    put(line, *(demand(f"pro{n}", tier=PRO) for n in range(40) for _ in range(100)))
    put(line, *(demand(f"free{n}") for n in range(6) for _ in range(100)))
    users = serve_all(line, 3500)
    free = sum(user.startswith("free") for user in users)
    assert free / (len(users) - free) == pytest.approx(0.05, rel=0.15)


def test_the_floor_takes_nothing_where_weights_give_the_free_users_as_much():
    line = queue()
    put(line, *(demand(f"{tier}{n}", tier=tier) for tier in WEIGHTS for n in range(2) for _ in range(400)))
    users = serve_all(line, 840)
    got = [sum(user.startswith(tier) for user in users) for tier in ("free", "plus", "pro")]
    assert got == pytest.approx([40, 160, 640], abs=6)


def test_putting_a_run_twice_changes_nothing():
    line = queue()
    (one,) = put(line, demand("u"))
    line.put(one)
    assert len(line) == 1
    assert line.take(5) == [one]
    line.put(one)
    assert (len(line), line.take(5)) == (0, [])


def test_unknown_ids_are_fine_everywhere():
    line = queue()
    put(line, demand("u"))
    line.discard("x")
    line.started("x", 1, 0)
    line.delivered("x", 1)
    line.refund("x")
    assert line.end("x") is None
    assert line.position("x") is None
    assert len(line) == 1


def test_a_run_that_comes_back_goes_before_its_users_younger_runs():
    line = queue()
    first, second = put(line, demand("u"), demand("u"))
    line.take(1)
    line.refund(first.run_id)
    line.put(first)
    assert line.take(2) == [first, second]


def test_a_user_who_changes_tier_has_the_new_weight_at_once():
    line = queue()
    put(line, *(demand("u") for _ in range(20)), *(demand("other") for _ in range(60)))
    assert serve_all(line, 20).count("u") == 10
    put(line, *(demand("u", tier=PLUS) for _ in range(60)))
    assert serve_all(line, 50).count("u") == pytest.approx(40, abs=1)


def test_the_floor_moves_no_tier_but_the_one_that_it_is_for():
    line = queue()
    put(line, *(demand(f"rich{n % 50}", tier=PRO) for n in range(500)))
    (before,) = put(line, demand("u", tier=PRO, run_id="a"))
    put(line, demand("u", run_id="b"))  # downgraded while a run waits
    while before not in (taken := line.take(1)):
        serve(line, taken[0])
    line.delivered("a", 1000)
    # Neither the user's own, as one of the free, nor that of those who pay.
    assert line._time.offset(PRO) == 0.0 < line._time.offset(FREE)


def test_of_two_who_begin_to_wait_the_one_of_more_weight_goes_first():
    line = FairQueue({FREE: 1.0, PLUS: 4.0, PRO: 16.0}, cost=COST)
    put(line, *(demand(f"busy{n}") for n in range(5)))
    batch = line.take(5)
    put(line, demand("free"), demand("plus", tier=PLUS), demand("pro", tier=PRO))
    serve(line, batch[0])
    assert [one.user_id for one in line.take(3)] == ["pro", "plus", "free"]


# Idling ---------------------------------------------------------------------------------------------------------------


def test_idling_earns_no_credit():
    line = queue()
    put(line, *(demand("busy") for _ in range(200)), demand("idler"))
    serve_all(line, 100)
    put(line, *(demand("idler") for _ in range(50)))
    assert 9 <= serve_all(line, 20).count("idler") <= 11


def test_idling_forgives_no_debt():
    line = queue()
    (large,) = put(line, demand("debtor"))
    assert line.take(1) == [large]
    put(line, *(demand("other") for _ in range(100)), demand("third"))
    serve(line, large, tokens=500)
    assert "third" in serve_all(line, 3)
    put(line, demand("debtor"))
    # 1,600 of service ahead, 130 a reply of the other's: it waits for about a dozen of them.
    assert "debtor" not in serve_all(line, 9)
    assert "debtor" in serve_all(line, 6)


def test_who_begins_to_wait_begins_no_lower_than_others_did_but_for_what_was_charged_ahead():
    time = VirtualTime(WEIGHTS, floor_share=0.0, quantum=100)
    time.work(FREE, 3)
    time.dispatched(0.0, 40.0)
    time.wait(FREE, 500.0)
    time.started(time.start(500.0))
    time.wait_no_more(FREE, 500.0)
    time.wait(FREE, 10.0)
    assert time.start(10.0) == 460


def test_a_crowd_of_newcomers_cannot_keep_a_user_waiting_for_ever():
    line = queue()
    put(line, demand("old"), demand("old"))
    (one,) = line.take(1)
    served = []
    for n in range(40):
        put(line, demand(f"new{n}a"), demand(f"new{n}b"))
        served += serve_all(line, 1)
        if n == 0:
            serve(line, one)
    assert "old" in served


def test_nothing_is_kept_of_users_who_are_done():
    line = queue()
    put(line, *(demand(f"u{n}") for n in range(100)))
    serve_all(line, 100)
    assert len(line._flows) == 0


def test_what_is_kept_of_users_is_bounded_while_others_wait():
    line = queue()
    put(line, *(demand("steady") for _ in range(10)))
    for n in range(5 * KEPT_IDLE):
        put(line, demand(f"passer-by{n}"))
        serve_all(line, 1)
        if len(line) < 5:
            put(line, demand("steady"))
    assert len(line._flows) < 2 * KEPT_IDLE


def test_what_is_kept_of_users_is_bounded_while_many_come_and_go_through_a_batch():
    line = queue()
    put(line, *(demand(steady) for steady in ("a", "b") for _ in range(30)))
    batch = line.take(6)
    for n in range(4 * KEPT_IDLE):
        put(line, demand("a"), demand("b"), *(demand(f"passer-by{n}{part}") for part in "xyz"))
        for one in batch[:5]:
            serve(line, one, tokens=300 if one.user_id in "ab" else 20)
        batch = batch[5:] + line.take(5)
    assert len(line._flows) < 1.2 * KEPT_IDLE


# Charges --------------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 60), max_size=12),
    st.sampled_from(["complete", "stopped", "failed", "crashed"]),
    st.integers(0, 400),
    st.booleans(),
)
def test_what_is_charged_is_what_was_delivered_whatever_the_end(parts, how, cached, twice):
    line = queue()
    (one,) = put(line, demand("u", prompt=300, most=500, cached=100))
    line.take(1)
    line.started(one.run_id, 300, cached)
    if twice:
        line.started(one.run_id, 999, 0)
    for tokens in parts:
        line.delivered(one.run_id, tokens)
    charge = line.end(one.run_id, complete=how == "complete")
    assert charge.service == pytest.approx(COST.of_prompt(300, cached) + 3 * sum(parts))
    assert line.end(one.run_id) is None


def test_a_run_that_was_refunded_cost_nothing():
    line = queue()
    put(line, demand("u", prompt=5000))
    (first,) = line.take(1)
    put(line, *(demand("u") for _ in range(9)), *(demand("v") for _ in range(9)))
    line.started(first.run_id, 5000, 0)
    line.refund(first.run_id)
    assert serve_all(line, 8).count("u") == 4


def test_a_prompt_that_was_being_read_when_its_run_was_stopped_is_charged():
    line = queue()
    (one,) = put(line, demand("u", prompt=30_000))
    line.take(1)
    assert line.end(one.run_id).service == 30_000


def test_a_user_who_is_charged_ahead_gets_back_what_was_not_written():
    line = queue()
    put(line, *(demand("short") for _ in range(50)), *(demand("long") for _ in range(50)))
    got = {"short": 0, "long": 0}
    for _ in range(60):
        for one in line.take(1):
            got[one.user_id] += serve(line, one, tokens=1 if one.user_id == "short" else 100).service
    assert abs(got["short"] - got["long"]) < 500


def test_what_was_charged_ahead_is_given_back_also_while_other_replies_of_the_user_go_on():
    line = queue()
    put(line, *(demand("brief") for _ in range(200)), *(demand("other") for _ in range(200)))
    batch = line.take(6)
    got = {"brief": 0, "other": 0}
    for _ in range(190):
        one = batch.pop(0)
        got[one.user_id] += serve(line, one, tokens=1 if one.user_id == "brief" else 120).service
        batch += line.take(1)
    assert got["brief"] == pytest.approx(got["other"], rel=0.2)


# Positions ------------------------------------------------------------------------------------------------------------


def test_positions_say_in_which_order_runs_will_start():
    line = queue()
    runs = put(line, *(demand(f"u{n % 4}", tier=[FREE, PLUS, PRO, FREE][n % 4]) for n in range(40)))
    told = {one.run_id: line.position(one.run_id).position for one in runs}
    order = [one.run_id for _ in range(40) for one in line.take(1)]
    assert sorted(told.values()) == list(range(1, 41))
    off = [abs(told[run_id] - place) for place, run_id in enumerate(order, 1)]
    assert max(off) <= 4


def test_positions_of_many_new_users_are_those_of_their_turns():
    line = queue(quantum=1024)
    runs = put(line, *(demand(f"u{n}", prompt=1000 - 20 * n) for n in range(40)))
    told = {one.run_id: line.position(one.run_id).position for one in runs}
    brief, long = put(line, demand("brief", prompt=10), demand("long", prompt=1100))
    told |= {one.run_id: line.position(one.run_id).position for one in (brief, long)}
    assert (told.pop(brief.run_id), told.pop(long.run_id)) == (1, 41)
    order = [one.run_id for _ in range(42) for one in line.take(1)]
    assert (order[0], order[-1]) == (brief.run_id, long.run_id)
    assert [told[run_id] for run_id in order[1:-1]] == list(range(1, 41))


def test_the_service_ahead_grows_with_the_position():
    line = queue()
    runs = put(line, *(demand(f"u{n}") for n in range(10)))
    ahead = [line.position(one.run_id).service_ahead for one in runs]
    assert ahead[0] == 0
    assert ahead == sorted(ahead)
    assert ahead[9] == pytest.approx(9 * (100 + 3 * OutputEstimator.FIRST_GUESS))


def test_a_run_that_came_since_the_last_look_has_a_position_too():
    line = queue()
    put(line, *(demand(f"u{n}") for n in range(100)))
    line.position(next(iter(line.ids())))
    (new,) = put(line, demand("new"))
    assert 1 <= line.position(new.run_id).position <= 101
