"""Waiting times are foretold by the pace of an engine that has all its places taken, and by no other time's."""

import pytest

from chatsvc.clock import SystemClock
from chatsvc.inference.base import EngineLimits
from chatsvc.limits import ServiceCost, TierName
from chatsvc.run import WaitingRun
from chatsvc.scheduler.lines import Lines

COST = ServiceCost(prompt=1, cached=0.1, output=3)
PROMPT, REPLY = 100, 100


class Engine:
    limits = EngineLimits(model="m", window=1000, slots=2)


class Clock(SystemClock):
    time = 0.0

    def monotonic(self):
        return self.time


@pytest.fixture
def clock():
    return Clock()


class Service:
    """A line, and an engine that gives each run under way ten tokens a second and reads prompts at once."""

    def __init__(self, clock):
        self.lines = Lines({"m": Engine()}, {"m": 2}, dict.fromkeys(TierName, 1.0), clock, COST)
        self._clock = clock
        self._serving = []

    def put(self, *numbers):
        for number in numbers:
            run = WaitingRun(
                id=f"run{number}",
                user_id=f"user{number}",
                tier=TierName.FREE,
                model="m",
                prompt_tokens=PROMPT,
                max_tokens=REPLY,
            )
            self.lines.put(run)
        for model, run_id in self.lines.take():
            meter = self.lines.meter(model, run_id)
            meter.started(PROMPT, 0)
            self._serving.append(meter)

    def serve(self, seconds):
        for _ in range(seconds):
            self._clock.time += 1.0
            for meter in self._serving:
                meter.delivered(10)

    def wait_s(self, number):
        return self.lines.standing("m", f"run{number}")[1]


@pytest.fixture
def service(clock):
    return Service(clock)


def test_the_time_before_the_first_of_a_burst_says_nothing_about_the_pace(service, clock):
    clock.time = 10_000.0  # nobody came all night
    service.put(0, 1, 2, 3)
    service.serve(5)
    assert service.wait_s(2) == pytest.approx(5, rel=0.5)  # of ten seconds that those before it take, five are over


def test_that_one_place_of_two_was_taken_says_nothing_about_the_pace_of_both(service, clock):
    service.put(0)
    service.serve(9)
    clock.time += 600  # it hangs
    service.put(1, 2, 3)
    service.serve(1)
    assert service.wait_s(2) is None  # not known yet, rather than wrong
    service.serve(4)
    assert service.wait_s(3) < 60


def test_the_pace_of_a_full_engine_is_known_to_the_first_who_waits(service):
    service.put(0, 1)
    service.serve(5)
    service.put(2)
    assert service.wait_s(2) == pytest.approx(5, rel=0.5)
