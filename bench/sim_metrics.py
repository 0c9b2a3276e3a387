"""How fair a run was.

The measure of Sheng et al.: a request's service, prompt + 2 x output tokens, is spread over its serving time. In
windows of 60 s, after 30 s of warm-up, the difference is the sum over users of
min(largest user's service - own service, |own demand - own service|), in service per second.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate, combinations
from typing import Any, Final

import msgspec
from measure import percentile
from sim_engine import Result, Served
from sim_policies import COST, WEIGHTS

from chatsvc.limits import TierName

WINDOW_S: Final = 60
WARM_UP_S: Final = 30


def cost(served: Served) -> float:
    return COST.of_prompt(served.job.prompt_tokens, 0) + COST.of_output(served.job.output_tokens)


def by_second(result: Result, seconds: int) -> dict[str, list[float]]:
    """Service each user received in each second."""
    users: dict[str, list[float]] = {served.job.user: [0.0] * seconds for served in result.served}
    for served in result.served:
        if served.dispatched_s is None or served.ended_s is None:
            continue
        begin, end = served.dispatched_s, served.ended_s
        rate = cost(served) / (end - begin)
        line = users[served.job.user]
        for second in range(int(begin), min(int(end) + 1, seconds)):
            line[second] += rate * max(0.0, min(end, second + 1) - max(begin, second))
    return users


def windows(result: Result) -> list[float]:
    """The difference in the window around every second."""
    seconds = int(result.trace.until_s)
    received = {user: [0.0, *accumulate(line)] for user, line in by_second(result, seconds).items()}
    demand = {user: [0.0] * seconds for user in received}
    for served in result.served:
        if served.job.arrival_s < seconds:
            demand[served.job.user][int(served.job.arrival_s)] += cost(served)
    wanted = {user: [0.0, *accumulate(line)] for user, line in demand.items()}
    differences = []
    for begin in range(WARM_UP_S, seconds - WINDOW_S + 1):
        end = begin + WINDOW_S
        own = {user: line[end] - line[begin] for user, line in received.items()}
        most = max(own.values())
        differences.append(
            sum(min(most - got, abs(wanted[user][end] - wanted[user][begin] - got)) for user, got in own.items())
            / WINDOW_S
        )
    return differences


def waits_through(served: Iterable[Served], seconds: int) -> dict[str, list[bool]]:
    """For each user and second, whether it had a request waiting all the time."""
    intervals: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in served:
        if one.dispatched_s is not None and one.dispatched_s > one.job.arrival_s:
            intervals[one.job.user].append((one.job.arrival_s, one.dispatched_s))
    waits = {}
    for user, spans in intervals.items():
        line = [False] * seconds
        begin, end = -1.0, -1.0
        for start, stop in [*sorted(spans), (float("inf"), float("inf"))]:
            if start <= end:
                end = max(end, stop)
                continue
            for second in range(int(begin) + 1, min(int(end), seconds)):
                line[second] = True
            begin, end = start, stop
        waits[user] = line
    return waits


def accumulated(result: Result) -> float:
    """Largest difference of weighted service between two users over any time in which both had requests waiting (L12).

    Counted from 30 s after the second began to wait: what was under way then cannot be taken back by any order.
    """
    seconds = int(result.ended_s) + 1
    weight = {served.job.user: WEIGHTS[served.job.tier] for served in result.served}
    received = {
        user: list(accumulate(amount / weight[user] for amount in line))
        for user, line in by_second(result, seconds).items()
    }
    waits = waits_through(result.served, seconds)
    largest = 0.0
    patient = [user for user, line in waits.items() if sum(line) > WARM_UP_S]
    for one, other in combinations(patient, 2):
        mine, theirs = received[one], received[other]
        since, low, high = 0, math.inf, -math.inf
        for second, both in enumerate(map(operator.and_, waits[one], waits[other])):
            if not both:
                since, low, high = second + 1, math.inf, -math.inf
            elif second - since >= WARM_UP_S:
                ahead = mine[second] - theirs[second]
                low, high = min(low, ahead), max(high, ahead)
                largest = max(largest, high - low)
    return largest


def delays(result: Result) -> dict[TierName, list[float]]:
    """Seconds from arrival to dispatch, by tier."""
    found: dict[TierName, list[float]] = defaultdict(list)
    for served in result.served:
        if served.dispatched_s is not None:
            found[served.job.tier].append(served.dispatched_s - served.job.arrival_s)
    return found


def phases(result: Result) -> dict[str, dict[str, Any]]:
    """How long each tier waited, by the share of the engine that was there when a request came."""
    capacity = result.trace.capacity
    ends = [*(begin for begin, _ in capacity[1:]), math.inf]
    found = {}
    for (begin, share), end in zip(capacity, ends, strict=True):
        came = [one for one in result.served if begin <= one.job.arrival_s < end]
        waited = delays(msgspec.structs.replace(result, served=came))
        p99 = {str(tier): round(percentile(line, 0.99), 2) for tier, line in sorted(waited.items())}
        found[f"{begin:.0f}"] = {"share": share, "delay_p99_s": p99}
    return found


def tier_service(result: Result) -> dict[TierName, float]:
    """Service per second and user of each tier, while requests came."""
    seconds = int(result.trace.until_s)
    total: dict[TierName, float] = defaultdict(float)
    users: dict[TierName, set[str]] = defaultdict(set)
    tier = {served.job.user: served.job.tier for served in result.served}
    for user, line in by_second(result, seconds).items():
        total[tier[user]] += sum(line[WARM_UP_S:])
        users[tier[user]].add(user)
    return {name: total[name] / len(users[name]) / (seconds - WARM_UP_S) for name in total}


def mean(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean of each figure over several runs. A single run is a matter of luck: one request more or less."""
    first = runs[0]
    return {
        name: mean([run[name] for run in runs])
        if isinstance(value, dict)
        else round(sum(run.get(name, 0.0) for run in runs) / len(runs), 3)
        for name, value in first.items()
    }


def figures(result: Result) -> dict[str, Any]:
    """What one policy came to in one run."""
    differences = windows(result)
    done = [served for served in result.served if served.ended_s is not None]
    tokens = sum(served.job.prompt_tokens + served.job.output_tokens for served in done)
    waited = delays(result)
    return {
        "window_max": round(max(differences), 1),
        "window_mean": round(sum(differences) / len(differences), 1),
        "accumulated_max": round(accumulated(result)),
        "throughput": round(tokens / result.ended_s, 1),
        "served": len(done),
        "refused": sum(served.refused for served in result.served),
        "moved": sum(served.moved for served in result.served),
        "idle_s": round(result.idle_s, 3),
        "longest_wait_s": round(max((delay for line in waited.values() for delay in line), default=0.0), 1),
        "delay_p50_s": {str(tier): round(percentile(line, 0.5), 2) for tier, line in sorted(waited.items())},
        "delay_p99_s": {str(tier): round(percentile(line, 0.99), 2) for tier, line in sorted(waited.items())},
        "phases": phases(result) if len(result.trace.capacity) > 1 else {},
        "service_per_user": {str(tier): round(value, 2) for tier, value in sorted(tier_service(result).items())},
    }
