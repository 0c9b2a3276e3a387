"""An engine that dies is replaced, as often as it takes, and says where it stands meanwhile."""

import asyncio
from contextlib import aclosing
from itertools import pairwise

import pytest

from chatsvc.conversation import Role
from chatsvc.errors import EngineFailed, EngineUnavailable
from chatsvc.inference.base import EngineHealth
from chatsvc.inference.factory import create_engine
from chatsvc.inference.supervised import SupervisedEngine
from chatsvc.prompt import ChatMessage, Sampling


class Workshop:
    """Makes scripted engines that can be broken, and whose next starts can be made to fail."""

    def __init__(self, tmp_path):
        self.tmp_path = tmp_path
        self.made = []
        self.failing_starts = 0
        self.made_one = asyncio.Event()

    def make(self):
        engine = create_engine("scripted:?tokens_per_s=50&tokens=500", name="m", data_dir=self.tmp_path)
        engine.broken = None
        healthy, start = engine.health, engine.start

        async def health():
            return EngineHealth(ready=False, reason=engine.broken) if engine.broken else await healthy()

        async def starting(progress):
            if self.failing_starts and len(self.made) > 1:
                self.failing_starts -= 1
                raise EngineUnavailable("no memory")
            await start(progress)
            self.made_one.set()

        engine.health, engine.start = health, starting
        self.made.append(engine)
        return engine


@pytest.fixture
async def workshop(tmp_path):
    return Workshop(tmp_path)


@pytest.fixture
async def engine(workshop):
    engine = SupervisedEngine(workshop.make, model="m", look_every_s=0.01, waits_s=(0.01,))
    await engine.start(lambda line: None)
    watching = asyncio.create_task(engine.run())
    yield engine
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await engine.aclose()


async def words(engine, run_id, most=3):
    prompt = await engine.render([ChatMessage(Role.USER, "hello")])
    heard = []
    async with aclosing(engine.generate(prompt, Sampling(max_tokens=400), run_id)) as chunks:
        async for chunk in chunks:
            heard.append(chunk.text)
            if len(heard) >= most:
                break
    return heard


async def replaced(workshop, engine):
    async with asyncio.timeout(60):
        while not (engine.restarts and (await engine.health()).ready):
            await asyncio.sleep(0.005)


async def test_a_dead_engine_is_replaced_and_answers_again(workshop, engine):
    assert await words(engine, "before")
    running = asyncio.create_task(words(engine, "during", most=1000))
    while not engine.load().running:
        await asyncio.sleep(0.005)
    workshop.made[0].broken = "the core has died"
    await replaced(workshop, engine)
    with pytest.raises((EngineFailed, EngineUnavailable)):
        await running
    assert len(workshop.made) == 2
    assert await words(engine, "after")
    assert engine.load().running == 0


async def test_it_tries_again_until_it_starts_and_says_so_meanwhile(workshop, engine):
    workshop.failing_starts = most = 1_000_000
    workshop.made[0].broken = "out of luck"
    async with asyncio.timeout(60):
        while "no memory" not in ((await engine.health()).reason or ""):
            await asyncio.sleep(0.001)
    with pytest.raises(EngineUnavailable, match="no memory"):
        await words(engine, "meanwhile")
    failed, workshop.failing_starts = most - workshop.failing_starts, 0
    await replaced(workshop, engine)
    assert len(workshop.made) == failed + 2
    assert engine.restarts == 1


async def test_it_waits_longer_after_each_start_that_fails(workshop):
    engine = SupervisedEngine(workshop.make, model="m", look_every_s=0.01, waits_s=(0.05, 0.1, 0.2))
    await engine.start(lambda line: None)
    watching = asyncio.create_task(engine.run())
    loop, tries, make = asyncio.get_running_loop(), [], workshop.make

    def make_noted():
        tries.append(loop.time())
        return make()

    engine._make = make_noted
    workshop.failing_starts = 4
    workshop.made[0].broken = "out of luck"
    await replaced(workshop, engine)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await engine.aclose()
    waits = [later - earlier for earlier, later in pairwise(tries)]
    assert [wait >= least for wait, least in zip(waits, (0.05, 0.1, 0.2, 0.2), strict=True)] == [True] * 4


async def test_one_bad_look_is_not_enough(workshop, engine):
    looks, looked = 0, asyncio.Event()
    healthy = workshop.made[0].health

    async def bad_once():
        nonlocal looks
        looks += 1
        if looks == 1:
            return EngineHealth(ready=False, reason="a long step")
        if looks == 10:
            looked.set()
        return await healthy()

    workshop.made[0].health = bad_once
    async with asyncio.timeout(60):
        await looked.wait()
    assert len(workshop.made) == 1
    assert await words(engine, "still there")


async def test_limits_stay_known_while_it_is_away(workshop, engine):
    window = engine.limits.window
    await engine.aclose()
    assert engine.limits.window == window
