"""When a prefix is read and when not, and who goes first: always somebody else."""

import math
from datetime import timedelta

import pytest
import structlog
from warming_world import NOW, as_run, reply, settled, until, warming

from chatsvc.errors import EngineFailed, NotFound, StoreUnavailable
from chatsvc.run import RunKind
from chatsvc.scheduler import warming as warming_module
from chatsvc.scheduler.line import Spare
from chatsvc.scheduler.warming import MOST_AT_ONCE, USED_WITHIN, WISH_S, fits


@pytest.mark.parametrize(
    ("sizes", "spare", "right"),
    [
        ([10], Spare(1, math.inf), True),
        ([10], Spare(0, math.inf), False),
        ([10, 10], Spare(1, math.inf), False),
        ([10] * MOST_AT_ONCE, Spare(64, math.inf), True),
        ([10] * (MOST_AT_ONCE + 1), Spare(64, math.inf), False),
        ([10, 20], Spare(9, 30), True),
        ([10, 20], Spare(9, 29), False),
        ([], Spare(0, 0), True),
    ],
)
def test_there_is_room_for_a_few_in_what_nobody_uses(sizes, spare, right):
    assert fits(sizes, spare) == right


async def test_only_a_complete_reply_for_which_turns_were_recalled_is_followed_by_reading():
    async with warming() as world:
        world.warming.after_reply(reply(recalled=()))
        world.warming.after_reply(reply(complete=False))
        await settled()
        assert not world.warming.busy
        world.engine.may_read.set()
        world.warming.after_reply(reply())
        await until(lambda: not world.warming.busy)
        assert world.ended == {("m", "read"): 1}
        assert world.shelf.billed == world.engine.read


async def test_a_reply_that_the_next_prompt_has_no_room_for_is_followed_by_reading_what_that_begins_with():
    async with warming() as world:
        world.engine.may_read.set()
        world.warming.after_reply(reply(recalled=(), output_tokens=9, room=9))
        await settled()
        assert not world.warming.busy
        world.warming.after_reply(reply(recalled=(), output_tokens=10, room=9, complete=False))
        await settled()
        assert not world.warming.busy
        # Of old turns there was none in the prompt, and so none that the next one could leave out.
        world.warming.after_reply(reply(recalled=(), output_tokens=10, room=-999, verbatim=0))
        await settled()
        assert not world.warming.busy
        world.warming.after_reply(reply(recalled=(), output_tokens=10, room=9))
        await until(lambda: not world.warming.busy)
        assert world.ended == {("m", "read"): 1}


async def test_it_waits_for_a_place_and_begins_when_one_is_free():
    async with warming(slots=1) as world:
        meter = world.begin()
        world.warming.after_reply(reply())
        await settled()
        assert (world.engine.read, world.warming.busy) == ([], True)
        meter.end(complete=True)
        world.warming.look()
        await until(lambda: world.engine.read)


async def test_whoever_needs_the_place_has_it_and_pays_for_nothing():
    async with warming(slots=1) as world:
        world.warming.after_reply(reply())
        await until(lambda: world.engine.load().running)
        world.begin()
        await until(lambda: not world.engine.load().running)
        assert world.ended == {("m", "given_up"): 1}
        assert (world.warming.busy, world.shelf.billed) == (False, [])


async def test_one_that_is_given_up_before_its_first_step_leaves_nothing_behind():
    async with warming(slots=1) as world:
        world.warming.after_reply(reply())
        await until(lambda: any(reading.task for reading in world.warming._readings.values()))
        world.begin()
        await until(lambda: not world.warming.busy)
        assert world.ended.get(("m", "read")) is None


async def test_with_places_free_it_goes_on_beside_others_and_the_newest_goes_first_when_there_are_none():
    async with warming(slots=3) as world:
        for name in ("conv_1", "conv_2, the name of which is longer"):
            world.warming.after_reply(reply(name=name))
        await until(lambda: world.engine.load().running == 2)
        world.begin()
        await settled()
        assert world.engine.load().running == 2
        world.begin()
        await until(lambda: world.engine.load().running == 1)
        world.engine.may_read.set()
        await until(lambda: not world.warming.busy)
        assert world.ended == {("m", "read"): 1, ("m", "given_up"): 1}
        older, newer = world.engine.read
        assert older != newer
        assert world.shelf.billed == [older]


async def test_no_more_than_a_few_are_read_at_once_and_all_in_the_end():
    async with warming(slots=64) as world:
        for number in range(7):
            world.warming.after_reply(reply(name=f"conv_{number}"))
        await settled()
        assert world.engine.load().running == MOST_AT_ONCE
        world.engine.may_read.set()
        await until(lambda: not world.warming.busy)
        assert world.ended == {("m", "read"): 7}


async def test_while_anybody_waits_nothing_is_read():
    async with warming(slots=2) as world:
        world.warming.after_reply(reply())
        await until(lambda: world.engine.load().running)
        # It does not fit, say: there is a place, and somebody who waits.
        world.lines.put(world.run())
        world.warming.make_room()
        await until(lambda: not world.engine.load().running)
        world.warming.after_reply(reply())
        await settled()
        assert len(world.engine.read) == 1


async def test_the_conversations_own_next_turn_reads_it_itself():
    async with warming(slots=9) as world:
        world.warming.after_reply(reply())
        await until(lambda: world.engine.load().running)
        world.begin("conv_1")
        await until(lambda: not world.warming.busy)
        assert world.ended == {("m", "given_up"): 1}


async def test_of_a_conversation_one_is_read_at_a_time_and_the_newest_counts():
    async with warming(slots=9) as world:
        world.warming.after_reply(reply())
        await until(lambda: world.engine.load().running)
        for _ in range(5):
            world.warming.after_fold(as_run())
        await settled()
        assert world.engine.load().running == 1
        world.engine.may_read.set()
        await until(lambda: not world.warming.busy)
        assert world.ended == {("m", "given_up"): 1, ("m", "read"): 1}


@pytest.mark.parametrize("after", ["a reply", "a fold", "a change"])
async def test_room_for_a_reply_as_long_as_the_last_one_asked_for_is_kept_whatever_it_is_read_after(after):
    """What the next prompt leaves out hangs on it: else what is read is not what that prompt begins with."""
    async with warming() as world:
        world.engine.may_read.set()
        world.served()
        for world.shelf.asked in (None, 8165):
            if after == "a reply":
                world.warming.after_reply(reply())
            elif after == "a fold":
                world.warming.after_fold(as_run())
            else:
                world.warming.changed("ada", "conv_1")
            await until(lambda: not world.warming.busy)
        usual, long = world.engine.read
        assert long < usual


async def test_what_was_changed_is_read_where_the_conversation_was_served_lately():
    async with warming() as world:
        world.engine.may_read.set()
        world.warming.changed("ada", "conv_1")
        await settled()
        assert not world.warming.busy  # not here
        world.served()
        world.shelf.updated_at = NOW - USED_WITHIN - timedelta(seconds=1)
        world.warming.changed("ada", "conv_1")
        await until(lambda: not world.warming.busy)
        assert world.ended == {}
        world.shelf.updated_at = NOW - USED_WITHIN + timedelta(seconds=1)
        world.home_at = "another"
        world.warming.changed("ada", "conv_1")
        await until(lambda: not world.warming.busy)
        assert world.ended == {}
        world.home_at = "me"
        world.warming.changed("ada", "conv_1")
        await until(lambda: not world.warming.busy)
        assert world.ended == {("m", "read"): 1}


async def test_under_pressure_nothing_is_read_nor_once_it_is_too_late():
    async with warming(slots=1) as world:
        world.may_work = False
        world.warming.after_reply(reply())
        await until(lambda: not world.warming.busy)
        world.may_work = True
        meter = world.begin()
        world.warming.after_reply(reply())
        await settled()
        world.clock.time += WISH_S + 1
        meter.end(complete=True)
        world.warming.look()
        await until(lambda: not world.warming.busy)
        assert world.engine.read == []


@pytest.mark.parametrize("options", [{"warm": False}, {"cache_tokens": 0}], ids=["turned off", "nothing is kept"])
async def test_nothing_is_read_in_vain(options):
    async with warming(**options) as world:
        world.warming.after_reply(reply())
        await until(lambda: not world.warming.busy)
        assert world.engine.read == []


@pytest.mark.parametrize("error", [EngineFailed("It broke."), RuntimeError("what no backend should throw")])
async def test_an_engine_that_breaks_ends_nothing_else(error):
    async with warming() as world:
        world.engine.may_read.set()
        world.engine.error = error
        world.warming.after_reply(reply())
        await until(lambda: not world.warming.busy)
        world.engine.error = None
        world.warming.after_reply(reply())
        await until(lambda: not world.warming.busy)
        assert world.ended == {("m", "failed"): 1, ("m", "read"): 1}


@pytest.mark.parametrize("error", [NotFound("deleted"), StoreUnavailable("away"), KeyError("a template")])
async def test_a_store_or_tokenizer_that_breaks_ends_nothing_else(error):
    async with warming() as world:
        world.engine.may_read.set()
        world.shelf.error = error
        world.warming.after_reply(reply())
        await until(lambda: not world.warming.busy)
        world.shelf.error = None
        world.warming.after_reply(reply())
        await until(lambda: not world.warming.busy)
        assert world.ended == {("m", "read"): 1}


@pytest.mark.parametrize("error", [StoreUnavailable("away"), ValueError("what no store should throw")])
async def test_what_cannot_be_counted_ends_nothing_else(error):
    async with warming() as world:
        world.engine.may_read.set()
        world.shelf.bill_error = error
        world.warming.after_reply(reply())
        await until(lambda: world.ended and not world.warming.busy)
        await settled()
        world.shelf.bill_error = None
        world.warming.after_reply(reply())
        await until(lambda: world.shelf.billed)
        assert world.ended == {("m", "read"): 2}


async def test_a_shutdown_ends_it_and_begins_no_more():
    async with warming() as world:
        world.warming.after_reply(reply())
        await until(lambda: world.engine.load().running)
        world.warming.stop()
        world.warming.after_reply(reply())
        await until(lambda: not world.warming.busy)
        assert world.ended == {("m", "given_up"): 1}


@pytest.mark.parametrize("how", ["its next turn begins", "a shutdown"])
async def test_what_is_given_up_while_the_prefix_is_made_is_not_read(how):
    async with warming(slots=9) as world:
        world.shelf.may_view.clear()
        world.warming.after_reply(reply())
        await settled()
        if how == "a shutdown":
            world.warming.stop()
        else:
            world.begin("conv_1")
        world.shelf.may_view.set()
        await until(lambda: not world.warming.busy)
        assert world.engine.read == []


async def test_a_place_that_is_taken_while_the_prefix_is_made_is_waited_for():
    async with warming(slots=1) as world:
        world.served()
        world.shelf.may_view.clear()
        world.warming.changed("ada", "conv_1")  # with which model is read with the rest
        await settled()
        meter = world.begin()
        world.shelf.may_view.set()
        await settled()
        assert (world.engine.read, world.warming.busy) == ([], True)
        meter.end(complete=True)
        world.warming.look()
        await until(lambda: world.engine.read)


async def test_what_waits_to_be_read_is_forgotten_when_the_conversations_next_turn_begins():
    async with warming(slots=1) as world:
        meter = world.begin()
        world.warming.after_reply(reply())
        await settled()
        meter.end(complete=True)
        meter = world.begin("conv_1")
        assert not world.warming.busy
        meter.end(complete=True)
        world.warming.look()
        await settled()
        assert world.engine.read == []


@pytest.mark.parametrize("read", [False, True], ids=["waiting", "being read"])
async def test_what_a_fold_puts_off_is_read_after_it_unless_it_has_come_to_something(read):
    async with warming(slots=1) as world:
        fold = as_run(kind=RunKind.FOLD)
        for number, after in enumerate((world.warming.fold_ended, world.warming.after_fold), start=1):
            world.engine.may_read.clear()
            meter = None if read else world.begin()
            world.warming.after_reply(reply())
            await (until(lambda: world.engine.load().running) if read else settled())
            if meter is not None:
                meter.end(complete=True)
            world.warming.run_begins(fold)
            await until(lambda: not world.engine.load().running)
            assert not world.warming.busy
            world.engine.may_read.set()
            after(fold)
            await until(lambda: not world.warming.busy)
            world.warming.fold_ended(fold)
            await until(lambda: not world.warming.busy)
            assert world.ended["m", "read"] == number


async def test_what_a_fold_has_put_off_is_forgotten_when_the_next_turn_begins():
    async with warming(slots=9) as world:
        fold = as_run(kind=RunKind.FOLD)
        world.warming.after_reply(reply())
        world.warming.run_begins(fold)
        world.begin("conv_1")
        world.warming.fold_ended(fold)
        await settled()
        assert (world.engine.read, world.warming.busy) == ([], False)


async def test_nothing_is_read_behind_a_reply_after_which_the_conversation_has_gone_on():
    async with warming() as world:
        world.shelf.head_id = "newer"
        world.warming.after_reply(reply())
        await until(lambda: not world.warming.busy)
        assert world.engine.read == []


async def test_of_more_than_can_be_remembered_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr(warming_module, "_MOST_WISHES", 3)
    async with warming(slots=1) as world:
        meter = world.begin()
        for number in range(5):
            world.warming.after_reply(reply(name=f"conv{' longer' * number}"))
        await settled()
        meter.end(complete=True)
        world.engine.may_read.set()
        world.warming.look()
        await until(lambda: not world.warming.busy)
        assert world.ended == {("m", "read"): 3}
        forgotten = min(world.engine.read)
        world.warming.after_reply(reply(name="conv longer"))
        await until(lambda: not world.warming.busy)
        assert world.engine.read[-1] < forgotten


@pytest.mark.parametrize(("asked", "level"), [(8180, "info"), (None, "warning")])
async def test_that_there_is_no_room_beside_the_reply_that_was_asked_for_is_no_fault_and_not_warned_of(asked, level):
    async with warming() as world:
        world.shelf.asked = asked
        world.shelf.error = None if asked else StoreUnavailable("away")
        with structlog.testing.capture_logs() as logged:
            world.warming.after_reply(reply())
            await until(lambda: any(line["event"] == "prefix not warmed" for line in logged))
        assert [line["log_level"] for line in logged if line["event"] == "prefix not warmed"][:1] == [level]
