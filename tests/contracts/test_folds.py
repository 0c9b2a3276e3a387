"""Folds on a running scheduler: off the request path, one at a time, and nothing is lost whatever becomes of one."""

import asyncio
from functools import partial

import pytest
from chaos.settle import INVARIANTS
from folding import WINDOW, WORDS, Scribe, carried_on, is_fold, rows
from running_scheduler import take_over
from store_world import World
from streaming import soon

from chatsvc import ids
from chatsvc.context.fold import PARTS
from chatsvc.conversation import Role
from chatsvc.errors import EngineFailed
from chatsvc.run import MOST_LOSSES, RunKind, RunStatus
from chatsvc.scheduler.active import Interrupt
from chatsvc.scheduler.giving_way import MOST_TIMES

pytestmark = pytest.mark.usefixtures("recall_has_time")


@pytest.fixture
def world(store):
    return World(store)


@pytest.fixture
def talking(world, store, tmp_path, postgres_url):
    """A conversation with a scripted summariser: use it as a context manager."""
    return partial(carried_on, world, store, tmp_path, postgres_url)


async def test_a_conversation_that_outgrows_its_window_is_folded_again_and_again(talking, world, store):
    engine = Scribe("Facts\nA cat sat.", "Facts\nA cat sat and saw.", "Facts\nA rat.", "Facts\nA mat.")
    async with talking(engine) as talk:
        for _ in range(30):
            await talk.turn()
            await talk.quiet()
        summaries = await talk.summaries()
        assert len(summaries) >= 3
        path = await world.path(
            talk.conversation.id, (await talk.store.conversations.get("alice", talk.conversation.id)).head_message_id
        )
        places = [path.index(summary.through_message_id) for summary in summaries]
        assert places == sorted(places, reverse=True)
        # Each goes on from the one before, which is shown instead of the turns that it stands for.
        assert [summary.previous_id for summary in summaries] == [each.id for each in summaries[1:]] + [None]
        for number, prompt in enumerate(engine.fold_prompts):
            assert ("Notes so far" in prompt.messages[1].content) == (number > 0)
            assert prompt.tokens <= WINDOW
        context = await store.runs.context("alice", (await talk.turn()).id)
        assert context.summary.id == summaries[0].id
        assert context.left_out == 0
        await talk.quiet()
        for what, statement in INVARIANTS.items():
            assert await rows(talk.url, statement) == [], what


async def test_between_folds_every_prompt_begins_as_the_one_before_L11(talking, store):
    engine = Scribe("Facts\nA cat sat.")
    async with talking(engine) as talk:
        before, folded, folds = [], False, 0
        for _ in range(24):
            engine.prompts.clear()
            await talk.turn()
            prompt = next(each for each in engine.prompts if not is_fold(each))
            # The newest message comes with what was recalled for it, and goes down as it was said.
            *stable, _ = prompt.messages
            assert (stable[: len(before)] == before) == (not folded)
            await talk.quiet()
            before, folded, folds = stable, len(await talk.summaries()) > folds, len(await talk.summaries())
        assert folds > 1


async def test_the_new_prefix_is_warm_when_the_next_turn_comes(talking, store):
    engine = Scribe("Facts\nA cat sat.")
    async with talking(engine) as talk:
        await talk.until_folding(engine)
        await talk.quiet()
        context = await store.runs.context("alice", (await talk.turn("And now?")).id)
        assert context.summary is not None
        assert context.cached_tokens > 0.8 * context.prompt_tokens


class Cooling(Scribe):
    """Breaks when it is to read the new prefix."""

    async def generate(self, prompt, sampling, run_id, priority=0):
        if run_id.endswith(".warm"):
            self.prompts.append(prompt)
            raise EngineFailed("It broke.")
        async for chunk in super().generate(prompt, sampling, run_id, priority):
            yield chunk


async def test_what_a_prefix_took_that_could_not_be_warmed_is_counted_and_no_fold_has_failed(
    talking, store, monkeypatch, capsys
):
    engine = Cooling("Facts\nA cat sat.")
    billed, bill = [], store.allowances.bill

    async def noting(user_id, usage, kind):
        billed.append((usage.prompt_tokens, kind))
        await bill(user_id, usage, kind)

    monkeypatch.setattr(store.allowances, "bill", noting)
    async with talking(engine) as talk:
        await talk.until_folding(engine)
        await talk.quiet()
        assert await talk.fold_runs() == [("complete", None)]
        assert billed == [(engine.prompts[-1].tokens, RunKind.FOLD)]
    said = capsys.readouterr().out
    assert "prefix not warmed" in said
    assert "fold failed" not in said


async def test_a_turn_and_a_fold_at_the_same_time_both_survive(talking, store):
    engine = Scribe("Facts\nA cat sat.")
    engine.go_on.clear()
    async with talking(engine) as talk:
        await talk.until_folding(engine)
        run = await talk.turn("Meanwhile.")
        assert await talk.summaries() == ()
        other = await talk.start("At the same moment.")
        engine.go_on.set()
        await talk.ended(other)
        await talk.quiet()
        [summary] = await talk.summaries()
        for each in (run, other):
            message = await store.conversations.owner_of_message("alice", each.message_id)
            assert (message.status, message.content != "") == (RunStatus.COMPLETE, True)
        _, view = await store.conversations.view("alice", talk.conversation.id, other.message_id)
        assert view.summary == summary
        assert [message.id for message in view.verbatim[-4:]] == [
            run.user_message_id,
            run.message_id,
            other.user_message_id,
            other.message_id,
        ]


async def test_while_a_fold_is_not_ready_turns_go_on_and_say_what_was_left_out(talking, store):
    engine = Scribe("Facts\nA cat sat.")
    engine.go_on.clear()
    async with talking(engine) as talk:
        await talk.until_folding(engine)
        for _ in range(8):
            run = await talk.turn()
        context = await store.runs.context("alice", run.id)
        assert context.left_out > 0
        assert context.summary is None
        assert [status for status, _ in await talk.fold_runs()] == ["streaming"]
        engine.go_on.set()
        await talk.quiet()
        assert len(await talk.summaries()) > 0
        context = await store.runs.context("alice", (await talk.turn()).id)
        assert context.left_out == 0


LONG = WORDS * 40
SAME = "A cat.\n" * 9


@pytest.mark.parametrize("bad", ["", "  \n ", LONG, SAME], ids=["empty", "blank", "cut by its limit", "a loop"])
async def test_a_draft_that_is_no_summary_is_refused_and_asked_for_once_more(talking, store, bad):
    engine = Scribe(bad, "Facts\nA cat sat.")
    async with talking(engine) as talk:
        await talk.until_folding(engine)
        await talk.quiet()
        [summary] = await talk.summaries()
        assert summary.text == "Facts\nA cat sat."
        first, second = engine.fold_prompts
        assert "not usable" not in first.messages[0].content
        assert "not usable" in second.messages[0].content
        assert await talk.fold_runs() == [("complete", None)]


async def test_after_a_second_refusal_fewer_turns_are_folded_at_once(talking, store):
    engine = Scribe("", "", "Facts\nA cat sat.")
    async with talking(engine) as talk:
        await talk.until_folding(engine)
        await talk.quiet()
        [summary] = await talk.summaries()
        assert await talk.fold_runs() == [("failed", "summary_refused"), ("complete", None)]
        whole, _, half = engine.fold_prompts
        assert 0 < said(half) <= said(whole) // 2
        # What is said from there on is shown word by word: nothing is lost between them.
        context = await store.runs.context("alice", (await talk.turn("And now?")).id)
        assert (context.summary.id, context.left_out) == (summary.id, 0)
        # Before it and after it prefixes are warmed.
        [shown] = [prompt.messages for prompt in engine.prompts if prompt.messages[-1].content == "And now?"]
        assert sum(message.role is Role.USER for message in shown) + said(half) == talk.said + 1  # the summary's


def said(fold_prompt):
    """How many turns are folded."""
    return fold_prompt.messages[1].content.count("\nuser:\n")


async def test_after_all_of_it_was_refused_the_turns_stay_and_are_left_alone_for_a_while(talking, store):
    engine = Scribe("")
    async with talking(engine) as talk:
        await talk.until_folding(engine)
        await talk.quiet()
        await talk.turns(3)
        await talk.quiet()
        assert await talk.summaries() == ()
        assert len(engine.fold_prompts) == 2 * len(PARTS)
        assert await talk.fold_runs() == [("failed", "summary_refused")] * len(PARTS)
        context = await store.runs.context("alice", (await talk.turn()).id)
        assert context.summary is None


async def test_an_engine_that_breaks_the_fold_leaves_the_turns_as_they_are(talking, store):
    engine = Scribe("Facts.", error=RuntimeError("what no backend should throw"))
    async with talking(engine) as talk:
        await talk.until_folding(engine)
        await talk.quiet()
        assert await talk.summaries() == ()
        assert await talk.fold_runs() == [("failed", "internal_error")]
        assert (await store.runs.get("alice", (await talk.turn()).id)).status is RunStatus.COMPLETE


async def test_an_edit_of_the_summary_during_a_fold_wins_and_the_fold_starts_anew_from_it(talking, store):
    engine = Scribe("Facts\nA cat sat.", "Facts\nFrom the old.", "Facts\nFrom mine.")
    async with talking(engine) as talk:
        await talk.until_folding(engine)
        await talk.quiet()
        [first] = await talk.summaries()
        engine.summarising.clear()
        engine.go_on.clear()
        await talk.until_folding(engine)
        mine = await store.summaries.edit(
            "alice", talk.conversation.id, first.through_message_id, version=1,
            summary_id=ids.new_summary_id(), text="Facts\nMy own words.", tokens=6,
        )  # fmt: skip
        engine.go_on.set()
        await talk.quiet()
        newest, before = await talk.summaries()
        assert before == mine
        assert (newest.text, newest.previous_id) == ("Facts\nFrom mine.", mine.id)
        assert "> My own words." in engine.fold_prompts[-1].messages[1].content
        assert [status for status, _ in await talk.fold_runs()] == ["complete", "failed", "complete"]


async def test_a_deleted_conversation_ends_its_fold_and_what_it_used_is_noted(talking, store):
    engine = Scribe("Facts\nA cat sat.")
    engine.go_on.clear()
    async with talking(engine) as talk:
        await talk.until_folding(engine)
        before = engine.load().running
        await talk.made.delete_conversation("alice", talk.conversation.id)
        await talk.quiet()
        assert engine.load().running <= before
        [(units,)] = await rows(talk.url, "SELECT sum(background_units) FROM usage")
        assert units > 100


@pytest.mark.parametrize(("attempt", "losses"), [(1, 0), (MOST_TIMES + 1, 0), (9, MOST_LOSSES - 2)])
async def test_the_fold_of_a_worker_that_died_is_queued_again_and_loses_nothing(talking, store, attempt, losses):
    """However often it gave way before."""
    engine = Scribe("Facts\nA cat sat.")
    engine.go_on.clear()
    async with talking(engine) as talk:
        await talk.until_folding(engine)
        [active] = [each for each in talk.made.dispatcher.actives() if each.run.kind is RunKind.FOLD]
        await _worker_dies(talk, active, attempt, losses)
        engine.go_on.set()
        taken = await take_over(store, talk.made)
        assert [run.id for run in taken] == [active.run.id]
        talk.made._orphans.settle(active.run.id)
        await soon(_summary(talk))
        await talk.quiet()
        assert await talk.fold_runs() == [("complete", None)]


async def _worker_dies(talk, active, attempt, losses):
    """To the others it is gone: its heartbeat is not renewed any more."""
    sql = "UPDATE runs SET owner = 'a-worker-that-died', attempt = %s, losses = %s WHERE id = %s RETURNING id"
    assert await rows(talk.url, sql, attempt, losses, active.run.id)
    active.interrupt(Interrupt.LOST)
    await soon(active.ended.wait())


async def test_a_fold_whose_workers_died_again_and_again_is_failed(talking, store):
    engine = Scribe("Facts\nA cat sat.")
    engine.go_on.clear()
    async with talking(engine) as talk:
        await talk.until_folding(engine)
        [active] = [each for each in talk.made.dispatcher.actives() if each.run.kind is RunKind.FOLD]
        await _worker_dies(talk, active, 1, MOST_LOSSES - 1)
        assert [run.id for run in await take_over(store, talk.made)] == [active.run.id]
        talk.made._orphans.settle(active.run.id)
        await talk.ended(active.run)
        assert await talk.fold_runs() == [("failed", "worker_lost")]


async def _summary(talk):
    while not await talk.summaries():
        await asyncio.sleep(0.02)


async def test_a_shutdown_does_not_wait_for_a_fold(talking, store):
    engine = Scribe("Facts\nA cat sat.")
    engine.go_on.clear()
    async with talking(engine) as talk:
        await talk.until_folding(engine)
        await soon(talk.made.drain(600))
        assert await talk.fold_runs() == [("queued", None)]


async def test_on_an_engine_with_one_place_a_fold_gives_way_to_a_reply_twice_and_then_is_done(talking, store):
    engine = Scribe("Facts\nA cat sat.", slots=1)
    engine.go_on.clear()
    async with talking(engine) as talk:
        await talk.until_folding(engine)
        for _ in range(MOST_TIMES):
            engine.summarising.clear()
            # It ends, though the fold does not: its place is free as soon as somebody waits for one.
            run = await talk.turn("Meanwhile.")
            assert (await store.runs.get("alice", run.id)).status is RunStatus.COMPLETE
            await soon(engine.summarising.wait())  # and begins anew
            assert await talk.summaries() == ()
        waits = await talk.start("And now?")
        engine.go_on.set()
        await talk.ended(waits)
        assert len(await talk.summaries()) == 1
        await talk.quiet()
        # What was begun in vain is nobody's: charged is what was delivered.
        [(attempt, fold_tokens)] = await rows(
            talk.url, "SELECT attempt, prompt_tokens FROM runs WHERE kind = 'fold' AND status = 'complete'"
        )
        assert attempt == MOST_TIMES + 1
        assert fold_tokens == engine.fold_prompts[-1].tokens
        for what, statement in INVARIANTS.items():
            assert await rows(talk.url, statement) == [], what


async def test_with_a_place_free_no_fold_gives_way(talking, store):
    engine = Scribe("Facts\nA cat sat.", slots=2)
    engine.go_on.clear()
    async with talking(engine) as talk:
        await talk.until_folding(engine)
        await talk.turn("Meanwhile.")
        engine.go_on.set()
        await talk.quiet()
        assert len(engine.fold_prompts) == 1
        assert await talk.fold_runs() == [("complete", None)]


async def test_nothing_is_folded_while_background_work_may_not_be_done(talking, store):
    engine = Scribe("Facts\nA cat sat.")
    async with talking(engine) as talk:
        talk.made.folds.may_work = lambda model: False
        await talk.turns(12)
        await talk.quiet()
        assert await talk.fold_runs() == []
        talk.made.folds.may_work = lambda model: True
        await talk.turn()
        await talk.quiet()
        assert len(await talk.summaries()) > 0


async def test_a_turn_too_long_for_the_summariser_is_shortened_in_the_middle(talking, store):
    engine = Scribe("Facts\nA cat sat.")
    async with talking(engine) as talk:
        await talk.turn("BEGIN " + "word " * 1800 + "END", max_tokens=16)
        await talk.turn("Short.")
        await talk.quiet()
        [prompt] = engine.fold_prompts
        assert prompt.tokens + 256 <= WINDOW
        assert "BEGIN" in prompt.messages[1].content
        assert "END" in prompt.messages[1].content
        assert "[…]" in prompt.messages[1].content
