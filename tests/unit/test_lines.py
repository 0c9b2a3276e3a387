"""The lines of this process: nothing is taken without a place and room, and nothing that was taken keeps its place."""

import pytest

from chatsvc.clock import SystemClock
from chatsvc.inference.base import EngineLimits
from chatsvc.limits import ServiceCost, TierName
from chatsvc.run import RunKind, WaitingRun
from chatsvc.scheduler.lines import Lines

WEIGHTS = {TierName.FREE: 1.0, TierName.PLUS: 4.0, TierName.PRO: 16.0}


class Engine:
    def __init__(self, *, window=1000, slots=2, **kv):
        self.limits = EngineLimits(model="m", window=window, slots=slots, **kv)


class Clock(SystemClock):
    """A clock that is set."""

    time = 0.0

    def monotonic(self):
        return self.time


def lines(clock=None, **engines):
    slots = {name: engine.limits.slots for name, engine in engines.items()}
    return Lines(engines, slots, WEIGHTS, clock or SystemClock(), ServiceCost())


def run(number, model="m", user="ann", **fields):
    return WaitingRun(
        id=f"run{number:03}", user_id=user, tier=TierName.FREE, model=model, **{"prompt_tokens": 100, **fields}
    )


def test_no_more_are_taken_than_there_are_places():
    line = lines(m=Engine(slots=2))
    for number in range(3):
        line.put(run(number))
    assert line.take() == [("m", "run000"), ("m", "run001")]
    assert line.take() == []
    line.meter("m", "run000").end(complete=True)
    assert line.take() == [("m", "run002")]


def test_a_model_without_places_holds_up_no_other():
    line = lines(busy=Engine(slots=1), idle=Engine(slots=1))
    for number, model in enumerate(("busy", "busy", "idle")):
        line.put(run(number, model))
    assert line.take() == [("busy", "run000"), ("idle", "run002")]
    assert line.ids() == {"run001"}


def test_an_engine_that_is_not_ready_gets_nothing():
    line = lines(m=Engine())
    line.put(run(1))
    line.set_ready("m", ready=False)
    assert line.take() == []
    assert not line.take_at_once(run(2))
    line.set_ready("m", ready=True)
    assert line.take() == [("m", "run001")]


def test_a_run_is_taken_only_if_all_it_may_write_fits():
    line = lines(m=Engine(slots=9, kv_tokens=1000))
    line.put(run(1, max_tokens=500))
    line.put(run(2, max_tokens=500))
    assert line.take() == [("m", "run001")]
    line.meter("m", "run001").end(complete=True)
    assert line.take() == [("m", "run002")]


def test_without_a_wish_a_run_may_write_what_the_window_leaves():
    line = lines(m=Engine(slots=9, window=1000, kv_tokens=1999))
    line.put(run(1))
    line.put(run(2))
    assert line.take() == [("m", "run001")]


@pytest.mark.parametrize("fields", [{"prompt_tokens": 5000}, {"prompt_tokens": 1500}, {}, {"max_tokens": 5000}])
def test_a_run_that_asks_for_more_than_the_engine_has_is_taken_all_the_same(fields):
    line = lines(m=Engine(window=2000, kv_tokens=1000))
    line.put(run(1, **fields))
    assert line.take() == [("m", "run001")]


def test_a_run_takes_whole_blocks():
    line = lines(m=Engine(slots=9, kv_tokens=160, kv_block=16))
    for number in range(3):
        line.put(run(number, prompt_tokens=60, max_tokens=5))
    assert line.take() == [("m", "run000"), ("m", "run001")]
    line = lines(m=Engine(slots=9, kv_tokens=144, kv_block=16))
    for number in range(3):
        line.put(run(number, prompt_tokens=60, max_tokens=5))
    assert line.take() == [("m", "run000")]


def test_with_room_a_run_waits_for_nothing_and_never_passes_those_who_wait():
    line = lines(m=Engine(slots=2))
    assert line.take_at_once(run(1))
    line.put(run(2))
    assert not line.take_at_once(run(3))
    assert line.ids() == {"run002"}
    assert line.take() == [("m", "run002")]
    assert not line.take_at_once(run(4))
    line.meter("m", "run001").refund()
    assert line.take_at_once(run(4))


@pytest.mark.parametrize("ending", [lambda meter: meter.end(complete=False), lambda meter: meter.refund()])
def test_each_kind_of_end_frees_the_place(ending):
    line = lines(m=Engine(slots=1))
    for number in range(5):
        assert line.take_at_once(run(number))
        meter = line.meter("m", f"run{number:03}")
        meter.started(100, 0)
        meter.delivered(7)
        ending(meter)


def test_a_user_with_one_run_goes_before_another_ones_tenth():
    line = lines(m=Engine(slots=1))
    for number in range(10):
        line.put(run(number))
    line.put(run(99, user="bob"))
    order = []
    while taken := line.take():
        order += taken
        meter = line.meter(*taken[0])
        meter.started(100, 0)
        meter.delivered(200)
        meter.end(complete=True)
    assert order.index(("m", "run099")) == 1


def test_a_discarded_run_is_not_taken_and_an_unknown_model_is_not_waited_for():
    line = lines(m=Engine())
    assert line.put(run(1))
    assert not line.put(run(2, "other"))
    line.discard("run001")
    assert (line.take(), len(line)) == ([], 0)


def test_a_run_has_waited_since_it_was_posted_not_since_it_was_heard_of():
    clock = Clock()
    clock.time = 100.0
    line = lines(clock, m=Engine(slots=1))
    line.put(run(1, age_s=30.0))
    assert [since for _, since in line.line("m").waits()] == [70.0]
    assert line.take()
    meter = line.meter("m", "run001")
    meter.claimed()
    clock.time = 110.0
    assert meter.age_s == 40.0
    assert list(line.line("m").delays.look(110.0, []).values()) == [30.0]


def test_a_line_knows_how_long_its_runs_waited_and_wait():
    clock = Clock()
    line = lines(clock, m=Engine(slots=1))
    assert line.take_at_once(run(1))
    line.put(run(2))
    line.put(run(3))
    line.put(run(4, kind=RunKind.FOLD))
    [queue] = line
    assert [(each.id, since) for each, since in queue.waits()] == [("run002", 0), ("run003", 0), ("run004", 0)]
    clock.time = 8.0
    line.discard("run003")
    under_way = ["run001"]
    while under_way:
        meter = line.meter("m", under_way.pop())
        meter.claimed()
        meter.end(complete=True)
        under_way += [run_id for _, run_id in line.take()]
    # Nor does a place that was not used, or a run that another process had already.
    assert line.take_at_once(run(5))
    line.meter("m", "run005").refund()
    assert list(queue.waits()) == []
    # One began at once and one after 8 s. The one that was discarded does not count, and neither does work that nobody
    # waits for.
    assert queue.delays.look(8.0, []) == {TierName.FREE: 4.0}


def fold(number, **fields):
    return run(number, kind=RunKind.FOLD, **fields)


def test_what_nobody_waits_for_lets_replies_go_first_whoever_came_first():
    line = lines(m=Engine(slots=1))
    line.put(run(1))
    assert line.take() == [("m", "run001")]
    line.put(fold(2))
    line.put(run(3, user="bob"))
    assert line.line("m").held_up == 1
    # And so its place says: whoever waits is told of replies only.
    assert line.standing("m", "run003")[0].position == 1
    line.meter("m", "run001").end(complete=True)
    assert line.take() == [("m", "run003")]
    assert line.line("m").held_up == 0
    line.meter("m", "run003").end(complete=True)
    assert line.take() == [("m", "run002")]
    assert not line.line("m").began_by_turn("run002")


@pytest.mark.parametrize("others", [0, 200])
def test_it_lets_so_much_pass_and_then_it_is_its_turn(others):
    line = lines(m=Engine(slots=1, window=100_000))
    line.put(fold(0, user="zoe"))
    for number in range(others):
        line.put(fold(500 + number, user=f"user{number}"))
    replies = 0
    while "run000" in line.ids():
        line.put(run(replies + 1, prompt_tokens=1000, max_tokens=100))
        line.put(run(replies + 2, prompt_tokens=1000, max_tokens=100))
        [(_, taken)] = line.take()
        if taken != "run000":
            replies += 1
            meter = line.meter("m", taken)
            meter.started(1000, 0)
            meter.delivered(100)
            meter.end(complete=True)
    assert 3 <= replies <= 6
    assert line.line("m").began_by_turn("run000")
    line.meter("m", "run000").end(complete=True)
    assert not line.line("m").began_by_turn("run000")


def test_however_many_wait_for_whom_nobody_waits_replies_go_first():
    line = lines(m=Engine(slots=1))
    line.put(run(1, user="bob"))
    line.take()
    for number in range(2, 202):
        line.put(fold(number, user=f"user{number}"))
    line.meter("m", "run001").started(100, 0)
    line.meter("m", "run001").delivered(800)
    line.meter("m", "run001").end(complete=True)
    line.put(run(900, user="bob"))  # behind all of them, by less than they have to let pass
    assert line.take() == [("m", "run900")]
    line.meter("m", "run900").end(complete=True)
    [(_, taken)] = line.take()
    assert not line.line("m").began_by_turn(taken)


def test_room_that_is_kept_for_what_nobody_waits_for_is_given_to_a_reply():
    line = lines(m=Engine(slots=9, window=1000, kv_tokens=1000))
    line.put(run(1, prompt_tokens=100, max_tokens=500))
    assert line.take() == [("m", "run001")]
    line.put(fold(2, user="zoe", prompt_tokens=500, max_tokens=200))
    assert line.take() == []  # it is next, and room is kept for it
    line.put(run(3, user="bob", prompt_tokens=300, max_tokens=300))
    line.meter("m", "run001").end(complete=True)
    assert line.take() == [("m", "run003")]
    line.meter("m", "run003").end(complete=True)
    assert line.take() == [("m", "run002")]


@pytest.mark.parametrize(("reply", "helps"), [(300, True), (500, False)])
def test_it_helps_a_reply_that_a_fold_ends_where_there_is_room_enough_then(reply, helps):
    """300 of 1,000 tokens are a fold's, 600 another reply's."""
    line = lines(m=Engine(slots=3, kv_tokens=1000))
    line.put(run(1, max_tokens=500))
    assert line.take() == [("m", "run001")]
    line.put(fold(2, max_tokens=200))
    assert line.take() == [("m", "run002")]
    line.put(run(3, user="bob", prompt_tokens=reply - 100, max_tokens=100))
    assert line.take() == []
    [the_line] = line
    assert the_line.helps(["run002"]) == helps
    assert the_line.helps(["run001", "run002"])
    assert line.ids() == {"run003"}  # nobody was taken
    line.meter("m", "run002").refund()
    assert line.take() == ([("m", "run003")] if helps else [])


def test_replies_that_wait_for_another_replica_hold_up_nothing_here():
    class Other:
        me = "a"

        def others(self, model):
            return True

        def lives(self, replica_id):
            return replica_id == "b"

        def serves(self, replica_id, model):
            return replica_id == "b"

        def speed(self, model):
            return 0.0

    line = Lines({"m": Engine(slots=1)}, {"m": 1}, WEIGHTS, SystemClock(), ServiceCost(), neighbours=Other())
    line.put(run(1), "b")
    line.put(fold(2), "a")
    assert line.line("m").held_up == 0
    assert line.take() == [("m", "run002")]
    line.put(run(1), "a")
    assert line.line("m").held_up == 1
    line.put(run(3), "gone")
    assert line.line("m").held_up == 2


def test_how_full_an_engine_is_is_told_by_its_replies_and_only_while_it_is_ready():
    line = lines(m=Engine(slots=4, kv_tokens=2000))
    line.put(run(1, max_tokens=400))
    assert line.take() == [("m", "run001")]
    line.put(fold(2, user="bob", max_tokens=400))
    assert line.take() == [("m", "run002")]
    assert line.fullness("m") == (4, 0.25, 0.25)
    line.set_ready("m", ready=False)
    assert line.fullness("m").places == line.fullness("unknown").places == 0


def test_an_engine_that_tells_no_size_of_its_cache_is_as_full_as_its_places_are_taken():
    line = lines(m=Engine(slots=4))
    line.put(run(1))
    line.take()
    assert line.fullness("m") == (4, 0.25, 0.0)
