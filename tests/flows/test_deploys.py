"""SIGTERM to one process of several: who stays, who is sent elsewhere, and when."""

import asyncio
import contextlib
import signal
import time

import httpx
import pytest
from api_client import Api
from reader import Rendered, events_of, read

READERS = 100
LEAVE_S = 6.0


class Watcher:
    """A reader that keeps the bytes of its one connection, and when it ended."""

    def __init__(self):
        self.body = b""
        self.ended_at = None
        self.rendered = Rendered()

    async def watch(self, client, url):
        async with client.stream("GET", url) as answer:
            assert answer.status_code == httpx.codes.OK
            async for chunk in answer.aiter_raw():
                self.body += chunk
        self.ended_at = time.monotonic()
        async for event in events_of(self._body()):
            self.rendered.take(event)

    async def _body(self):
        yield self.body


async def until(condition, patience_s=60):
    async with asyncio.timeout(patience_s):
        while not await condition():
            await asyncio.sleep(0.02)


def most_within(times, window_s):
    """How many of these moments fall into the fullest window."""
    return max(sum(first <= other < first + window_s for other in times) for first in times)


@pytest.fixture
async def many():
    async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=300)) as client:
        yield client


@pytest.fixture(scope="module")
def worker(start_server):
    return start_server("scripted:?tokens_per_s=5&tokens=2000&slots=4", CHATSVC_SERVER_GRACE_S="1")


@pytest.mark.slow
async def test_readers_of_a_process_that_goes_down_leave_one_after_another_between_events(
    start_server, worker, client, many
):
    door = start_server(beside=worker, CHATSVC_ROLES="api", CHATSVC_SERVER_LEAVE_S=str(LEAVE_S))
    there, here = Api(client, worker.base_url), Api(client, door.base_url)
    here.headers = there.headers
    reply = await there.start()
    watchers = [Watcher() for _ in range(READERS)]
    watching = [asyncio.create_task(watcher.watch(many, here.stream_url(reply))) for watcher in watchers]

    async def all_are_served():
        return all(b"event: delta" in watcher.body for watcher in watchers)

    await until(all_are_served)
    began = time.monotonic()
    stopping = asyncio.create_task(asyncio.to_thread(door.stop, 40))

    async def not_ready():
        return (await here.call("GET", "/readyz")).status_code == 503

    await until(not_ready)
    refused = await here.send(reply["conversation_id"], "Late.")
    assert (refused.status_code, refused.json()["code"]) == (503, "draining")
    assert (refused.json()["retryable"], refused.headers["connection"]) == (True, "close")

    # Who finds no other process is served here until the end.
    await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
    first = next(watcher for watcher in watchers if watcher.ended_at is not None)
    seen = len(first.rendered.events)
    while len(first.rendered.events) == seen:
        with contextlib.suppress(httpx.ReadError):  # sent in the moment in which a kept connection was closed
            await read(many, here.stream_url(reply), first.rendered, cut=lambda now: len(now.events) > seen)

    assert await stopping == 0
    took = time.monotonic() - began
    await asyncio.gather(*watching)
    ends = sorted(watcher.ended_at - began for watcher in watchers)
    assert ends[0] > LEAVE_S / 8, "load balancers had no time to notice"
    assert ends[-1] - ends[0] > LEAVE_S / 3
    assert most_within(ends, LEAVE_S / 12) < READERS / 2
    assert took < LEAVE_S + 15  # what is above a second is the machine
    for watcher in watchers:
        rest = watcher.body.rpartition(b"\n\n")[2]
        assert all(line.startswith(b":") for line in rest.splitlines()), f"cut within an event: {rest}"
    # They go on where they were: an event too many or too few would be told by Rendered.
    await asyncio.gather(
        *(
            read(many, there.stream_url(reply), watcher.rendered, cut=lambda seen: seen.connections > 0)
            for watcher in watchers
        )
    )
    await there.call("POST", f"/v1/responses/{reply['response_id']}/stop")
    assert (await read(many, there.stream_url(reply))).end.data["finish_reason"] == "stopped"
    stored = await there.message_of(reply)
    assert all(stored["content"].startswith(watcher.rendered.text) for watcher in watchers)


async def test_readers_of_replies_that_run_here_stay_while_those_of_others_leave(start_server, client):
    server = start_server("scripted:?tokens_per_s=20&tokens=2000&slots=1", CHATSVC_SERVER_GRACE_S="60")
    start_server(beside=server, CHATSVC_ROLES="api")
    api = Api(client, server.base_url)
    running, waiting = await api.start(), await api.start()
    stays, leaves = Watcher(), Watcher()
    staying = asyncio.create_task(stays.watch(client, api.stream_url(running)))
    leaving = asyncio.create_task(leaves.watch(client, api.stream_url(waiting)))

    async def both_are_served():
        return b"event: delta" in stays.body and b"event: queued" in leaves.body

    await until(both_are_served)
    stopping = asyncio.create_task(asyncio.to_thread(server.stop, 60))
    await leaving
    assert leaves.rendered.end is None
    assert not staying.done()
    await api.call("POST", f"/v1/responses/{running['response_id']}/stop")
    await staying
    assert stays.rendered.end.name == "done"
    assert await stopping == 0


async def test_a_server_that_is_alone_keeps_all_readers_until_its_replies_have_ended(start_server, client):
    server = start_server("scripted:?tokens_per_s=20&tokens=2000&slots=1", CHATSVC_SERVER_GRACE_S="60")
    api = Api(client, server.base_url)
    running, waiting = await api.start(), await api.start()
    first, second = Watcher(), Watcher()
    watching = [
        asyncio.create_task(first.watch(client, api.stream_url(running))),
        asyncio.create_task(second.watch(client, api.stream_url(waiting))),
    ]

    async def both_are_served():
        return b"event: delta" in first.body and b"event: queued" in second.body

    await until(both_are_served)
    stopping = asyncio.create_task(asyncio.to_thread(server.stop, 60))

    async def not_ready():
        return (await api.call("GET", "/readyz")).status_code == 503

    await until(not_ready)
    await api.call("POST", f"/v1/responses/{running['response_id']}/stop")
    assert await stopping == 0
    await asyncio.gather(*watching)
    assert first.rendered.end.name == "done"
    assert second.rendered.end is None
    assert second.ended_at >= first.ended_at


async def test_a_second_signal_cuts_the_leaving_short_too(start_server, worker, client):
    door = start_server(beside=worker, CHATSVC_ROLES="api", CHATSVC_SERVER_LEAVE_S="50")
    api = Api(client, door.base_url)
    reply = await api.start()
    watcher = Watcher()
    watching = asyncio.create_task(watcher.watch(client, api.stream_url(reply)))

    async def is_served():
        return b"event: start" in watcher.body

    await until(is_served)
    door.signal(signal.SIGTERM)

    async def not_ready():
        return (await api.call("GET", "/readyz")).status_code == 503

    await until(not_ready)
    assert await asyncio.to_thread(door.stop, 20) == 0
    await watching
    assert watcher.rendered.end is None
    there = Api(client, worker.base_url, headers=api.headers)
    await there.call("POST", f"/v1/responses/{reply['response_id']}/stop")
    assert (await read(client, there.stream_url(reply), watcher.rendered)).end.data["finish_reason"] == "stopped"
