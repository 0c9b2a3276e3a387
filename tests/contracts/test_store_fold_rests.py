"""How long turns are let be that no summary could be made of."""

import msgspec
import pytest
from recall_world import rows_committed
from store_world import World, failed, new_fold, stopped


@pytest.fixture
def world(store):
    return World(store)


async def queued(store, conversation, through, rest_s=600):
    return await store.summaries.queue(new_fold(conversation, through), rest_s=rest_s)


async def claimed(store, conversation, through):
    run = await queued(store, conversation, through)
    [fold] = await store.runs.claim([run.id], "worker-1")
    return fold


async def test_what_failed_is_not_tried_again_at_once(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 2)
    fold = await claimed(store, conversation, path[1])
    assert await store.runs.finish(fold.id, fold.attempt, failed())
    assert await queued(store, conversation, path[1]) is None
    assert await store.summaries.queue(new_fold(conversation, path[1]), rest_s=0) is not None


@pytest.mark.parametrize(
    ("code", "rests"), [("summary_refused", (100, 400, 1600, 1600)), ("engine_failed", (1600, 1600, 1600))]
)
async def test_refused_drafts_are_soon_tried_again_and_ever_later(world, store, postgres_url, code, rests):
    conversation = await world.conversation()
    path = await world.turns(conversation, 2)

    async def again():
        return await store.summaries.queue(new_fold(conversation, path[1]), rest_s=1600)

    async def ended_ago(seconds):
        await rows_committed(
            postgres_url, f"UPDATE runs SET ended_at = now() - interval '{seconds} s' WHERE kind = 'fold'"
        )

    fold = await again()
    for rest in rests:
        [fold] = await store.runs.claim([fold.id], "worker-1")
        await store.runs.finish(fold.id, fold.attempt, msgspec.structs.replace(failed(), error_code=code))
        await ended_ago(rest - 10)
        assert await again() is None
        await ended_ago(rest + 10)
        fold = await again()
        assert fold is not None


@pytest.mark.parametrize(("code", "days", "rest"), [("summary_refused", 90, 100), ("engine_failed", 0.02, 400)])
async def test_how_long_refused_turns_rest_depends_on_the_last_failure_and_how_many_there_were_lately(
    world, store, postgres_url, code, days, rest
):
    conversation = await world.conversation()
    path = await world.turns(conversation, 2)

    async def failing(code, ago):
        fold = await store.summaries.queue(new_fold(conversation, path[1]), rest_s=0)
        [fold] = await store.runs.claim([fold.id], "worker-1")
        await store.runs.finish(fold.id, fold.attempt, msgspec.structs.replace(failed(), error_code=code))
        await ended_ago(fold, ago)
        return fold

    async def ended_ago(fold, ago):
        await rows_committed(
            postgres_url, f"UPDATE runs SET ended_at = now() - interval '{ago}' WHERE id = '{fold.id}'"
        )

    await failing(code, f"{days} days")
    fold = await failing("summary_refused", f"{rest - 10} s")
    assert await store.summaries.queue(new_fold(conversation, path[1]), rest_s=1600) is None
    await ended_ago(fold, f"{rest + 10} s")
    assert await store.summaries.queue(new_fold(conversation, path[1]), rest_s=1600) is not None


@pytest.mark.parametrize("code", ["summary_refused", "engine_failed"])
async def test_folds_that_rest_are_told_with_why_and_those_of_another_base_or_conversation_are_not(
    world, store, postgres_url, code
):
    conversation, other = await world.conversation(), await world.conversation()
    path = await world.turns(conversation, 3)
    for through in (path[1], path[3]):
        fold = await claimed(store, conversation, through)
        await store.runs.finish(fold.id, fold.attempt, msgspec.structs.replace(failed(), error_code=code))
    stopped_fold = await claimed(store, conversation, path[5])
    await store.runs.finish(stopped_fold.id, stopped_fold.attempt, stopped(text=""))
    refused = code == "summary_refused"
    resting = store.summaries.resting
    assert await resting(conversation.id, None, rest_s=600) == {path[1]: refused, path[3]: refused}
    assert await resting(conversation.id, "sum_1", rest_s=600) == {}
    assert await resting(other.id, None, rest_s=600) == {}
    await rows_committed(
        postgres_url, f"UPDATE runs SET ended_at = now() - interval '601 s' WHERE fold_through_id = '{path[1]}'"
    )
    assert await resting(conversation.id, None, rest_s=600) == {path[3]: refused}


async def test_what_was_stopped_may_be_tried_again_at_once(world, store):
    conversation = await world.conversation()
    path = await world.turns(conversation, 2)
    fold = await claimed(store, conversation, path[1])
    assert await store.runs.finish(fold.id, fold.attempt, stopped(text=""))
    assert await queued(store, conversation, path[1]) is not None
