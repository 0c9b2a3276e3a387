"""How full a model would be without the ladder's last step."""

import pytest

from chatsvc.scheduler.spared import LEAST_RUNS, LEAST_S, Fullness, Need, Spared

NOTHING = Need()
RUN = Need(1, 1000)


class World:
    """One model, seen every second."""

    def __init__(self, start=0.0):
        self.spared = Spared(60.0)
        self.now = start

    def seconds(self, count, full, taken=(), *, in_time=True):
        """What is expected after so many seconds in each of which these were taken in."""
        for _ in range(count):
            for here, below in taken:
                self.spared.take_in(self.now, here, below)
            self.now += 1
            load = self.spared.look(self.now, full, in_time=in_time)
        return load

    def step(self):
        self.spared.restart(self.now)


def test_where_a_step_keeps_nothing_away_it_is_as_full_as_it_is():
    assert World().seconds(120, Fullness(10, 0.5, 0.25), [(RUN, RUN)] * 2) == pytest.approx(0.5)


def test_what_is_kept_away_would_take_as_much_as_what_is_not():
    # Two of three are moved to another model.
    taken = [(RUN, RUN), (NOTHING, RUN), (NOTHING, RUN)]
    assert World().seconds(120, Fullness(10, 0.6, 0.1), taken) == pytest.approx(1.8)


@pytest.mark.parametrize("start", [0.0, 5000.0])
def test_what_was_learnt_in_the_first_seconds_is_right_whatever_the_clock_began_at(start):
    world = World(start)
    world.seconds(12, Fullness(10, 0.5), [(RUN, RUN)])
    world.step()
    assert world.seconds(120, Fullness(10, 0.0), [(NOTHING, RUN)]) == pytest.approx(0.5, rel=0.02)


def test_what_is_shorter_takes_less_of_the_cache_and_as_many_places():
    taken = [(Need(1, 500), Need(1, 2000))]
    assert World().seconds(120, Fullness(10, 0.2, 0.4), taken) == pytest.approx(1.6)
    assert World().seconds(120, Fullness(10, 0.9, 0.1), taken) == pytest.approx(0.9)


def test_with_half_the_places_it_is_twice_as_full_and_that_is_known_at_once():
    world = World()
    taken = [(RUN, RUN)] * 3
    world.seconds(120, Fullness(10, 0.9), taken)
    # The half that is left is full, and has a queue: what is taken in is not what is served.
    assert world.seconds(1, Fullness(5, 1.0), taken, in_time=False) == pytest.approx(1.8)
    assert world.seconds(120, Fullness(5, 1.0), taken, in_time=False) == pytest.approx(1.8)


def test_when_all_are_moved_away_it_is_still_known_what_they_took():
    world = World()
    world.seconds(120, Fullness(10, 0.8), [(RUN, RUN)] * 2)
    world.step()
    assert world.seconds(120, Fullness(5, 0.0), [(NOTHING, RUN)] * 2) == pytest.approx(1.6)
    assert world.seconds(120, Fullness(10, 0.0), [(NOTHING, RUN)] * 2) == pytest.approx(0.8)


def test_what_was_asked_for_before_the_window_is_forgotten():
    world = World()
    world.seconds(120, Fullness(10, 0.8), [(RUN, RUN)] * 4)
    world.step()
    world.seconds(120, Fullness(10, 0.2), [(RUN, RUN), *[(NOTHING, RUN)] * 3])
    assert world.seconds(61, Fullness(10, 0.2), [(RUN, RUN)]) == pytest.approx(0.2)


def test_nothing_is_said_before_enough_was_seen():
    assert World().seconds(int(LEAST_S) - 1, Fullness(10, 0.5), [(RUN, RUN)] * 10) == 0
    assert World().seconds(LEAST_RUNS - 1, Fullness(10, 0.5), [(RUN, RUN)]) == 0
    assert World().seconds(120, Fullness(10, 0.0), [(NOTHING, RUN)] * 10) == 0
    assert World().seconds(120, Fullness(), [(RUN, RUN)] * 10) == 0
