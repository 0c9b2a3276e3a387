"""What a question finds of what was said long ago: in its own branch, within its room, never to the reply's harm."""

from __future__ import annotations

import asyncio

import psycopg
import pytest
from recall_world import Letters, ask, branch_of, index, lines, recall_of, rows_committed, said
from store_world import World

from chatsvc.context.words import VERSION
from chatsvc.errors import EngineUnavailable
from chatsvc.scheduler import question_vectors
from chatsvc.scheduler import recall as recall_module
from chatsvc.store import recall as recall_store

pytestmark = pytest.mark.usefixtures("recall_has_time")


@pytest.fixture
def world(store):
    return World(store)


@pytest.fixture
def embedder():
    return Letters()


async def talked(store, world, embedder):
    """The indexed branch of a conversation of three turns."""
    conversation = await world.conversation()
    path = await world.turns(conversation, 3)
    branch = branch_of(conversation, path[-1])
    await index(store, branch, embedder=embedder)
    return branch


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


async def test_for_a_question_that_nothing_has_to_do_with_nothing_is_quoted(store, world, embedder):
    branch = await talked(store, world, embedder)
    far, near = "zzzz yyyy vvvv ss", "questions"
    for unrelated in (None, 0.5):
        embedder.unrelated = unrelated
        recall = recall_of(store, embedder)
        assert await ask(recall, branch, far) == ()
        assert "User: question 1" in lines(await ask(recall, branch, near))
    embedder.unrelated = 0.999
    assert await ask(recall_of(store, embedder), branch, near) == ()  # half of what was said has this word


async def test_what_was_said_just_now_is_not_looked_for_further_back(store, world, embedder):
    conversation = await world.conversation()
    _, told = await said(world, conversation, None, "My dentist is called Dr. Quillfeather.", "Noted.")
    path = await world.turns_after(conversation, told, 20)
    branch = branch_of(conversation, path[-1])
    await index(store, branch)
    recall = recall_of(store)
    asked, answered = "What was the name of my dentist?", "The name of your dentist was Dr. Quillfeather."
    assert await ask(recall, branch, asked)
    assert await ask(recall, branch, asked, lately=answered) == ()
    assert await ask(recall, branch, asked, lately="The train to Lisbon leaves at seven.")


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
    branch = await talked(store, world, embedder)
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
    branch = await talked(store, world, embedder)
    embedder.may_go.clear()
    assert "User: question 1" in lines(await ask(recall_of(store, embedder), branch, "question 1"))


async def test_a_model_that_is_closed_while_a_question_waits_takes_its_vector_only(store, world, embedder):
    branch = await talked(store, world, embedder)
    recall = recall_of(store, embedder)
    embedder.may_go.clear()
    asking = asyncio.create_task(ask(recall, branch, "question 1"))
    while not recall._vectors._tasks:
        await asyncio.sleep(0)
    await recall.aclose()
    assert "User: question 1" in lines(await asking)


class Unthought(Exception):
    """A library's own, of no kind that we know."""


@pytest.mark.parametrize("broken", [EngineUnavailable("gone"), Unthought("gone"), KeyError("gone"), "rank", "store"])
async def test_trouble_is_never_the_replys(store, world, embedder, broken, monkeypatch):
    branch = await talked(store, world, embedder)
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
    branch = await talked(store, world, embedder)
    recall = recall_of(store, embedder)
    embedder.error, embedder.calls = EngineUnavailable("not installed"), 0
    for number in range(5):
        assert await ask(recall, branch, f"question {number}")
    assert embedder.calls == 1
    assert recall.indexer.embedder_rests


async def test_however_many_ask_few_wait_for_the_model(store, world, embedder, monkeypatch):
    monkeypatch.setattr(recall_module, "VECTOR_S", 0.05)
    branch = await talked(store, world, embedder)
    recall = recall_of(store, embedder)
    embedder.may_go.clear()
    embedder.calls = 0
    await asyncio.gather(*(ask(recall, branch, f"question {number}") for number in range(20)))
    assert embedder.calls == 1  # it has not made any vector yet: one loads it
    embedder.may_go.set()
    await asyncio.gather(*recall._vectors._tasks.values())
    embedder.may_go.clear()
    embedder.calls = 0
    await asyncio.gather(*(ask(recall, branch, f"and question {number}") for number in range(20)))
    assert embedder.calls == question_vectors.MOST
    await recall.aclose()


async def test_a_vector_is_made_only_for_a_question_whose_words_leave_open_whether_anything_is_needed(
    store, world, embedder
):
    branch = await talked(store, world, embedder)
    recall = recall_of(store, embedder)
    embedder.texts.clear()
    # All of its words were said lately, and no old passage has any of the others.
    assert await ask(recall, branch, "And then, heron?", lately="The heron stood there, and then it flew.") == ()
    assert embedder.texts == []
    assert "User: question 2" in lines(await ask(recall, branch, "question 2"))
    assert embedder.texts == ["question 2"]
    await recall.aclose()


async def test_vectors_nobody_asks_for_any_more_are_forgotten_and_failed_ones_made_anew(store, world, embedder):
    recall = recall_of(store, embedder)
    vectors = recall._vectors
    for number in range(3 * question_vectors._KEPT):
        await vectors.asked("conv_local_1", f"question {number}")
    assert len(vectors._tasks) <= question_vectors._KEPT
    embedder.error = EngineUnavailable("away")
    assert await vectors.asked("conv_local_1", "another") is None
    embedder.error = None
    recall.indexer._failed_at = None  # its rest is over
    assert await vectors.asked("conv_local_1", "another") is not None
    await recall.aclose()


class Hand:
    """A clock that is set by hand, and what ``recall`` wants to be called for later on the loop."""

    def __init__(self):
        self.at = 0.0
        self.timers = []

    def monotonic(self):
        return self.at

    def watch(self, recall, monkeypatch):
        loop = asyncio.get_running_loop()
        later = loop.call_later

        def call_later(delay, callback, *args, **options):
            timer = later(delay, callback, *args, **options)
            if getattr(callback, "__self__", None) is recall:
                self.timers.append((self.at + delay, callback, timer))
            return timer

        monkeypatch.setattr(loop, "call_later", call_later)

    def rings(self):
        """The time has come for the only thing to be done."""
        [(self.at, callback, timer)] = self.timers
        self.timers.clear()
        timer.cancel()
        callback()


async def test_what_was_found_is_in_memory_no_longer_than_it_is_of_use(store, world, monkeypatch):
    branch = await talked(store, world, None)
    clock = Hand()
    recall = recall_of(store, clock=clock)
    clock.watch(recall, monkeypatch)
    assert await ask(recall, branch, "question 1")
    clock.at = 20.0
    assert await ask(recall, branch, "question 2")
    assert len(recall._answers) == 2
    clock.rings()
    assert clock.at == 30.0
    [key] = recall._answers
    assert "question 2" in key
    clock.rings()
    assert clock.at == 50.0
    assert not recall._answers
    assert not clock.timers

    assert await ask(recall, branch, "question 3")
    [(at, _, timer)] = clock.timers
    assert at == 80.0
    await recall.aclose()
    assert timer.cancelled()
    assert not recall._answers


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
    user_id, _ = await said(world, conversation, None, "herons 77 herons", "ok")
    _, leaf = await said(world, conversation, user_id and (await head(store, conversation)), "tell me", long)
    await rows_committed(postgres_url, f"UPDATE messages SET pinned = true WHERE id = '{user_id}'")
    branch = branch_of(conversation, leaf)
    await index(store, branch)
    for budget in (0, 30, 300, 1000):
        found = await ask(recall_of(store, most=4), branch, "herons sentence 77", budget_tokens=budget)
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
    found = await ask(recall_of(store, most=100), branch, "question answer")
    assert len(lines(found)) > 12
    assert all(len(turn.message_ids) <= recall_module.TOGETHER for turn in found)
    for turn in found:
        first = path.index(turn.message_ids[0])
        assert list(turn.message_ids) == path[first : first + len(turn.message_ids)]
    said = [id_ for turn in found for id_ in turn.message_ids]
    assert len(set(said)) == len(said)


async def head(store, conversation):
    return (await store.conversations.get("alice", conversation.id)).head_message_id
