"""What does an operation of the fair queue cost while ten thousand users wait?

    python bench/fair_queue.py [--users 10000] [--rounds 20000] [--json]

Every round takes one run, reports its prompt, 16 tokens, and its end, and puts another of its user's; some runs are
discarded, some asked for their position. Half the prompts are warm, so that several candidates are looked at.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable

from measure import percentile

from chatsvc.limits import TierName
from chatsvc.scheduler.fair_flow import Demand
from chatsvc.scheduler.fair_queue import FairQueue

WEIGHTS = {TierName.PRO: 16.0, TierName.PLUS: 4.0, TierName.FREE: 1.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    chance = random.Random(1)
    queue = FairQueue(WEIGHTS)
    seconds: dict[str, list[float]] = defaultdict(list)
    tiers = list(WEIGHTS)
    made = 0

    def demand(user: int) -> Demand:
        nonlocal made
        made += 1
        return Demand(
            run_id=f"{made:012d}",
            user_id=f"user{user}",
            tier=tiers[user % 3],
            prompt_tokens=chance.randint(10, 2000),
            max_tokens=1000,
            cached_tokens=chance.choice((0, 500)),
        )

    def timed(name: str, call: Callable[[], object]) -> object:
        began = time.perf_counter()
        answer = call()
        seconds[name].append(time.perf_counter() - began)
        return answer

    for user in range(arguments.users):
        one = demand(user)
        timed("put", lambda one=one: queue.put(one))
    for _ in range(arguments.rounds):
        (run,) = timed("take", lambda: queue.take(1, 100_000))  # type: ignore[misc]
        timed("started", lambda run=run: queue.started(run.run_id, run.prompt_tokens, run.cached_tokens))
        timed("delivered", lambda run=run: queue.delivered(run.run_id, 16))
        timed("end", lambda run=run: queue.end(run.run_id, complete=True))
        one = demand(int(run.user_id[4:]))
        timed("put", lambda one=one: queue.put(one))
        timed("position", lambda one=one: queue.position(one.run_id))
        if chance.random() < 0.1:
            timed("discard", lambda one=one: queue.discard(one.run_id))
            queue.put(one)
    found = {
        name: {"p50_us": percentile(taken, 0.5) * 1e6, "p99_us": percentile(taken, 0.99) * 1e6}
        for name, taken in seconds.items()
    }
    found["position"]["mean_us"] = sum(seconds["position"]) / len(seconds["position"]) * 1e6
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"{arguments.users} users wait; microseconds\n")
    print(f"{'operation':<12}{'p50':>8}{'p99':>8}")
    for name, taken in found.items():
        print(f"{name:<12}{taken['p50_us']:>8.1f}{taken['p99_us']:>8.1f}")
    print(f"\nposition, on average: {found['position']['mean_us']:.1f}, the looks at all of them included")


if __name__ == "__main__":
    main()
