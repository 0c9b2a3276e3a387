"""How long a run will wait: by what the engine delivers while it is full."""

import pytest

from chatsvc.scheduler.pace import Pace


class Time:
    def __init__(self):
        self.at = 100.0

    def monotonic(self):
        return self.at


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def pace(time):
    return Pace(time)


def deliver(pace, time, seconds, per_second):
    for _ in range(seconds):
        time.at += 1
        pace.delivered(per_second)


def test_nothing_is_foretold_before_the_speed_is_known(pace, time):
    assert pace.wait_s(1, 0, [100.0]) is None
    time.at += 1
    pace.delivered(50)
    assert pace.wait_s(1, 0, [100.0]) is None


def test_with_a_free_place_here_the_pace_of_the_others_counts(pace):
    assert pace.wait_s(1, 0, [100.0], elsewhere=10.0) == pace.wait_s(1, 0, [100.0], elsewhere=10.0, here=False) == 10.0


def test_the_next_starts_when_the_run_with_the_least_left_ends(pace, time):
    deliver(pace, time, 10, 40.0)  # four runs, ten units a second each
    left = [50.0, 100.0, 200.0, 300.0]
    assert [pace.wait_s(place, 0, left) for place in (1, 2, 4)] == [5.0, 10.0, 30.0]


def test_who_is_behind_the_runs_under_way_waits_for_those_in_between_too(pace, time):
    deliver(pace, time, 10, 20.0)
    # Two runs with up to 100 left; the run at place 6 has five before it of 60 each.
    assert pace.wait_s(6, 300.0, [80.0, 100.0]) == (100 * 2 + 4 * 60) / 20


def test_a_change_of_speed_is_followed(pace, time):
    deliver(pace, time, 60, 40.0)
    deliver(pace, time, 31, 10.0)
    assert pace.per_second() == pytest.approx(10.0, rel=0.1)


def test_idle_time_says_nothing_about_speed(pace, time):
    deliver(pace, time, 10, 40.0)
    pace.idle()
    time.at += 1000
    assert pace.per_second() is None
    pace.idle()
    deliver(pace, time, 5, 40.0)
    assert pace.per_second() == 40.0
