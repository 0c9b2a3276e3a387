"""What a user wants to be known: theirs alone, in bounds, shown as of a conversation's beginning or fold, and gone."""

import asyncio

import psycopg
import pytest
from store_world import ALICE, BOB, World

from chatsvc import ids
from chatsvc.errors import MemoryFull, NotFound
from chatsvc.store import memories as rules


@pytest.fixture
def world(store):
    return World(store)


async def add(store, text, principal=ALICE):
    return await store.memories.add(principal, ids.new_memory_id(), text)


async def shown(store, conversation, user_id="alice"):
    """What the next prompt of a conversation is given."""
    return (await store.conversations.get(user_id, conversation.id)).memory


async def test_nothing_is_shown_unless_the_user_said_so(world, store):
    assert not await store.memories.enabled("alice")
    await add(store, "I live in Lisbon.")
    conversation = await world.conversation()
    assert await shown(store, conversation) == ()
    await store.memories.enable(ALICE, enabled=True)
    assert await store.memories.enabled("alice")
    assert await shown(store, conversation) == (), "a prompt changed in the middle of a conversation (L11)"
    assert await shown(store, await world.conversation()) == ("I live in Lisbon.",)
    assert await shown(store, await world.conversation(temporary=True)) == ()


async def test_turned_off_it_is_off_at_once_everywhere_and_the_entries_stay(world, store):
    await store.memories.enable(ALICE, enabled=True)
    memory = await add(store, "I live in Lisbon.")
    conversation = await world.conversation()
    await store.memories.enable(ALICE, enabled=False)
    assert await shown(store, conversation) == ()
    assert await store.memories.list("alice") == (memory,)


async def test_what_is_added_later_waits_for_the_next_conversation_L11(world, store):
    await store.memories.enable(ALICE, enabled=True)
    await add(store, "I live in Lisbon.")
    before = await world.conversation()
    await add(store, "I have a cat.")
    assert await shown(store, before) == ("I live in Lisbon.",)
    assert await shown(store, await world.conversation()) == ("I live in Lisbon.", "I have a cat.")


async def test_what_is_reworded_or_deleted_is_shown_nowhere_any_more(world, store):
    await store.memories.enable(ALICE, enabled=True)
    wrong, secret = await add(store, "I live in Lisbon."), await add(store, "I am ill.")
    conversation = await world.conversation()
    assert (await store.memories.change(ALICE, wrong.id, "I live in Porto.")).text == "I live in Porto."
    await store.memories.delete("alice", secret.id)
    assert await shown(store, conversation) == ()
    assert await shown(store, await world.conversation()) == ("I live in Porto.",)


async def test_only_its_owner_sees_changes_or_deletes_a_memory_L10(world, store):
    await store.memories.enable(BOB, enabled=True)
    memory = await add(store, "I live in Lisbon.")
    assert await store.memories.list("bob") == ()
    assert await shown(store, await world.conversation(BOB), "bob") == ()
    with pytest.raises(NotFound):
        await store.memories.change(BOB, memory.id, "mine")
    with pytest.raises(NotFound):
        await store.memories.delete("bob", memory.id)
    assert await store.memories.list("alice") == (memory,)


async def test_there_is_room_for_so_many_and_no_more_however_many_are_added_at_once(store):
    answers = await asyncio.gather(
        *(add(store, f"fact {number}") for number in range(rules.MOST + 5)), return_exceptions=True
    )
    refused = [answer for answer in answers if isinstance(answer, MemoryFull)]
    assert [answer.extra["limit"] for answer in refused] == [rules.MOST] * 5
    kept = await store.memories.list("alice")
    assert len(kept) == rules.MOST
    await store.memories.delete("alice", kept[0].id)
    long = await add(store, "x" * 500)
    with pytest.raises(MemoryFull, match=str(rules.MOST_CHARS)):
        await store.memories.change(ALICE, long.id, "x" * rules.MOST_CHARS)
    assert (await store.memories.list("alice"))[-1] == long


async def test_a_memory_is_one_line(store):
    assert (await add(store, "  I live\n\nin \u2028 Lisbon.\x00 ")).text == "I live in Lisbon.\ufffd"


async def test_nothing_of_a_deleted_user_remains(store, postgres_url):
    await add(store, "I live in Lisbon.")
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        await connection.execute("DELETE FROM users WHERE id = 'alice'")
        rows = await connection.execute("SELECT count(*) FROM memories")
        assert await rows.fetchone() == (0,)
