"""A fold that is cut short has a summary with its size, or none; and is tried again, but for what breaks engines."""

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from chatsvc.conversation import BranchView, Message, Role
from chatsvc.errors import EngineFailed
from chatsvc.inference.scripted import ScriptedEngine, ScriptedOptions
from chatsvc.limits import TierName
from chatsvc.prompt import Chunk
from chatsvc.run import MOST_LOSSES, Run, RunKind, RunStatus
from chatsvc.scheduler.active import ActiveRun, Interrupt
from chatsvc.scheduler.fold_runner import FoldRunner
from chatsvc.store import Committed

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
FOLD = Run(
    id="run", user_id="ada", conversation_id="conv", user_message_id="", message_id="", client_msg_id="", model="m",
    tier=TierName.FREE, status=RunStatus.STREAMING, attempt=1, created_at=BEGAN, max_tokens=200, kind=RunKind.FOLD,
    fold_through_id="msg",
)  # fmt: skip
SUMMARY = "Facts\n- Ada lives in Rome."


class Engine(ScriptedEngine):
    """Writes the summary at once, and counts it when it is told to; or fails."""

    def __init__(self, error=None):
        super().__init__(ScriptedOptions(window=8192), model="m")
        self.error = error
        self.counting = asyncio.Event()
        self.may_count = asyncio.Event()

    async def generate(self, prompt, sampling, run_id, priority=0):
        if self.error:
            raise self.error
        yield Chunk(text=SUMMARY, output_tokens=9, finish_reason="stop")

    async def encode(self, text):
        if text == SUMMARY:
            self.counting.set()
            await self.may_count.wait()
        return await super().encode(text)


class Shelf:
    """A store of one long message; keeps what became of its fold."""

    def __init__(self):
        self.conversations = self.summaries = self.runs = self
        self.committed = []
        self.requeued = []

    async def view(self, user_id, conversation_id, leaf, *, leaf_may_be_folded):
        said = Message(
            id="msg", conversation_id="conv", parent_id=None, role=Role.USER, content="I live in Rome. " * 50,
            status=RunStatus.COMPLETE, created_at=BEGAN,
        )  # fmt: skip
        return None, BranchView(summary=None, pinned=(), verbatim=(said,))

    async def commit(self, run, summary_id, text, tokens, outcome):
        self.committed.append((text, tokens, outcome.status))
        return Committed.NO

    async def requeue(self, run_id, attempt, *, lost):
        self.requeued.append((run_id, attempt, lost))
        return True

    async def finish(self, run_id, attempt, outcome):
        self.committed.append(("", 0, outcome.status))
        return True


class Carried:
    """A fold that is being carried out, and stands where its accepted summary is counted."""

    def __init__(self, fold=FOLD, error=None):
        self.shelf: Any = Shelf()
        self.engine = Engine(error)
        folds: Any = SimpleNamespace(may_work=lambda _: True)
        nothing: Any = SimpleNamespace(started=lambda *_: None, delivered=lambda _: None)
        self.active = ActiveRun(fold, nothing)
        runner = FoldRunner(store=self.shelf, engines={"m": self.engine}, folds=folds, warming=nothing)
        self.task = asyncio.create_task(runner.execute(self.active))


@pytest.fixture
async def carried():
    fold = Carried()
    async with asyncio.timeout(30):
        await fold.engine.counting.wait()
    yield fold
    fold.task.cancel()
    await asyncio.gather(fold.task, return_exceptions=True)


@pytest.mark.parametrize("why", [Interrupt.GIVE_WAY, Interrupt.DRAIN])
async def test_a_summary_that_is_not_counted_yet_is_written_by_another_attempt(carried, why):
    carried.active.interrupt(why)
    assert await carried.task
    assert carried.shelf.committed == []
    assert carried.shelf.requeued == [("run", 1, False)]
    assert carried.active.queued_again


async def test_a_summary_is_committed_with_its_size(carried):
    carried.engine.may_count.set()
    assert await carried.task
    size = len(await carried.engine.encode(SUMMARY))
    assert size > 0
    assert carried.shelf.committed == [(SUMMARY, size, RunStatus.COMPLETE)]


@pytest.mark.parametrize("attempt", [1, 3, 9])
@pytest.mark.parametrize(("losses", "again"), [(0, True), (MOST_LOSSES - 2, True), (MOST_LOSSES - 1, False)])
async def test_a_fold_is_failed_by_how_often_it_lost_its_engine_whatever_else_it_gave_way_to(losses, again, attempt):
    fold = Carried(replace(FOLD, losses=losses, attempt=attempt), EngineFailed("It broke."))
    async with asyncio.timeout(30):
        await fold.task
    assert fold.active.queued_again == again
    assert fold.shelf.requeued == ([("run", attempt, True)] if again else [])
    assert fold.shelf.committed == ([] if again else [("", 0, RunStatus.FAILED)])
