"""What replicas share: news that all hear in order, and homes of conversations. On Redis and in memory alike."""

import asyncio
import uuid

import psycopg
import pytest
from log_server import LogServer
from redis.crc import key_slot
from redis_groups import Cluster, SentinelGroup
from streaming import soon

from chatsvc.errors import LogUnavailable
from chatsvc.scheduler import shared_state as shared_state_module
from chatsvc.scheduler.shared_state import Board, Home, MemoryState, RedisState
from chatsvc.store import open_store
from chatsvc.streamlog.factory import HASH_TAG
from chatsvc.streamlog.redis_cluster import SlotMap
from chatsvc.streamlog.redis_wire import Address, pack


class Listener:
    def __init__(self, state):
        self.heard = []
        self._more = asyncio.Event()
        self._task = asyncio.create_task(state.follow(self._hear))

    def _hear(self, news):
        self.heard.append(news)
        self._more.set()

    async def until(self, *last):
        async def comes():
            while tuple(self.heard[-len(last) :]) != last:
                self._more.clear()
                await self._more.wait()

        await soon(comes())

    async def close(self):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@pytest.fixture(params=["memory", "redis"])
async def states(request, redis_url):
    if request.param == "memory":
        board = Board()
        made = [MemoryState(board) for _ in range(2)]
    else:
        scope = uuid.uuid4().hex
        made = [RedisState(redis_url, scope=scope, timeout_s=5) for _ in range(2)]
    yield made
    for state in made:
        await state.aclose()


async def follow(state, speaker):
    """Returns once it hears: who begins to listen hears what is said from then on."""
    listener = Listener(state)
    while not listener.heard:
        await speaker.publish(b"are you there?")
        await asyncio.sleep(0.01)
    return listener


async def test_all_hear_all_news_in_one_order(states):
    one, other = states
    listeners = [await follow(state, one) for state in states]
    for number in range(100):
        await (one, other)[number % 2].publish(b"%d" % number)
    for listener in listeners:
        await listener.until(b"98", b"99")
        said = [news for news in listener.heard if news != b"are you there?"]
        assert said == [b"%d" % number for number in range(100)]
        await listener.close()


async def test_a_home_is_what_was_noted_last(states):
    one, other = states
    assert list(await other.homes(["conv_a", "conv_b"])) == [None, None]
    await one.settle({"conv_a": Home("r1", 10), "conv_b": Home("r1", 20)})
    await other.settle({"conv_a": Home("r2", 30)})
    assert list(await one.homes(["conv_a", "conv_b", "conv_c"])) == [Home("r2", 30), Home("r1", 20), None]
    assert list(await one.homes([])) == []


async def test_those_with_another_database_hear_nothing_and_know_no_homes(redis_url):
    ours, theirs = (RedisState(redis_url, scope=scope, timeout_s=5) for scope in ("ours", "theirs"))
    listener = await follow(ours, ours)
    await theirs.publish(b"x")
    await theirs.settle({"conv_a": Home("r1")})
    assert list(await ours.homes(["conv_a"])) == [None]
    await ours.publish(b"y")
    await listener.until(b"y")
    assert b"x" not in listener.heard
    await listener.close()
    for state in (ours, theirs):
        await state.aclose()


async def test_old_news_are_not_kept(redis_url, monkeypatch):
    monkeypatch.setattr(shared_state_module, "_NEWS_KEPT_S", 0.0)
    state = RedisState(redis_url, scope="old news", timeout_s=5)
    for number in range(1000):
        await state.publish(b"%d" % number)
    [kept] = await state._talk(pack(b"XLEN", state._news))
    assert 0 < kept < 500
    await state.aclose()


async def test_a_redis_that_was_away_and_came_back_empty_is_heard_again(tmp_path):
    with LogServer(tmp_path) as server:
        state = RedisState(server.url, scope="s", timeout_s=2)
        listener = await follow(state, state)
        server.kill()
        with pytest.raises(LogUnavailable):
            await state.publish(b"lost")
        with pytest.raises(LogUnavailable):
            await state.homes(["conv_a"])
        server.start()
        await listener.close()
        listener = await follow(state, state)
        await state.publish(b"again")
        await listener.until(b"again")
        await listener.close()
        await state.aclose()


async def test_who_listens_while_redis_restarts_hears_what_is_said_afterwards(tmp_path):
    with LogServer(tmp_path) as server:
        state = RedisState(server.url, scope="s", timeout_s=2)
        listener = await follow(state, state)
        server.kill()
        server.start()
        while listener.heard[-1] != b"after":
            try:
                await state.publish(b"after")
            except LogUnavailable:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.01)
        await listener.close()
        await state.aclose()


async def test_in_a_cluster_all_keys_are_in_the_one_slot_that_is_looked_up():
    [slot] = SlotMap([Address()], partitions=1, patience_s=1)._slots
    assert key_slot(f"news:{HASH_TAG}:x".encode()) == slot
    assert key_slot(f"home:{HASH_TAG}:x:conv_a".encode()) == slot


async def test_those_who_share_a_database_have_one_name_and_others_another(store, postgres_url, empty_postgres_url):
    async with open_store(postgres_url, pool_size=1, timeout_s=5, wait_s=0) as again:
        assert await again.workers.service_id() == await store.workers.service_id()
    async with open_store(empty_postgres_url, pool_size=1, timeout_s=5, wait_s=0) as other:
        assert await other.workers.service_id() != await store.workers.service_id()


async def test_the_name_of_a_database_needs_no_special_rights(store, postgres_url):
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute("CREATE ROLE plain LOGIN")
        try:
            admin.execute("SET ROLE plain")
            assert admin.execute("SELECT system_identifier FROM pg_control_system()").fetchone()
        finally:
            admin.execute("RESET ROLE")
            admin.execute("DROP ROLE plain")


@pytest.mark.slow
@pytest.mark.parametrize("group", [SentinelGroup, Cluster])
async def test_under_sentinel_and_in_a_cluster_news_go_on_after_the_master_died(tmp_path, group):
    servers = group(tmp_path, replicas=1)
    with servers:
        speaker, hearer = (RedisState(servers.url, scope="s", timeout_s=2) for _ in range(2))
        listener = await follow(hearer, speaker)
        await speaker.settle({"conv_a": Home("r1", 10)})
        assert list(await hearer.homes(["conv_a"])) == [Home("r1", 10)]
        master = servers.master if group is SentinelGroup else servers.holder(f"news:{HASH_TAG}:s")
        master.kill()
        async with asyncio.timeout(60):
            while listener.heard[-1] != b"after":
                try:
                    await speaker.publish(b"after")
                except LogUnavailable:
                    await asyncio.sleep(0.05)
                await asyncio.sleep(0.02)
        await listener.close()
        for state in (speaker, hearer):
            await state.aclose()
