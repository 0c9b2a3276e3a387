"""How long runs wait, and what a request is taken in on when they wait too long."""

from datetime import UTC, datetime, timedelta

import pytest

from chatsvc.config import Config, DegradationConfig, ModelConfig
from chatsvc.errors import TooLate
from chatsvc.limits import TierName
from chatsvc.run import RunKind, WaitingRun
from chatsvc.scheduler.degrade import TOP
from chatsvc.scheduler.pressure import LEAST_RETRY_S, LEAST_SPREAD_S, Pressure, Terms, UsualReply
from chatsvc.scheduler.queue_delay import RATE_WINDOW_S, QueueDelays
from chatsvc.scheduler.spared import Fullness

FREE, PLUS, PRO = TierName.FREE, TierName.PLUS, TierName.PRO
MIDNIGHT = datetime(2026, 1, 1, tzinfo=UTC)


class Clock:
    """A clock that is set."""

    def __init__(self):
        self.time = 0.0

    def monotonic(self):
        return self.time

    def now(self):
        return MIDNIGHT + timedelta(seconds=self.time)


# The delay ------------------------------------------------------------------------------------------------------------


def free(*since):
    return [(FREE, at) for at in since]


def test_the_delay_is_the_median_of_those_who_began_and_those_who_wait():
    delays = QueueDelays()
    delays.begins(FREE, 20.0, 10.0)
    assert delays.look(10.0, free(0.0, 6.0)) == {FREE: 20.0}  # of 20, 8 and 20
    assert delays.look(20.0, free(0.0, 6.0)) == {FREE: 34.0}  # of 40 and 28: who began counts in one look only


def test_in_a_queue_that_stands_as_it_is_the_delay_is_what_a_run_waits():
    delays = QueueDelays()
    seen = []
    for second in range(40, 200):  # two come and two begin a second; each has waited for 40 s
        delays.begins(FREE, 40.0, float(second))
        delays.begins(FREE, 40.0, float(second))
        since = [float(each) for each in range(second - 39, second + 1) for _ in range(2)]
        seen.append(delays.look(second + 0.5, free(*since))[FREE])
    assert seen == pytest.approx([40.0] * len(seen), rel=0.05)


def test_where_nobody_waits_or_begins_there_is_no_delay():
    delays = QueueDelays()
    assert delays.look(5.0, []) == {}
    delays.begins(PRO, 0.0, 6.0)
    assert delays.look(7.0, []) == {PRO: 0.0}
    assert delays.look(8.0, []) == {}


def test_a_few_who_wait_for_long_do_not_make_the_delay():
    delays = QueueDelays()
    for _ in range(20):
        delays.begins(FREE, 0.1, 100.0)
    assert delays.look(100.0, free(0.0, 0.0, 0.0))[FREE] == pytest.approx(0.1)


def test_the_expected_wait_is_what_those_who_wait_take_at_their_pace():
    delays = QueueDelays()
    for second in range(100):
        for _ in range(2):
            delays.begins(FREE, 50.0, float(second))
    delays.look(99.0, free(*[50.0] * 200))
    assert delays.expected_s(FREE, 99.0, 60.0) == pytest.approx(100, rel=0.1)
    assert delays.expected_s(PRO, 99.0, 60.0) == 0


def test_while_none_begins_the_oldest_says_how_long_it_takes():
    delays = QueueDelays()
    delays.begins(FREE, 1.0, 10.0)
    delays.look(100.0, free(10.0, 90.0))
    assert 10.0 + RATE_WINDOW_S < 100.0
    assert delays.expected_s(FREE, 101.0, 60.0) == 91.0


def test_who_is_refused_for_having_waited_too_long_is_not_waited_for():
    delays = QueueDelays()
    for second in range(70, 100):
        delays.begins(FREE, 20.0, float(second))
    delays.look(99.5, free(*[10.0] * 500, *[90.0] * 20))
    assert delays.expected_s(FREE, 99.5, 60.0) == pytest.approx(20, rel=0.1)
    assert delays.expected_s(FREE, 99.5, 90.0) == pytest.approx(520, rel=0.1)


# The terms ------------------------------------------------------------------------------------------------------------


class Queue:
    """Who waits for a model, and since when."""

    def __init__(self, model):
        self.model = model
        self.delays = QueueDelays()
        self.waiting = {}

    def waits(self):
        return self.waiting.values()


class World:
    """A pressure of two models, whose ladders are pushed up by runs that wait."""

    def __init__(self, *, enabled=True, **rules):
        self.clock = Clock()
        models = {
            "large": ModelConfig(engine="scripted:", default=True, degrade_to="small"),
            "small": ModelConfig(engine="scripted:"),
        }
        config = Config(
            data_dir=None, models=models, degradation=DegradationConfig(interval_s=1, recover_s=60, **rules)
        )
        self.unready = set()
        self.queues = {name: Queue(name) for name in models}
        self.full = dict.fromkeys(models, Fullness())
        self.pressure = Pressure(
            config=config, queues=self.queues.values(), clock=self.clock, enabled=enabled, fullness=self.full.get
        )

    def push(self, step, model="large"):
        """Let runs of all tiers wait until the model stands on this step."""
        for tier in TierName:
            self.waits(f"{model} {tier}", tier, model)
        while self.pressure.step(model) < step:
            self.clock.time += 1
            self.pressure.look()
            assert self.clock.time < 10_000
        return self

    def waits(self, run_id, tier, model="large", **fields):
        run = WaitingRun(id=run_id, user_id="ann", tier=tier, model=model, prompt_tokens=1, **fields)
        self.queues[model].waiting.setdefault(run_id, (run, self.clock.time))

    def terms(self, tier=FREE, model="large", *, named=False, max_tokens=None, most=4096, reserve=2048) -> Terms:
        return self.pressure.terms(
            tier,
            model,
            named=named,
            max_tokens=max_tokens,
            usual=lambda _: UsualReply(most, reserve),
            is_ready=lambda name: name not in self.unready,
        )


def test_without_pressure_everybody_gets_what_they_asked_for():
    world = World()
    for tier in TierName:
        terms = world.terms(tier, max_tokens=9000)
        assert (terms.model, terms.max_tokens, terms.history_share, terms.degraded) == ("large", 9000, 1.0, ())


def test_what_is_in_force_is_told_by_tier_and_model():
    world = World().push(4)
    assert world.pressure.in_force(FREE, "large") == ("model", "max_tokens", "history")
    assert world.pressure.in_force(PRO, "large") == world.pressure.in_force(FREE, "small") == ()


def test_free_gets_the_small_model_and_the_paying_tiers_keep_theirs():
    world = World().push(2)
    assert (world.terms(FREE).model, world.terms(FREE).degraded) == ("small", ("model",))
    assert world.terms(FREE, named=True).model == "small"
    for tier in (PLUS, PRO):
        assert (world.terms(tier).model, world.terms(tier).degraded) == ("large", ())


def test_what_a_paying_user_named_is_kept_to_the_last():
    world = World().push(TOP)
    for tier in (PLUS, PRO):
        assert world.terms(tier).model == "small"
        assert world.terms(tier, named=True).model == "large"
        assert "model" not in world.terms(tier, named=True).degraded


def test_a_small_model_that_is_not_ready_answers_nobody():
    world = World().push(2)
    world.unready.add("small")
    assert (world.terms().model, world.terms().degraded) == ("large", ())


def test_nobody_is_moved_to_a_model_that_is_worse_off():
    world = World().push(3, "small").push(2, "large")
    assert world.pressure.step("small") > world.pressure.step("large")
    assert world.terms().model == "large"


def test_only_a_reply_that_could_have_been_longer_is_said_to_be_kept_short():
    world = World(max_tokens=100).push(3)
    assert (world.terms(max_tokens=50).max_tokens, world.terms(max_tokens=50).degraded) == (50, ("model",))
    assert world.terms(max_tokens=101).degraded == ("model", "max_tokens")
    assert world.terms(max_tokens=101).max_tokens == 100
    assert world.terms(most=80).max_tokens is None
    assert world.terms(most=None, reserve=None).max_tokens == 100


def test_who_asked_for_no_length_keeps_as_much_of_the_window_for_the_conversation():
    world = World(max_tokens=1000).push(3)
    assert world.terms(reserve=512).max_tokens == 512
    assert world.terms(max_tokens=3000, reserve=512).max_tokens == 1000


def test_less_history_and_a_shorter_queue_come_with_their_steps():
    world = World(history_share=0.25, queue_share=0.1).push(4)
    assert (world.terms().history_share, world.terms().tier.max_queued) == (0.25, 200)
    world.push(5)
    assert world.terms().tier.max_queued == 20
    assert world.terms(PRO).tier.max_queued == 1000


def test_what_would_come_too_late_is_refused_with_a_time():
    world = World().push(5)
    world.clock.time += 300
    world.pressure.refuse_late(FREE, "large")  # it does not matter yet
    world.push(6)
    with pytest.raises(TooLate) as refused:
        world.pressure.refuse_late(FREE, "large")
    assert refused.value.retry_after >= 1
    assert refused.value.status == 503
    world.pressure.refuse_late(PRO, "large")
    world.pressure.refuse_late(FREE, "small")


def test_runs_whose_deadline_has_passed_are_named_from_that_step_on():
    world = World().push(5)
    world.clock.time += 300
    assert world.pressure.overdue() == {}
    world.push(6)
    world.waits("young", FREE)
    assert world.pressure.overdue().keys() == {f"large {FREE}"}


def test_those_who_are_refused_are_told_when_the_others_are_served_and_not_all_the_same():
    world = World().push(6)
    for number in range(100):
        world.waits(f"late {number}", FREE)
    world.clock.time += 300
    for number in range(20):
        world.waits(f"young {number}", FREE)
    for second in range(30):  # one begins a second, and who is left is served in 20 s
        world.queues["large"].delays.begins(FREE, 1.0, world.clock.time - 30 + second)
    world.pressure.look()
    told = world.pressure.overdue()
    assert len(told) == 101
    assert min(told.values()) >= LEAST_RETRY_S
    assert max(told.values()) <= LEAST_RETRY_S + LEAST_SPREAD_S
    assert len(set(told.values())) >= LEAST_SPREAD_S
    assert world.pressure.overdue() == told
    world.pressure.refuse_late(FREE, "large")  # nor are those who come


def test_a_long_wait_is_told_with_a_fifth_of_it_between_the_first_and_the_last():
    world = World().push(6)
    for number in range(100):
        world.waits(f"late {number}", FREE)
    world.clock.time += 300
    for number in range(200):
        world.waits(f"young {number}", FREE)
    deadline_s = world.terms().tier.deadline_s
    for second in range(0, 30, 2):  # one begins every two seconds
        world.queues["large"].delays.begins(FREE, 1.0, world.clock.time - 30 + second)
    world.pressure.look()
    told = world.pressure.overdue().values()
    wait_s = 400 - deadline_s
    assert wait_s <= min(told) < wait_s * 1.05
    assert wait_s * 1.15 < max(told) <= wait_s * 1.2 + 1
    for _ in range(100):
        with pytest.raises(TooLate) as refused:
            world.pressure.refuse_late(FREE, "large")
        assert wait_s <= refused.value.retry_after <= wait_s * 1.2 + 1
        assert f"Try again in {refused.value.retry_after} s." in refused.value.detail


def test_while_none_begins_who_is_refused_is_told_to_look_again_after_a_while():
    world = World().push(6)
    world.clock.time += 1000
    world.pressure.look()
    told = world.pressure.overdue()[f"large {FREE}"]
    assert RATE_WINDOW_S <= told <= RATE_WINDOW_S * 1.2 + 1


def test_background_work_stops_first_and_by_itself_is_no_pressure():
    world = World()
    world.waits("a fold", FREE, kind=RunKind.FOLD)
    for _ in range(100):
        world.clock.time += 1
        world.pressure.look()
    assert world.pressure.step("large") == 0
    assert world.pressure.allows_background("large")
    assert not world.push(1).pressure.allows_background("large")
    assert world.pressure.allows_background("small")


def test_switched_off_nothing_is_ever_given_up():
    world = World(enabled=False)
    world.waits("a", FREE)
    for _ in range(1000):
        world.clock.time += 1
        world.pressure.look()
    assert world.pressure.delays["large"][FREE] == 2000.0
    assert world.pressure.step("large") == 0
    assert world.terms().degraded == ()


def test_a_model_whose_queue_is_elsewhere_stands_on_the_ground():
    assert World().pressure.step("unknown") == 0


def seconds(world, count, *takes, max_tokens=500):
    """So many seconds in each of which these tiers ask the large model for something."""
    for _ in range(count):
        for tier in takes:
            world.pressure.note(tier, world.terms(tier, max_tokens=max_tokens), 500)
        world.clock.time += 1
        world.pressure.look()
    return world.pressure.step("large")


def calm(world):
    """Nobody waits any more."""
    for queue in world.queues.values():
        queue.waiting.clear()


def test_free_keeps_the_small_model_while_its_messages_would_not_fit_into_what_there_is():
    world = World().push(2)
    calm(world)
    world.full["large"] = Fullness(10, 0.5)
    assert seconds(world, 300, FREE, FREE, PRO) == 2  # 1.5 times what there is
    world.full["large"] = Fullness(20, 0.25)
    assert seconds(world, 200, FREE, FREE, PRO) < 2  # all the replicas are back


def test_for_the_small_model_what_was_moved_to_it_is_no_longer_or_shorter_on_any_step():
    world = World(max_tokens=500).push(3)
    calm(world)
    world.push(3, "small")
    calm(world)
    world.full["small"] = Fullness(10, 0.5, 0.6)
    for _ in range(30):
        for _ in range(3):
            world.pressure.note(FREE, world.terms(max_tokens=500), 500)
        world.pressure.note(FREE, world.terms(model="small", max_tokens=1500), 500)
        world.clock.time += 1
        world.pressure.look()
    # Four ask for 1000 tokens each; without the step one of them would ask for 2000.
    assert world.pressure.loads_below["small"] == pytest.approx(0.6 * 5 / 4)


def test_what_was_taken_in_on_another_step_says_nothing_of_this_one():
    world = World().push(2)
    calm(world)
    world.full["large"] = Fullness(10, 0.5)
    seconds(world, 40, FREE, PRO)
    assert world.pressure.loads_below["large"] == pytest.approx(1.0)
    world.waits("a", FREE)
    while world.pressure.step("large") < 3:
        seconds(world, 1, FREE, PRO)
    calm(world)
    seconds(world, 40, FREE, PRO)  # on step 2 free would be moved too
    assert world.pressure.loads_below["large"] == pytest.approx(0.5)


def test_shorter_replies_are_kept_while_longer_ones_would_not_fit():
    world = World(max_tokens=500)
    world.unready.add("small")
    world.push(3)
    calm(world)
    world.full["large"] = Fullness(10, 0.5, 0.6)
    # 1000 tokens each instead of 2000.
    assert seconds(world, 300, FREE, FREE, max_tokens=1500) == 3
    world.full["large"] = Fullness(10, 0.5, 0.4)
    assert seconds(world, 120, FREE, FREE, max_tokens=1500) == 2
