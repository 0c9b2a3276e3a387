"""Messages and regenerations: written whole, once (L8), where they may stand, and no more of them than are allowed."""

import asyncio

import pytest
from store_world import (
    ALICE,
    BOB,
    World,
    at_most,
    complete,
    failed,
    regeneration,
    stopped,
    submission,
)

from chatsvc.errors import ConversationBusy, IdempotencyMismatch, NotFound, TooManyReplies, UnknownParent
from chatsvc.limits import Principal, TierName
from chatsvc.run import RunStatus
from chatsvc.store import Submitted, open_store


@pytest.fixture
def world(store):
    return World(store)


@pytest.fixture
async def replica(postgres_url):
    """A second process' store on the same database."""
    async with open_store(postgres_url, pool_size=10, timeout_s=5) as opened:
        yield opened


async def test_a_submission_writes_question_answer_and_run_and_moves_the_head(world, store):
    conversation = await world.conversation()
    wanted = submission(conversation, max_tokens=64, temperature=0.5, background=True, user_tokens=7)
    submitted = await store.runs.submit(wanted)
    run = submitted.run
    assert submitted.created
    assert (run.id, run.status, run.attempt, run.last_seq) == (wanted.response_id, RunStatus.QUEUED, 0, 0)
    assert (run.tier, run.model, run.max_tokens, run.temperature, run.background) == (
        TierName.PLUS, "small", 64, 0.5, True
    )  # fmt: skip
    found, (question, answer) = await store.conversations.tree("alice", conversation.id)
    assert (found.head_message_id, found.updated_at > conversation.updated_at) == (answer.id, True)
    assert (question.content, question.status, question.tokens) == (wanted.content, RunStatus.COMPLETE, 7)
    assert (question.parent_id, answer.parent_id) == (None, question.id)
    assert (answer.content, answer.status, answer.response_id, answer.model) == (
        "", RunStatus.QUEUED, run.id, "small"
    )  # fmt: skip
    assert run == await store.runs.get("alice", run.id)


async def test_fifty_racing_submissions_with_one_id_make_one_run(world, store, replica):
    conversation = await world.conversation()
    same = {"client_msg_id": "one", "request_hash": b"body"}
    answers = await asyncio.gather(
        *(each.runs.submit(submission(conversation, **same)) for _ in range(25) for each in (store, replica))
    )
    assert sum(answer.created for answer in answers) == 1
    assert len({answer.run.id for answer in answers}) == 1
    assert len((await store.conversations.tree("alice", conversation.id))[1]) == 2


async def test_fifty_racing_first_submissions_of_different_users_all_succeed(store):
    async def first(number):
        principal = Principal(f"user-{number % 10}", TierName.FREE)
        world = World(store)
        conversation = await world.conversation(principal)
        return await store.runs.submit(submission(conversation, principal=principal, tier=at_most(50)))

    answers = await asyncio.gather(*(first(number) for number in range(50)))
    assert all(answer.created for answer in answers)


async def test_the_same_id_gives_the_same_run_in_whatever_state_it_is_now(world, store):
    run = await world.complete(client_msg_id="one", request_hash=b"body")
    conversation = await store.conversations.get("alice", run.conversation_id)
    again = await store.runs.submit(submission(conversation, client_msg_id="one", request_hash=b"body"))
    assert again == Submitted(run, created=False)
    assert await store.runs.replay("alice", "one", b"body") == again
    assert again.run.status is RunStatus.COMPLETE


async def test_a_replay_comes_before_every_other_refusal(world, store):
    """The conversation is busy and the user has no reply left, and all the same the first answer is repeated."""
    run = await world.queued(client_msg_id="one", request_hash=b"body")
    conversation = await store.conversations.get("alice", run.conversation_id)
    same = submission(conversation, run.message_id, client_msg_id="one", request_hash=b"body", tier=at_most(1))
    assert await store.runs.submit(same) == Submitted(run, created=False)


async def test_the_same_id_with_another_body_is_refused(world, store):
    run = await world.queued(client_msg_id="one", request_hash=b"body")
    conversation = await store.conversations.get("alice", run.conversation_id)
    for call in (
        store.runs.submit(submission(conversation, client_msg_id="one", request_hash=b"other")),
        store.runs.regenerate(regeneration(run.user_message_id, client_msg_id="one", request_hash=b"other")),
        store.runs.replay("alice", "one", b"other"),
    ):
        with pytest.raises(IdempotencyMismatch):
            await call


async def test_one_users_id_means_nothing_for_another(world, store):
    await world.queued(client_msg_id="one")
    assert await store.runs.replay("bob", "one", b"hash") is None
    theirs = await world.queued(await world.conversation(BOB), principal=BOB, client_msg_id="one")
    assert theirs.user_id == "bob"


async def test_an_unknown_or_foreign_parent_is_refused_and_nothing_is_written(world, store):
    conversation, other = await world.conversation(), await world.complete()
    own = await world.complete(conversation)
    before = await store.conversations.tree("alice", conversation.id)
    for parent in ("msg_none", "\x00", other.message_id, own.user_message_id):
        with pytest.raises((UnknownParent, NotFound)):
            await store.runs.submit(submission(conversation, parent))
    assert await store.conversations.tree("alice", conversation.id) == before


async def test_an_unknown_conversation_is_not_found(world, store):
    conversation = await world.conversation()
    await store.conversations.delete("alice", conversation.id)
    with pytest.raises(NotFound):
        await store.runs.submit(submission(conversation))


@pytest.mark.parametrize("state", ["queued", "streaming"])
async def test_a_branch_whose_reply_is_running_is_busy(world, store, state):
    run = await getattr(world, state)()
    conversation = await store.conversations.get("alice", run.conversation_id)
    with pytest.raises(ConversationBusy) as caught:
        await store.runs.submit(submission(conversation, run.message_id))
    assert caught.value.extra == {"response_id": run.id, "stop_requested": False}
    await store.runs.submit(submission(conversation))  # another branch is free


async def test_a_busy_branch_says_whether_a_stop_is_on_its_way(world, store):
    run = await world.streaming()
    await store.runs.request_stop("alice", run.id)
    conversation = await store.conversations.get("alice", run.conversation_id)
    with pytest.raises(ConversationBusy) as caught:
        await store.runs.submit(submission(conversation, run.message_id))
    assert caught.value.extra["stop_requested"] is True


@pytest.mark.parametrize("outcome", [complete(), stopped(), failed()], ids=lambda outcome: outcome.status)
async def test_a_reply_can_be_answered_to_however_it_ended(world, store, outcome):
    run = await world.streaming()
    await store.runs.finish(run.id, run.attempt, outcome)
    conversation = await store.conversations.get("alice", run.conversation_id)
    assert (await store.runs.submit(submission(conversation, run.message_id))).created


async def test_more_open_replies_than_allowed_are_refused_with_their_ids(world, store):
    there = [await world.queued(), await world.streaming(), await world.queued()]
    await world.queued(await world.conversation(BOB), principal=BOB)
    conversation = await world.conversation()
    with pytest.raises(TooManyReplies) as caught:
        await store.runs.submit(submission(conversation, tier=at_most(3)))
    assert caught.value.extra["open"] == [run.id for run in there]
    assert (await store.conversations.tree("alice", conversation.id))[1] == ()
    await store.runs.finish(there[1].id, 1, complete())
    assert (await store.runs.submit(submission(conversation, tier=at_most(3)))).created


async def test_racing_submissions_never_open_more_replies_than_allowed(world, store, replica):
    conversation = await world.conversation()
    answers = await asyncio.gather(
        *(each.runs.submit(submission(conversation, tier=at_most(3))) for _ in range(10) for each in (store, replica)),
        return_exceptions=True,
    )
    assert sum(isinstance(answer, Submitted) for answer in answers) == 3
    assert sum(isinstance(answer, TooManyReplies) for answer in answers) == 17
    assert len(await store.runs.open_runs("alice")) == 3


async def test_racing_messages_under_one_parent_are_all_kept(world, store, replica):
    conversation = await world.conversation()
    parent = (await world.complete(conversation)).message_id
    await asyncio.gather(
        *(each.runs.submit(submission(conversation, parent)) for _ in range(5) for each in (store, replica))
    )
    _, messages = await store.conversations.tree("alice", conversation.id)
    assert sum(message.parent_id == parent for message in messages) == 10


async def test_the_users_tier_is_that_of_the_last_request(world, store):
    conversation = await world.conversation()
    await store.runs.submit(submission(conversation))
    promoted = await store.runs.submit(submission(conversation, principal=Principal("alice", TierName.PRO)))
    assert promoted.run.tier is TierName.PRO


async def test_a_regeneration_is_a_sibling_and_becomes_the_head(world, store):
    first = await world.complete()
    again = (await store.runs.regenerate(regeneration(first.user_message_id, model="large"))).run
    found, messages = await store.conversations.tree("alice", first.conversation_id)
    assert [message.parent_id for message in messages[1:]] == [first.user_message_id] * 2
    assert len(messages) == 3
    assert (found.head_message_id, again.user_message_id) == (again.message_id, first.user_message_id)
    assert (messages[-1].response_id, messages[-1].model, messages[-1].status) == (again.id, "large", RunStatus.QUEUED)


async def test_racing_regenerations_with_one_id_make_one_run(world, store, replica):
    first = await world.complete()
    answers = await asyncio.gather(
        *(
            each.runs.regenerate(regeneration(first.user_message_id, client_msg_id="one"))
            for _ in range(10)
            for each in (store, replica)
        )
    )
    assert sum(answer.created for answer in answers) == 1
    assert len({answer.run.id for answer in answers}) == 1


async def test_only_a_users_message_can_be_answered_again(world, store):
    run = await world.complete()
    with pytest.raises(UnknownParent):
        await store.runs.regenerate(regeneration(run.message_id))
    with pytest.raises(NotFound):
        await store.runs.regenerate(regeneration("msg_none"))


async def test_a_regeneration_counts_as_an_open_reply(world, store):
    run = await world.streaming()
    with pytest.raises(TooManyReplies):
        await store.runs.regenerate(regeneration(run.user_message_id, tier=at_most(1)))


async def test_the_first_message_names_a_conversation_that_has_no_title(world, store):
    nameless, named = await world.conversation(), await world.conversation(title="Mine")
    await world.queued(nameless, title="Capital\x00s")
    await world.queued(nameless, title="Later")
    await world.queued(named, title="Later")
    assert (await store.conversations.get("alice", nameless.id)).title == "Capital\ufffds"
    assert (await store.conversations.get("alice", named.id)).title == "Mine"


async def test_a_user_who_was_seen_can_own_things(store):
    await store.users.touch(ALICE)
    await store.users.touch(Principal("alice", TierName.PRO))
    assert (await World(store).conversation()).user_id == "alice"
