"""The simulator of ``bench/scheduler_sim.py``: it measures what it says, and the queue keeps its promises in it."""

import json
import sys
from pathlib import Path

import msgspec
import pytest

from chatsvc.limits import TierName

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from measure import percentile
from scheduler_sim import main, run, taken_again
from sim_engine import Engine, Result, Served, simulate
from sim_metrics import accumulated, figures, windows
from sim_policies import POLICIES, WEIGHTS
from sim_service import CONFIG, Service
from sim_traces import MADE, Job, Trace, overload, read, tiers


def cut(trace, seconds):
    """The beginning of a trace."""
    jobs = [job for job in trace.jobs if job.arrival_s < seconds]
    return msgspec.structs.replace(trace, jobs=jobs, until_s=float(seconds))


def served(number, user, arrival, dispatched, ended, prompt=0, output=300):
    job = Job(arrival_s=arrival, number=number, user=user, prompt_tokens=prompt, output_tokens=output)
    return Served(job=job, dispatched_s=dispatched, first_token_s=dispatched, ended_s=ended)


def result(*records, until=120.0):
    trace = Trace(name="t", jobs=[one.job for one in records], until_s=until)
    return Result(trace=trace, served=list(records), ended_s=until, idle_s=0.0)


def test_two_users_who_get_the_same_do_not_differ():
    same = result(served(1, "a", 0, 0.0, 120.0), served(2, "b", 0, 0.0, 120.0))
    # Both asked before the first window, and are served evenly in all of them.
    assert max(windows(same)) == 0


def test_a_user_who_is_made_to_wait_while_another_is_served_differs_by_what_it_asked_for():
    unequal = result(served(1, "a", 40, 40.0, 60.0), served(2, "b", 40, 100.0, 119.0, output=150))
    # From 30 to 90: a has its 600, b nothing of its 300.
    assert windows(unequal)[0] == pytest.approx(300 / 60)


def test_the_accumulated_difference_counts_while_both_wait():
    waiting = [served(n, user, 0, 119.0, 120.0, output=1) for n, user in ((8, "a"), (9, "b"))]
    one_sided = result(served(1, "a", 0, 0.0, 120.0), *waiting)
    assert accumulated(one_sided) == pytest.approx(600 / 120 * 88, rel=0.02)
    assert accumulated(result(served(1, "a", 0, 0.0, 120.0), waiting[1])) == 0


def test_every_policy_serves_all_that_it_does_not_refuse_and_never_idles():
    trace = cut(overload(2), 60)
    for name, policy in POLICIES.items():
        found = figures(simulate(msgspec.structs.replace(trace, until_s=120.0), policy(), Engine()))
        assert found["served"] + found["refused"] == len(trace.jobs), name
        assert found["idle_s"] == 0, name


def test_weights_are_what_is_served_under_overload():
    trace = cut(tiers(9), 400)
    found = figures(simulate(trace, POLICIES["ours"](), Engine()))["service_per_user"]
    free = found["free"]
    for tier, weight in WEIGHTS.items():
        assert found[str(tier)] / free == pytest.approx(weight, rel=0.05)


def test_users_are_served_more_evenly_than_by_plain_vtc_and_far_more_than_in_order_of_arrival():
    found = run([cut(overload(2), 240)] * 2, ["ours", "vtc", "fcfs"], Engine(), None)
    ours, vtc, fcfs = found["ours"], found["vtc"], found["fcfs"]
    assert ours["throughput"] == pytest.approx(vtc["throughput"], rel=0.01)
    assert ours["window_mean"] < 0.9 * vtc["window_mean"]
    assert ours["accumulated_max"] < 0.9 * vtc["accumulated_max"]
    assert fcfs["window_mean"] > 3 * ours["window_mean"]


def test_a_trace_is_read_from_a_file_and_a_line_that_is_none_is_named(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("arrival_s,user,prompt_tokens,output_tokens,tier\n1.5,u,10,20,pro\n0.5,v,1,2000,\n")
    trace = read(file)
    assert [(job.user, job.tier, job.max_tokens) for job in trace.jobs] == [
        ("v", TierName.FREE, 2000),
        ("u", TierName.PRO, 1024),
    ]
    file.write_text("arrival_s,user,prompt_tokens,output_tokens\n1.5,u,ten,20\n")
    with pytest.raises(ValueError, match="line 2"):
        read(file)


def test_plots_are_drawn(tmp_path):
    run([cut(MADE["capacity-drop"](7), 120)], ["ours", "service"], Engine(), tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["delay-capacity-drop.svg", "service-capacity-drop.svg"]
    assert "the ladder" in (tmp_path / "delay-capacity-drop.svg").read_text()


@pytest.mark.usefixtures("restored_logging")
def test_the_figures_are_printed_as_json_by_policy(tmp_path, capsys, monkeypatch):
    file = tmp_path / "trace.csv"
    file.write_text(
        "arrival_s,user,prompt_tokens,output_tokens\n"
        + "".join(f"{second},u{second % 2},10,20\n" for second in range(120))
    )
    names = ["ours", "vtc", "fcfs", "service"]
    arguments = ["--trace", str(file), "--policies", ",".join(names), "--repeats", "1", "--json"]
    monkeypatch.setattr(sys, "argv", ["scheduler_sim.py", *arguments])
    main()
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == ["policies"]
    assert list(printed["policies"]) == names
    wanted = {"window_max", "window_mean", "accumulated_max", "throughput", "refused", "idle_s", "delay_p99_s"}
    assert all(wanted <= set(found) for found in printed["policies"].values())


def test_the_door_of_the_simulated_service_lets_in_what_the_tiers_limits_let_in():
    jobs = [
        Job(arrival_s=0.0, number=n, user="u" if n < 5 else f"v{n}", prompt_tokens=10, output_tokens=50)
        for n in range(8)
    ]
    tier = msgspec.structs.replace(CONFIG.tiers[TierName.FREE], max_open_replies=3, max_queued=5)
    done = simulate(Trace(name="t", jobs=jobs, until_s=60.0), Service({**CONFIG.tiers, TierName.FREE: tier}), Engine())
    # Two of u's are one too many each; of the others two fill the queue.
    assert [one.refused for one in done.served] == [False] * 3 + [True] * 2 + [False] * 2 + [True]


def test_a_budget_that_is_used_up_refuses_in_the_simulated_service_too():
    jobs = [Job(arrival_s=60.0 * n, number=n, user="u", prompt_tokens=100, output_tokens=500) for n in range(4)]
    tier = msgspec.structs.replace(CONFIG.tiers[TierName.FREE], budget=3000)
    done = simulate(Trace(name="t", jobs=jobs, until_s=300.0), Service({**CONFIG.tiers, TierName.FREE: tier}), Engine())
    # Each costs 100 + 2 x 500, and is expected to cost 100 + 2 x 512.
    assert [one.refused for one in done.served] == [False, False, True, True]


def test_when_capacity_is_halved_free_users_give_something_up_first_and_nothing_is_cut():
    # The engine at what it can do for 100 s, then half of it.
    trace = cut(MADE["capacity-drop"](7), 300)
    trace = msgspec.structs.replace(trace, capacity=((0.0, 1.0), (100.0, 0.5)))
    policy = Service()
    done = simulate(trace, policy, Engine())
    assert 0 < max(step for _, step in policy.steps) <= 6
    assert {tier for tier, _ in policy.degraded} == {TierName.FREE}
    begun = [one for one in done.served if one.dispatched_s is not None]
    assert all(one.ended_s is not None for one in begun)
    assert len(begun) + sum(one.refused or one.moved for one in done.served) == len(trace.jobs)
    assert done.idle_s == 0


@pytest.fixture(scope="module")
def halved():
    """A busy hour on the whole engine for 300 s, then on half of it: two traces."""
    found = []
    for seed in range(2):
        trace = msgspec.structs.replace(cut(MADE["capacity-drop"](seed), 720), capacity=((0.0, 1.0), (300.0, 0.5)))
        policy = Service()
        found.append((policy, simulate(trace, policy, Engine(), seed)))
    return found


def waits(halved, begin, end, tier=TierName.PRO):
    return [
        one.dispatched_s - one.job.arrival_s
        for _, done in halved
        for one in done.served
        if one.dispatched_s is not None and one.job.tier is tier and begin <= one.job.arrival_s < end
    ]


def test_on_half_the_engine_pro_waits_less_than_twice_as_long_as_on_all_of_it(halved):
    assert percentile(waits(halved, 300, 720), 0.99) < 2 * percentile(waits(halved, 0, 300), 0.99)


def test_while_the_engine_stays_halved_no_step_is_given_back_to_be_taken_again(halved):
    for policy, done in halved:
        assert taken_again(policy.steps, done.trace)["300"] == 0
        assert 2 <= max(step for at, step in policy.steps if at < 720) <= 3
        # A minute after the drop free users have another engine.
        assert next(at for at, step in policy.steps if step == 2) < 375


def test_a_step_counts_as_taken_again_only_while_capacity_stays_the_same():
    trace = Trace(name="t", jobs=[], capacity=((0.0, 1.0), (300.0, 0.5)))
    steps = [(0.0, 0), (10.0, 1), (90.0, 0), (310.0, 1), (320.0, 2), (400.0, 1), (410.0, 0), (420.0, 1), (430.0, 2)]
    assert taken_again(steps, trace) == {"0": 0, "300": 2}
