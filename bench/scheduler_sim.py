"""How fair is the order in which requests are served?

    python bench/scheduler_sim.py [--trace NAME|FILE] [--policies ours,vtc,…] [--repeats 5] [--admit-every 10]
                                  [--plots DIR] [--json]

A batching engine as discrete events, and the service's own queue (``ours``) beside others: plain VTC, VTC that knows
all lengths, first come first served, tiers by strict priority, a limit of requests per minute. ``service`` is the queue
behind the service's door (open replies, budgets, queue caps) and under its degradation ladder, with default limits;
``one_model`` is the same without a smaller model that free users could be moved to.
FILE is a CSV of arrival_s, user, prompt_tokens, output_tokens and, if it likes, tier. NAME is one of the made-up
traces, or ``all`` of them. Each policy serves the same requests on the same engine; figures are means over the repeats,
which differ in how long steps take, and made-up traces in what is asked for.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import structlog
from sim_engine import Engine, Result, simulate
from sim_metrics import WINDOW_S, by_second, figures, mean
from sim_plots import Lines, draw
from sim_policies import POLICIES, WEIGHTS, Policy
from sim_service import Service
from sim_traces import FREE, MADE, Trace, read

ALL: Final[dict[str, Callable[[], Policy]]] = {
    **POLICIES,
    "service": Service,
    "one_model": lambda: Service(smaller=False),
}
COLUMNS = (
    ("policy", 14),
    ("window max", 10),
    ("mean", 7),
    ("accumulated", 11),
    ("tokens/s", 8),
    ("refused", 7),
    ("idle s", 6),
    ("longest wait s", 14),
)


def table(trace: Trace, policies: dict[str, dict[str, Any]]) -> None:
    """Print one line a policy, and what each tier got where there are several."""
    users = len({job.user for job in trace.jobs})
    print(f"\n{trace.name}: {len(trace.jobs)} requests of {users} users in {trace.until_s:.0f} s\n")
    print("  ".join(f"{name:>{width}}" if index else f"{name:<{width}}" for index, (name, width) in enumerate(COLUMNS)))
    for name, found in policies.items():
        cells = (
            found["window_max"],
            found["window_mean"],
            found["accumulated_max"],
            found["throughput"],
            found["refused"],
            found["idle_s"],
            found["longest_wait_s"],
        )
        widths = (width for _, width in COLUMNS[1:])
        print(f"{name:<14}  " + "  ".join(f"{cell:>{width}.0f}" for cell, width in zip(cells, widths, strict=True)))
    if len({job.tier for job in trace.jobs}) > 1:
        print("\nservice per user and second; seconds to dispatch, p50 and p99")
        for name, found in policies.items():
            tiers = "  ".join(
                f"{tier}: {found['service_per_user'][tier]:8.2f} {found['delay_p50_s'][tier]:7.2f} "
                f"{found['delay_p99_s'][tier]:8.2f}"
                for tier in found["service_per_user"]
            )
            print(f"{name:<14}  {tiers}")


def phases(found: dict[str, Any]) -> None:
    """Print how long each tier waited while capacity was what it was."""
    print("\nseconds to dispatch, p99, of requests that came while so much of the engine was there")
    for name, figures_of in found.items():
        parts = (f"{phase['share']:.0%}: {phase['delay_p99_s']}" for phase in figures_of["phases"].values())
        print(f"{name:<14}  " + "  ".join(parts).replace("'", ""))
        if "step_changes" in figures_of:
            again = "  ".join(
                f"{phase['share']:.0%}: {figures_of['taken_again'][begin]:.1f}"
                for begin, phase in figures_of["phases"].items()
            )
            print(f"{'':<14}  steps up and down: {figures_of['step_changes']:.1f}; taken again: {again}")


def service_lines(result: Result) -> Lines:
    """Weighted service per second of each user, in windows of a minute."""
    weight = {served.job.user: WEIGHTS[served.job.tier] for served in result.served}
    seconds = int(result.trace.until_s)
    return {
        user: [
            (begin + WINDOW_S / 2, sum(line[begin : begin + WINDOW_S]) / WINDOW_S / weight[user])
            for begin in range(0, seconds - WINDOW_S + 1, 10)
        ]
        for user, line in by_second(result, seconds).items()
    }


def delay_lines(result: Result) -> Lines:
    """Mean seconds to dispatch of each tier's requests, by the half minute in which they came."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for served in result.served:
        if served.dispatched_s is not None:
            found[served.job.tier][int(served.job.arrival_s // 30)].append(served.dispatched_s - served.job.arrival_s)
    return {
        tier: [(30.0 * slot + 15, sum(delays) / len(delays)) for slot, delays in sorted(slots.items())]
        for tier, slots in found.items()
    }


def step_lines(steps: list[tuple[float, int]], until_s: float) -> Lines:
    """The ladder's step over time."""
    line: list[tuple[float, float]] = []
    for at, step in [*steps, (until_s, steps[-1][1])]:
        line += [(at, line[-1][1] if line else 0.0), (at, float(step))]
    return {"step": line}


def taken_again(steps: list[tuple[float, int]], trace: Trace) -> dict[str, int]:
    """How many steps were taken again that had been given back while so much of the engine was there, by the second

    from which on it was.
    """
    found: dict[str, int] = {}
    ends = [*(begin for begin, _ in trace.capacity[1:]), math.inf]
    for (begin, _), end in zip(trace.capacity, ends, strict=True):
        given_back: set[int] = set()
        again = 0
        for (_, before), (at, step) in pairwise(steps):
            if begin <= at < end:
                again += step > before and step in given_back
                given_back.update(range(step + 1, before + 1))
        found[f"{begin:.0f}"] = again
    return found


def run(traces: Sequence[Trace], names: list[str], engine: Engine, plots: Path | None) -> dict[str, dict[str, Any]]:
    """Serve the traces, one a repeat, under each policy."""
    trace = traces[0]
    found, first = {}, {}
    steps: Lines = {}
    for name in names:
        policies = [ALL[name]() for _ in traces]
        results = [
            simulate(one, policy, engine, seed) for seed, (one, policy) in enumerate(zip(traces, policies, strict=True))
        ]
        each = [figures(result) for result in results]
        found[name] = mean(each)
        for key in ("window_max", "window_mean", "accumulated_max"):
            values = [one[key] for one in each]
            found[name][f"{key}_range"] = f"{min(values):.0f}-{max(values):.0f}"
        first[name] = results[0]
        if isinstance(policies[0], Service):
            found[name]["step_changes"] = sum(len(one.steps) - 1 for one in policies) / len(policies)
            again = [taken_again(one.steps, trace) for one, trace in zip(policies, traces, strict=True)]
            found[name]["taken_again"] = {begin: sum(one[begin] for one in again) / len(again) for begin in again[0]}
            found[name]["most_steps"] = max(step for one in policies for _, step in one.steps)
            steps = step_lines(policies[0].steps, results[0].ended_s)
    if plots is not None:
        services = {name: service_lines(result) for name, result in first.items()}
        draw(plots / f"service-{trace.name}.svg", f"{trace.name}: weighted service per user", "per second", services)
        waits = {name: delay_lines(result) for name, result in first.items()}
        apart = {}
        if steps:
            paying = {tier: line for tier, line in waits.get("service", {}).items() if tier != FREE}
            if paying:
                waits["service: plus and pro"] = paying
                apart["service: plus and pro"] = "seconds"
            waits["service: the ladder"] = steps
            apart["service: the ladder"] = "step"
        draw(plots / f"delay-{trace.name}.svg", f"{trace.name}: time in the queue by tier", "seconds", waits, apart)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="people", help=f"a CSV file, or {', '.join(MADE)}, or all")
    parser.add_argument("--policies", default=",".join(ALL), help=f"of {', '.join(ALL)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--admit-every", type=int, default=Engine().admit_every, help="steps between looks at the queue"
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw service and delay over time, as SVG")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    names = arguments.policies.split(",")
    if unknown := [name for name in names if name not in ALL]:
        parser.error(f"unknown policy {unknown[0]}; there are {', '.join(ALL)}")
    # What the ladder does is in the figures.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    engine = Engine(admit_every=arguments.admit_every)
    repeats = range(arguments.repeats)
    if arguments.trace == "all":
        repeated = [[make(seed) for seed in repeats] for make in MADE.values()]
    elif arguments.trace in MADE:
        repeated = [[MADE[arguments.trace](seed) for seed in repeats]]
    elif Path(arguments.trace).is_file():
        repeated = [[read(Path(arguments.trace))] * arguments.repeats]
    else:
        parser.error(f"{arguments.trace}: no such file, and no made-up trace of that name ({', '.join(MADE)})")
    for traces in repeated:
        trace = traces[0]
        policies = run(traces, names, engine, arguments.plots)
        if arguments.json:
            # Of several traces each says which it is.
            print(json.dumps({"policies": policies} | ({"trace": trace.name} if len(repeated) > 1 else {})))
        else:
            table(trace, policies)
            if len(trace.capacity) > 1:
                phases(policies)


if __name__ == "__main__":
    main()
