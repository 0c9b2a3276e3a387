"""L12 over random scenarios: the bounds that docs/scheduling.md promises, with their derivation there.

A scenario is a small engine and users who come and go: weights, sizes, lengths of replies unlike the predictions,
places and room that change, warm and cold prompts. What users receive is counted here, beside the queue's own accounts.
"""

import random
from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatsvc.limits import ServiceCost, TierName
from chatsvc.scheduler.fair_flow import Demand
from chatsvc.scheduler.fair_queue import FairQueue
from chatsvc.scheduler.fair_rules import Rules
from chatsvc.scheduler.output_length import OutputEstimator

WEIGHTS = {TierName.PRO: 16.0, TierName.PLUS: 4.0, TierName.FREE: 1.0}
COST = ServiceCost(prompt=1, cached=0.1, output=3)
QUANTUM = 200.0
EAGER = (0.0, 0.05, 0.4, 0.9)


class Scenario:
    """Users against a queue, step by step."""

    def __init__(self, seed, users, tiers, most_prompt, most_output, places, steps=500):
        self.random = chance = random.Random(seed)
        self.estimator = OutputEstimator()
        # The floor gives one tier more than its weight; it has a test of its own.
        rules = Rules(quantum=QUANTUM, floor_share=0.0)
        self.queue = FairQueue(WEIGHTS, cost=COST, estimator=self.estimator, rules=rules)
        self.tier = {f"u{n}": chance.choice(tiers) for n in range(users)}
        self.weight = {user: WEIGHTS[tier] for user, tier in self.tier.items()}
        # Some flood, some ask now and then, some rest, and they change; some always get long replies, some short ones.
        self.eager = {user: chance.choice(EAGER) for user in self.tier}
        self.share = {user: chance.choice((0.02, 0.3, 1.0)) for user in self.tier}
        self.most_prompt, self.most_output = most_prompt, most_output
        self.places, self.room = places, places * (most_prompt + most_output)
        self.steps, self.capacity = steps, 1.0
        self.waiting: dict[str, Demand] = {}
        self.running: dict[str, Running] = {}
        self.received = dict.fromkeys(self.tier, 0.0)
        self.span = {}
        self.gap = self.ahead = self.coming = self.largest = 0.0

    def run(self):
        for step in range(self.steps):
            if self.random.random() < 0.05:
                self.capacity = self.random.choice((0.0, 0.3, 0.5, 1.0))
            self.come(step)
            self.start()
            self.write()
            self.compare()
        return self

    def come(self, step):
        for user, tier in self.tier.items():
            if self.random.random() < 0.01:
                self.eager[user] = self.random.choice(EAGER)
            if self.random.random() < self.eager[user]:
                one = Demand(
                    run_id=f"{step:06d}{user}",
                    user_id=user,
                    tier=tier,
                    prompt_tokens=self.random.randint(1, self.most_prompt),
                    max_tokens=self.most_output,
                    cached_tokens=self.random.choice((0, 0, self.most_prompt)),
                )
                self.waiting[one.run_id] = one
                self.queue.put(one)

    def start(self):
        places = int(self.places * self.capacity) - len(self.running)
        room = int(self.room * self.capacity) - sum(run.demand.kv_tokens for run in self.running.values())
        for one in self.queue.take(max(places, 0), max(room, 0)):
            del self.waiting[one.run_id]
            left = int(self.most_output * self.share[one.user_id] * self.random.random()) + 1
            self.running[one.run_id] = Running(one, left)
            self.largest = max(self.largest, self.expected(one) / WEIGHTS[one.tier])
            for user in self.tier:
                self.measure(user)
            # Not always are the cached tokens there that were expected.
            cached = self.random.choice((0, one.cached_tokens))
            self.queue.started(one.run_id, one.prompt_tokens, cached)
            self.running[one.run_id].service = prompt = COST.of_prompt(one.prompt_tokens, cached)
            self.received[one.user_id] += prompt / WEIGHTS[one.tier]
        self.nothing_idles(places, room)
        assert all(flow.head.bypassed <= Rules().most_bypasses for flow in self.queue._line_of.values())

    def nothing_idles(self, places, room):
        """With the whole engine free, whatever fits has started."""
        if not self.running and places > 0:
            heads = {one.user_id: one for one in reversed(self.waiting.values())}
            assert all(one.kv_tokens > room for one in heads.values())

    def expected(self, one):
        """What it is reckoned with: the whole prompt, and as many tokens as were ever expected."""
        output = min(one.max_tokens, max(self.estimator.usual, OutputEstimator.FIRST_GUESS, self.most_output))
        return COST.of_prompt(one.prompt_tokens, 0) + COST.of_output(output)

    def measure(self, user):
        """The most that was charged ahead, and the most that was still to come, for the runs of one user."""
        runs = [run for run in self.running.values() if run.demand.user_id == user]
        lookahead = Rules().lookahead * max(self.estimator.usual, OutputEstimator.FIRST_GUESS)
        prompts = sum(COST.of_prompt(run.demand.prompt_tokens, 0) for run in runs)
        ahead = prompts + sum(COST.of_output(min(lookahead, run.demand.max_tokens)) for run in runs)
        coming = prompts + sum(COST.of_output(run.left) for run in runs)
        self.ahead = max(self.ahead, ahead / self.weight[user])
        self.coming = max(self.coming, coming / self.weight[user])

    def write(self):
        for run_id, run in list(self.running.items()):
            fresh = min(run.left, self.random.randint(1, 40))
            self.queue.delivered(run_id, fresh)
            user = run.demand.user_id
            self.received[user] += COST.of_output(fresh) / self.weight[user]
            run.left -= fresh
            run.service += COST.of_output(fresh)
            if not run.left or self.random.random() < 0.02:
                charge = self.queue.end(run_id, complete=not run.left)
                assert charge.service == pytest.approx(run.service)
                del self.running[run_id]

    def compare(self):
        """The range of each difference since both users have had work waiting."""
        wait = {one.user_id for one in self.waiting.values()}
        for pair in combinations(self.tier, 2):
            if wait.issuperset(pair):
                gap = self.received[pair[0]] - self.received[pair[1]]
                low, high = self.span.get(pair, (gap, gap))
                self.span[pair] = low, high = min(low, gap), max(high, gap)
                self.gap = max(self.gap, high - low)
            else:
                self.span.pop(pair, None)

    @property
    def bound(self):
        """docs/scheduling.md: 2 (E + A + max(2q, A, Z))."""
        return 2 * (self.coming + self.ahead + max(2 * QUANTUM, self.ahead, self.largest))


class Running:
    """A run under way, and how many tokens it will still write."""

    def __init__(self, demand, left):
        self.demand, self.left = demand, left
        self.service = 0.0


scenarios = st.builds(
    Scenario,
    seed=st.integers(0, 2**32),
    users=st.integers(2, 5),
    tiers=st.sampled_from([[TierName.FREE], [TierName.FREE, TierName.PLUS], list(WEIGHTS)]),
    most_prompt=st.sampled_from([20, 100, 500]),
    most_output=st.sampled_from([10, 50, 200]),
    places=st.integers(1, 4),
)


def differs_by_a_bounded_amount(scenario):
    """Asserts on the way, too: what is charged is what was delivered, nothing idles, nobody is bypassed too often."""
    scenario.run()
    assert scenario.gap <= scenario.bound


def over(examples):
    return settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@over(60)
@given(scenarios)
def test_between_two_users_with_work_waiting_service_differs_by_a_bounded_amount(scenario):
    differs_by_a_bounded_amount(scenario)


@pytest.mark.slow
@pytest.mark.timeout(600)
@over(1000)
@given(scenarios)
def test_between_two_users_service_differs_by_a_bounded_amount_in_a_thousand_scenarios(scenario):
    differs_by_a_bounded_amount(scenario)
