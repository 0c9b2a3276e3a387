"""After which replies is looked whether to fold, with which numbers; and how long a summary may be."""

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from chatsvc.config import ContextConfig
from chatsvc.conversation import BranchView, Conversation, Message, Role, Summary
from chatsvc.errors import NotFound, SummaryTooLong
from chatsvc.inference.scripted import ScriptedEngine, ScriptedOptions
from chatsvc.run import RunStatus
from chatsvc.scheduler.folds import Folds
from chatsvc.scheduler.prompts import Prompts
from chatsvc.scheduler.wanted import Wanted

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
WINDOW = 8192
CONVERSATION = Conversation(
    id="conv_1", user_id="ada", title=None, system_prompt=None, model=None, head_message_id="msg_0",
    pinned=False, temporary=False, created_at=BEGAN, updated_at=BEGAN,
)  # fmt: skip


def words(count):
    """A text of so many tokens."""
    return "w " * count


class Shelf:
    """A store of one conversation; keeps the folds that are queued. ``asked``: what its last request named."""

    def __init__(self, *sizes, summary=None, asked=None, **fields):
        self.conversation = msgspec.structs.replace(CONVERSATION, **fields)
        turns = [
            Message(
                id=f"msg_{number}", conversation_id="conv_1", parent_id=f"msg_{number - 1}",
                role=Role.ASSISTANT if number % 2 else Role.USER, content=words(size), status=RunStatus.COMPLETE,
                created_at=BEGAN, tokens=size, response_id=f"resp_{number}" if number % 2 else None,
            )
            for number, size in enumerate(sizes)
        ]  # fmt: skip
        self.shown = BranchView(summary=summary, pinned=(), verbatim=tuple(turns))
        self.queued = []
        self.edits = []
        self.error = None
        self.rest = {}
        self.asked = {f"resp_{number}": None for number in range(len(sizes))} | {f"resp_{len(sizes) - 1}": asked}
        self.conversations = self.summaries = self
        self.runs = SimpleNamespace(get=self.run)

    async def run(self, user_id, response_id):
        return SimpleNamespace(max_tokens=self.asked[response_id])

    async def view(self, user_id, conversation_id, leaf, *, leaf_may_be_folded):
        if self.error:
            raise self.error
        return self.conversation, self.shown

    async def get(self, user_id, conversation_id):
        return self.conversation

    async def resting(self, conversation_id, base_id, *, rest_s):
        return self.rest

    async def queue(self, fold, *, rest_s):
        self.queued.append(fold)

    async def edit(self, *_, **fields):
        self.edits.append(fields)


def looking(shelf, recall=None, **smaller):
    engine = ScriptedEngine(ScriptedOptions(window=WINDOW), model="m")
    others = {name: ScriptedEngine(ScriptedOptions(window=window), model=name) for name, window in smaller.items()}
    config = ContextConfig()
    store: Any = shelf
    return Folds(
        store=store,
        engines={"m": engine, **others},
        prompts=Prompts({"m": engine, **others}, config, recall),
        default_model="m",
        config=config,
        may_work=lambda _: True,
    )


async def tokens_of(text):
    return len(await ScriptedEngine(ScriptedOptions(window=WINDOW), model="m").encode(text))


def a_run(conversation_id="conv_1", model="m", asked=None) -> Any:
    return SimpleNamespace(
        user_id="ada", conversation_id=conversation_id, message_id="msg_1", model=model, asked_model=asked
    )


def ended(prompt_tokens, output_tokens, *, window=WINDOW, **fields):
    run = a_run(**fields)
    report = SimpleNamespace(left_out=0, prompt_tokens=prompt_tokens, window=window)
    active: Any = SimpleNamespace(run=run, prepared=SimpleNamespace(report=report), output_tokens=output_tokens)
    return active


async def test_after_a_short_prompt_a_long_reply_is_reason_enough_to_look():
    folds = looking(Shelf(10, 10))
    folds.consider(ended(2400, 20))
    assert not folds.looking
    folds.consider(ended(2400, 4000))
    assert folds.looking


@pytest.mark.parametrize(
    ("model", "asked", "own", "folded_for"),
    [
        ("m", None, None, []),
        ("small", None, None, ["small"]),
        ("small", "m", None, []),
        ("small", "elsewhere", None, []),
        ("small", None, "m", []),
        ("small", None, "small", ["small"]),
        ("m", None, "small", ["small"]),
        ("small", None, "elsewhere", ["small"]),
    ],
)
async def test_for_a_smaller_model_that_the_next_turn_does_not_ask_nothing_is_folded(model, asked, own, folded_for):
    """It has answered in another's place, or was asked once. What was condensed to its window would be so for good."""
    shelf = Shelf(*[100, 100] * 15, model=own)
    folds = looking(shelf, small=2048)
    running = asyncio.create_task(folds.run())
    folds.consider(ended(1900, 100, window=2048, model=model, asked=asked))
    async with asyncio.timeout(30):
        while folds.looking:
            await asyncio.sleep(0)
    running.cancel()
    assert [fold.model for fold in shelf.queued] == folded_for


async def folded(shelf):
    folds = looking(shelf)
    return await folds.fold_if_due(shelf.conversation, shelf.shown, "m")


@pytest.mark.parametrize(
    ("rest", "through"),
    [
        ({}, "msg_7"),
        ({"msg_7": True}, "msg_3"),
        ({"msg_7": True, "msg_3": True}, "msg_1"),
        ({"msg_7": True, "msg_3": True, "msg_1": True}, None),
        ({"msg_7": False}, None),
        ({"msg_7": True, "msg_3": False}, None),
        ({"msg_3": True}, "msg_7"),
    ],
)
async def test_fewer_turns_are_folded_instead_of_those_whose_summary_was_refused(rest, through):
    shelf = Shelf(*[100, 500] * 9)
    shelf.rest = rest
    assert await folded(shelf)
    assert [fold.through_message_id for fold in shelf.queued] == ([through] if through else [])


async def test_what_the_user_wants_to_be_known_takes_room_that_is_planned_with():
    memory = tuple(words(90) for _ in range(10))
    system_prompt = words(1000)
    sizes = [100, 500] * 6
    assert not await folded(Shelf(*sizes, system_prompt=system_prompt))
    shelf = Shelf(*sizes, system_prompt=system_prompt, memory=memory)
    assert await folded(shelf)
    assert len(shelf.queued) == 1


@pytest.mark.parametrize("after", ["a reply", "a fold that came too late"])
@pytest.mark.parametrize(("asked", "due"), [(None, False), (10, False), (2048, False), (4000, True), (8000, True)])
async def test_room_for_the_replies_that_are_asked_for_is_planned_with(asked, due, after):
    """Else turns would be left out of every prompt, and never folded."""
    shelf = Shelf(*[100, 500] * 6, asked=asked)
    folds = looking(shelf)
    running = asyncio.create_task(folds.run())
    if after == "a reply":
        folds.consider(ended(3600, 100))
    else:
        folds.look_again(a_run())
    async with asyncio.timeout(30):
        while folds.looking:
            await asyncio.sleep(0)
    running.cancel()
    assert bool(shelf.queued) == due


@pytest.mark.parametrize(("answer", "due"), [(4400, False), (4650, True)])
async def test_the_room_that_is_kept_for_a_question_is_planned_with(answer, due):
    """The room is 6,144 tokens, 384 of them a question's: a fold is due behind four fifths of the rest, 4,608."""
    shelf = Shelf(10, 10, 10, answer)
    await folded(shelf)
    assert bool(shelf.queued) == due


@pytest.mark.parametrize("memory", [(), tuple(words(90) for _ in range(10))])
async def test_an_edit_may_be_as_long_as_a_prompt_shows_it_and_no_longer(memory):
    shelf = Shelf(20, 20, system_prompt=words(3500), memory=memory)
    folds = looking(shelf)
    with pytest.raises(SummaryTooLong) as refused:
        await folds.edit("ada", "conv_1", "msg_x", text=words(1020), version=1)
    limit = refused.value.extra["limit"]
    await folds.edit("ada", "conv_1", "msg_x", text=words(limit), version=1)
    [edit] = shelf.edits
    summary = Summary(
        id="sum_1", conversation_id="conv_1", through_message_id="msg_x", version=2, previous_id=None,
        text=edit["text"], tokens=edit["tokens"], edited=True, model="m", created_at=BEGAN,
    )  # fmt: skip
    view = msgspec.structs.replace(shelf.shown, summary=summary)
    wanted = Wanted(model="m", conversation=shelf.conversation, view=view, leaf_id="msg_1", question="And?")
    prepared = await folds._prompts.prepare(wanted)
    assert prepared.report.summary.tokens == limit == await tokens_of(edit["text"])


@pytest.mark.parametrize("error", [RuntimeError("a template"), KeyError("a tokenizer"), NotFound("deleted")])
async def test_no_conversation_ends_the_looking(error):
    shelf = Shelf(*[100, 500] * 9)
    folds = looking(shelf)
    running = asyncio.create_task(folds.run())
    for shelf.error in (error, None):
        folds.consider(ended(5000, 100))
        async with asyncio.timeout(30):
            while folds.looking and not running.done():
                await asyncio.sleep(0)
    assert not running.done()
    assert len(shelf.queued) == 1
    running.cancel()


async def test_for_whatever_reply_is_asked_half_of_the_usual_room_is_not_folded_away():
    """Else every turn would be folded by itself."""
    window, system = WINDOW, 3000
    usual = (window - system - window // 4) // 2
    short = [10, 90] * (int(usual * 0.7) // 110)
    for asked in (window // 2, window - 3500, window):
        assert not await folded(Shelf(*short, system_prompt=words(system), asked=asked))
