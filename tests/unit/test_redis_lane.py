"""A lane of the Redis log: one connection is made for all who wait for it, in a time of its own (S8, S10).

Each server here answers a greeting when the test lets it, so that a connection takes as long to make as it should.
"""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest
from streaming import running, soon

from chatsvc.errors import LogUnavailable
from chatsvc.streamlog.redis_wire import Address, Lane, pack

GREETING, QUESTION = pack(b"AUTH", b"secret"), pack(b"GET", b"key")
LONG_S = 30.0


class GatedServer:
    """Answers greetings while ``open``, each ``delay_s`` after it came; others with ``answer``, unless ``silent``."""

    def __init__(self, *, delay_s=0.0, answer=b"+OK\r\n"):
        self.open, self.asked, self.delay_s, self.answer = asyncio.Event(), asyncio.Event(), delay_s, answer
        self.connections = self.gone = 0
        self.silent = False
        self.all_gone = asyncio.Event()

    async def serve(self, reader, writer):
        self.connections += 1
        self.all_gone.clear()
        try:
            await reader.readexactly(len(GREETING))
            self.asked.set()
            await self.open.wait()
            await asyncio.sleep(self.delay_s)
            writer.write(b"+OK\r\n")
            while await reader.readuntil(QUESTION):
                writer.write(b"" if self.silent else self.answer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the lane has closed it: that is what is counted
        finally:
            self.gone += 1
            if self.gone == self.connections:
                self.all_gone.set()
            writer.close()

    @property
    def port(self):
        return self.server.sockets[0].getsockname()[1]


@asynccontextmanager
async def gated(**options):
    made = GatedServer(**options)
    made.server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    try:
        yield made
    finally:
        made.open.set()
        made.server.close()


@asynccontextmanager
async def lane_to(server, timeout_s=LONG_S):
    lane = Lane(Address(host="127.0.0.1", port=server.port, greeting=(GREETING,)).locate, timeout_s)
    try:
        yield lane
    finally:
        lane.close()
        await soon(server.all_gone.wait())


def call(lane):
    return asyncio.create_task(lane.call([QUESTION]))


async def answered(lane):
    """What is answered in the end: connecting may take longer than a caller has on a busy machine."""
    while True:
        with suppress(LogUnavailable):
            return await lane.call([QUESTION])


async def given_up(task):
    await asyncio.sleep(0)  # it has begun
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_connection_is_made_though_those_who_asked_for_it_are_cancelled():
    async with gated() as server, lane_to(server) as lane:
        first = call(lane)
        await soon(server.asked.wait())
        await given_up(first)
        for _ in range(3):
            await given_up(call(lane))
        server.open.set()
        assert await soon(call(lane)) == [b"OK"]
        assert server.connections == 1
        assert lane.notice() == 0


async def test_a_lane_under_load_connects_again_after_an_outage():
    """Else each caller dials anew with what is left of its time, and no dial ever comes to its end."""
    answered = asyncio.Event()

    async def ask(lane):
        with suppress(LogUnavailable):
            await lane.call([QUESTION])
            answered.set()

    async with gated(delay_s=0.2) as server, lane_to(server, 1.0) as lane, asyncio.TaskGroup() as callers:
        loop = asyncio.get_running_loop()
        back_at = loop.time() + 1.5
        while not answered.is_set() and loop.time() < back_at + 8:
            callers.create_task(ask(lane))
            await asyncio.sleep(0.02)
            if loop.time() > back_at:
                server.open.set()
        assert answered.is_set()


async def test_a_connection_that_cannot_be_made_is_tried_once_for_all_who_wait():
    async with gated() as server, lane_to(server, 0.3) as lane:
        outcomes = await soon(asyncio.gather(*(call(lane) for _ in range(20)), return_exceptions=True))
        assert {type(outcome) for outcome in outcomes} == {LogUnavailable}
        assert server.connections == 1
        server.open.set()
        assert await soon(answered(lane)) == [b"OK"]


class Ticks:
    """How long this process was held up, at the most."""

    def __init__(self):
        self.longest_s = 0.0

    async def run(self):
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await asyncio.sleep(0.02)
            self.longest_s = max(self.longest_s, loop.time() - began)


async def test_who_spent_its_time_on_waiting_for_a_connection_does_not_break_it_for_the_others():
    found, ticks = None, Ticks()
    while found != (1, 0, 1):
        assert found is None or ticks.longest_s > 0.2, found  # else it is tried once more
        ticks = Ticks()
        async with running(ticks.run()), gated(delay_s=1.4) as server, lane_to(server, 2.0) as lane:
            server.open.set()
            server.silent = True
            with pytest.raises(LogUnavailable):
                await lane.call([QUESTION])
            first = server.connections, lane.notice()
            # But who had all the time there is and got no answer does.
            with pytest.raises(LogUnavailable):
                await lane.call([QUESTION])
            found = (*first, lane.notice())


@pytest.mark.parametrize("end", [Lane.close, Lane.drop])
async def test_whoever_waits_for_a_connection_is_told_when_it_is_given_up(end):
    async with gated() as server, lane_to(server) as lane:
        waiting = [call(lane) for _ in range(3)]
        await soon(server.asked.wait())
        end(lane)
        outcomes = await soon(asyncio.gather(*waiting, return_exceptions=True))
        assert {type(outcome) for outcome in outcomes} == {LogUnavailable}
        server.open.set()
        await soon(server.all_gone.wait())
        if end is Lane.drop:
            assert await soon(call(lane)) == [b"OK"]
        else:
            with pytest.raises(LogUnavailable):
                await lane.call([QUESTION])


@asynccontextmanager
async def moving(timeout_s=LONG_S):
    """A lane to a node that sends everybody to another, and both nodes."""
    async with gated(answer=b"+OK\r\n+THERE\r\n") as other:
        async with gated(answer=b"-ASK 1 127.0.0.1:%d\r\n" % other.port) as node, lane_to(node, timeout_s) as lane:
            node.open.set()
            yield lane, node, other
        # Whoever was connected is so no more.
        await soon(other.all_gone.wait())


async def test_callers_sent_to_the_same_node_share_one_connection_to_it_that_ends_with_the_lane():
    async with moving() as (lane, _, other):
        first = call(lane)
        await soon(other.asked.wait())
        second, third = call(lane), call(lane)
        await given_up(second)
        other.open.set()
        assert await soon(asyncio.gather(first, third)) == [[b"THERE"], [b"THERE"]]
        assert other.connections == 1


async def test_a_node_that_does_not_let_anybody_in_breaks_no_connection_to_the_one_that_names_it():
    found, ticks = None, Ticks()
    while found != (1, 0):
        assert found is None or ticks.longest_s > 0.1, found  # else it is tried once more
        ticks = Ticks()
        async with running(ticks.run()), moving(0.3) as (lane, node, other):
            with pytest.raises(LogUnavailable):
                await lane.call([QUESTION])
            other.open.set()
            # The connection that was being made may still have to come to its end.
            assert await soon(answered(lane)) == [b"THERE"]
            found = node.connections, lane.notice()
