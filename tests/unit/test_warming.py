"""When a prefix is read and when not, and who goes first: always somebody else."""

import asyncio
import math
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from chatsvc.clock import SystemClock
from chatsvc.config import ContextConfig
from chatsvc.conversation import BranchView, Conversation, Message, Role
from chatsvc.errors import EngineFailed, NotFound, StoreUnavailable
from chatsvc.inference.scripted import ScriptedEngine, ScriptedOptions
from chatsvc.limits import ServiceCost, TierName
from chatsvc.run import RunStatus, WaitingRun
from chatsvc.scheduler.line import Spare
from chatsvc.scheduler.lines import Lines
from chatsvc.scheduler.prompts import Prompts
from chatsvc.scheduler.shared_state import Home
from chatsvc.scheduler.warming import MOST_AT_ONCE, USED_WITHIN, WISH_S, Warming, fits

NOW = datetime(2026, 1, 1, tzinfo=UTC)
WEIGHTS = {TierName.FREE: 1.0, TierName.PLUS: 4.0, TierName.PRO: 16.0}


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


class Clock(SystemClock):
    """A clock that is set."""

    time = 0.0

    def monotonic(self):
        return self.time

    def now(self):
        return NOW


class Held(ScriptedEngine):
    """Reads prefixes when it is told to."""

    def __init__(self, **options):
        super().__init__(ScriptedOptions(window=8192, **{"slots": 2, **options}), model="m")
        self.may_read = asyncio.Event()
        self.read: list[int] = []
        self.error: Exception | None = None

    async def generate(self, prompt, sampling, run_id, priority=0):
        self.read.append(prompt.tokens)
        if self.error:
            raise self.error
        async with self._slots.hold(priority):
            await self.may_read.wait()
        async for chunk in super().generate(prompt, sampling, run_id, priority):
            yield chunk


class Shelf:
    """A store of conversations of two messages each."""

    def __init__(self):
        self.error: Exception | None = None
        self.bill_error: Exception | None = None
        self.billed: list[int] = []
        self.updated_at = NOW
        self.conversations = self.allowances = self

    def _conversation(self, name):
        if self.error:
            raise self.error
        return Conversation(
            id=name, user_id="ada", title=None, system_prompt=f"Be brief in {name}.", model=None, head_message_id="r",
            pinned=False, temporary=False, created_at=NOW, updated_at=self.updated_at,
        )  # fmt: skip

    async def get(self, user_id, name):
        return self._conversation(name)

    async def view(self, user_id, name, leaf, *, leaf_may_be_folded):
        asked = Message(
            id="q", conversation_id=name, parent_id=None, role=Role.USER, content="Why?", status=RunStatus.COMPLETE,
            created_at=NOW,
        )  # fmt: skip
        answered = msgspec.structs.replace(
            asked, id="r", parent_id="q", role=Role.ASSISTANT, content="So.", response_id="resp_1", model="m"
        )
        return self._conversation(name), BranchView(summary=None, pinned=(), verbatim=(asked, answered))

    async def bill(self, user_id, usage, kind):
        if self.bill_error:
            raise self.bill_error
        self.billed.append(usage.prompt_tokens)


class World:
    """Warming, and what stands around it."""

    def __init__(self, *, warm=True, **options):
        self.engine = Held(**options)
        self.shelf: Any = Shelf()
        self.clock = Clock()
        self.lines = Lines(
            {"m": self.engine}, {"m": self.engine.limits.slots}, WEIGHTS, self.clock, ServiceCost()
        )  # fmt: skip
        self.may_work = True
        self.home_at: str | None = None
        self.warming = Warming(
            store=self.shelf,
            engines={"m": self.engine},
            prompts=Prompts({"m": self.engine}, ContextConfig(warm=warm)),
            lines=self.lines,
            clock=self.clock,
            may_work=lambda _: self.may_work,
            home=self._home,
            me="me",
        )
        self._runs = 0

    async def _home(self, model, name):
        return Home(self.home_at, 10) if self.home_at else None

    def run(self):
        self._runs += 1
        return WaitingRun(id=f"run{self._runs}", user_id="bob", tier=TierName.FREE, model="m", prompt_tokens=10)

    def begin(self, name="conv_other"):
        """A reply of a conversation takes a place."""
        run = self.run()
        assert self.lines.take_at_once(run)
        self.warming.run_begins(as_run(name))
        return self.lines.meter("m", run.id)

    def served(self, name="conv_1"):
        line = self.lines.line("m")
        assert line is not None
        line.warmth.served(name, 100)

    @property
    def ended(self):
        return dict(self.warming.ended)


@asynccontextmanager
async def warming(**options):
    world = World(**options)
    await world.engine.start(lambda _: None)
    running = asyncio.create_task(world.warming.run())
    try:
        yield world
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        # Nothing is left in the engine, however it came to an end.
        assert world.engine.load().running == 0


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)


async def settled():
    """Let everything happen that does not wait for the test."""
    for _ in range(50):
        await asyncio.sleep(0)


def as_run(name="conv_1") -> Any:
    return SimpleNamespace(user_id="ada", conversation_id=name, message_id="r", model="m", max_tokens=None)


def reply(*, recalled=("x",), complete=True, name="conv_1") -> Any:
    prepared = SimpleNamespace(report=SimpleNamespace(recalled=recalled))
    return SimpleNamespace(run=as_run(name), prepared=prepared, complete=complete)


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
        for name in ("conv_1", "conv_2"):
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
