"""A fair queue of three tiers, what stands in it, and an engine that serves it."""

from itertools import count

from chatsvc.limits import ServiceCost, TierName
from chatsvc.scheduler.fair_flow import Demand
from chatsvc.scheduler.fair_queue import FairQueue
from chatsvc.scheduler.fair_rules import Rules

FREE, PLUS, PRO = TierName.FREE, TierName.PLUS, TierName.PRO
WEIGHTS = {PRO: 16.0, PLUS: 4.0, FREE: 1.0}
COST = ServiceCost(prompt=1, cached=0.1, output=3)
numbers = count()


def demand(user, *, prompt=100, most=500, cached=0, tier=FREE, run_id=None):
    return Demand(
        run_id=run_id or f"r{next(numbers):09d}",
        user_id=user,
        tier=tier,
        prompt_tokens=prompt,
        max_tokens=most,
        cached_tokens=cached,
    )


def queue(**rules):
    return FairQueue(WEIGHTS, cost=COST, rules=Rules(**rules))


def put(line, *demands):
    for one in demands:
        line.put(one)
    return demands


def serve(line, one, tokens=10, **end):
    """A whole reply, from its dispatch on."""
    line.started(one.run_id, one.prompt_tokens, one.cached_tokens)
    line.delivered(one.run_id, tokens)
    return line.end(one.run_id, **end)


def serve_all(line, rounds, tokens=10):
    """One at a time; returns the users in the order in which they were served."""
    users = []
    for _ in range(rounds):
        for one in line.take(1):
            users.append(one.user_id)
            serve(line, one, tokens)
    return users
