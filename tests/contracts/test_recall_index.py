"""The index of old passages: one branch and one user at a time, made once however often it is asked for."""

from __future__ import annotations

import asyncio

import numpy as np
import psycopg
import pytest
from store_world import ALICE, BOB, World

from chatsvc.clock import SystemClock
from chatsvc.context.words import VERSION
from chatsvc.errors import EngineUnavailable
from chatsvc.inference.embedder import Embedder, unit
from chatsvc.scheduler import recall as recall_module
from chatsvc.scheduler.indexing import Indexer
from chatsvc.scheduler.recall import Recall
from chatsvc.store import NewChunk, RecallBranch
from chatsvc.store import recall as recall_store


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


@pytest.fixture
def world(store):
    return World(store)


@pytest.fixture
def embedder():
    return Letters()


def indexer_of(store, embedder=None):
    return Indexer(index=store.recall, embedder=embedder, clock=SystemClock())


def recall_of(store, embedder=None, *, most=8):
    return Recall(
        index=store.recall,
        engines={},
        embedder=embedder,
        clock=SystemClock(),
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


async def ask(recall, branch, question, *, budget_tokens=1000):
    return await recall.recall(
        branch.user_id,
        branch.conversation_id,
        branch.through,
        branch.through,
        question,
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


async def test_what_was_said_long_ago_is_found_and_quoted_with_its_speaker(store, world, embedder):
    conversation = await world.conversation()
    _, told = await said(world, conversation, None, "My dentist is called Dr. Quillfeather.", "Noted.")
    path = await world.turns_after(conversation, told, 20)
    branch = branch_of(conversation, path[-1])
    await index(store, branch, embedder=embedder)
    for recall in (recall_of(store, embedder), recall_of(store)):
        found = await ask(recall, branch, "What was the name of my dentist?")
        assert "User: My dentist is called Dr. Quillfeather." in found[0].text.splitlines()
        assert [turn.score for turn in found] == sorted((turn.score for turn in found), reverse=True)


async def test_only_this_branch_up_to_the_fold_is_looked_at(store, world):
    conversation = await world.conversation()
    _, root = await said(world, conversation, None, "Hello", "Hi")
    _, left = await said(world, conversation, root, "The password is heron", "Fine")
    _, right = await said(world, conversation, root, "The password is magpie", "Fine")
    _, later = await said(world, conversation, left, "The password is now osprey", "Fine")
    await index(store, *(branch_of(conversation, leaf) for leaf in (later, left, right)))
    recall = recall_of(store)

    async def birds(through):
        found = await ask(recall, branch_of(conversation, through), "What is the password?")
        return {line.rsplit(" ", 1)[1] for line in lines(found) if "password" in line}

    assert await birds(left) == {"heron"}
    assert await birds(right) == {"magpie"}
    assert await birds(later) == {"heron", "osprey"}
    assert await birds(root) == set()


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


async def rows_committed(postgres_url, statement):
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
        await connection.execute(statement)


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


async def test_for_a_question_that_nothing_has_to_do_with_nothing_is_quoted(store, world, embedder):
    conversation = await world.conversation()
    path = await world.turns(conversation, 3)
    branch = branch_of(conversation, path[-1])
    await index(store, branch, embedder=embedder)
    far, near = "zzzz yyyy vvvv ss", "questions"
    assert lines(await ask(recall_of(store, embedder), branch, far))  # of this model nothing is known
    embedder.unrelated = 0.5
    recall = recall_of(store, embedder)
    assert await ask(recall, branch, far) == ()
    assert "User: question 1" in lines(await ask(recall, branch, near))


async def test_without_vectors_words_decide_and_the_vectors_are_made_up_for(store, world, embedder):
    conversation = await world.conversation()
    path = await world.turns(conversation, 3)
    branch = branch_of(conversation, path[-1])
    await index(store, branch)
    recall = recall_of(store, embedder)
    assert "User: question 1" in lines(await ask(recall, branch, "question 1"))
    await recall.indexer.step()
    [chunk] = await store.recall.chunks(branch, version=VERSION, embedder=embedder.name)
    assert chunk.vectors is not None


async def test_vectors_of_another_model_are_not_compared(store, world, embedder):
    conversation = await world.conversation()
    path = await world.turns(conversation, 3)
    branch = branch_of(conversation, path[-1])
    await index(store, branch, embedder=embedder)
    other = Letters("other")
    [chunk] = await store.recall.chunks(branch, version=VERSION, embedder=other.name)
    assert chunk.vectors is None
    recall = recall_of(store, other)
    assert await ask(recall, branch, "question 1")
    await recall.indexer.step()
    [chunk] = await store.recall.chunks(branch, version=VERSION, embedder=other.name)
    assert chunk.vectors is not None


async def test_of_an_endless_branch_the_newest_passages_are_compared(store, world, monkeypatch):
    conversation = await world.conversation()
    path = await world.turns(conversation, 6)
    await index(store, *(branch_of(conversation, path[end]) for end in (3, 7)))
    branch = branch_of(conversation, path[11])
    await index(store, branch)
    assert len(await store.recall.chunks(branch, version=VERSION, embedder=None)) == 3
    monkeypatch.setattr(recall_store, "MOST_PASSAGES", 5)
    newest = await store.recall.chunks(branch, version=VERSION, embedder=None)
    assert [chunk.passages for chunk in newest] == [4, 4]
    assert "User: question 2" in lines(await ask(recall_of(store), branch, "question 2"))
    assert "User: question 1" not in lines(await ask(recall_of(store), branch, "question 1"))
    # Indexed is all of it.
    assert len(await store.recall.without_vectors(branch, version=VERSION, embedder="letters")) == 3


async def test_a_question_does_not_wait_for_a_model_that_loads(store, world, embedder, monkeypatch):
    monkeypatch.setattr(recall_module, "VECTOR_S", 0.05)
    conversation = await world.conversation()
    path = await world.turns(conversation, 3)
    branch = branch_of(conversation, path[-1])
    await index(store, branch, embedder=embedder)
    embedder.may_go.clear()
    assert "User: question 1" in lines(await ask(recall_of(store, embedder), branch, "question 1"))


class Unthought(Exception):
    """A library's own, of no kind that we know."""


@pytest.mark.parametrize("broken", [EngineUnavailable("gone"), Unthought("gone"), KeyError("gone"), "rank", "store"])
async def test_trouble_is_never_the_replys(store, world, embedder, broken, monkeypatch):
    conversation = await world.conversation()
    path = await world.turns(conversation, 3)
    branch = branch_of(conversation, path[-1])
    await index(store, branch, embedder=embedder)
    if isinstance(broken, Exception):
        embedder.error = broken
        assert "User: question 1" in lines(await ask(recall_of(store, embedder), branch, "question 1"))
    elif broken == "rank":
        monkeypatch.setattr(recall_module, "_rank", None)
        assert await ask(recall_of(store, embedder), branch, "question 1") == ()
    else:
        monkeypatch.setattr(recall_module, "DEADLINE_S", 0.05)
        async with await psycopg.AsyncConnection.connect(store._database._url) as connection:
            await connection.execute("LOCK TABLE recall_chunks")
            assert await ask(recall_of(store, embedder), branch, "question 1") == ()


async def test_questions_try_a_broken_model_once_in_a_while(store, world, embedder):
    conversation = await world.conversation()
    path = await world.turns(conversation, 3)
    branch = branch_of(conversation, path[-1])
    await index(store, branch, embedder=embedder)
    recall = recall_of(store, embedder)
    embedder.error, embedder.calls = EngineUnavailable("not installed"), 0
    for number in range(5):
        assert await ask(recall, branch, f"question {number}")
    assert embedder.calls == 1
    assert recall.indexer.embedder_rests


async def test_however_many_ask_few_wait_for_the_model(store, world, embedder, monkeypatch):
    monkeypatch.setattr(recall_module, "VECTOR_S", 0.05)
    conversation = await world.conversation()
    path = await world.turns(conversation, 3)
    branch = branch_of(conversation, path[-1])
    await index(store, branch, embedder=embedder)
    recall = recall_of(store, embedder)
    embedder.may_go.clear()
    embedder.calls = 0
    await asyncio.gather(*(ask(recall, branch, f"question {number}") for number in range(20)))
    assert embedder.calls == 1  # it has not made any vector yet: one loads it
    embedder.may_go.set()
    await asyncio.gather(*recall._embedding)
    embedder.may_go.clear()
    embedder.calls = 0
    await asyncio.gather(*(ask(recall, branch, f"and question {number}") for number in range(20)))
    assert embedder.calls == recall_module._MOST_EMBEDDING
    await recall.aclose()


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


async def test_what_is_not_indexed_yet_is_asked_for_by_the_first_question(store, world):
    conversation = await world.conversation()
    path = await world.turns(conversation, 6)
    await index(store, branch_of(conversation, path[5]))
    recall = recall_of(store)
    branch = branch_of(conversation, path[-1])
    assert "User: question 5" not in lines(await ask(recall, branch, "question 5"))
    await recall.indexer.step()
    assert "User: question 5" in lines(await ask(recall, branch, "question 5"))


async def test_what_is_quoted_fits_and_pinned_messages_are_not_quoted(store, world, postgres_url):
    conversation = await world.conversation()
    long = " ".join(f"The answer number {n} is a sentence about herons." for n in range(200))
    user_id, _ = await said(world, conversation, None, "herons herons", "ok")
    _, leaf = await said(world, conversation, user_id and (await head(store, conversation)), "tell me", long)
    await rows_committed(postgres_url, f"UPDATE messages SET pinned = true WHERE id = '{user_id}'")
    branch = branch_of(conversation, leaf)
    await index(store, branch)
    for budget in (0, 30, 300, 1000):
        found = await ask(recall_of(store, most=4), branch, "herons sentence", budget_tokens=budget)
        assert sum(turn.tokens for turn in found) <= budget
        assert len(lines(found)) <= 4
        assert all(len(line) < 900 for line in lines(found))
        assert user_id not in {id_ for turn in found for id_ in turn.message_ids}
    assert found


async def test_neighbours_are_quoted_together_but_not_without_end(store, world):
    conversation = await world.conversation()
    path = await world.turns(conversation, 12)
    branch = branch_of(conversation, path[-1])
    await index(store, branch)
    found = await ask(recall_of(store, most=100), branch, "question answer 1 2 3 4 5 6 7 8 9 10 11")
    assert len(lines(found)) > 12
    assert all(len(turn.message_ids) <= recall_module.TOGETHER for turn in found)
    for turn in found:
        first = path.index(turn.message_ids[0])
        assert list(turn.message_ids) == path[first : first + len(turn.message_ids)]
    said = [id_ for turn in found for id_ in turn.message_ids]
    assert len(set(said)) == len(said)


async def head(store, conversation):
    return (await store.conversations.get("alice", conversation.id)).head_message_id
