"""What a message stands on may change while it is taken in: then it is looked at again, or refused as a whole."""

import asyncio

import msgspec
import pytest
from running_scheduler import Held, scheduler
from store_world import ALICE, MANY, World, complete, regeneration, stopped, submission

from chatsvc import ids
from chatsvc.errors import ConversationBusy, QueueFull
from chatsvc.limits import Principal, TierName
from chatsvc.scheduler import NewAnswer, NewMessage, entrance
from chatsvc.store import Moved, NewConversation


@pytest.fixture
def world(store):
    return World(store)


class Overheard:
    """What an engine was asked, as texts."""

    def __init__(self, engine):
        self.prompts = []
        self._render, self._generate = engine.render, engine.generate
        self._texts = {}
        engine.render, engine.generate = self.render, self.generate

    async def render(self, messages):
        prompt = await self._render(messages)
        self._texts[prompt.token_ids] = [message.content for message in messages]
        return prompt

    def generate(self, prompt, *args):
        self.prompts.append(self._texts[prompt.token_ids])
        return self._generate(prompt, *args)


async def conversation_of(store, principal=ALICE):
    return await store.conversations.create(principal, NewConversation(id=ids.new_conversation_id()))


async def ended(store, run):
    while not await store.runs.ended([run.id]):
        await asyncio.sleep(0.005)
    return await store.runs.get(run.user_id, run.id)


async def text_of(store, run):
    return (await store.conversations.owner_of_message(run.user_id, run.message_id)).content


def message(content, client_msg_id):
    return NewMessage(content=content, client_msg_id=client_msg_id)


async def test_a_message_sent_right_after_a_stop_is_answered_with_all_that_was_kept_l11(store, tmp_path, monkeypatch):
    monkeypatch.setattr(entrance, "STOPPING_WAIT_S", 60.0)  # the end of the other may take long on a busy machine
    async with scheduler(store, tmp_path, script="tokens_per_s=200&tokens=1000&slots=4") as made:
        heard = Overheard(made.engine)
        for number in range(20):
            conversation = await conversation_of(store)
            first = (await made.submit(ALICE, conversation.id, message("one", f"a{number}"))).run
            while not (active := made.dispatcher.active(first.id)) or not made.engine.load().running:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            await made.stop("alice", first.id)
            asked = len(heard.prompts)
            second = (await made.submit(ALICE, conversation.id, message("two", f"b{number}"))).run
            while len(heard.prompts) == asked:
                await asyncio.sleep(0.005)
            await made.stop("alice", second.id)
            await ended(store, second)
            assert active.run.id == first.id
            assert heard.prompts[-1] == ["one", await text_of(store, first), "two"]


async def test_a_message_sent_while_its_parent_ends_is_answered_with_the_whole_parent_or_refused(store, tmp_path):
    async with scheduler(store, tmp_path, script="tokens_per_s=50&tokens=10&slots=4") as made:
        held = Held(made.engine)
        heard = Overheard(made.engine)
        conversation = await conversation_of(store)
        first = (await made.submit(ALICE, conversation.id, message("one", "a"))).run
        with pytest.raises(ConversationBusy):
            await made.submit(ALICE, conversation.id, message("two", "b"))
        ground = store.runs.ground

        async def slow_ground(*args):
            found = await ground(*args)
            held.go_on.set()
            await ended(store, first)
            return found

        store.runs.ground = slow_ground
        second = (await made.submit(ALICE, conversation.id, message("two", "b"))).run
        await ended(store, second)
        assert heard.prompts[-1] == ["one", await text_of(store, first), "two"]


async def test_a_continued_reply_that_is_stopped_at_once_keeps_its_text(store, world, tmp_path):
    async with scheduler(store, tmp_path, script="tokens_per_s=50&tokens=200&slots=4") as made:
        for number in range(10):
            broken = await world.streaming(model="of-yesterday")
            assert await store.runs.finish(broken.id, broken.attempt, stopped("What was said before."))
            said = await store.conversations.owner_of_message("alice", broken.message_id)
            wish = NewAnswer(client_msg_id=f"c{number}", model="small", continues=said)
            run = (await made.answer_again(ALICE, broken.user_message_id, wish)).run
            await made.stop("alice", run.id)
            await ended(store, run)
            assert (await text_of(store, run)).startswith("What was said before.")


async def test_of_two_messages_to_one_head_at_once_one_is_taken(store, world):
    for _ in range(20):
        conversation = await world.conversation()
        head = (await world.complete(conversation)).message_id
        answers = await asyncio.gather(
            *(store.runs.submit(submission(conversation, head, at_head=True)) for _ in range(2)), return_exceptions=True
        )
        assert sum(isinstance(answer, Moved) for answer in answers) == 1
        # Whoever names the parent means it: an edit.
        assert (await store.runs.submit(submission(conversation, head))).created


async def test_answers_again_in_a_line_that_fills_are_taken_or_refused(store, world):
    users = [Principal(f"user-{number}", TierName.FREE) for number in range(8)]
    asked = []
    for user in users:
        conversation = await conversation_of(store, user)
        run = (await store.runs.submit(submission(conversation, principal=user, owner="w"))).run
        assert await store.runs.finish(run.id, 1, complete())
        asked.append((user, run.user_message_id))
    short = msgspec.structs.replace(MANY, max_queued=3)
    for _ in range(5):
        answers = await asyncio.gather(
            *(store.runs.regenerate(regeneration(each, principal=user, tier=short)) for user, each in asked),
            return_exceptions=True,
        )
        refused = [answer for answer in answers if isinstance(answer, Exception)]
        assert {type(answer) for answer in refused} <= {QueueFull, Moved}
        for answer in answers:
            if answer not in refused:
                await store.runs.request_stop(answer.run.user_id, answer.run.id)


async def test_a_message_gets_no_place_that_a_claim_under_way_has_and_passes_nobody(store, world, tmp_path):
    claim = store.runs.claim
    committed, answer = asyncio.Event(), asyncio.Event()

    async def held(*args):
        claimed = await claim(*args)
        committed.set()
        await answer.wait()
        return claimed

    store.runs.claim = held
    async with scheduler(store, tmp_path, script="tokens_per_s=5&tokens=200&slots=1") as made:
        first = await world.queued()
        async with asyncio.timeout(60):
            await committed.wait()
        conversation = await conversation_of(store)
        second = (await made.submit(ALICE, conversation.id, message("one", "a"))).run
        assert second.owner is None
        answer.set()
        while made.dispatcher.active(first.id) is None:
            await asyncio.sleep(0.005)
        assert (made.dispatcher.active_count, made.dispatcher.waiting_count) == (1, 1)
