"""What other replicas tell of their runs is in the accounts once, however often and late it is told."""

import pytest

from chatsvc.limits import ServiceCost, TierName
from chatsvc.run import WaitingRun
from chatsvc.scheduler.fair_flow import Demand
from chatsvc.scheduler.fair_queue import FairQueue
from chatsvc.scheduler.flights import Flights
from chatsvc.scheduler.news import End, Held

COST = ServiceCost(prompt=1, cached=0.1, output=3)
RUN = WaitingRun(id="r1", user_id="ann", tier=TierName.FREE, model="m", prompt_tokens=100)
DEMAND = Demand(run_id="r1", user_id="ann", tier=TierName.FREE, prompt_tokens=100, max_tokens=500)


def held(**fields):
    return Held(run=RUN, read=True, prompt_tokens=100, cached_tokens=50, **fields)


@pytest.fixture
def queue():
    return FairQueue({TierName.FREE: 1.0}, cost=COST)


@pytest.fixture
def flights(queue):
    return Flights(queue)


def test_totals_that_are_told_again_or_late_are_counted_once(flights, queue):
    for output_tokens in (10, 10, 30, 20, 30):
        flights.hear("b", held(output_tokens=output_tokens), DEMAND)
    assert queue.end("r1").service == pytest.approx(50 + 0.1 * 50 + 3 * 30)


def test_a_run_whose_end_is_all_that_was_heard_of_it_is_counted_whole(flights, queue):
    queue.put(DEMAND)
    assert flights.hear("b", held(output_tokens=10, end=End.COMPLETE), DEMAND)
    assert not queue.waits()
    assert (queue.left(), flights.load["b"]) == ([], 0)


def test_of_a_run_given_back_that_waits_here_nothing_is_changed_by_hearing_so_late(flights, queue):
    queue.put(DEMAND)
    assert not flights.hear("b", held(output_tokens=10, end=End.REFUND), DEMAND)
    assert queue.ids() == {"r1"}
    assert (queue.left(), flights.load["b"]) == ([], 0)


def test_of_two_attempts_the_later_one_counts_and_the_end_of_the_other_changes_nothing(flights, queue):
    flights.hear("b", held(output_tokens=10), DEMAND)
    flights.hear("c", Held(run=RUN), DEMAND)
    assert not flights.hear("b", held(output_tokens=10, end=End.REFUND), DEMAND)
    assert flights.holder("r1") == "c"
    assert (flights.load["b"], flights.load["c"]) == (0, 1)
    flights.hear("c", held(output_tokens=2), DEMAND)
    assert queue.end("r1").service == pytest.approx(50 + 0.1 * 50 + 3 * 2)


def test_what_is_ours_is_not_theirs_whatever_they_say(flights, queue):
    queue.put(DEMAND)
    queue.take(1)
    flights.begin(RUN)
    assert not flights.hear("b", held(output_tokens=10), DEMAND)
    assert flights.holder("r1") is None
    assert flights.whole() == []  # nor is it told before Postgres says that it is ours
    flights.claimed("r1")
    assert [one.run.id for one in flights.whole()] == ["r1"]


def test_of_a_replica_that_has_nothing_more_nothing_is_left(flights, queue):
    flights.hear("b", held(output_tokens=10), DEMAND)
    flights.forget("b", but={"r1"})
    assert flights.holder("r1") == "b"
    flights.forget("b")
    assert flights.holder("r1") is None
    assert queue.left() == []
