"""A slot is held by one or free, whatever is cancelled when."""

from __future__ import annotations

import asyncio

import pytest

from chatsvc.errors import EngineUnavailable
from chatsvc.inference.slots import Slots


class Holder:
    """A task that waits for a slot and holds it until told."""

    def __init__(self, slots: Slots, priority: int = 0) -> None:
        self.leave = asyncio.Event()
        self.held = asyncio.Event()
        self.task = asyncio.create_task(self._hold(slots, priority))

    async def _hold(self, slots: Slots, priority: int) -> None:
        async with slots.hold(priority):
            self.held.set()
            await self.leave.wait()


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_slot_handed_to_someone_cancelled_in_the_same_moment_goes_to_the_next():
    slots = Slots(1)
    first = Holder(slots)
    await first.held.wait()
    second, third = Holder(slots), Holder(slots)
    await turns()
    assert slots.waiting == 2
    first.leave.set()
    # One turn: the first gives its slot to the second, which has not run yet.
    await asyncio.sleep(0)
    second.task.cancel()
    await asyncio.wait([second.task])
    await third.held.wait()
    third.leave.set()
    await third.task
    assert (slots.held, slots.waiting) == (0, 0)


async def test_someone_cancelled_while_waiting_is_passed_over():
    slots = Slots(1)
    first = Holder(slots)
    await first.held.wait()
    second, third = Holder(slots), Holder(slots)
    await turns()
    second.task.cancel()
    await asyncio.wait([second.task])
    assert slots.waiting == 1
    first.leave.set()
    await third.held.wait()
    assert slots.held == 1
    third.leave.set()
    await third.task
    assert slots.held == 0


async def test_closing_ends_every_wait_and_leaves_holders_alone():
    slots = Slots(1)
    first = Holder(slots)
    await first.held.wait()
    second = Holder(slots)
    await turns()
    slots.close("closed")
    with pytest.raises(EngineUnavailable, match="closed"):
        await second.task
    assert (slots.held, slots.waiting) == (1, 0)
    first.leave.set()
    await first.task
    assert slots.held == 0
