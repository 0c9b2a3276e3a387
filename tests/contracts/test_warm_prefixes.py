"""What the next prompt begins with is read while nobody waits, on a running scheduler and a real store."""

import asyncio
from functools import partial

import pytest
from folding import WORDS, Scribe, carried_on
from store_world import ALICE, World
from streaming import soon

from chatsvc import ids
from chatsvc.context.assemble import RECALLED
from chatsvc.context.words import VERSION
from chatsvc.run import RunStatus
from chatsvc.scheduler import NewMessage, dispatch, service
from chatsvc.store import ConversationPatch, RecallBranch

BLOCK = 16
HERON = "The code word of the heron society is quixotic."
ASKED = "What is the code word of the heron society?"
pytestmark = pytest.mark.usefixtures("recall_has_time")


@pytest.fixture
def talking(store, tmp_path, postgres_url):
    """A conversation with a scripted summariser: use it as a context manager."""
    return partial(carried_on, World(store), store, tmp_path, postgres_url)


@pytest.fixture
def billed(store, monkeypatch):
    """What is charged for prefixes, from when it begins to be written down: that may take a while."""
    noted, bill = [], store.allowances.bill

    async def noting(user_id, usage, kind):
        noted.append(usage)
        await bill(user_id, usage, kind)

    monkeypatch.setattr(store.allowances, "bill", noting)
    return noted


class Watched(Scribe):
    """Notes who asked, and holds prefixes back until they may be read."""

    def __init__(self, *drafts, **fields):
        super().__init__(*drafts, **fields)
        self.asked = []
        self.warming = asyncio.Event()
        self.may_warm = asyncio.Event()
        self.may_warm.set()
        self.aborted = 0

    async def generate(self, prompt, sampling, run_id, priority=0):
        self.asked.append((prompt, run_id))
        if run_id.endswith(".warm"):
            self.warming.set()
            try:
                # In a place of the engine, as a real one would be.
                async with self._slots.hold(priority):
                    await self.may_warm.wait()
            except asyncio.CancelledError:
                self.aborted += 1
                raise
        async for chunk in super().generate(prompt, sampling, run_id, priority):
            yield chunk

    @property
    def warmed(self):
        return [prompt for prompt, run_id in self.asked if run_id.endswith(".warm")]

    @property
    def last(self):
        return [prompt for prompt, run_id in self.asked if not run_id.endswith(".warm")][-1]


async def folded(talk, engine):
    """Talk until the first turn, which says what is asked for later, is folded, and can be found."""
    await talk.turn(HERON)
    await talk.until_folding(engine)
    await talk.quiet()
    summary, *_ = await talk.summaries()
    await soon(indexed(talk.store, summary))


async def indexed(store, summary):
    """What it stands for is indexed behind the replies."""
    branch = RecallBranch(user_id="alice", conversation_id=summary.conversation_id, through=summary.through_message_id)
    while not (chunks := await store.recall.chunks(branch, version=VERSION, embedder=None)) or chunks[0].missing:
        await asyncio.sleep(0.01)


async def one_more(talk, how, before):
    while talk.made.warming.ended["small", how] <= before:
        await asyncio.sleep(0.01)


async def test_after_a_turn_with_recalled_turns_the_next_one_finds_its_question_and_answer_cached(talking, store):
    engine = Watched("Facts\nA cat sat.")
    async with talking(engine) as talk:
        await folded(talk, engine)
        engine.asked.clear()
        run = await talk.turn(ASKED)
        assert RECALLED in engine.last.messages[-1].content
        await talk.quiet()
        [prefix] = engine.warmed
        again = await talk.turn("Thanks, and now to something else.")
        # Exactly what the next prompt begins with, through the answer just given.
        assert engine.last.token_ids[: prefix.tokens] == prefix.token_ids
        answer = await store.conversations.owner_of_message("alice", run.message_id)
        history = [message.content for message in engine.last.messages[:-1]]
        assert history[-2:] == [ASKED, answer.content]
        assert prefix.tokens > (await engine.render(engine.last.messages[:-1])).tokens
        context = await store.runs.context("alice", again.id)
        assert prefix.tokens - BLOCK < context.cached_tokens


async def test_after_a_turn_for_which_nothing_was_recalled_there_is_nothing_to_read(talking):
    engine = Watched("Facts\nA cat sat.")
    async with talking(engine) as talk:
        for _ in range(3):
            await talk.turn()
        await talk.quiet()
        assert engine.warmed == []


async def test_the_turn_for_which_the_oldest_are_left_out_finds_all_that_is_left_cached(talking, store):
    engine = Watched("…", tokens=100)  # no summary is usable
    async with talking(engine) as talk:
        left_out = 0
        while not left_out:
            assert talk.said < 40
            context = await store.runs.context("alice", (await talk.turn(f"{talk.said}: {WORDS}")).id)
            left_out = context.left_out
            await talk.quiet()
        assert left_out > 1
        assert context.prompt_tokens - context.cached_tokens < len(await engine.encode(f"99: {WORDS}")) + 2 * BLOCK
        assert engine.warmed


async def test_what_a_fold_has_put_off_that_came_to_nothing_is_read_all_the_same(talking, store):
    engine = Watched("…", tokens=650)  # a turn is so long that what asks for a fold has no room in the next prompt
    async with talking(engine) as talk:
        engine.may_warm.clear()
        engine.go_on.clear()
        await talk.until_folding(engine)
        engine.may_warm.set()
        engine.go_on.set()
        await talk.quiet()
        assert await talk.fold_runs() == [("failed", "summary_refused")]
        context = await store.runs.context("alice", (await talk.turn("And now?")).id)
        assert context.left_out
        assert context.prompt_tokens - context.cached_tokens < 3 * BLOCK


@pytest.mark.parametrize("change", ["summary", "pin", "system prompt"])
async def test_what_the_user_changes_is_read_before_the_next_turn(talking, store, change):
    engine = Watched("Facts\nA cat sat.")
    async with talking(engine) as talk:
        await folded(talk, engine)
        conversation_id = talk.conversation.id
        [summary] = await talk.summaries()
        before = talk.made.warming.ended["small", "read"]
        if change == "summary":
            await talk.made.folds.edit(
                "alice", conversation_id, summary.through_message_id, text="Facts\nMy own words.", version=1
            )
        elif change == "pin":
            await store.conversations.pin("alice", summary.through_message_id, pinned=True)
        else:
            patch = ConversationPatch(system_prompt="Be brief.")
            await store.conversations.update("alice", conversation_id, patch)
        await soon(one_more(talk, "read", before))
        await talk.quiet()
        context = await store.runs.context("alice", (await talk.turn("And now?")).id)
        # Computed was what is new: a question, and what does not fill a block.
        assert context.prompt_tokens - context.cached_tokens < 3 * BLOCK
        assert context.prompt_tokens > 300


async def other_turn(talk):
    """A whole turn of another conversation."""
    other = await World(talk.store).conversation()
    new = NewMessage(content="hi", client_msg_id=ids.uuid7_hex())
    run = (await talk.made.submit(ALICE, other.id, new)).run
    await talk.ended(run)
    return run


@pytest.mark.parametrize("same", [True, False], ids=["the next turn", "somebody else"])
async def test_the_only_place_is_had_at_once_by_whoever_asks_for_a_reply(talking, store, billed, same, monkeypatch):
    # Now and then places are looked at anyway: here by nobody but who asks.
    monkeypatch.setattr(service, "HEALTH_EVERY_S", 3600)
    monkeypatch.setattr(dispatch, "SWEEP_S", 3600)
    engine = Watched("Facts\nA cat sat.", slots=1)
    async with talking(engine) as talk:
        await folded(talk, engine)
        before = talk.made.warming.ended["small", "given_up"]
        [after_the_fold] = billed
        engine.may_warm.clear()
        engine.warming.clear()
        await talk.turn(ASKED)
        await soon(engine.warming.wait())
        # The engine's one place is taken, and no line knows of it.
        assert (engine.load().running, talk.made.dispatcher.active_count) == (1, 0)
        run = await talk.turn("Next.") if same else await other_turn(talk)
        assert (await store.runs.get("alice", run.id)).status is RunStatus.COMPLETE
        await soon(one_more(talk, "given_up", before))
        assert engine.aborted == 1
        await talk.quiet()
        # What gave way has cost nothing.
        assert billed == [after_the_fold]


async def test_a_shutdown_waits_for_no_prefix(talking):
    engine = Watched("Facts\nA cat sat.")
    async with talking(engine) as talk:
        await folded(talk, engine)
        engine.may_warm.clear()
        engine.warming.clear()
        await talk.turn(ASKED)
        await soon(engine.warming.wait())
        await soon(talk.made.drain(600))
        await soon(_idle(engine))
        assert not talk.made.warming.busy


async def _idle(engine):
    while engine.load().running:
        await asyncio.sleep(0.01)


async def test_an_engine_that_keeps_nothing_is_given_nothing_to_read(talking):
    engine = Watched("Facts\nA cat sat.", cache_tokens=0)
    async with talking(engine) as talk:
        await folded(talk, engine)
        await talk.turn(ASKED)
        assert RECALLED in engine.last.messages[-1].content
        await talk.quiet()
        assert engine.warmed == []
