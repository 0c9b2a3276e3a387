"""Warming, with a store, an engine and a clock that do what a test says."""

import asyncio
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import msgspec

from chatsvc.clock import SystemClock
from chatsvc.config import ContextConfig
from chatsvc.conversation import BranchView, Conversation, Message, Role
from chatsvc.inference.scripted import ScriptedEngine, ScriptedOptions
from chatsvc.limits import ServiceCost, TierName
from chatsvc.run import RunKind, RunStatus, WaitingRun
from chatsvc.scheduler.fleet import Fleet
from chatsvc.scheduler.lines import Lines
from chatsvc.scheduler.prompts import Prompts
from chatsvc.scheduler.shared_state import Home
from chatsvc.scheduler.warming import Warming

NOW = datetime(2026, 1, 1, tzinfo=UTC)
WEIGHTS = {TierName.FREE: 1.0, TierName.PLUS: 4.0, TierName.PRO: 16.0}


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
        self.head_id = "r"
        self.may_view = asyncio.Event()
        self.may_view.set()
        self.asked: int | None = None
        """The longest reply that the last request named."""
        self.conversations = self.allowances = self
        self.runs = SimpleNamespace(get=self.run)

    async def run(self, user_id, response_id):
        assert response_id == "resp_1"
        return SimpleNamespace(max_tokens=self.asked)

    def _conversation(self, name):
        if self.error:
            raise self.error
        return Conversation(
            id=name, user_id="ada", title=None, system_prompt=f"Be brief in {name}.", model=None,
            head_message_id=self.head_id, pinned=False, temporary=False, created_at=NOW, updated_at=self.updated_at,
        )  # fmt: skip

    async def get(self, user_id, name):
        return self._conversation(name)

    async def view(self, user_id, name, leaf, *, leaf_may_be_folded):
        await self.may_view.wait()
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
        self.fleet = Fleet("me", self.clock)
        self.lines = Lines(
            {"m": self.engine}, {"m": self.engine.limits.slots}, WEIGHTS, self.clock, ServiceCost(),
            neighbours=self.fleet,
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


def as_run(name="conv_1", kind=RunKind.REPLY) -> Any:
    return SimpleNamespace(user_id="ada", conversation_id=name, message_id="r", model="m", kind=kind)


def reply(*, recalled=("x",), complete=True, name="conv_1", output_tokens=9, room=9, verbatim=99) -> Any:
    report = SimpleNamespace(recalled=recalled, parts=SimpleNamespace(verbatim=verbatim))
    prepared = SimpleNamespace(report=report, room=room)
    run = as_run(name)
    return SimpleNamespace(run=run, prepared=prepared, complete=complete, output_tokens=output_tokens)
