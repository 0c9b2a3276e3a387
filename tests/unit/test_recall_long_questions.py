"""A long question is split into words beside the event loop, which has others' replies to deliver."""

import threading
from datetime import UTC, datetime
from typing import Any

import pytest

from chatsvc.clock import SystemClock
from chatsvc.context import passages as passages_module
from chatsvc.context.passages import Passage, pack
from chatsvc.conversation import Role
from chatsvc.scheduler import recall as recall_module
from chatsvc.scheduler.recall import Recall
from chatsvc.store import StoredChunk, StoredPassage

SAID = "The code word of the heron society is quixotic."
SAID_AT = datetime(2026, 1, 1, tzinfo=UTC)


class Shelf:
    """An index of one passage."""

    async def chunks(self, branch, *, version, embedder):
        packed = pack([Passage("m", 0, len(SAID), SAID, SAID_AT), Passage("n", 0, 5, "Well.", SAID_AT)])
        return (StoredChunk(id=1, passages=2, words=packed.words, vectors=None, missing=0),)

    async def passages(self, user_id, places):
        first = StoredPassage(place=1, message_id="m", role=Role.USER, said_at=SAID_AT, pinned=False, text=SAID)
        return (first,)


@pytest.mark.parametrize("long", [False, True])
async def test_a_long_question_does_not_hold_up_the_loop_and_finds_the_same(monkeypatch, long):
    threads = []
    split = passages_module.terms

    def terms(text):
        if text.endswith("society?"):
            threads.append(threading.current_thread())
        return split(text)

    monkeypatch.setattr(passages_module, "terms", terms)
    monkeypatch.setattr(recall_module, "terms", terms)
    monkeypatch.setattr(recall_module, "DEADLINE_S", 60.0)
    shelf: Any = Shelf()
    recall = Recall(index=shelf, engines={}, embedder=None, clock=SystemClock(), most=8)
    question = f"{'?! ' * 4000 if long else ''}What is the code word of the heron society?"
    [found] = await recall.recall("ada", "c", "n", "n", question, lately="", budget_tokens=1000, model="m")
    assert found.text == f"User: {SAID}"
    assert len(threads) == 2
    assert long != (threading.main_thread() in threads)
