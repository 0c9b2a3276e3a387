"""What the next prompt leaves out is known before its question is: so it can be read ahead (L11)."""

import asyncio
from itertools import accumulate, chain

import msgspec
from contracts.long_talk import asking, said
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chatsvc.context.budget import QUESTION_SHARE
from chatsvc.conversation import Role
from chatsvc.inference.scripted import ScriptedEngine, ScriptedOptions
from chatsvc.inference.scripted_text import encode
from chatsvc.scheduler.next_prefix import prefix
from chatsvc.scheduler.prompts import Prompts

SIZES = st.lists(st.tuples(st.integers(1, 10), st.integers(0, 250)), min_size=1, max_size=40)
WINDOWS = st.integers(1000, 4000)
MOST = 4000 // QUESTION_SHARE
SLACK = 16
"""What a reply and a question take beside their own tokens, and a little more."""

SHORT_STEPS = [(7, 177), (5, 184), (2, 8), (7, 5), (1, 217), (1, 39), (6, 227)]
"""Where less is shown than a step may have, a place comes and goes with the turns behind it."""


def words(count):
    return "word " * count


def branch_of(sizes):
    pairs = [
        (said(Role.USER, words(asked), 2 * number), said(Role.ASSISTANT, words(answered), 2 * number + 1))
        for number, (asked, answered) in enumerate(sizes, start=1)
    ]
    return tuple(chain.from_iterable(pairs))


def made(window):
    engine = ScriptedEngine(ScriptedOptions(window=window), model="m")
    return engine, Prompts({"m": engine})


@given(WINDOWS, SIZES, st.integers(1, MOST))
@settings(deadline=None, max_examples=60)
def test_any_question_that_the_room_kept_for_one_holds_finds_the_same_prefix(window, sizes, length):
    async def compared():
        engine, prompts = made(window)
        read = await prefix(prompts, engine, asking(branch_of(sizes), ""))
        coming = await prompts.prepare(asking(branch_of(sizes), words(length)))
        assert coming.prompt.token_ids[: read.tokens] == read.token_ids

    most = (window - window // 4 - 200) // QUESTION_SHARE  # beside a reply and the system prompt
    length = min(length, most - len(encode(" ")))
    asyncio.run(compared())


@given(WINDOWS, SIZES, st.sampled_from([None, 0.6, 0.75]))
@example(2000, SHORT_STEPS, 0.6)
@settings(deadline=None, max_examples=60)
def test_a_reply_that_there_is_room_for_moves_nothing_and_one_that_is_longer_moves_it(window, sizes, share):
    async def compared():
        longest = int(window * share) if share else None
        _, prompts = made(window)
        before = None
        for turns in accumulate(([size] for size in sizes), lambda one, other: one + other):
            branch = branch_of(turns)
            wanted = asking(branch[:-2], branch[-2].content)
            prepared = await prompts.prepare(msgspec.structs.replace(wanted, max_tokens=longest))
            if before is not None:
                beyond = len(encode(branch[-3].content)) - before.room
                moved = before.report.left_out < prepared.report.left_out
                assert beyond > 0 if moved else beyond <= SLACK
            before = prepared

    asyncio.run(compared())


async def test_beside_a_long_reply_too_more_than_the_newest_turn_is_shown_and_seldom_anew():
    """A third of the window is more than there is for turns beside a reply of three quarters."""
    _, prompts = made(4000)
    shown, left_out = [], []
    for count in range(20, 60):
        wanted = asking(branch_of([(20, 60)] * count), words(20))
        report = (await prompts.prepare(msgspec.structs.replace(wanted, max_tokens=3000))).report
        shown.append(report.parts.verbatim)
        left_out.append(report.left_out)
    assert min(shown) > 2 * 90
    assert len(set(left_out)) < 40 / 4


async def test_where_a_step_is_about_to_be_taken_the_prefix_has_taken_it():
    engine, prompts = made(2000)
    for turns in range(2, 40):
        branch = branch_of([(20, 100)] * turns)
        coming = await prompts.prepare(asking(branch, "word"))
        if coming.report.left_out:
            break
    last = await prompts.prepare(asking(branch[:-2], branch[-2].content))
    assert last.report.left_out == 0
    assert last.room < len(encode(branch[-1].content))
    read = await prefix(prompts, engine, asking(branch, ""))
    assert coming.prompt.token_ids[: read.tokens] == read.token_ids
    assert read.tokens > coming.prompt.tokens - SLACK
