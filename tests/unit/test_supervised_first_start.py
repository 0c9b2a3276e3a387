"""An engine whose server is not there at the first start is waited for; whatever else is wrong ends that start."""

import asyncio
import contextlib

import pytest
from structlog.testing import capture_logs

from chatsvc.errors import EngineUnavailable
from chatsvc.inference.base import EngineLimits, ServerAway
from chatsvc.inference.factory import create_engine
from chatsvc.inference.supervised import SupervisedEngine


class Far:
    """Makes engines whose starts raise what is in ``faults``, one after the other, and then go well."""

    def __init__(self, tmp_path, *faults):
        self.tmp_path = tmp_path
        self.faults = list(faults)
        self.closed = 0

    def make(self):
        guess = EngineLimits(model="m", window=8192, slots=3)
        engine = create_engine("scripted:?tokens=2&window=12000&slots=3", name="m", data_dir=self.tmp_path)
        start, close = engine.start, engine.aclose

        async def starting(progress):
            if self.faults:
                engine._limits = guess
                raise self.faults.pop(0)
            await start(progress)

        async def closing():
            self.closed += 1
            await close()

        engine.start, engine.aclose = starting, closing
        return engine


@contextlib.asynccontextmanager
async def supervised(far, waits_s=(0.01,)):
    engine = SupervisedEngine(far.make, model="m", look_every_s=0.01, waits_s=waits_s)
    async with asyncio.TaskGroup() as tasks:
        watching = None

        def watch():
            nonlocal watching
            watching = tasks.create_task(engine.run())

        yield engine, watch
        if watching is not None:
            watching.cancel()
    await engine.aclose()


async def becomes_ready(engine):
    async with asyncio.timeout(60):
        while not (await engine.health()).ready:
            await asyncio.sleep(0.005)


async def test_one_whose_server_is_there_is_ready_at_once(tmp_path):
    async with supervised(Far(tmp_path)) as (engine, _):
        assert await engine.start_or_wait(print)
        assert (await engine.health()).ready


async def test_one_whose_server_is_away_is_not_ready_says_why_and_comes_by_itself(tmp_path):
    far = Far(tmp_path, *(ServerAway("nobody there") for _ in range(3)))
    async with supervised(far) as (engine, watch):
        assert not await engine.start_or_wait(print)
        health = await engine.health()
        assert not health.ready
        assert "nobody there" in health.reason
        with pytest.raises(EngineUnavailable, match="nobody there"):
            await engine.encode("hi")
        assert (engine.limits.window, engine.load().running) == (8192, 0)
        watch()
        await becomes_ready(engine)
        assert engine.limits.window == 12_000
        assert far.closed == 3
        assert engine.restarts == 0


async def test_what_is_found_wrong_once_its_server_has_come_is_told_and_tried_again(tmp_path):
    far = Far(tmp_path, ServerAway("nobody there"), *(EngineUnavailable("another key") for _ in range(9000)))
    async with supervised(far) as (engine, watch):
        assert not await engine.start_or_wait(print)
        watch()
        async with asyncio.timeout(60):
            while "another key" not in ((await engine.health()).reason or ""):
                await asyncio.sleep(0.001)
        far.faults.clear()
        await becomes_ready(engine)


async def test_what_nobody_expected_is_told_by_its_kind_and_its_words_are_for_the_log(tmp_path):
    far = Far(tmp_path, ServerAway("nobody there"), *(OSError("key sesame of /root/model") for _ in range(9000)))
    with capture_logs() as logged:
        async with supervised(far) as (engine, watch):
            assert not await engine.start_or_wait(print)
            watch()
            async with asyncio.timeout(60):
                while "OSError" not in (told := (await engine.health()).reason or ""):
                    await asyncio.sleep(0.001)
            with pytest.raises(EngineUnavailable) as refused:
                await engine.encode("hi")
            far.faults.clear()
            await becomes_ready(engine)
    assert not [text for text in (told, refused.value.detail) if "sesame" in text or "/root" in text]
    assert [line for line in logged if "sesame" in line.get("reason", "")]


async def test_what_must_be_set_right_ends_the_first_start(tmp_path):
    far = Far(tmp_path, EngineUnavailable("another key"))
    async with supervised(far) as (engine, _):
        with pytest.raises(EngineUnavailable, match="another key"):
            await engine.start_or_wait(print)
        assert far.closed == 1
