"""Readers are told where their runs stand; that there are thousands of them holds up nobody's reply."""

import asyncio
from datetime import UTC, datetime

import pytest

from chatsvc.clock import SystemClock
from chatsvc.limits import ServiceCost, TierName
from chatsvc.run import Run, RunStatus, waiting
from chatsvc.scheduler import positions as positions_module
from chatsvc.scheduler.lines import Lines
from chatsvc.scheduler.positions import Positions

MANY = 2000


@pytest.fixture(autouse=True)
def nothing_grows_old(monkeypatch):
    """What was worked out is good for the length of a test, however long a busy machine takes."""
    monkeypatch.setattr(positions_module, "REFRESH_S", 3600.0)


class Runs:
    """Postgres: who waits."""

    def __init__(self, runs):
        self.runs = [run.id for run in runs]

    async def still_queued(self, ids):
        return set(self.runs).intersection(ids)

    async def positions(self):
        return {run_id: place for place, run_id in enumerate(self.runs, start=1)}


class Store:
    def __init__(self, runs):
        self.runs = Runs(runs)


def run(number):
    return Run(
        id=f"run{number:05}",
        user_id=f"user{number}",
        conversation_id="c",
        user_message_id="u",
        message_id="m",
        client_msg_id="k",
        model="m",
        tier=TierName.FREE,
        status=RunStatus.QUEUED,
        attempt=0,
        created_at=datetime.now(UTC),
        expected_prompt_tokens=100,
    )


def line_of(runs):
    lines = Lines({}, {}, {TierName.FREE: 1.0}, SystemClock(), ServiceCost(), models=["m"])
    for one in runs:
        lines.put(waiting(one))
    return lines


async def turns_until(asking):
    """What it says, and how often others had the event loop meanwhile."""
    asking, turns = asyncio.create_task(asking), 0
    while not asking.done():
        await asyncio.sleep(0)
        turns += 1
    return asking.result(), turns


async def test_the_places_of_thousands_are_worked_out_a_few_at_a_time():
    runs = [run(number) for number in range(MANY)]
    told, turns = await turns_until(Positions(Store(runs), line_of(runs)).of(runs))
    assert sorted(queued.position for queued in told.values()) == list(range(1, MANY + 1))
    assert turns >= MANY / 100


async def test_the_place_of_one_among_thousands_is_found_a_few_of_them_at_a_time():
    runs = [run(number) for number in range(MANY)]
    positions = Positions(Store(runs), line_of(runs))
    told, turns = await turns_until(positions.of([runs[7]]))
    assert [queued.position for queued in told.values()] == [8]
    assert turns >= MANY / 512
    # Who asks right after that finds it done, and so does who has waited for it.
    (first, turns), (second, _) = await asyncio.gather(
        turns_until(positions.of([runs[8]])), turns_until(positions.of([runs[9]]))
    )
    assert [queued.position for told in (first, second) for queued in told.values()] == [9, 10]
    assert turns < MANY / 512


async def test_what_is_left_of_those_under_way_is_found_once_for_all_who_ask(monkeypatch):
    runs = [run(number) for number in range(MANY)]
    lines = line_of(runs)
    queue, looks = lines.line("m").queue, []
    monkeypatch.setattr(queue, "left", lambda: looks.append(1) or [100.0])
    told = await Positions(Store(runs), lines).of(runs)
    assert len(told) == MANY
    assert len(looks) == 1
