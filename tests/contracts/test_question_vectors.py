"""Vectors of new questions: whatever comes, and whatever the model does, no request is hurt and no place is lost."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from recall_world import Letters, indexer_of

from chatsvc.scheduler import question_vectors
from chatsvc.scheduler.question_vectors import MOST, QuestionVectors


class NoStore:
    recall = None


def vectors_of(embedder):
    return QuestionVectors(embedder, indexer_of(NoStore, embedder))


@pytest.fixture
def embedder():
    return Letters()


@pytest.fixture
async def complaints():
    """What the event loop was told of that nobody caught."""
    told = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    return told


async def asking(vectors, *conversations):
    """They have asked, and the model works."""
    for conversation in conversations:
        assert await vectors.asked(conversation, "a first question") is not None


async def held(vectors, embedder, count):
    """So many vectors are being made, until ``embedder.may_go``."""
    embedder.may_go.clear()
    tasks = [vectors.asked("conv_1", f"held {number}") for number in range(count)]
    await asyncio.sleep(0)
    return tasks


@pytest.mark.parametrize("question", ["", "\x00", "a\ud83d", "\ud83d\ude00", "\udc00" * 3000, "word " * 100_000])
async def test_any_text_may_be_asked(embedder, question):
    vectors = vectors_of(embedder)
    await asking(vectors, "conv_1")
    for _ in range(2):
        assert await vectors.asked("conv_1", question) is not None
    assert embedder.calls == 2
    assert all(len(text.encode()) <= 4 * question_vectors._CHARS for text in embedder.texts)


async def test_what_is_kept_tells_neither_a_text_nor_that_another_asked_the_same(embedder):
    vectors = vectors_of(embedder)
    await asking(vectors, "conv_1", "conv_2")
    for conversation in ("conv_1", "conv_2", "conv_2"):
        await vectors.asked(conversation, "Where is the key to the safe?")
    assert embedder.texts.count("Where is the key to the safe?") == 2
    assert "safe" not in str(vectors._tasks)
    assert not any(isinstance(key, str) for key in vectors._tasks)


async def test_one_too_many_has_no_place_and_one_that_is_under_way_needs_none(embedder):
    vectors = vectors_of(embedder)
    await asking(vectors, "conv_1")
    tasks = await held(vectors, embedder, MOST)
    assert None not in tasks
    assert vectors.asked("conv_1", "one too many") is None
    assert vectors.asked("conv_1", "held 0") is tasks[0]
    embedder.may_go.set()
    await vectors.aclose()


async def test_a_model_that_gives_nothing_has_failed(embedder, complaints, monkeypatch):
    async def nothing(texts):
        return np.zeros((0, 26), np.float32)

    monkeypatch.setattr(embedder, "embed", nothing)
    vectors = vectors_of(embedder)
    assert await vectors.asked("conv_1", "a question") is None
    await asyncio.sleep(0)
    assert not vectors._tasks
    assert vectors._indexer.embedder_rests
    assert not complaints


async def test_a_vector_that_fails_while_old_ones_are_forgotten_frees_its_place(embedder, complaints, monkeypatch):
    monkeypatch.setattr(question_vectors, "_KEPT", 0)
    ends = {name: asyncio.get_running_loop().create_future() for name in ("fails", "works")}
    vectors = vectors_of(embedder)
    await asking(vectors, "conv_1")

    async def embed(texts):
        return await ends[texts[0]]

    monkeypatch.setattr(embedder, "embed", embed)
    tasks = [vectors.asked("conv_1", name) for name in ends]
    await asyncio.sleep(0)
    ends["works"].set_result(np.ones((1, 26), np.float32))  # it ends first, and the older one is forgotten for it
    ends["fails"].set_exception(ValueError("too late"))
    await asyncio.wait(tasks)
    await asyncio.sleep(0)
    assert tasks[0].result() is None
    assert (vectors._under_way, dict(vectors._tasks)) == (0, {})
    assert not complaints


async def test_who_waits_for_a_vector_and_goes_takes_it_from_nobody(embedder):
    vectors = vectors_of(embedder)
    await asking(vectors, "conv_1")
    [task] = await held(vectors, embedder, 1)
    one, other = (asyncio.create_task(asyncio.wait({task})) for _ in range(2))
    await asyncio.sleep(0)
    one.cancel()
    await asyncio.sleep(0)
    embedder.may_go.set()
    await other
    assert task.result() is not None


async def test_at_the_end_nothing_is_under_way_any_more(embedder, complaints):
    vectors = vectors_of(embedder)
    await asking(vectors, "conv_1")
    tasks = await held(vectors, embedder, MOST)
    await vectors.aclose()
    assert all(task.cancelled() for task in tasks)
    assert vectors._under_way == 0
    assert not complaints
