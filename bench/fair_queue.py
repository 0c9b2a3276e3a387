"""What does an operation of the fair queue cost while ten thousand users wait?

    python bench/fair_queue.py [--users 10000] [--rounds 20000] [--json]

Every round takes one run, reports its prompt, 16 tokens, and its end, and puts another of its user's, whose position is
asked for; some runs are discarded. Half the prompts are warm, so that several candidates are looked at. Where all stand
is surveyed when an eighth has changed, in steps between which an event loop goes on: the longest is what it waits for.
All in processor time, so that other work on the machine changes little. The garbage collector is set as the service
sets it; its rounds are told by themselves, for they may fall into any operation.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable

from measure import percentile

from chatsvc.app import COLLECT_EVERY
from chatsvc.limits import TierName
from chatsvc.scheduler.fair_flow import Demand
from chatsvc.scheduler.fair_queue import FairQueue

SHARES = {"p50": 0.5, "p99": 0.99, "longest": 1.0}
WEIGHTS = {TierName.PRO: 16.0, TierName.PLUS: 4.0, TierName.FREE: 1.0}


class Stopwatch:
    """Seconds by operation, without the garbage collector's, which has a row of its own."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._collecting_since = 0.0
        self._collected_s = 0.0
        gc.collect()
        gc.freeze()
        gc.set_threshold(COLLECT_EVERY, 10, 10)
        gc.callbacks.append(self._collecting)

    def timed(self, name: str, call: Callable[[], object]) -> object:
        """Do it, and note how long it took."""
        began = time.thread_time() - self._collected_s
        answer = call()
        self.seconds[name].append(time.thread_time() - self._collected_s - began)
        return answer

    def _collecting(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collecting_since = time.thread_time()
        else:
            took = time.thread_time() - self._collecting_since
            self.seconds["collector"].append(took)
            self._collected_s += took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    watch = Stopwatch()
    timed, seconds = watch.timed, watch.seconds
    chance = random.Random(1)
    queue = FairQueue(WEIGHTS)
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
        steps, surveying = queue.survey(), False
        while timed("survey", lambda steps=steps: next(steps, steps)) is not steps:
            surveying = True
        if not surveying:
            seconds["survey"].pop()  # that was a look whether there is anything to do
        timed("position", lambda one=one: queue.position(one.run_id))
        if chance.random() < 0.1:
            timed("discard", lambda one=one: queue.discard(one.run_id))
            queue.put(one)
    found = {
        name: {f"{share}_us": percentile(taken, of) * 1e6 for share, of in SHARES.items()}
        for name, taken in seconds.items()
    }
    found["position"]["mean_us"] = (sum(seconds["position"]) + sum(seconds["survey"])) / len(seconds["position"]) * 1e6
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"{arguments.users} users wait; microseconds\n")
    print(f"{'operation':<12}{'p50':>10}{'p99':>10}{'longest':>10}")
    for name, taken in found.items():
        print(f"{name:<12}" + "".join(f"{taken[f'{share}_us']:>10.1f}" for share in SHARES))
    print(f"\nposition, on average: {found['position']['mean_us']:.1f}, the surveys included")


if __name__ == "__main__":
    main()
