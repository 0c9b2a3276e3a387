"""What told first of a run that was posted elsewhere is counted: lost news shows, though it is made up for."""

import asyncio

import pytest

from chatsvc.clock import SystemClock
from chatsvc.limits import ServiceCost, TierName
from chatsvc.run import WaitingRun
from chatsvc.scheduler import replicas as replicas_module
from chatsvc.scheduler.fleet import Fleet
from chatsvc.scheduler.lines import Lines
from chatsvc.scheduler.news import News, Places, Posted, encode
from chatsvc.scheduler.replicas import Replicas, Source
from chatsvc.scheduler.shared_state import Board, MemoryState


def run(number):
    return WaitingRun(id=f"run{number}", user_id="ann", tier=TierName.FREE, model="m", prompt_tokens=9)


@pytest.fixture
async def here(monkeypatch):
    """One replica, which hears another one on the board."""
    monkeypatch.setattr(replicas_module, "TICK_S", 0.02)
    monkeypatch.setattr(replicas_module, "OVERHEARD_S", 3600.0)
    board, fleet = Board(), Fleet("here", SystemClock())
    lines = Lines({}, {}, {TierName.FREE: 1.0}, SystemClock(), ServiceCost(), models=["m"], neighbours=fleet)
    replicas = Replicas(state=MemoryState(board), fleet=fleet, lines=lines, clock=SystemClock())
    waits = asyncio.Event()
    replicas.wakes(waits.set)
    running = asyncio.create_task(replicas.run())
    there = MemoryState(board)

    async def says(*posted):
        waits.clear()
        news = News(replica="there", models={"m": Places(slots=2)}, posted=[Posted(run=one) for one in posted])
        await there.publish(encode(news))

    while not board.listeners:
        await asyncio.sleep(0)
    await says(run(0))
    await waits.wait()
    yield replicas, says, waits
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_run_is_counted_once_by_what_told_of_it_first(here):
    replicas, says, waits = here
    assert replicas.heard == {Source.POSTER: 1}
    await says(run(0))
    await waits.wait()
    await replicas.place([run(0)])
    assert +replicas.heard == {Source.POSTER: 1}
    await replicas.place([run(0), run(1)])
    assert replicas.heard == {Source.POSTER: 1, Source.SWEEP: 1}


async def test_a_notification_counts_only_when_the_poster_says_nothing_for_a_while(here, monkeypatch):
    replicas, says, waits = here
    replicas.overhear(run(1))
    await asyncio.sleep(3 * replicas_module.TICK_S)  # it is looked at, and let be
    await says(run(1))
    await waits.wait()
    assert replicas.heard == {Source.POSTER: 2}
    replicas.overhear(run(2))
    monkeypatch.setattr(replicas_module, "OVERHEARD_S", 0.05)
    async with asyncio.timeout(30):
        while not replicas.heard[Source.NOTIFICATION]:
            await says()
            await asyncio.sleep(replicas_module.TICK_S)
    assert replicas.heard == {Source.POSTER: 2, Source.NOTIFICATION: 1}
