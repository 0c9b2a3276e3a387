"""Summaries and the runs that write them: bound to a branch, committed by compare-and-set, never in the user's way."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import psycopg
import pytest
from store_world import ALICE, BOB, MANY, World, complete, failed, new_fold, submission

from chatsvc import ids
from chatsvc.errors import NotFound, SummaryChanged
from chatsvc.limits import ServiceCost, Usage
from chatsvc.run import RunKind, RunStatus
from chatsvc.store import Committed
from chatsvc.store.pool import Database
from chatsvc.store.summaries import Summaries


@pytest.fixture
def world(store):
    return World(store)


async def queued(store, conversation, through, base=None, **changes):
    return await store.summaries.queue(new_fold(conversation, through, base, **changes), rest_s=600)


async def claimed(store, conversation, through, base=None):
    run = await queued(store, conversation, through, base)
    [fold] = await store.runs.claim([run.id], "worker-1")
    return fold


async def commit(store, fold, text="Facts\nA cat."):
    return await store.summaries.commit(fold, ids.new_summary_id(), text, 4, complete(text=""))


async def folded(store, conversation, through, base=None, text="Facts\nA cat."):
    """The summary that a fold has left there."""
    fold = await claimed(store, conversation, through, base)
    assert await commit(store, fold, text) is Committed.YES
    return (await on_branch(store, conversation, through))[0]


async def on_branch(store, conversation, leaf=None):
    return await store.summaries.on_branch(conversation.user_id, conversation.id, leaf)


async def edit(store, conversation, summary, text="Mine.", user_id="alice"):
    return await store.summaries.edit(
        user_id,
        conversation.id,
        summary.through_message_id,
        version=summary.version,
        summary_id=ids.new_summary_id(),
        text=text,
        tokens=2,
    )


async def status_of(store, fold):
    return (await store.runs.reply(fold.id)).run.status


async def test_a_fold_leaves_its_summary_and_its_run_ends_with_it(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 3)
    fold = await claimed(store, conversation, path[1])
    assert (fold.kind, fold.fold_through_id, fold.fold_base_id) == (RunKind.FOLD, path[1], None)
    assert await commit(store, fold, "A\0 cat.") is Committed.YES
    [summary] = await on_branch(store, conversation)
    assert (summary.text, summary.version, summary.previous_id) == ("A\ufffd cat.", 1, None)
    assert (summary.through_message_id, summary.edited, summary.model) == (path[1], False, "small")
    assert await status_of(store, fold) is RunStatus.COMPLETE


async def test_saying_a_commit_again_gives_the_same_answer_and_writes_nothing_more(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 2)
    fold = await claimed(store, conversation, path[1])
    assert await commit(store, fold) is Committed.YES
    assert await commit(store, fold, "Something else.") is Committed.YES
    assert [summary.text for summary in await on_branch(store, conversation)] == ["Facts\nA cat."]


async def test_a_fold_goes_on_from_the_summary_before(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 4)
    first = await folded(store, conversation, path[1])
    second = await folded(store, conversation, path[5], first.id, "More.")
    assert second.previous_id == first.id
    assert await on_branch(store, conversation) == (second, first)
    _, view = await store.conversations.view("alice", conversation.id, path[-1], leaf_may_be_folded=True)
    assert view.summary == second
    assert [message.id for message in view.verbatim] == path[6:]


async def test_one_fold_of_a_conversation_is_open_however_many_are_wanted_at_once(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 4)
    runs = await asyncio.gather(*(queued(store, conversation, path[1 + 2 * (n % 3)]) for n in range(8)))
    assert sum(run is not None for run in runs) == 1
    other = await world.conversation()
    [leaf] = (await world.turns(other, 1))[1:]
    assert await queued(store, other, leaf) is not None


async def test_a_fold_whose_base_was_edited_meanwhile_fails_and_the_edit_stays(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 4)
    first = await folded(store, conversation, path[1])
    fold = await claimed(store, conversation, path[5], first.id)
    mine = await edit(store, conversation, first)
    assert await commit(store, fold) is Committed.CHANGED
    assert await on_branch(store, conversation) == (mine,)
    run = (await store.runs.reply(fold.id)).run
    assert (run.status, run.error_code) == (RunStatus.FAILED, "summary_changed")


@pytest.mark.parametrize("first", ["fold", "edit"])
async def test_of_a_fold_and_an_edit_that_race_neither_overwrites_what_it_has_not_seen(
    world, store, postgres_url, first
):
    """Both wait for the conversation, and get it in the order in which they came."""
    conversation = await world.conversation()
    path = await world.turns(conversation, 2)
    base = await folded(store, conversation, path[1])
    fold = await claimed(store, conversation, path[3], base.id)
    calls = {"fold": lambda: commit(store, fold), "edit": lambda: edit(store, conversation, base)}
    racing = {}
    async with await psycopg.AsyncConnection.connect(postgres_url) as holding:
        await holding.execute("SELECT 1 FROM conversations WHERE id = %s FOR UPDATE", [conversation.id])
        for name in sorted(calls, key=lambda name: name != first):
            racing[name] = asyncio.create_task(calls[name]())
            await waiting_for_locks(postgres_url, len(racing))
    committed, mine = await asyncio.gather(racing["fold"], racing["edit"])
    summaries = await on_branch(store, conversation)
    if first == "fold":
        # The edit is a later version of what the fold went on from.
        assert committed is Committed.YES
        assert (summaries[0].through_message_id, summaries[0].previous_id) == (path[3], base.id)
        assert summaries[1:] == (mine,)
        assert summaries[0].created_at <= mine.created_at
    else:
        assert committed is Committed.CHANGED
        assert summaries == (mine,)
    assert mine.previous_id == base.id


async def waiting_for_locks(url, count):
    """Return once so many of this database's connections wait for one."""
    sql = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    async with asyncio.timeout(60), await psycopg.AsyncConnection.connect(url, autocommit=True) as watching:
        while await (await watching.execute(sql)).fetchone() != (count,):
            await asyncio.sleep(0.005)


async def test_of_many_edits_of_one_version_one_is_taken_and_the_others_are_told(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 1)
    first = await folded(store, conversation, path[1])
    answers = await asyncio.gather(
        *(edit(store, conversation, first, f"Edit {n}.") for n in range(8)), return_exceptions=True
    )
    [taken] = [answer for answer in answers if not isinstance(answer, Exception)]
    refused = [answer for answer in answers if isinstance(answer, SummaryChanged)]
    assert len(refused) == 7
    assert all(error.extra["version"] == 2 for error in refused)
    assert await on_branch(store, conversation) == (taken,)
    assert (taken.version, taken.previous_id, taken.edited) == (2, first.id, True)


async def test_siblings_share_a_summary_and_a_branch_that_leaves_before_it_has_the_one_before(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 4)
    first = await folded(store, conversation, path[1])
    second = await folded(store, conversation, path[5], first.id, "More.")
    sibling = await world.complete(conversation, path[5], content="another way on")
    early = await world.complete(conversation, path[3], content="an edit before the fold")
    earlier = await world.complete(conversation, path[1], content="an edit right behind the first fold")
    root = await world.complete(conversation, None, content="a new beginning")
    assert await on_branch(store, conversation, sibling.message_id) == (second, first)
    for run, expected in ((sibling, second), (early, first), (earlier, first), (root, None)):
        _, view = await store.conversations.view("alice", conversation.id, run.message_id)
        assert view.summary == expected
    assert await on_branch(store, conversation, root.message_id) == ()


async def test_a_fold_may_stand_on_the_earlier_summary_of_a_branch_that_left_before_a_later_one(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 4)
    first = await folded(store, conversation, path[1])
    await folded(store, conversation, path[5], first.id, "More.")
    early = await world.complete(conversation, path[3], content="an edit before the fold")
    other = await folded(store, conversation, early.message_id, first.id, "The other way.")
    assert await on_branch(store, conversation, early.message_id) == (other, first)


async def test_a_summary_is_not_written_by_who_does_not_hold_the_run(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 1)
    fold = await claimed(store, conversation, path[1])
    assert await store.runs.requeue(fold.id, fold.attempt)
    assert await commit(store, fold) is Committed.NO
    [again] = await store.runs.claim([fold.id], "worker-2")
    assert await commit(store, fold) is Committed.NO
    assert await on_branch(store, conversation) == ()
    assert await commit(store, again) is Committed.YES


async def test_a_deleted_conversation_takes_its_folds_and_summaries_along(world, store, postgres_url):
    conversation = await world.conversation()
    path = await world.turns(conversation, 3)
    first = await folded(store, conversation, path[1])
    fold = await claimed(store, conversation, path[3], first.id)
    deleted = await store.conversations.delete("alice", conversation.id)
    assert fold.id in deleted.running
    assert await commit(store, fold) is Committed.NO
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        for table in ("runs", "summaries"):
            cursor = await connection.execute(
                f"SELECT count(*) FROM {table} WHERE conversation_id = %s", [conversation.id]
            )
            assert await cursor.fetchone() == (0,)


async def test_a_fold_is_no_open_reply_and_no_response_of_the_users(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 2)
    fold = await claimed(store, conversation, path[1])
    tier = msgspec.structs.replace(MANY, max_open_replies=1, max_queued=1)
    assert await store.runs.open_runs("alice") == []
    assert (await store.allowances.allowance("alice", tier)).open_used == 0
    for call in (store.runs.get("alice", fold.id), store.runs.find(fold.id), store.runs.request_stop("alice", fold.id)):
        with pytest.raises(NotFound):
            await call
    submitted = await store.runs.submit(submission(conversation, path[-1], tier=tier))
    assert submitted.created
    assert [run.id for run in await store.runs.open_runs("alice")] == [submitted.run.id]


async def test_waiting_folds_take_no_place_in_the_tiers_queue_or_before_a_reply(world, store):
    conversation = await world.conversation(BOB)
    run = await world.complete(conversation, principal=BOB)
    assert await queued(store, conversation, run.message_id) is not None
    tier = msgspec.structs.replace(MANY, max_queued=1)
    reply = (await store.runs.submit(submission(conversation, run.message_id, principal=BOB, tier=tier))).run
    assert await store.runs.positions() == {reply.id: 1}


@pytest.mark.parametrize("end", ["committed", "failed", "deleted"])
async def test_a_fold_is_in_the_usage_as_what_it_cost_and_takes_nothing_off_the_budget(world, store, postgres_url, end):
    budget = msgspec.structs.replace(MANY, budget=1_000, budget_window_s=3_600)
    conversation = await world.conversation()
    path = await world.turns(conversation, 1)
    before = await store.allowances.allowance("alice", budget)
    fold = await claimed(store, conversation, path[1])
    assert await store.allowances.allowance("alice", budget) == before
    used = Usage(prompt_tokens=20_000, cached_tokens=1_000, output_tokens=500)
    if end == "committed":
        outcome = msgspec.structs.replace(complete(text=""), usage=used)
        await store.summaries.commit(fold, ids.new_summary_id(), "Facts.", 2, outcome)
    elif end == "failed":
        await store.runs.finish(fold.id, fold.attempt, msgspec.structs.replace(failed(), usage=used))
    else:
        await store.conversations.delete("alice", conversation.id)
        await store.allowances.bill("alice", used, RunKind.FOLD)
    assert await store.allowances.allowance("alice", budget) == before
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        cursor = await connection.execute(
            "SELECT sum(replies), sum(prompt_tokens), sum(output_tokens), sum(background_units) FROM usage"
        )
        assert await cursor.fetchone() == (1, 20_020, 504, pytest.approx(19_000 + 100 + 1_500))
    assert (await store.runs.submit(submission(await world.conversation(), tier=budget))).created


async def test_the_end_of_a_fold_is_no_activity_of_its_conversation(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 1)
    before = (await store.conversations.get("alice", conversation.id)).updated_at
    await folded(store, conversation, path[1])
    assert (await store.conversations.get("alice", conversation.id)).updated_at == before


async def test_a_fold_that_was_planned_before_another_one_ended_is_not_queued(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 3)
    first = await folded(store, conversation, path[1])
    assert await queued(store, conversation, path[1]) is None
    assert await queued(store, conversation, path[3]) is None, "this one would not go on from the summary there is"
    await edit(store, conversation, first)
    assert await queued(store, conversation, path[3], first.id) is None


class HeldBack(Database):
    """Its transactions have done all that they do, and are not over before they may."""

    def __init__(self, url):
        super().__init__(url, size=1, timeout_s=60)
        self.done, self.go_on = asyncio.Event(), asyncio.Event()

    async def transaction(self, work, *, snapshot=False):
        async def held_back(connection):
            result = await work(connection)
            self.done.set()
            await self.go_on.wait()
            return result

        return await super().transaction(held_back, snapshot=snapshot)


@asynccontextmanager
async def being_committed(url, fold):
    """While the transaction that ends a fold and writes its summary has only its commit before it."""
    database = HeldBack(url)
    call = Summaries(database, ServiceCost()).commit(fold, ids.new_summary_id(), "Facts.", 2, complete(text=""))
    committing = asyncio.create_task(call)
    try:
        async with asyncio.timeout(60):
            await database.done.wait()
        yield
    finally:
        database.go_on.set()
        committed = await committing
        await database.close()
    assert committed is Committed.YES


@asynccontextmanager
async def being_ended(url, fold, status):
    async with await psycopg.AsyncConnection.connect(url) as ending:
        sql = "UPDATE runs SET status = %s, ended_at = clock_timestamp(), error_code = 'engine_failed' WHERE id = %s"
        await ending.execute(sql, [status, fold.id])
        yield


@pytest.mark.parametrize(("end", "last"), [("committed", 1), ("committed", 3), ("failed", 1), ("stopped", 1)])
async def test_no_fold_is_queued_while_another_one_ends_and_none_waits_for_that(world, store, postgres_url, end, last):
    """It would be queued by what it saw before: though it has no summary to go on from, or its turns rest by then."""
    conversation = await world.conversation()
    path = await world.turns(conversation, 3)
    fold = await claimed(store, conversation, path[1])
    being = being_committed(postgres_url, fold) if end == "committed" else being_ended(postgres_url, fold, end)
    async with being:
        assert await queued(store, conversation, path[last]) is None
    again = await queued(store, conversation, path[last])
    assert (again is not None) == (end == "stopped")


async def test_no_fold_is_queued_in_a_conversation_that_is_just_being_deleted(world, store, postgres_url):
    conversation = await world.conversation()
    path = await world.turns(conversation, 1)
    async with await psycopg.AsyncConnection.connect(postgres_url) as deleting:
        await deleting.execute("DELETE FROM conversations WHERE id = %s", [conversation.id])
        queueing = asyncio.create_task(queued(store, conversation, path[1]))
        await waiting_for_locks(postgres_url, 1)
    assert await queueing is None


async def test_the_fold_of_a_lost_worker_is_taken_over_like_any_run(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 1)
    fold = await claimed(store, conversation, path[1])
    await store.workers.heartbeat("me", roles=["worker"], capacity=1, ttl_s=60)
    [taken] = await store.workers.take_over("me")
    assert (taken.id, taken.kind, taken.attempt) == (fold.id, RunKind.FOLD, 2)
    # Saying so again counts no other loss.
    for _ in range(2):
        assert await store.runs.requeue(taken.id, taken.attempt, lost=True)
    [again] = await store.runs.claim([fold.id], "me")
    assert (again.attempt, again.losses) == (3, 1)
    assert await store.runs.requeue(again.id, again.attempt)  # it gave way
    [again] = await store.runs.claim([fold.id], "me")
    assert (again.attempt, again.losses) == (4, 1)


async def test_another_users_summaries_are_not_there(world, store):
    conversation = await world.conversation(ALICE)
    path = await world.turns(conversation, 1)
    summary = await folded(store, conversation, path[1])
    with pytest.raises(NotFound):
        await store.summaries.on_branch("bob", conversation.id, None)
    with pytest.raises(NotFound):
        await edit(store, conversation, summary, user_id="bob")
    assert await store.summaries.queue(new_fold(conversation, path[1], user_id="bob"), rest_s=0) is None
    with pytest.raises(NotFound):
        await store.summaries.on_branch("alice", conversation.id, ids.new_message_id())
    assert await on_branch(store, await world.conversation()) == ()
