"""Readers are told where their runs stand; that there are thousands of them holds up nobody's reply."""

import asyncio
from datetime import UTC, datetime

from chatsvc.clock import SystemClock
from chatsvc.limits import ServiceCost, TierName
from chatsvc.run import Run, RunStatus, waiting
from chatsvc.scheduler.lines import Lines
from chatsvc.scheduler.positions import Positions

MANY = 2000


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


async def test_the_places_of_thousands_are_worked_out_a_few_at_a_time():
    runs = [run(number) for number in range(MANY)]
    lines = Lines({}, {}, {TierName.FREE: 1.0}, SystemClock(), ServiceCost(), models=["m"])
    for one in runs:
        lines.put(waiting(one))
    looking = asyncio.create_task(Positions(Store(runs), lines).of_all(runs))
    turns = 0
    while not looking.done():
        await asyncio.sleep(0)
        turns += 1
    places = [queued.position for queued in looking.result().values()]
    assert sorted(places) == list(range(1, MANY + 1))
    assert turns >= MANY / 100
