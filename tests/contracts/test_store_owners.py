"""What is another user's, or nobody's, is not found, whatever is asked for (L10)."""

import pytest
from store_world import BOB, World, regeneration, submission

from chatsvc.errors import NotFound
from chatsvc.store import ConversationPatch


@pytest.fixture
def world(store):
    return World(store)


FOREIGN = {
    "get": lambda s, run: s.conversations.get("bob", run.conversation_id),
    "tree": lambda s, run: s.conversations.tree("bob", run.conversation_id),
    "branch_page": lambda s, run: s.conversations.branch_page(
        "bob", run.conversation_id, leaf=None, cursor=None, limit=5
    ),
    "branch_page of a leaf": lambda s, run: s.conversations.branch_page(
        "bob", run.conversation_id, leaf=run.message_id, cursor=None, limit=5
    ),
    "turn": lambda s, run: s.conversations.turn("bob", run.conversation_id, run.message_id),
    "update": lambda s, run: s.conversations.update("bob", run.conversation_id, ConversationPatch(title="mine")),
    "delete": lambda s, run: s.conversations.delete("bob", run.conversation_id),
    "owner_of_message": lambda s, run: s.conversations.owner_of_message("bob", run.message_id),
    "run": lambda s, run: s.runs.get("bob", run.id),
    "stop": lambda s, run: s.runs.request_stop("bob", run.id),
    "regenerate": lambda s, run: s.runs.regenerate(regeneration(run.user_message_id, principal=BOB)),
    "submit": lambda s, run: s.runs.submit(
        submission(Conversationlike(run.conversation_id), run.message_id, principal=BOB)
    ),
}


class Conversationlike:
    def __init__(self, conversation_id):
        self.id = conversation_id


@pytest.mark.parametrize("method", FOREIGN)
async def test_another_users_ids_are_not_found_and_nothing_changes(world, store, method):
    await world.conversation(BOB)
    run = await world.queued()
    before = await store.conversations.tree("alice", run.conversation_id), await store.runs.get("alice", run.id)
    with pytest.raises(NotFound):
        await FOREIGN[method](store, run)
    after = await store.conversations.tree("alice", run.conversation_id), await store.runs.get("alice", run.id)
    assert before == after


@pytest.mark.parametrize("bad", ["", "conv_none", "x\x00y", "\ud800", "x" * 10_000, "';--"])
async def test_an_id_that_can_be_none_is_not_found(store, world, bad):
    await world.conversation()
    for call in (
        store.conversations.get("alice", bad),
        store.conversations.tree("alice", bad),
        store.conversations.delete("alice", bad),
        store.conversations.owner_of_message("alice", bad),
        store.conversations.turn("alice", "conv_none", bad),
        store.runs.get("alice", bad),
        store.runs.reply(bad),
        store.runs.request_stop("alice", bad),
    ):
        with pytest.raises(NotFound):
            await call
