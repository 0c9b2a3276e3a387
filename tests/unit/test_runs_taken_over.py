"""A run that was taken over from its worker and waits again is held back in no line by what that worker says later."""

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from replica_processes import MODEL, Engine, processes, run, until

from chatsvc.clock import SystemClock
from chatsvc.limits import ServiceCost, TierName
from chatsvc.run import Run, RunStatus, waiting
from chatsvc.scheduler import dispatch as dispatch_module
from chatsvc.scheduler.active import Interrupt
from chatsvc.scheduler.dispatch import Dispatcher
from chatsvc.scheduler.fleet import Fleet
from chatsvc.scheduler.lines import Lines
from chatsvc.scheduler.news import End, Held, News, Places, encode
from chatsvc.scheduler.replicas import Replicas
from chatsvc.scheduler.shared_state import Board, MemoryState

OURS = Run(
    id="run00001", user_id="ann", conversation_id="conv1", user_message_id="q", message_id="a", client_msg_id="c",
    model=MODEL, tier=TierName.FREE, status=RunStatus.STREAMING, attempt=1, created_at=datetime(2026, 1, 1, tzinfo=UTC),
    expected_prompt_tokens=100,
)  # fmt: skip


@pytest.mark.parametrize("awake_before", [False, True])
async def test_what_waits_is_not_taken_out_by_who_had_it_before(awake_before):
    """Or Postgres is asked at once, where its worker woke and spoke of it before it knew."""
    async with processes("a", "b") as (_, b):
        b.holds = True
        b.lines.put(run(1), "b")
        asked = []
        b.replicas.wakes(b.dispatch, lambda: asked.append(b.lines.ids()))

        def hear(**held):
            b.replicas._hear(
                encode(News(replica="a", models={MODEL: Places(slots=2)}, held=[Held(run=run(1), **held)]))
            )

        if awake_before:
            hear()
        hear(output_tokens=5, end=End.CUT, lost=True)
        [there] = asked
        assert there == (set() if awake_before else {"run00001"})
        assert b.lines.line(MODEL).flights.holder("run00001") is None


class Queued:
    """The run waits, says Postgres, since it was taken over; it is asked how often, and nobody may claim it."""

    def __init__(self):
        self.asked = self.refused = 0

    async def queued(self, *, limit):
        self.asked += 1
        return [waiting(OURS)]

    async def claim(self, run_ids, worker_id):
        self.refused += len(run_ids)
        return []


async def test_who_loses_a_run_says_so_and_asks_whether_it_waits(monkeypatch):
    monkeypatch.setattr(dispatch_module, "SWEEP_S", 3600.0)
    board, fleet, runs = Board(), Fleet("me", SystemClock()), Queued()
    lines = Lines(
        {MODEL: Engine(2)}, {MODEL: 2}, {TierName.FREE: 1.0}, SystemClock(), ServiceCost(), neighbours=fleet
    )  # fmt: skip
    replicas = Replicas(state=MemoryState(board), fleet=fleet, lines=lines, clock=SystemClock())
    nothing: Any = SimpleNamespace(
        make_room=lambda: None, look=lambda: None, run_begins=lambda _: None, consider=lambda _: None,
        after_reply=lambda _: None,
    )  # fmt: skip

    async def execute(active):
        while active.why is None:
            await asyncio.sleep(0)
        return True

    dispatcher = Dispatcher(
        store=SimpleNamespace(runs=runs),  # type: ignore[arg-type]
        lines=lines, replicas=replicas, engines={}, runner=SimpleNamespace(execute=execute),  # type: ignore[arg-type]
        folds=nothing, fold_runner=nothing, warming=nothing, worker_id="me",
    )  # fmt: skip
    running = asyncio.create_task(dispatcher.run())
    try:
        await until(lambda: runs.refused == 1)  # what the first sweep found waits here no more: there is a place
        assert runs.asked == 1
        with dispatcher.place(waiting(OURS)) as place:
            place.take(OURS, None)
        active = dispatcher.active(OURS.id)
        assert active is not None
        lines.line(MODEL).flights.moved()
        dispatcher.give_up(OURS.id, OURS.attempt)
        await active.ended.wait()
        [held] = lines.line(MODEL).flights.moved()
        assert (held.end, held.lost, active.why) == (End.CUT, True, Interrupt.LOST)
        await until(lambda: runs.asked == 2)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
