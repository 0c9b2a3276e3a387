"""Conversations and their trees: owned, paged without gaps, deleted without rest."""

import asyncio
from datetime import timedelta

import psycopg
import pytest
from msgspec import UNSET
from plan_rows import only_indexes, rows_read
from store_world import ALICE, BOB, World, regeneration

from chatsvc import ids
from chatsvc.conversation import Role
from chatsvc.errors import IdempotencyMismatch, InvalidCursor, NotFound, UnknownParent
from chatsvc.run import RunStatus
from chatsvc.store import ConversationPatch, NewConversation, Submitted
from chatsvc.store.conversations import _BRANCH, TURN


@pytest.fixture
def world(store):
    return World(store)


async def pages(fetch, limit):
    """All pages of a list, one tuple each."""
    cursor, found = None, []
    while True:
        page = await fetch(cursor, limit)
        assert len(page.items) <= limit
        found.append(page.items)
        cursor = page.next_cursor
        if cursor is None:
            return found


async def test_a_new_conversation_is_empty_and_what_was_asked_for(store):
    new = NewConversation(id=ids.new_conversation_id(), title="Trip", system_prompt="Be brief.", model="small")
    made = await store.conversations.create(ALICE, new)
    assert (made.title, made.system_prompt, made.model) == ("Trip", "Be brief.", "small")
    assert (made.user_id, made.head_message_id, made.pinned, made.temporary) == ("alice", None, False, False)
    assert made.created_at == made.updated_at
    assert made.created_at.utcoffset() == timedelta(0)
    assert await store.conversations.tree("alice", made.id) == (made, ())


async def test_the_list_has_the_newest_activity_first_and_no_temporary_ones(world, store):
    first, second, third = [await world.conversation() for _ in range(3)]
    await world.conversation(temporary=True)
    await world.conversation(BOB)
    await world.queued(first)
    listed = await store.conversations.list("alice", cursor=None, limit=100)
    assert [each.id for each in listed.items] == [first.id, third.id, second.id]
    assert listed.next_cursor is None


@pytest.mark.parametrize("limit", [1, 3, 7])
async def test_paging_the_list_is_complete_and_repeats_nothing_while_rows_are_added(world, store, limit):
    there = [(await world.conversation()).id for _ in range(15)]

    async def fetch(cursor, limit):
        page = await store.conversations.list("alice", cursor=cursor, limit=limit)
        await world.conversation()
        return page

    found = [each.id for page in await pages(fetch, limit) for each in page]
    assert found == list(reversed(there))


async def test_paging_is_complete_when_all_rows_have_the_same_time(world, store, postgres_url):
    there = {(await world.conversation()).id for _ in range(10)}
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        await connection.execute("UPDATE conversations SET updated_at = now()")
    found = await pages(lambda cursor, limit: store.conversations.list("alice", cursor=cursor, limit=limit), 3)
    assert sorted(each.id for page in found for each in page) == sorted(there)


@pytest.mark.parametrize(
    "cursor", ["", "!", "x", "bnVsbA", "WyJ4Il0", "W10", "é", "\x00", "WyJub3QgYSB0aW1lIiwieCJd", "=" * 9]
)
async def test_a_cursor_that_was_not_given_out_is_refused(world, store, cursor):
    conversation = await world.conversation()
    with pytest.raises(InvalidCursor):
        await store.conversations.list("alice", cursor=cursor, limit=5)
    with pytest.raises(InvalidCursor):
        await store.conversations.branch_page("alice", conversation.id, leaf=None, cursor=cursor, limit=5)


async def test_the_tree_has_parents_before_children_and_ends_in_the_head(world, store):
    conversation = await world.conversation()
    await world.turns(conversation, 3)
    root = (await store.conversations.tree("alice", conversation.id))[1][0]
    await store.runs.regenerate(regeneration(root.id))
    found, messages = await store.conversations.tree("alice", conversation.id)
    seen = {None}
    for message in messages:
        assert message.parent_id in seen
        seen.add(message.id)
    assert len(messages) == 7
    assert messages[-1].id == found.head_message_id
    assert [message.role for message in messages[:2]] == [Role.USER, Role.ASSISTANT]
    assert [message.status for message in messages[-2:]] == [RunStatus.COMPLETE, RunStatus.QUEUED]


async def test_a_child_is_younger_than_its_parent_even_when_the_clock_was_set_back(world, store, postgres_url):
    conversation = await world.conversation()
    first = await world.complete(conversation)
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        await connection.execute("UPDATE messages SET created_at = created_at + interval '1 hour'")
    await world.queued(conversation, first.message_id)
    _, messages = await store.conversations.tree("alice", conversation.id)
    assert [message.parent_id for message in messages] == [None, *(message.id for message in messages[:-1])]


async def test_the_tree_is_of_one_moment(world, store):
    """Every message moves the head in its own transaction; a head that is not the newest is the mark of two moments."""
    conversation = await world.conversation()
    parent = None

    async def grow():
        nonlocal parent
        for _ in range(30):
            parent = (await world.complete(conversation, parent)).message_id

    growing = asyncio.create_task(grow())
    while not growing.done():
        found, messages = await store.conversations.tree("alice", conversation.id)
        assert found.head_message_id == (messages[-1].id if messages else None)
    await growing


async def test_a_branch_is_the_path_from_the_root_to_its_leaf(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 4)
    aside = await world.complete(conversation, path[3])
    assert await world.path(conversation.id, path[-1]) == path
    assert await world.path(conversation.id, aside.message_id) == [*path[:4], aside.user_message_id, aside.message_id]
    assert await world.path(conversation.id, path[4]) == path[:5]


async def test_a_new_message_stands_on_the_head_or_where_it_was_told_to(world, store):
    conversation = await world.conversation(system_prompt="Be brief.")

    async def ground(parent_id):
        found = await store.runs.ground("alice", conversation.id, parent_id, "new", b"hash")
        assert (found.known, found.conversation.system_prompt) == (None, "Be brief.")
        return [] if found.view is None else [message.id for message in found.view.branch.verbatim]

    assert await ground(UNSET) == []
    path = await world.turns(conversation, 3)
    assert await ground(UNSET) == path
    assert await ground(path[3]) == path[:4]
    assert await ground(None) == []
    assert await ground((await world.complete()).message_id) == []


async def test_there_is_no_ground_in_another_users_conversation(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 1)
    for parent_id in (UNSET, None, path[-1]):
        found = await store.runs.ground("bob", conversation.id, parent_id, "new", b"hash")
        assert (found.known, found.conversation, found.view) == (None, None, None)


async def test_a_message_that_came_before_is_known_before_anything_else(world, store):
    run = await world.queued(client_msg_id="one", request_hash=b"body")
    found = await store.runs.ground("alice", "conv_none", UNSET, "one", b"body")
    assert found.known == Submitted(run, created=False)
    with pytest.raises(IdempotencyMismatch):
        await store.runs.ground("alice", run.conversation_id, UNSET, "one", b"other")


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
async def test_a_branch_is_paged_newest_first(world, store, limit):
    conversation = await world.conversation()
    path = await world.turns(conversation, 3)
    aside = await world.complete(conversation, path[1])

    def page_of(leaf):
        return lambda cursor, limit: store.conversations.branch_page(
            "alice", conversation.id, leaf=leaf, cursor=cursor, limit=limit
        )

    found = [each.id for page in await pages(page_of(path[-1]), limit) for each in page]
    assert found == path[::-1]
    of_head = [each.id for page in await pages(page_of(None), limit) for each in page]
    assert of_head == [aside.message_id, aside.user_message_id, *path[1::-1]]


async def test_an_empty_conversation_has_an_empty_branch(world, store):
    conversation = await world.conversation()
    page = await store.conversations.branch_page("alice", conversation.id, leaf=None, cursor=None, limit=5)
    assert (page.items, page.next_cursor) == ((), None)


async def test_a_leaf_of_another_conversation_is_not_found(world, store):
    conversation, other = await world.conversation(), await world.complete()
    with pytest.raises(NotFound):
        await store.conversations.branch_page("alice", conversation.id, leaf=other.message_id, cursor=None, limit=5)
    with pytest.raises(NotFound):
        await store.conversations.turn("alice", conversation.id, other.message_id)
    with pytest.raises(UnknownParent):
        await store.conversations.update("alice", conversation.id, ConversationPatch(head_message_id=other.message_id))
    with pytest.raises(NotFound):
        await store.conversations.turn("alice", conversation.id, "msg_none")


async def test_a_cursor_of_one_branch_opens_no_other_conversation(world, store):
    mine = await world.conversation()
    await world.turns(mine, 2)
    page = await store.conversations.branch_page("alice", mine.id, leaf=None, cursor=None, limit=1)
    theirs = await world.conversation(BOB)
    with pytest.raises(InvalidCursor):
        await store.conversations.branch_page("bob", theirs.id, leaf=None, cursor=page.next_cursor, limit=1)


async def test_a_patch_changes_what_it_sets_and_nothing_else(world, store):
    conversation = await world.conversation(title="Old", system_prompt="Be brief.")
    path = await world.turns(conversation, 2)
    before = await store.conversations.get("alice", conversation.id)
    renamed = await store.conversations.update("alice", conversation.id, ConversationPatch(title="New", pinned=True))
    assert (renamed.title, renamed.pinned, renamed.system_prompt) == ("New", True, "Be brief.")
    assert (renamed.head_message_id, renamed.updated_at) == (path[-1], before.updated_at)
    moved = await store.conversations.update("alice", conversation.id, ConversationPatch(head_message_id=path[1]))
    assert (moved.head_message_id, moved.title) == (path[1], "New")
    emptied = await store.conversations.update(
        "alice", conversation.id, ConversationPatch(title=None, system_prompt=None, model="large")
    )
    assert (emptied.title, emptied.system_prompt, emptied.model, emptied.pinned) == (None, None, "large", True)
    assert await store.conversations.update("alice", conversation.id, ConversationPatch()) == emptied
    assert await store.conversations.get("alice", conversation.id) == emptied


async def test_a_refused_head_leaves_the_rest_of_the_patch_undone(world, store):
    conversation = await world.conversation(title="Old")
    with pytest.raises(UnknownParent):
        await store.conversations.update(
            "alice", conversation.id, ConversationPatch(title="New", head_message_id="msg_none")
        )
    assert (await store.conversations.get("alice", conversation.id)).title == "Old"


async def rows_with(url, needles):
    """Rows of any table in which one of the words occurs."""
    found = []
    async with await psycopg.AsyncConnection.connect(url) as connection:
        tables = await connection.execute(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"
        )
        for (table,) in await tables.fetchall():
            rows = await connection.execute(f"SELECT row_to_json(t)::text FROM {table} t")
            found += [row for (row,) in await rows.fetchall() if any(needle in row for needle in needles)]
    return found


async def test_nothing_of_a_deleted_conversation_remains(world, store, postgres_url):
    conversation = await world.conversation(title="needle")
    path = await world.turns(conversation, 3)
    _, branch = await store.conversations.turn("alice", conversation.id, path[-1])
    ended = [message.response_id for message in branch if message.response_id]
    streaming = await world.streaming(conversation, path[-1], content="needle")
    queued = await world.queued(conversation, path[1])
    kept = await world.complete()
    traces = [conversation.id, "needle", *path, *ended, streaming.id, queued.id, streaming.client_msg_id]
    assert await rows_with(postgres_url, traces)

    deleted = await store.conversations.delete("alice", conversation.id)

    # Until the logs are gone too.
    await store.deleted_runs.done(deleted.response_ids, timedelta())
    assert await rows_with(postgres_url, traces) == []
    assert sorted(deleted.response_ids) == sorted([*ended, streaming.id, queued.id])
    assert sorted(deleted.running) == sorted([streaming.id, queued.id])
    assert (await store.runs.get("alice", kept.id)) == kept
    with pytest.raises(NotFound):
        await store.conversations.delete("alice", conversation.id)


async def test_the_client_msg_ids_of_a_deleted_conversation_may_be_used_again(world, store):
    first = await world.queued(client_msg_id="again", request_hash=b"one")
    await store.conversations.delete("alice", first.conversation_id)
    second = await world.queued(client_msg_id="again", request_hash=b"two")
    assert second.id != first.id


async def test_idle_temporary_conversations_are_swept_and_others_stay(world, store, postgres_url):
    idle = await world.conversation(temporary=True)
    gone = await world.complete(idle)
    busy = await world.conversation(temporary=True)
    await world.streaming(busy)
    kept = await world.conversation()
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        await connection.execute("UPDATE conversations SET updated_at = now() - interval '2 hours'")
    fresh = await world.conversation(temporary=True)

    assert list(await store.conversations.sweep_temporary(timedelta(hours=1))) == [gone.id]

    with pytest.raises(NotFound):
        await store.conversations.get("alice", idle.id)
    for each in (busy, kept, fresh):
        await store.conversations.get("alice", each.id)
    assert list(await store.conversations.sweep_temporary(timedelta(hours=1))) == []


async def test_nul_and_half_characters_become_replacement_characters(world, store):
    conversation = await world.conversation(title="a\x00b", system_prompt="\ud83d\ude00 \ud800")
    assert (conversation.title, conversation.system_prompt) == ("a\ufffdb", "\U0001f600 \ufffd")
    renamed = await store.conversations.update("alice", conversation.id, ConversationPatch(title="\x00"))
    assert renamed.title == "\ufffd"
    run = await world.complete(conversation, content="q\x00\udfff", text="a\x00\ud83d")
    _, (question, answer) = await store.conversations.turn("alice", run.conversation_id, run.message_id)
    assert (question.content, answer.content) == ("q\ufffd\ufffd", "a\ufffd\ufffd")


async def test_text_comes_back_byte_for_byte(world, store):
    text = "\r\n\t\u2028\u2029\x85\ufeff e\u0301 \U0001f468\u200d\U0001f469 ไทย \x01\x7f data: x\n\nid: 7"
    run = await world.complete(content=text, text=text)
    _, (question, answer) = await store.conversations.turn("alice", run.conversation_id, run.message_id)
    assert (question.content, answer.content) == (text, text)


async def chain(url, conversation, length):
    """A long branch, written past the door, in one statement. Returns the leaf."""
    async with await psycopg.AsyncConnection.connect(url) as connection:
        await connection.execute(
            """
            INSERT INTO messages (id, user_id, conversation_id, parent_id, role, content, status, created_at)
            SELECT %(id)s || '_' || n, 'alice', %(id)s, CASE WHEN n > 1 THEN %(id)s || '_' || n - 1 END,
                CASE n %% 2 WHEN 1 THEN 'user' ELSE 'assistant' END, repeat('word ', 40), 'complete',
                now() + n * interval '1 second'
            FROM generate_series(1, %(length)s) n
            """,
            {"id": conversation.id, "length": length},
        )
        await connection.commit()
        await connection.set_autocommit(True)
        await connection.execute("VACUUM ANALYZE messages")
    return f"{conversation.id}_{length}"


async def test_a_branch_costs_what_it_is_long_and_a_page_of_it_what_the_page_is(world, store, postgres_url):
    turns, pages = [], []
    for length in (500, 2_000):
        conversation = await world.conversation()
        leaf = await chain(postgres_url, conversation, length)
        _, branch = await store.conversations.turn("alice", conversation.id, leaf)
        assert [message.id for message in branch] == [f"{conversation.id}_{n}" for n in range(1, length + 1)]
        page = await store.conversations.branch_page("alice", conversation.id, leaf=leaf, cursor=None, limit=30)
        assert len(page.items) == 30
        params = {"user_id": "alice", "id": conversation.id, "at_head": False, "leaf": leaf, "limit": 31}
        with psycopg.connect(postgres_url, autocommit=True) as database:
            only_indexes(database)
            turns.append(rows_read(database, TURN, params))
            pages.append(rows_read(database, _BRANCH, params))
    assert turns[1] == pytest.approx(4 * turns[0], rel=0.05)
    assert pages[1] == pytest.approx(pages[0], rel=0.05)
