"""A core that owes an answer: busy or hung."""

from __future__ import annotations

import asyncio

import pytest

from chatsvc.inference.pulse import Pulse


class Core:
    """Answers when told to; its processor time is whatever the test says."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.cpu = 0.0
        self.asked = 0

    async def ask(self) -> bool:
        self.asked += 1
        await self.answers.wait()
        return False


@pytest.fixture
async def core():
    return Core()


@pytest.fixture
async def pulse(core):
    made = Pulse(core.ask, lambda: core.cpu, answer_s=0.02)
    yield made
    await made.aclose()


async def test_a_core_that_answers_is_alive(core: Core, pulse: Pulse):
    core.answers.set()
    assert await pulse.beats()
    assert pulse.silent_s == 0


async def test_a_silent_core_that_uses_no_processor_has_hung(core: Core, pulse: Pulse):
    assert not await pulse.beats()
    assert not pulse.busy
    assert pulse.silent_s >= 0.02


async def test_a_silent_core_that_uses_the_processor_is_busy(core: Core, pulse: Pulse):
    beating = asyncio.create_task(pulse.beats())
    await asyncio.sleep(0)
    core.cpu = 10.0
    assert await beating
    assert pulse.busy


async def test_a_stopped_core_is_never_busy(core: Core, pulse: Pulse):
    core.cpu = -1.0
    assert not await pulse.beats()
    assert not pulse.busy


async def test_one_question_is_open_however_often_one_asks_and_a_late_answer_revives(core: Core, pulse: Pulse):
    for _ in range(3):
        assert not await pulse.beats()
    assert core.asked == 1
    core.answers.set()
    assert await pulse.beats()
    assert await pulse.beats()
    assert core.asked == 2
    assert pulse.silent_s == 0


async def test_a_core_that_answers_with_an_error_is_not_alive(pulse: Pulse):
    async def fail() -> None:
        raise RuntimeError("dead")

    broken = Pulse(fail, lambda: 0.0)
    assert not await broken.beats()
