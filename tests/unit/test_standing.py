"""Where runs stand is what sorting them all says, as of one moment, whatever happens while that is worked out."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatsvc.limits import TierName
from chatsvc.scheduler.fair_flow import Demand
from chatsvc.scheduler.fair_queue import FairQueue

WEIGHTS = {TierName.FREE: 1.0, TierName.PLUS: 4.0, TierName.PRO: 16.0}
TIERS = list(WEIGHTS)


class Crowd:
    """A queue in which things happen by chance."""

    def __init__(self, seed, users):
        self.chance = random.Random(seed)
        self.users = users
        self.queue = FairQueue(WEIGHTS)
        self.made = 0
        self.under_way = []

    def come(self):
        self.made += 1
        number = self.chance.randrange(self.users)
        demand = Demand(
            run_id=f"{self.made:06}",
            user_id=f"user{number}",
            tier=TIERS[number % 3],
            prompt_tokens=self.chance.randint(1, 3000),
            max_tokens=self.chance.choice((10, 200, 2000)),
            cached_tokens=self.chance.choice((0, 500)),
            background=number % 7 == 3,
        )
        self.queue.put(demand)
        return demand

    def happen(self):
        """Something."""
        what = self.chance.randrange(6)
        if what == 0:
            self.under_way += self.queue.take(self.chance.randint(1, 3))
        elif what == 1 and self.queue.ids():
            self.queue.discard(self.chance.choice(sorted(self.queue.ids())))
        elif what in {2, 3} and self.under_way:
            run = self.chance.choice(self.under_way)
            self.queue.started(run.run_id, run.prompt_tokens, run.cached_tokens)
            self.queue.delivered(run.run_id, self.chance.randint(1, 64))
        elif what == 4 and self.under_way:
            run = self.under_way.pop(self.chance.randrange(len(self.under_way)))
            self.queue.end(run.run_id, complete=self.chance.random() < 0.7)
        else:
            self.come()

    def naive(self):
        """Run id, position and service ahead of all, by sorting."""
        queue, entries = self.queue, []
        for flow in queue._flows.values():
            tag = queue._rank(flow)
            for run_id, waiting in flow.queued:
                service = queue._expected(waiting.demand)
                entries.append((tag + waiting.centre / flow.weight, run_id, service))
                tag += service / (flow.weight * queue._time.boost(flow.tier))
        told, ahead = {}, 0.0
        for position, (_, run_id, service) in enumerate(sorted(entries), start=1):
            told[run_id] = (position, ahead)
            ahead += service
        return told

    def told(self):
        """The same, as the queue says."""
        return {run_id: self.queue.position(run_id) for run_id in sorted(self.queue.ids())}


def agree(naive, told):
    told = {run_id: standing for run_id, standing in told.items() if run_id in naive}  # else nobody waits for it
    assert {run_id: standing.position for run_id, standing in told.items()} == {
        run_id: position for run_id, (position, _) in naive.items()
    }
    for run_id, standing in told.items():
        assert standing.service_ahead == pytest.approx(naive[run_id][1])


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), users=st.integers(1, 40), events=st.integers(0, 300))
def test_a_queue_of_few_tells_what_sorting_tells(seed, users, events):
    crowd = Crowd(seed, users)
    for _ in range(events):
        crowd.happen()
    agree(crowd.naive(), crowd.told())


@pytest.fixture
def in_small_steps(monkeypatch):
    monkeypatch.setattr("chatsvc.scheduler.standing._AT_ONCE", 4)


@pytest.mark.usefixtures("in_small_steps")
@pytest.mark.parametrize("seed", range(30))
def test_what_happens_during_a_survey_is_not_in_it(seed):
    crowd = Crowd(seed, 40)
    for _ in range(300):
        crowd.happen()
    while len(crowd.queue.ids()) < 20:
        crowd.come()
    naive, steps = {}, 0
    for _ in crowd.queue.survey():
        naive = naive or crowd.naive()  # the first step has noted all
        for _ in range(3):
            crowd.happen()
        while len(crowd.queue.ids()) < 20:
            crowd.come()
        steps += 1
    assert steps > 5
    still = naive.keys() & crowd.queue.ids()
    agree({run_id: naive[run_id] for run_id in still}, crowd.told())


@pytest.mark.usefixtures("in_small_steps")
@pytest.mark.parametrize(
    "change",
    [
        lambda crowd, run: crowd.queue.end(run.run_id),
        lambda crowd, run: crowd.queue.end(run.run_id, complete=True),
        lambda crowd, run: crowd.queue.refund(run.run_id),
        lambda crowd, run: crowd.queue.delivered(run.run_id, 900),
        lambda crowd, run: crowd.queue.take(40),
    ],
    ids=["cut", "complete", "refund", "delivered", "taken"],
)
def test_whatever_happens_to_a_user_with_a_reply_under_way_is_not_in_a_survey_that_has_begun(change):
    crowd = Crowd(1, 6)
    for _ in range(30):
        crowd.come()
    (run,) = crowd.queue.take(1)
    crowd.queue.started(run.run_id, run.prompt_tokens, 0)
    crowd.queue.delivered(run.run_id, 700)
    steps = crowd.queue.survey()
    next(steps)
    naive = crowd.naive()
    change(crowd, run)
    for _ in steps:
        pass
    seen = crowd.queue._places._seen
    agree(naive, {run_id: seen.of(run_id) for run_id in naive})


@pytest.mark.usefixtures("in_small_steps")
def test_until_a_survey_is_through_places_are_those_of_the_one_before():
    crowd = Crowd(1, 40)
    for _ in range(40):
        crowd.come()
    before = crowd.told()
    for _ in range(40):
        crowd.come()
    steps = iter(crowd.queue.survey())
    for _ in range(3):
        next(steps)
    assert {run_id: crowd.queue.position(run_id) for run_id in before} == before
    for _ in steps:
        pass
    agree(crowd.naive(), crowd.told())


def test_nothing_is_surveyed_anew_until_an_eighth_has_changed():
    crowd = Crowd(1, 1000)
    for _ in range(800):
        crowd.come()
    assert list(crowd.queue.survey())
    for _ in range(100):
        crowd.come()
    assert not list(crowd.queue.survey())
    for _ in range(20):
        crowd.come()
    assert list(crowd.queue.survey())
