"""An index of old passages on a real store, a model of meaning that counts letters, and questions to both."""

from __future__ import annotations

import asyncio

import numpy as np
import psycopg

from chatsvc.clock import SystemClock
from chatsvc.inference.embedder import Embedder, unit
from chatsvc.scheduler.indexing import Indexer
from chatsvc.scheduler.recall import Recall
from chatsvc.store import RecallBranch


class Letters(Embedder):
    """What a text means is how often each letter stands in it."""

    def __init__(self, name="letters"):
        self.name = name
        self.texts = []
        self.calls = 0
        self.may_go = asyncio.Event()
        self.may_go.set()
        self.error = None

    async def embed(self, texts):
        self.calls += 1
        await self.may_go.wait()
        if self.error is not None:
            raise self.error
        self.texts += texts
        return unit(np.array([[text.lower().count(chr(97 + n)) for n in range(26)] for text in texts], float))

    async def aclose(self):
        pass


def indexer_of(store, embedder=None):
    return Indexer(index=store.recall, embedder=embedder, clock=SystemClock())


def recall_of(store, embedder=None, *, most=8, clock=None):
    return Recall(
        index=store.recall,
        engines={},
        embedder=embedder,
        clock=clock or SystemClock(),
        most=most,
    )


def branch_of(conversation, through):
    return RecallBranch(user_id="alice", conversation_id=conversation.id, through=through)


async def index(store, *branches, embedder=None):
    indexer = indexer_of(store, embedder)
    for branch in branches:
        indexer.soon(branch)
    while await indexer.step():
        pass


async def ask(recall, branch, question, *, lately="", budget_tokens=1000):
    return await recall.recall(
        branch.user_id,
        branch.conversation_id,
        branch.through,
        branch.through,
        question,
        lately=lately,
        budget_tokens=budget_tokens,
        model="small",
    )


def lines(found):
    return [line for turn in found for line in turn.text.splitlines()]


async def said(world, conversation, parent, question, answer):
    run = await world.complete(conversation, parent, content=question, text=answer)
    return run.user_message_id, run.message_id


async def rows(postgres_url, statement):
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        return await (await connection.execute(statement)).fetchall()


async def rows_committed(postgres_url, statement):
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
        await connection.execute(statement)
