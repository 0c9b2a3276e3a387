"""The index of old passages: one branch and one user at a time, made once however often it is asked for."""

from __future__ import annotations

import asyncio

import psycopg
import pytest
from recall_world import Letters, ask, branch_of, index, indexer_of, recall_of, rows, rows_committed, said
from store_world import ALICE, BOB, World

from chatsvc.clock import SystemClock
from chatsvc.context.words import VERSION
from chatsvc.errors import EngineUnavailable
from chatsvc.scheduler.indexing import Indexer
from chatsvc.store import NewChunk, RecallBranch

pytestmark = pytest.mark.usefixtures("recall_has_time")


@pytest.fixture
def world(store):
    return World(store)


@pytest.fixture
def embedder():
    return Letters()


async def test_siblings_share_what_they_share(store, world, postgres_url):
    conversation = await world.conversation()
    path = await world.turns(conversation, 5)
    leaves = [(await said(world, conversation, path[-1], f"way {n}", "yes"))[1] for n in range(3)]
    await index(store, branch_of(conversation, path[-1]), *(branch_of(conversation, leaf) for leaf in leaves))
    [(messages,)] = await rows(postgres_url, "SELECT sum(cardinality(message_ids)) FROM recall_chunks")
    assert messages == 10 + 3 * 2


async def test_nobody_finds_what_another_user_said(store, world):
    """L10."""
    conversation = await world.conversation(ALICE)
    path = await world.turns(conversation, 3)
    branch = branch_of(conversation, path[-1])
    await index(store, branch)
    foreign = RecallBranch(user_id=BOB.user_id, conversation_id=conversation.id, through=path[-1])
    assert await ask(recall_of(store), branch, "question 1")
    assert await ask(recall_of(store), foreign, "question 1") == ()
    assert await store.recall.chunks(foreign, version=VERSION, embedder=None) == ()
    [chunk] = await store.recall.chunks(branch, version=VERSION, embedder=None)
    assert await store.recall.passages(BOB.user_id, [(chunk.id, 0)]) == ()
    assert (await store.recall.gap(foreign, version=VERSION)).message_ids == ()
    await store.recall.ask(foreign)
    assert await store.recall.take() is None


async def test_nothing_remains_of_a_deleted_conversation(store, world, postgres_url, embedder):
    conversation = await world.conversation()
    path = await world.turns(conversation, 3)
    await index(store, branch_of(conversation, path[-1]), embedder=embedder)
    indexer_of(store).soon(branch_of(conversation, path[-1]))
    await store.recall.ask(branch_of(conversation, path[-1]))
    await store.conversations.delete("alice", conversation.id)
    for table in ("recall_chunks", "recall_due"):
        assert await rows(postgres_url, f"SELECT * FROM {table}") == []


async def test_a_conversation_that_is_deleted_while_it_is_indexed_leaves_nothing(store, world, postgres_url, embedder):
    conversation = await world.conversation()
    path = await world.turns(conversation, 3)
    branch = branch_of(conversation, path[-1])
    embedder.may_go.clear()
    indexing = asyncio.create_task(index(store, branch, embedder=embedder))
    while not await store.recall.chunks(branch, version=VERSION, embedder=None):
        await asyncio.sleep(0.01)
    await store.conversations.delete("alice", conversation.id)
    embedder.may_go.set()
    await indexing
    assert await rows(postgres_url, "SELECT * FROM recall_chunks") == []


async def test_a_chunk_that_comes_during_a_delete_waits_for_it_and_is_not_kept(store, world, postgres_url):
    conversation = await world.conversation()
    path = await world.turns(conversation, 1)
    branch = branch_of(conversation, path[-1])
    chunk = NewChunk(previous_id=None, through=path[-1], message_ids=[], starts=[], ends=[], words=b"")
    async with await psycopg.AsyncConnection.connect(postgres_url) as deleting:
        await deleting.execute("UPDATE conversations SET head_message_id = NULL")
        await deleting.execute("DELETE FROM conversations")
        adding = asyncio.create_task(store.recall.add(branch, chunk, version=VERSION))
        while not await rows(postgres_url, "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
            await asyncio.sleep(0.01)
        await deleting.commit()
    assert await adding is None


async def test_indexing_again_changes_nothing(store, world, postgres_url, embedder):
    conversation = await world.conversation()
    path = await world.turns(conversation, 4)
    branch = branch_of(conversation, path[-1])
    await index(store, branch, embedder=embedder)
    before = await rows(postgres_url, "SELECT * FROM recall_chunks")
    made = len(embedder.texts)
    await index(store, branch, embedder=embedder)
    assert await rows(postgres_url, "SELECT * FROM recall_chunks") == before
    assert len(embedder.texts) == made == 8


async def test_what_an_older_version_indexed_goes_when_the_new_one_has_come_to_its_conversation(
    store, world, postgres_url
):
    branches = []
    for _ in range(2):
        conversation = await world.conversation()
        branches.append(branch_of(conversation, (await world.turns(conversation, 2))[-1]))
    await index(store, *branches)
    await rows_committed(postgres_url, f"UPDATE recall_chunks SET version = {VERSION - 1}")
    assert await store.recall.chunks(branches[0], version=VERSION, embedder=None) == ()
    await index(store, branches[0])
    assert await ask(recall_of(store), branches[0], "question 1")
    assert await rows(postgres_url, "SELECT version, through_message_id FROM recall_chunks ORDER BY version") == [
        (VERSION - 1, branches[1].through),
        (VERSION, branches[0].through),
    ]


async def test_two_workers_share_the_work_and_do_none_twice(store, world, postgres_url):
    conversations = [await world.conversation() for _ in range(4)]
    embedders = [Letters(), Letters()]
    branches = []
    for conversation in conversations:
        path = await world.turns(conversation, 3)
        branches += [branch_of(conversation, path[-1]), branch_of(conversation, path[-3])]
    for branch in branches:
        await store.recall.ask(branch)
    await asyncio.gather(*(index(store, embedder=embedder) for embedder in embedders))
    texts = [text for embedder in embedders for text in embedder.texts]
    assert len(texts) == 4 * 6
    [(messages,)] = await rows(postgres_url, "SELECT sum(cardinality(message_ids)) FROM recall_chunks")
    assert messages == 4 * 6
    assert await store.recall.take() is None


async def test_the_same_work_done_at_once_has_the_same_result(store, world, postgres_url):
    """A worker that was held up for longer than it may hold a conversation."""
    conversation = await world.conversation()
    path = await world.turns(conversation, 30)
    branch = branch_of(conversation, path[-1])

    async def work():
        await store.recall.ask(branch)
        indexer = indexer_of(store)
        due = await store.recall.take()
        await rows_committed(postgres_url, "UPDATE recall_due SET due_at = now()")
        if due is not None:
            await indexer._words(branch, due)
            await store.recall.done(due)

    await asyncio.gather(*(work() for _ in range(6)))
    chunks = await store.recall.chunks(branch, version=VERSION, embedder=None)
    assert sum(chunk.passages for chunk in chunks) == 60
    found = await ask(recall_of(store, most=100), branch, "question 3 answer 3", budget_tokens=10_000)
    assert len({turn.message_ids for turn in found}) == len(found)


async def test_what_a_dead_worker_had_taken_is_taken_again(store, world, postgres_url):
    conversation = await world.conversation()
    path = await world.turns(conversation, 3)
    await store.recall.ask(branch_of(conversation, path[-1]))
    assert await store.recall.take() is not None
    assert await store.recall.take() is None
    await rows_committed(postgres_url, "UPDATE recall_due SET due_at = due_at - interval '61 seconds'")
    await index(store)
    assert await ask(recall_of(store), branch_of(conversation, path[-1]), "question 1")


async def test_what_is_asked_for_while_it_is_indexed_is_not_forgotten(store, world):
    conversation = await world.conversation()
    path = await world.turns(conversation, 3)
    await store.recall.ask(branch_of(conversation, path[1]))
    due = await store.recall.take()
    await store.recall.ask(branch_of(conversation, path[-1]))
    await store.recall.done(due)
    rest = await store.recall.take()
    assert rest.through_message_ids == (path[-1],)


async def test_a_broken_model_leaves_the_words_and_is_not_tried_all_the_time(store, world, embedder):
    conversation = await world.conversation()
    path = await world.turns(conversation, 3)
    branch = branch_of(conversation, path[-1])
    embedder.error = EngineUnavailable("not installed")
    indexer = indexer_of(store, embedder)
    indexer.soon(branch)
    assert await indexer.step()
    assert not await indexer.step()
    assert await ask(recall_of(store), branch, "question 1")


async def test_a_conversation_that_cannot_be_indexed_keeps_no_other_waiting(store, world, monkeypatch):
    paths = []
    for _ in range(2):
        conversation = await world.conversation()
        paths.append(branch_of(conversation, (await world.turns(conversation, 2))[-1]))
    indexer = indexer_of(store)
    contents = store.recall.contents
    failed = []

    async def failing_once(ids):
        if not failed:
            failed.append(ids)
            raise ValueError("what nobody thought of")
        return await contents(ids)

    monkeypatch.setattr(store.recall, "contents", failing_once)
    for branch in paths:
        indexer.soon(branch)
    running = asyncio.create_task(indexer.run())
    async with asyncio.timeout(60):
        while not failed:
            await asyncio.sleep(0.01)
        indexer.soon(paths[1], anew=True)
        while not await store.recall.chunks(paths[1], version=VERSION, embedder=None):
            await asyncio.sleep(0.01)
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_under_pressure_words_go_on_and_vectors_come_later(store, world, embedder, postgres_url):
    branches = []
    for _ in range(2):
        conversation = await world.conversation()
        branches.append(branch_of(conversation, (await world.turns(conversation, 2))[-1]))
    time = []
    indexer = Indexer(index=store.recall, embedder=embedder, clock=SystemClock(), may_work=lambda: bool(time))
    for branch in branches:
        indexer.soon(branch)
    while await indexer.step():
        pass
    assert all([await ask(recall_of(store), branch, "question 1") for branch in branches])
    assert embedder.texts == []
    time.append("now")
    await rows_committed(postgres_url, "UPDATE recall_due SET due_at = due_at - interval '61 seconds'")
    while await indexer.step():
        pass
    assert len(embedder.texts) == 8
    assert await rows(postgres_url, "SELECT * FROM recall_due") == []
