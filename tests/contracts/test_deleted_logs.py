"""Nothing of a deleted conversation remains in the log either, whoever dies before it is removed."""

import asyncio
import contextlib
from datetime import timedelta

import psycopg
import pytest
from store_world import World
from streaming import FragileLog, append, delta, soon

from chatsvc.scheduler import forget
from chatsvc.scheduler.forget import LogForgetter

AT_ONCE = timedelta()
LONG = timedelta(hours=1)


class Log(FragileLog):
    """Cannot delete while it is away, and counts."""

    def __init__(self):
        super().__init__()
        self.deletions = 0
        self.refused = 0
        self._deleted = asyncio.Event()

    async def delete(self, response_ids):
        self.refused += self.away
        self._check()
        await super().delete(response_ids)
        self.deletions += 1
        self._deleted.set()

    async def one_more_deletion(self):
        self._deleted.clear()
        await soon(self._deleted.wait())

    async def holds(self, response_id):
        return await self.position(response_id) is not None


@pytest.fixture
def world(store):
    return World(store)


@pytest.fixture
def log(monkeypatch):
    monkeypatch.setattr(forget, "RETRY_S", 0.01)
    return Log()


@contextlib.asynccontextmanager
async def running(forgetter):
    task = asyncio.create_task(forgetter.run())
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def deleted_reply(world, log):
    """A reply with a log, whose conversation has just been deleted."""
    run = await world.complete()
    await log.open(run.id, 1)
    await log.append([append(run.id, delta(1))])
    await world.store.conversations.delete(run.user_id, run.conversation_id)
    return run.id


async def test_what_a_process_could_not_remove_before_it_died_is_removed_by_the_next(world, store, log):
    response_id = await deleted_reply(world, log)
    log.away = True
    await LogForgetter(log, store.deleted_runs).forget([response_id])
    log.away = False
    assert await log.holds(response_id)
    async with running(LogForgetter(log, store.deleted_runs)):
        await log.one_more_deletion()
    assert not await log.holds(response_id)


async def test_what_could_not_be_removed_is_removed_once_the_log_is_back(world, store, log):
    forgetter = LogForgetter(log, store.deleted_runs)
    async with running(forgetter):
        response_id = await deleted_reply(world, log)
        log.away = True
        await forgetter.forget([response_id])
        async with asyncio.timeout(60):
            while log.refused < 3:
                await asyncio.sleep(0.01)
        log.away = False
        await log.one_more_deletion()
        assert not await log.holds(response_id)


async def test_a_log_that_was_begun_anew_by_a_worker_that_had_not_heard_is_removed_too(world, store, log):
    forgetter = LogForgetter(log, store.deleted_runs, settled=AT_ONCE, every_s=0.01)
    response_id = await deleted_reply(world, log)
    await forgetter.forget([response_id])
    await log.open(response_id, 1)
    async with running(forgetter):
        await log.one_more_deletion()
    assert not await log.holds(response_id)


async def test_names_of_deleted_runs_are_kept_until_every_worker_has_heard_and_no_longer(world, store, log):
    response_id = await deleted_reply(world, log)
    async with running(LogForgetter(log, store.deleted_runs, settled=LONG)):
        await log.one_more_deletion()
    assert await store.deleted_runs.after("", AT_ONCE, 10) == [response_id]
    assert await store.deleted_runs.after("", LONG, 10) == []
    await store.deleted_runs.done([response_id], LONG)
    assert await store.deleted_runs.after("", AT_ONCE, 10) == [response_id]
    await store.deleted_runs.done([response_id], AT_ONCE)
    assert await store.deleted_runs.after("", AT_ONCE, 10) == []


async def test_more_than_are_taken_at_once_are_all_removed(world, store, log, monkeypatch):
    monkeypatch.setattr(forget, "_AT_ONCE", 2)
    gone = [await deleted_reply(world, log) for _ in range(5)]
    async with running(LogForgetter(log, store.deleted_runs)):
        for _ in range(3):
            await log.one_more_deletion()
    assert [await log.holds(response_id) for response_id in gone] == [False] * 5


async def test_runs_are_written_down_also_when_their_user_is_deleted_by_hand(world, store, postgres_url):
    run = await world.complete()
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        await connection.execute("DELETE FROM users WHERE id = %s", (run.user_id,))
    assert await store.deleted_runs.after("", AT_ONCE, 10) == [run.id]
