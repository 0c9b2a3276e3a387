"""A conversation that was folded by a model with a large window, and goes on with one that has a small one."""

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from chatsvc.conversation import BranchView, Message, Role, Summary
from chatsvc.inference.scripted import ScriptedEngine, ScriptedOptions
from chatsvc.limits import TierName
from chatsvc.run import Run, RunKind, RunStatus
from chatsvc.scheduler.active import ActiveRun
from chatsvc.scheduler.fold_runner import FoldRunner
from chatsvc.store import Committed

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
WINDOW = 2048
FOLD = Run(
    id="run", user_id="ada", conversation_id="conv", user_message_id="", message_id="", client_msg_id="", model="m",
    tier=TierName.FREE, status=RunStatus.STREAMING, attempt=1, created_at=BEGAN, max_tokens=WINDOW // 8,
    kind=RunKind.FOLD, fold_through_id="msg", fold_base_id="sum",
)  # fmt: skip
SAID = "I live in Rome. " * 100


class Engine(ScriptedEngine):
    """Keeps what it was asked."""

    def __init__(self):
        super().__init__(ScriptedOptions(window=WINDOW, text="It is all about Rome."), model="m")
        self.asked = []

    def generate(self, prompt, sampling, run_id, priority=0):
        self.asked.append(prompt)
        return super().generate(prompt, sampling, run_id, priority)


async def folded(summary):
    """What the summariser was asked, and what was committed, where that summary was there before."""
    committed = []
    view = BranchView(
        summary=Summary(
            id="sum", conversation_id="conv", through_message_id="old", version=1, previous_id=None, text=summary,
            tokens=1, edited=False, model="large", created_at=BEGAN,
        ),
        pinned=(),
        verbatim=(
            Message(
                id="msg", conversation_id="conv", parent_id="old", role=Role.USER, content=SAID,
                status=RunStatus.COMPLETE, created_at=BEGAN,
            ),
        ),
    )  # fmt: skip

    async def view_of(*_, **__):
        return None, view

    async def commit(run, summary_id, text, tokens, outcome):
        committed.append(text)
        return Committed.NO

    async def finish(run_id, attempt, outcome):
        pytest.fail(f"no summary: {outcome.error_message}")

    store: Any = SimpleNamespace(
        conversations=SimpleNamespace(view=view_of),
        summaries=SimpleNamespace(commit=commit),
        runs=SimpleNamespace(finish=finish),
    )
    nothing: Any = SimpleNamespace(may_work=lambda _: True, started=lambda *_: None, delivered=lambda _: None)
    engine = Engine()
    await engine.start(lambda _: None)
    runner = FoldRunner(store=store, engines={"m": engine}, folds=nothing, warming=nothing)
    await runner.execute(ActiveRun(FOLD, nothing))
    await engine.aclose()
    [asked], [text] = engine.asked, committed
    return "\n".join(message.content for message in asked.messages), text


@pytest.mark.parametrize("lines", [110, 150, 1000])
async def test_a_summary_that_a_larger_model_wrote_leaves_room_for_the_turns(lines):
    asked, text = await folded("Facts\n" + "- the user has a cat and a rat\n" * lines)
    assert text == "Facts\n- It is all about Rome."
    assert "> Facts\n> - the user has a cat" in asked
    assert SAID.strip() in asked


async def test_a_summary_as_long_as_this_model_writes_them_is_read_whole():
    summary = "Facts\n" + "- the cat has a rat\n" * (WINDOW // 8 // 7) + "- and a dog"
    asked, _ = await folded(summary)
    assert "- and a dog" in asked
