"""Replicas without their servers: Postgres and engines are played, a claim is a compare-and-set on a set."""

import asyncio
import contextlib
from collections import Counter

from chatsvc.clock import SystemClock
from chatsvc.inference.base import EngineLimits
from chatsvc.limits import ServiceCost, TierName
from chatsvc.run import WaitingRun
from chatsvc.scheduler.fleet import Fleet
from chatsvc.scheduler.lines import Lines
from chatsvc.scheduler.replicas import Replicas
from chatsvc.scheduler.shared_state import Board, MemoryState

WEIGHTS = {TierName.FREE: 1.0, TierName.PLUS: 4.0, TierName.PRO: 16.0}
MODEL = "m"


class Engine:
    def __init__(self, slots):
        self.limits = EngineLimits(model=MODEL, window=10_000, slots=slots)


class Postgres:
    """Which runs wait and who has which: claims, and the end of each."""

    def __init__(self):
        self.queued, self.begun, self.ended = {}, Counter(), Counter()

    def claim(self, run_id):
        return self.queued.pop(run_id, None) is not None


class Process:
    """One replica with its dispatcher: takes, claims, and writes replies of 20 tokens."""

    def __init__(self, name, board, postgres, *, slots=2, reply_s=0.01):
        self.name, self.postgres, self.reply_s = name, postgres, reply_s
        self.fleet = Fleet(name, SystemClock())
        engines = {MODEL: Engine(slots)} if slots else {}
        self.lines = Lines(
            engines, {MODEL: slots}, WEIGHTS, SystemClock(), ServiceCost(), models=[MODEL], neighbours=self.fleet
        )
        self.replicas = Replicas(state=MemoryState(board), fleet=self.fleet, lines=self.lines, clock=SystemClock())
        self.replicas.wakes(self.dispatch)
        self.served, self.replies = [], set()
        self.running = asyncio.create_task(self.replicas.run())
        self.writes = asyncio.Event()
        self.writes.set()
        self.holds = False
        self.dead = False

    def dispatch(self):
        if self.holds or self.dead:
            return
        for model, run_id in self.lines.take():
            meter = self.lines.meter(model, run_id)
            if self.postgres.claim(run_id):
                meter.claimed()
                self.postgres.begun[run_id] += 1
                self.served.append(run_id)
                self.replicas.tell_soon()
                task = asyncio.create_task(self.write(run_id, meter))
                self.replies.add(task)
                task.add_done_callback(self.replies.discard)
            else:
                meter.refund()

    async def write(self, run_id, meter):
        meter.started(100, 0)
        await self.writes.wait()
        for _ in range(4):
            await asyncio.sleep(self.reply_s / 4)
            meter.delivered(5)
        self.postgres.ended[run_id] += 1
        meter.end(complete=True)
        self.replicas.tell_soon()
        self.dispatch()

    def post(self, run, home=None):
        with self.replicas.choosing(run, home) as choice:
            self.postgres.queued[run.id] = run
            self.replicas.post(run, choice, home)
        return choice

    async def knows(self, count):
        async with asyncio.timeout(60):
            while self.replicas.known != count:
                await asyncio.sleep(0.005)

    async def close(self):
        self.dead = True
        tasks = [self.running, *self.replies]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def processes(*names, board=None, **options):
    board, postgres = board or Board(), Postgres()
    made = [Process(name, board, postgres, **options) for name in names]
    try:
        for one in made:
            await one.knows(len(made) - 1)
        yield made
    finally:
        for one in made:
            await one.close()


def run(number, user="ann", conversation=None, **fields):
    return WaitingRun(
        id=f"run{number:05}",
        user_id=user,
        tier=TierName.FREE,
        model=MODEL,
        prompt_tokens=100,
        conversation_id=conversation or f"conv{number}",
        **fields,
    )


async def until(condition, patience_s=60):
    async with asyncio.timeout(patience_s):
        while not condition():
            await asyncio.sleep(0.005)
