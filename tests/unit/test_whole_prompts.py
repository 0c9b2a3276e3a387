"""Less history is said to be given up where some of it was, a turn, a pin or a part of the summary, and only there."""

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatsvc.conversation import BranchView, Conversation, Message, Role, Summary
from chatsvc.inference.scripted import ScriptedEngine, ScriptedOptions
from chatsvc.limits import Principal, ServiceCost, TierName
from chatsvc.run import RunStatus
from chatsvc.scheduler.elsewhere import surely_shown
from chatsvc.scheduler.news import Window
from chatsvc.scheduler.pressure import HISTORY, Terms
from chatsvc.scheduler.prompts import Prompts
from chatsvc.scheduler.submit import Submitter
from chatsvc.scheduler.wanted import Wanted

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
WINDOW = 4096
"""Of 3,072 tokens for history a quarter is left, and of that a quarter for pins and half for a summary."""


def words(count):
    """A text of about so many tokens."""
    return "word " * count


def said(number, text, *, pinned=False):
    return Message(
        id=f"msg_{number}", conversation_id="conv", parent_id=f"msg_{number - 1}", content=text, created_at=BEGAN,
        role=Role.ASSISTANT if number % 2 else Role.USER, status=RunStatus.COMPLETE, pinned=pinned,
    )  # fmt: skip


def asking(*, turns=(), pins=(), summary="", share=0.25):
    conversation = Conversation(
        id="conv", user_id="ada", title=None, system_prompt="Be brief.", model=None, head_message_id=None,
        pinned=False, temporary=False, created_at=BEGAN, updated_at=BEGAN,
    )  # fmt: skip
    folded = Summary(
        id="sum", conversation_id="conv", through_message_id="msg_x", version=1, previous_id=None, text=summary,
        tokens=1, edited=False, model="m", created_at=BEGAN,
    )  # fmt: skip
    shown = [said(number, text) for number, text in enumerate(text for turn in turns for text in (turn, turn))]
    view = BranchView(
        summary=folded if summary else None,
        pinned=tuple(said(2 * (100 + number), text, pinned=True) for number, text in enumerate(pins)),
        verbatim=tuple(shown),
    )
    return Wanted(
        model="m", conversation=conversation, view=view, leaf_id=shown[-1].id if shown else None, question="And?",
        history_share=share,
    )  # fmt: skip


class NothingRecalled:
    """Room is kept for it all the same."""

    async def recall(self, *_, **__):
        return ()


def submitter(share):
    """One that takes messages in with less history."""
    engine = ScriptedEngine(ScriptedOptions(window=WINDOW), model="m")
    terms = Terms(
        model="m", asked_model="m", max_tokens=None, history_share=share, degraded=(HISTORY,) if share < 1 else (),
        tier=SimpleNamespace(),  # type: ignore[arg-type]
    )  # fmt: skip
    pressure: Any = SimpleNamespace(terms=lambda *_, **__: terms)
    replicas: Any = SimpleNamespace(is_served=lambda _: False)
    nothing: Any = SimpleNamespace()
    return Submitter(
        store=SimpleNamespace(runs=None),  # type: ignore[arg-type]
        engines={"m": engine},
        models=frozenset("m"),
        default_model="m",
        region="r",
        max_content_chars=100,
        is_ready=lambda _: True,
        check_log=nothing,
        dispatcher=nothing,
        replicas=replicas,
        prompts=Prompts({"m": engine}, None, NothingRecalled()),
        pressure=pressure,
        cost=ServiceCost(),
    )


async def told(share=0.25, **conversation):
    """What is said to be given up."""
    taken = await submitter(share)._on_terms(
        Principal("ada", TierName.FREE), asking(**conversation, share=share), named=False
    )
    return taken.terms.degraded


@pytest.mark.parametrize(
    "conversation",
    [
        {"turns": [words(200)] * 2},
        {"pins": [words(80)] * 3},
        {"summary": words(500)},
    ],
    ids=["turns", "pins", "a summary"],
)
async def test_what_of_the_history_is_not_shown_is_told(conversation):
    assert await told(**conversation) == (HISTORY,)
    assert await told(**conversation, share=1.0) == ()


@pytest.mark.parametrize(
    "conversation",
    [
        {},
        {"turns": [words(20)] * 4},
        {"pins": [words(40)] * 3, "turns": [words(20)] * 4},
        {"summary": words(300), "pins": [words(40)], "turns": [words(20)] * 2},
        {"pins": [words(4000)]},
    ],
    ids=["nothing", "turns", "pins", "a summary", "a pin that has no room anyway"],
)
async def test_what_is_shown_all_the_same_is_not_said_to_be_given_up(conversation):
    assert await told(**conversation) == ()


sizes = st.integers(0, 200)


@settings(max_examples=100, deadline=None)
@given(
    turns=st.lists(sizes, max_size=3),
    pins=st.lists(sizes, max_size=3),
    summary=sizes,
    share=st.sampled_from([0.25, 0.5]),
    unit=st.sampled_from([". ", "ab "]),
)
def test_what_is_surely_shown_by_a_model_that_is_elsewhere_is_shown_by_it(turns, pins, summary, share, unit):
    ask = asking(turns=[unit * n for n in turns], pins=[unit * n for n in pins], summary=unit * summary, share=share)
    if surely_shown(ask, Window(tokens=WINDOW, reply_tokens=500)):
        engine = ScriptedEngine(ScriptedOptions(window=WINDOW), model="m")
        prompts = Prompts({"m": engine}, None, NothingRecalled())
        assert not asyncio.run(prompts.prepare(ask)).curtailed


def test_what_is_surely_shown_is_known_where_there_is_little():
    ask = asking(turns=["Why?"], pins=["Because."], summary="Facts")
    assert surely_shown(ask, Window(tokens=WINDOW, reply_tokens=500))
