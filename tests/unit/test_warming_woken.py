"""What waits to be read is begun as soon as nobody waits for the engine any more, whatever became of who did."""

import asyncio
from contextlib import asynccontextmanager
from typing import Any

import pytest
from warming_world import reply as a_reply
from warming_world import settled, until, warming

from chatsvc.limits import TierName
from chatsvc.run import WaitingRun
from chatsvc.scheduler import dispatch as dispatch_module
from chatsvc.scheduler.active import Interrupt
from chatsvc.scheduler.dispatch import Dispatcher
from chatsvc.scheduler.news import End, Held, News, Places, Posted, encode
from chatsvc.scheduler.replicas import Replicas
from chatsvc.scheduler.shared_state import Board, MemoryState

RUN = WaitingRun(id="run", user_id="bob", tier=TierName.FREE, model="m", prompt_tokens=10)


class Queued:
    """Rows of runs that others claim. ``get``: of those that have ended."""

    def __init__(self, get):
        self.get = get
        self.rows: list[WaitingRun] = []

    async def queued(self, *, limit):
        return self.rows

    async def claim(self, run_ids, worker_id):
        return []


class Replica:
    """Warming and the dispatcher beside it, and another replica that says what a test wants."""

    def __init__(self, world, board):
        self.world = world
        self.runs = world.shelf.runs = Queued(world.shelf.run)
        self._there = MemoryState(board)
        self.replicas = Replicas(state=MemoryState(board), fleet=world.fleet, lines=world.lines, clock=world.clock)
        nobody: Any = None
        self.dispatcher = Dispatcher(
            store=world.shelf,
            lines=world.lines,
            replicas=self.replicas,
            engines={"m": world.engine},
            runner=nobody,
            folds=nobody,
            fold_runner=nobody,
            warming=world.warming,
            worker_id="me",
        )

    async def hear(self, **news):
        await self._there.publish(encode(News(replica="there", models={"m": Places(slots=2)}, **news)))

    async def let_a_run_wait_for_the_other(self):
        """And a wish of ours behind it."""
        line = self.world.lines.line("m")
        line._read_s, line._read_tokens = 1e6, 1.0  # reading anew takes long: it is left to its home
        self.runs.rows = [RUN]
        await self.hear(posted=[Posted(run=RUN, home="there", cached_tokens=10)])
        await until(lambda: self.dispatcher.waiting_count)
        self.world.warming.after_reply(a_reply())
        await settled()
        assert (self.world.engine.read, self.world.warming.busy) == ([], True)


@pytest.fixture
async def replica(monkeypatch):
    monkeypatch.setattr(dispatch_module, "SWEEP_S", 3600.0)  # which would make up for what is missed
    board = Board()
    async with warming() as world, running(Replica(world, board)) as here:
        await until(lambda: board.listeners)
        yield here


@asynccontextmanager
async def running(here):
    tasks = [asyncio.create_task(each.run()) for each in (here.dispatcher, here.replicas)]
    try:
        yield here
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_when_another_replica_begins_the_last_run_that_waited(replica):
    await replica.let_a_run_wait_for_the_other()
    await replica.hear(held=[Held(run=RUN)])
    await until(lambda: replica.world.engine.read)


async def test_when_it_began_and_ended_there_before_it_was_told_of(replica):
    await replica.let_a_run_wait_for_the_other()
    await replica.hear(held=[Held(run=RUN, end=End.COMPLETE)])
    await until(lambda: replica.world.engine.read)


async def test_when_the_last_run_that_waited_is_stopped(replica):
    await replica.let_a_run_wait_for_the_other()
    replica.dispatcher.interrupt(RUN.id, Interrupt.STOP)
    await until(lambda: replica.world.engine.read)


async def test_when_the_queue_shows_that_the_last_run_waits_no_more(replica):
    await replica.let_a_run_wait_for_the_other()
    replica.runs.rows = []
    replica.dispatcher.sweep_soon()
    await until(lambda: replica.world.engine.read)


async def test_when_the_engine_is_ready_again(replica):
    replica.dispatcher.set_ready("m", False)
    await settled()
    replica.world.warming.after_reply(a_reply())
    await settled()
    assert (replica.world.engine.read, replica.world.warming.busy) == ([], True)
    replica.dispatcher.set_ready("m", True)
    await until(lambda: replica.world.engine.read)


async def test_when_a_place_that_was_held_for_a_run_is_not_used(replica):
    replica.world.lines.line("m").slots = 1
    with replica.dispatcher.place(RUN) as place:
        assert place.owner == "me"
        replica.world.warming.after_reply(a_reply())
        await settled()
        assert (replica.world.engine.read, replica.world.warming.busy) == ([], True)
    await until(lambda: replica.world.engine.read)
