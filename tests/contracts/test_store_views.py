"""A branch as a prompt needs it: from its summary on, per branch, with its pins, and reading no more than it shows."""

import asyncio
import random

import psycopg
import pytest
from plan_rows import only_indexes, rows_read
from store_world import BOB, World, complete

from chatsvc import ids
from chatsvc.errors import NotFound, TooManyPins
from chatsvc.limits import TierName
from chatsvc.store import Committed, NewFold, conversations
from chatsvc.store.views import VIEW


@pytest.fixture
def world(store):
    return World(store)


async def fold(store, conversation, through, *, base=None, text="Facts\nA cat."):
    """Have the branch folded up to and including a message."""
    new = NewFold(
        id=ids.new_fold_id(),
        user_id=conversation.user_id,
        conversation_id=conversation.id,
        through_message_id=through,
        base_id=base,
        model="small",
        tier=TierName.FREE,
        prompt_tokens=300,
        max_tokens=100,
    )
    queued = await store.summaries.queue(new, rest_s=0)
    [run] = await store.runs.claim([queued.id], "worker-1")
    summary_id = ids.new_summary_id()
    assert await store.summaries.commit(run, summary_id, text, 4, complete(text="")) is Committed.YES
    return summary_id


async def view(store, conversation, leaf, **more):
    return (await store.conversations.view(conversation.user_id, conversation.id, leaf, **more))[1]


def shown(branch):
    return [message.id for message in branch]


async def test_an_unfolded_branch_is_shown_whole(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 3)
    seen = await view(store, conversation, path[-1])
    assert (seen.summary, seen.pinned, shown(seen.verbatim)) == (None, (), path)


async def test_a_folded_branch_begins_behind_what_its_summary_covers(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 4)
    summary_id = await fold(store, conversation, path[3], text="Facts\nÄ \u2028 cat.")
    seen = await view(store, conversation, path[-1])
    assert shown(seen.verbatim) == path[4:]
    assert (seen.summary.id, seen.summary.through_message_id) == (summary_id, path[3])
    assert (seen.summary.version, seen.summary.edited, seen.summary.text) == (1, False, "Facts\nÄ \u2028 cat.")
    assert seen.summary.created_at.tzinfo is not None


async def test_the_newest_version_of_the_newest_fold_is_used(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 6)
    first = await fold(store, conversation, path[3])
    second = await fold(store, conversation, path[7], base=first)
    edited = await store.summaries.edit(
        "alice", conversation.id, path[7], version=1, summary_id=ids.new_summary_id(), text="Mine.", tokens=2
    )
    seen = await view(store, conversation, path[-1])
    assert shown(seen.verbatim) == path[8:]
    assert (seen.summary.id, seen.summary.text, seen.summary.version) == (edited.id, "Mine.", 2)
    assert seen.summary.previous_id == second


async def test_siblings_share_a_summary_and_an_edit_before_it_finds_the_earlier_one(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 6)
    first = await fold(store, conversation, path[1])
    second = await fold(store, conversation, path[7], base=first)
    sibling = await world.complete(conversation, path[9], content="another sixth question")
    seen = await view(store, conversation, sibling.message_id)
    assert seen.summary.id == second
    assert shown(seen.verbatim) == [*path[8:10], sibling.user_message_id, sibling.message_id]
    before = await world.complete(conversation, path[5], content="another fourth question")
    seen = await view(store, conversation, before.message_id)
    assert seen.summary.id == first
    assert shown(seen.verbatim) == [*path[2:6], before.user_message_id, before.message_id]
    root = await world.complete(conversation, None, content="another first question")
    seen = await view(store, conversation, root.message_id)
    assert (seen.summary, shown(seen.verbatim)) == (None, [root.user_message_id, root.message_id])


async def test_a_leaf_that_is_to_be_gone_on_with_is_not_folded_itself(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 3)
    await fold(store, conversation, path[-1])
    seen = await view(store, conversation, path[-1])
    assert (seen.summary, shown(seen.verbatim)) == (None, path)
    answered = await view(store, conversation, path[-1], leaf_may_be_folded=True)
    assert (answered.summary.through_message_id, answered.verbatim) == (path[-1], ())


async def test_a_new_message_stands_on_the_head_also_when_that_is_folded(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 2)
    await fold(store, conversation, path[-1])
    ground = await store.runs.ground("alice", conversation.id, path[-1], "new", b"hash")
    assert ground.view.leaf.id == path[-1]
    assert ground.view.branch.verbatim == ()


async def test_pinned_messages_that_are_folded_are_found_on_their_branch_only(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 8)
    dead = await world.complete(conversation, path[1], content="a branch that was left")
    first = await fold(store, conversation, path[5])
    await fold(store, conversation, path[11], base=first)
    for pin in (path[0], path[3], path[5], path[6], path[11], path[13], dead.message_id):
        assert (await store.conversations.pin("alice", pin, pinned=True)).pinned
    seen = await view(store, conversation, path[-1])
    assert shown(seen.pinned) == [path[0], path[3], path[5], path[6], path[11]]
    assert shown(seen.verbatim) == path[12:]
    assert [message.id for message in seen.verbatim if message.pinned] == [path[13]]
    await store.conversations.pin("alice", path[3], pinned=False)
    seen = await view(store, conversation, path[-1])
    assert shown(seen.pinned) == [path[0], path[5], path[6], path[11]]


async def test_no_more_messages_can_be_pinned_than_a_turn_should_look_for(world, store, monkeypatch):
    monkeypatch.setattr(conversations, "MOST_PINS", 3)
    conversation, other = await world.conversation(), await world.conversation()
    path = await world.turns(conversation, 3)
    [elsewhere, _] = await world.turns(other, 1)
    for pin in path[:3]:
        await store.conversations.pin("alice", pin, pinned=True)
    with pytest.raises(TooManyPins, match="3 messages"):
        await store.conversations.pin("alice", path[3], pinned=True)
    assert (await store.conversations.pin("alice", path[0], pinned=True)).pinned  # once more
    assert (await store.conversations.pin("alice", elsewhere, pinned=True)).pinned
    await store.conversations.pin("alice", path[0], pinned=False)
    assert (await store.conversations.pin("alice", path[3], pinned=True)).pinned


async def test_of_many_messages_that_are_pinned_at_once_no_more_are_than_may_be(world, store, monkeypatch):
    monkeypatch.setattr(conversations, "MOST_PINS", 3)
    conversation = await world.conversation()
    path = await world.turns(conversation, 6)
    pinning = (store.conversations.pin("alice", message, pinned=True) for message in path)
    results = await asyncio.gather(*pinning, return_exceptions=True)
    assert sum(isinstance(result, TooManyPins) for result in results) == len(path) - 3
    assert sum(message.pinned for message in (await store.conversations.tree("alice", conversation.id))[1]) == 3


async def test_a_message_that_is_pinned_and_let_go_by_turns_is_never_one_too_many(world, store):
    conversation = await world.conversation()
    [message, *_] = await world.turns(conversation, 1)
    pinning = [store.conversations.pin("alice", message, pinned=number % 3 == 0) for number in range(60)]
    # Each as if it were alone with the others before it.
    for number, done in enumerate(await asyncio.gather(*pinning)):
        assert done.pinned == (number % 3 == 0)


async def test_pinning_is_no_activity_and_another_users_message_is_no_message(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 1)
    before = await store.conversations.get("alice", conversation.id)
    await store.conversations.pin("alice", path[0], pinned=True)
    assert await store.conversations.get("alice", conversation.id) == before
    with pytest.raises(NotFound):
        await store.conversations.pin(BOB.user_id, path[0], pinned=False)
    assert (await store.conversations.owner_of_message("alice", path[0])).pinned


@pytest.mark.parametrize("leaf", ["msg_" + "0" * 32, "of another conversation"])
async def test_an_unknown_leaf_is_not_found(world, store, leaf):
    conversation, other = await world.conversation(), await world.conversation()
    if leaf.startswith("of"):
        leaf = (await world.turns(other, 1))[-1]
    with pytest.raises(NotFound):
        await view(store, conversation, leaf)


async def test_another_users_conversation_is_not_found(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 1)
    with pytest.raises(NotFound):
        await store.conversations.view(BOB.user_id, conversation.id, path[-1])


def random_tree(chance, size):
    """Turns below random earlier ones: parents by id, ids in the order of their age."""
    parents, replies = {}, [None]
    for number in range(size):
        asked, answered = f"m{2 * number:03}", f"m{2 * number + 1:03}"
        parents[asked], parents[answered] = chance.choice(replies[-6:]), asked
        replies.append(answered)
    return parents


def path_to(parents, leaf):
    """From the root."""
    path = [leaf]
    while parents[path[-1]] is not None:
        path.append(parents[path[-1]])
    return path[::-1]


async def test_over_random_trees_folded_and_shown_are_the_branch_and_pins_are_its_own(postgres_url, store):
    chance = random.Random(7)
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as database:
        await database.execute("INSERT INTO users (id, tier) VALUES ('alice', 'free')")
        for number in range(12):
            name = f"conv_{number}"
            parents = random_tree(chance, 25)
            pins = set(chance.sample(sorted(parents), 8))
            through = chance.sample([message for message in parents if int(message[1:]) % 2], chance.randrange(8))
            await database.execute("INSERT INTO conversations (id, user_id) VALUES (%s, 'alice')", [name])
            for message, parent in parents.items():
                await database.execute(
                    "INSERT INTO messages (id, user_id, conversation_id, parent_id, role, content, status, created_at,"
                    " pinned) VALUES (%s, 'alice', %s, %s, %s, 'x', 'complete', now() + %s * interval '1 s', %s)",
                    [name + message, name, parent and name + parent, "assistant" if int(message[1:]) % 2 else "user",
                     int(message[1:]), message in pins],
                )  # fmt: skip
            for message in sorted(through):
                before = [other for other in path_to(parents, message)[:-1] if other in through]
                previous = chance.choice([None, f"sum_{name}{before[-1]}"]) if before else None
                await database.execute(
                    "INSERT INTO summaries (id, user_id, conversation_id, through_message_id, version, previous_id,"
                    " text, tokens) VALUES (%s, 'alice', %s, %s, 1, %s, 'x', 1)",
                    [f"sum_{name}{message}", name, name + message, previous],
                )
            for leaf in parents:
                path = path_to(parents, leaf)
                seen = (await store.conversations.view("alice", name, name + leaf, leaf_may_be_folded=True))[1]
                covered = max((place for place, message in enumerate(path) if message in through), default=-1)
                assert shown(seen.verbatim) == [name + message for message in path[covered + 1 :]]
                folded = path[: covered + 1]
                assert (seen.summary.through_message_id if seen.summary else None) == (
                    name + folded[-1] if folded else None
                )
                assert shown(seen.pinned) == [name + message for message in folded if message in pins]


GROW = """
    INSERT INTO messages (id, user_id, conversation_id, parent_id, role, content, status, created_at)
    SELECT %(c)s || '_' || n, 'grown', %(c)s, CASE WHEN n > 0 THEN %(c)s || '_' || n - 1 END,
        CASE WHEN n %% 2 = 0 THEN 'user' ELSE 'assistant' END, 'x', 'complete', now() + n * interval '1 s'
    FROM generate_series(0, %(messages)s - 1) n;
"""
FOLDS = """
    INSERT INTO summaries (id, user_id, conversation_id, through_message_id, version, previous_id, text, tokens)
    SELECT 'sum_' || %(c)s || n, 'grown', %(c)s, %(c)s || '_' || n, 1,
        CASE WHEN n > 100 THEN 'sum_' || %(c)s || n - 100 END, 'x', 1
    FROM generate_series(99, %(messages)s - 41, 100) n
"""


def of_view(conversation_id, leaf):
    return {"user_id": "grown", "id": conversation_id, "at_head": False, "leaf": leaf, "leaf_may_be_folded": True}


@pytest.mark.slow
async def test_a_turn_reads_as_many_rows_in_a_long_conversation_as_in_a_short_one(postgres_url, store):
    """In front of 40 messages behind the last fold lie 200 or 20,000 folded ones."""
    sizes = (240, 20_040)
    with psycopg.connect(postgres_url, autocommit=True) as database:
        database.execute("INSERT INTO users (id, tier) VALUES ('grown', 'free')")
        for messages in sizes:
            name = f"conv_{messages}"
            database.execute("INSERT INTO conversations (id, user_id) VALUES (%s, 'grown')", [name])
            for statement in (GROW, FOLDS):
                database.execute(statement, {"c": name, "messages": messages})
        database.execute("ANALYZE messages, summaries, conversations")
        only_indexes(database)

        def read():
            return [rows_read(database, VIEW, of_view(f"conv_{size}", f"conv_{size}_{size - 1}")) for size in sizes]

        short, long = read()
        assert long == pytest.approx(short, rel=0.05)
        database.execute("UPDATE messages SET pinned = true WHERE id LIKE 'conv_%\\_3'")
        short, long = read()
        # What is more with a pin at the beginning are 200 folds, seen by some nodes of the plan each, and not the
        # 20,000 messages, which a walk would show to several nodes too.
        assert long - short < 20_000 / 2
    branch = (await store.conversations.view("grown", "conv_20040", "conv_20040_20039"))[1]
    assert len(branch.verbatim) == 40
    assert shown(branch.pinned) == ["conv_20040_3"]
