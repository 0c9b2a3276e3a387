"""The wire of a stream over a real socket, on both ways to it: lent by our own protocol, and through plain ASGI."""

import asyncio
import re
import socket

import httpx
import pytest
import uvicorn
from httpx_sse import aconnect_sse
from openai._streaming import SSEDecoder
from streaming import DONE, FragileLog, Shelf, append, delta, parse, soon

from chatsvc.api.direct import StreamingProtocol
from chatsvc.api.sse import Streams
from chatsvc.events import entry
from chatsvc.streamlog.hub import Hub
from chatsvc.streamlog.resume import Resumer

A = "resp_local_a"
HEARTBEAT_S = 0.4
QUEUED = b'event: queued\ndata: {"position":1}\n\n'


class Service:
    """As little around the wire as possible: ``GET /<response id>`` with a ``Last-Event-ID``."""

    def __init__(self):
        self.log = FragileLog()
        self.hub = Hub(self.log)
        self.shelf = Shelf()
        self.shelf.running(A)
        self.resumer = Resumer(self.hub, self.shelf.source)
        self.streams = Streams(self.resumer, heartbeat_s=HEARTBEAT_S, buffer_events=200, buffer_bytes=20_000)
        self.answering = 0
        self.port = 0

    async def app(self, scope, receive, send):
        headers = dict(scope["headers"])
        stream = self.streams.open(scope, receive, send)
        if scope["query_string"] == b"queued":
            stream.push_passing(QUEUED)
        self.answering += 1
        try:
            await stream.run(scope["path"][1:], int(headers.get(b"last-event-id", 0)))
        finally:
            self.answering -= 1

    async def say(self, *seqs, response_id=A):
        """Append and tell, as the writer of this process does."""
        entries = [entry(DONE, attempt=1, seq=-seq) if seq < 0 else delta(seq) for seq in seqs]
        await self.log.append([append(response_id, *entries, recreate=True)])
        self.hub.deliver(response_id, entries)

    async def connect(self, request=f"GET /{A} HTTP/1.1\r\nHost: x\r\n\r\n", *, receive_buffer=None):
        sock = socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=sock)
        writer.write(request.encode())
        return reader, writer

    async def until(self, condition):
        async def wait():
            while not condition():
                await asyncio.sleep(0.002)

        await soon(wait())


@pytest.fixture(params=["direct", "relayed"])
async def service(request):
    service = Service()
    service.direct = request.param == "direct"
    config = uvicorn.Config(
        service.app,
        port=0,
        http=StreamingProtocol if request.param == "direct" else "httptools",
        lifespan="off",
        log_config=None,
        interface="asgi3",
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    loops = [asyncio.create_task(loop) for loop in (service.hub.run(), service.streams.run(), server.serve())]
    while not server.started:
        await asyncio.sleep(0.005)
    service.port = server.servers[0].sockets[0].getsockname()[1]
    await service.log.open(A, 1)
    service.hub.hold(A)
    yield service
    service.streams.close()
    server.should_exit = True
    await soon(loops.pop())
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)


async def chunks(reader):
    """The body's chunks, to its end."""
    while size := int(await reader.readline(), 16):
        yield await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readline() == b"\r\n"


async def head_of(reader):
    lines = (await soon(reader.readuntil(b"\r\n\r\n"))).decode().split("\r\n")
    return lines[0], dict(line.split(": ", 1) for line in lines[1:] if line)


async def body_of(reader):
    return b"".join([chunk async for chunk in chunks(reader)])


async def some_of(reader, condition):
    """Bytes as they come, until the condition holds."""
    seen = b""
    while not condition(seen):
        data = await soon(reader.read(65536))
        assert data, f"closed after {seen!r}"
        seen += data
    return seen


async def test_the_headers_are_those_of_a_stream_that_nothing_on_the_way_may_hold_back(service):
    reader, writer = await service.connect(f"GET /{A} HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip, br\r\n\r\n")
    status, headers = await head_of(reader)
    assert status == "HTTP/1.1 200 OK"
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-store, no-transform"
    assert headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in headers
    assert "content-length" not in headers
    writer.close()


async def test_the_first_line_is_a_retry_that_differs_between_connections(service):
    await service.say(1, -2)
    drawn = set()
    for _ in range(20):
        reader, writer = await service.connect()
        await head_of(reader)
        first, _, rest = (await soon(body_of(reader))).partition(b"\n")
        drawn.add(int(re.fullmatch(rb"retry: (\d+)", first)[1]))
        assert [event[0] for event in parse(rest)] == [1, 2]
        writer.close()
    assert all(1000 <= retry <= 3000 for retry in drawn)
    assert len(drawn) > 10


async def test_events_come_as_they_are_told_and_the_end_leaves_the_connection_usable(service):
    reader, writer = await service.connect()
    await head_of(reader)
    await service.until(lambda: service.answering)
    body = asyncio.create_task(body_of(reader))
    await service.until(lambda: any(one.live for one in service.hub.subscriptions(A)))
    for seq in range(1, 6):
        await service.say(seq)
    await service.say(-6)
    assert [event[0] for event in parse(await soon(body))] == [1, 2, 3, 4, 5, 6]
    writer.write(f"GET /{A} HTTP/1.1\r\nHost: x\r\nLast-Event-ID: 4\r\n\r\n".encode())
    await head_of(reader)
    assert [event[0] for event in parse(await soon(body_of(reader)))] == [5, 6]
    writer.close()
    await service.until(lambda: service.answering == 0)


async def test_a_frame_arrives_long_before_the_next_one_exists(service):
    reader, writer = await service.connect()
    for seq in (1, 2, 3):
        await service.until(lambda: any(one.live for one in service.hub.subscriptions(A)))
        await service.say(seq)
        assert b"<%d>" % seq in await some_of(reader, lambda seen, seq=seq: b"<%d>" % seq in seen)
    writer.close()


async def test_what_passes_before_the_headers_comes_after_them_and_has_no_id(service):
    await service.say(1, -2)
    reader, writer = await service.connect(f"GET /{A}?queued HTTP/1.1\r\nHost: x\r\n\r\n")
    await head_of(reader)
    events = parse(await soon(body_of(reader)))
    assert [event[:2] for event in events] == [(None, "queued"), (1, "delta"), (2, "done")]
    writer.close()


async def test_a_silent_stream_gets_heartbeats_of_one_line_and_events_after_them_are_whole(service):
    reader, writer = await service.connect()
    await head_of(reader)
    silent = await some_of(reader, lambda seen: seen.count(b": ping\n") == 2)
    assert b": ping\n\n" not in silent.replace(b"\r\n", b"")
    await service.say(1, -2)
    rest = await some_of(reader, lambda seen: b"event: done\n" in seen)
    assert b"id: 1\nevent: delta\n" in rest
    writer.close()


async def test_a_stream_with_events_gets_no_heartbeat(service):
    reader, writer = await service.connect()
    await service.until(lambda: any(one.live for one in service.hub.subscriptions(A)))
    loop = asyncio.get_running_loop()
    until, seq = loop.time() + 2 * HEARTBEAT_S, 0
    while loop.time() < until:
        seq += 1
        await service.say(seq)
        await asyncio.sleep(HEARTBEAT_S / 10)
    seen = await some_of(reader, lambda seen: b"<%d>" % seq in seen)
    assert b"ping" not in seen
    writer.close()


async def test_the_clients_people_use_read_through_two_heartbeats(service):
    async def speak():
        await service.until(lambda: any(one.live for one in service.hub.subscriptions(A)))
        await service.say(1)
        await asyncio.sleep(2.5 * HEARTBEAT_S)
        await service.say(2)
        await asyncio.sleep(1.5 * HEARTBEAT_S)
        await service.say(-3)

    url = f"http://127.0.0.1:{service.port}/{A}"
    speaking = asyncio.create_task(speak())
    async with httpx.AsyncClient(timeout=10) as client, aconnect_sse(client, "GET", url) as source:
        events = [(event.id, event.event) async for event in source.aiter_sse()]
        assert events == [("1", "delta"), ("2", "delta"), ("3", "done")]
        await speaking
        async with client.stream("GET", url, headers={"last-event-id": "1"}) as response:
            decoded = [(event.id, event.event) async for event in SSEDecoder().aiter_bytes(response.aiter_bytes())]
        assert decoded == [("2", "delta"), ("3", "done")]


async def test_the_openai_client_is_not_upset_by_a_heartbeat_after_an_id():
    frames = (
        delta(1).frame() + b": ping\n" + delta(2).frame() + b": ping\n: ping\n" + entry(DONE, attempt=1, seq=3).frame()
    )
    assert [event.event for event in SSEDecoder().iter_bytes(iter([frames]))] == ["delta", "delta", "done"]


async def test_a_client_that_vanishes_is_noticed_without_an_event_to_write(service):
    writers = [(await service.connect())[1] for _ in range(50)]
    await service.until(lambda: service.hub.subscribers == 50)
    for number, writer in enumerate(writers):
        if number % 2:
            writer.transport.abort()
        else:
            writer.close()
    await service.until(lambda: service.answering == 0)
    assert (service.hub.subscribers, len(service.streams)) == (0, 0)


async def test_a_client_that_vanishes_during_the_replay_is_noticed(service):
    await service.log.append([append(A, *(delta(seq, "x" * 200) for seq in range(1, 5000)), recreate=True)])
    for _ in range(20):
        _, writer = await service.connect()
        await asyncio.sleep(0.003)
        writer.transport.abort()
    await service.until(lambda: service.answering == 0)
    assert service.hub.subscribers == 0


async def test_a_client_that_does_not_read_is_cut_and_the_others_are_not(service):
    """A zero window: what is held for it stays below the bound, whatever is said meanwhile."""
    _, stuck = await service.connect(receive_buffer=4096)
    reader, writer = await service.connect()
    body = asyncio.create_task(some_of(reader, lambda seen: b"event: done" in seen))
    await service.until(lambda: len([one for one in service.hub.subscriptions(A) if one.live]) == 2)
    seq = 0
    while service.hub.subscribers == 2:
        seq += 1
        entries = [delta(seq, "x" * 4000)]
        await service.log.append([append(A, *entries)])
        service.hub.deliver(A, entries)
        assert seq < 5000, "never cut"
        if seq % 4 == 0:
            await asyncio.sleep(0.001)
    assert service.hub.cut == 1
    await service.say(-(seq + 1))
    assert (await soon(body)).count(b"event: delta") == seq
    writer.close()
    stuck.transport.abort()
    await service.until(lambda: service.answering == 0)


async def test_a_long_snapshot_is_no_reason_to_cut_a_client(service):
    await service.log.append([append(A, delta(1, "x" * 500_000), recreate=True)])
    await service.say(-2)
    reader, writer = await service.connect()
    await head_of(reader)
    assert [event[0] for event in parse(await soon(body_of(reader)))] == [1, 2]
    writer.close()


async def test_a_slow_client_gets_a_long_replay_at_its_own_pace(service):
    await service.log.append([append(A, *(delta(seq, "x" * 100) for seq in range(1, 9001)), recreate=True)])
    await service.say(-9001)
    reader, writer = await service.connect(receive_buffer=4096)
    await head_of(reader)
    seen = 0
    async for chunk in chunks(reader):
        seen += chunk.count(b"\nevent: ")
        await asyncio.sleep(0.01)
    assert seen == 9001
    writer.close()


async def test_at_shutdown_every_stream_ends_at_once_and_new_ones_end_too(service):
    connections = [await service.connect() for _ in range(100)]
    await service.until(lambda: service.hub.subscribers == 100)
    service.streams.close()
    for reader, writer in connections:
        await head_of(reader)
        body = await soon(body_of(reader))
        assert re.fullmatch(rb"retry: \d+\n", body)
        if service.direct:
            # Over the same connection the client would come back to this process. The server itself waits for 5 s.
            assert await asyncio.wait_for(reader.read(), 3) == b""
        writer.close()
    reader, _ = await service.connect()
    await head_of(reader)
    assert await soon(body_of(reader))
    await service.until(lambda: service.answering == 0)


async def test_at_shutdown_a_client_that_does_not_read_holds_nobody_up(service):
    await service.log.append([append(A, *(delta(seq, "x" * 2000) for seq in range(1, 3001)), recreate=True)])
    _, stuck = await service.connect(receive_buffer=4096)
    await service.until(lambda: service.hub.subscribers == 1)
    await asyncio.sleep(0.05)
    service.streams.close()
    await service.until(lambda: service.hub.subscribers == 0)
    stuck.transport.abort()


async def test_a_client_of_http_1_0_is_served(service):
    await service.say(1, -2)
    reader, writer = await service.connect(f"GET /{A} HTTP/1.0\r\nHost: x\r\n\r\n")
    seen = await soon(reader.read())
    assert b"id: 2\nevent: done" in seen
    writer.close()


async def test_nothing_is_written_after_the_last_chunk(service):
    """Whoever still has the stream in hand, as a teller of queue positions may, cannot spoil the next answer."""
    opened = []
    open_now = service.streams.open
    service.streams.open = lambda *arguments: opened.append(open_now(*arguments)) or opened[-1]
    await service.say(1, -2)
    reader, writer = await service.connect()
    await head_of(reader)
    await soon(body_of(reader))
    await service.until(lambda: service.answering == 0)
    opened[0].push_passing(QUEUED)
    service.streams.beat()
    writer.write(f"GET /{A} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert (await head_of(reader))[0] == "HTTP/1.1 200 OK"
    writer.close()


async def test_two_requests_sent_at_once_are_answered_one_after_the_other(service):
    reader, writer = await service.connect(2 * f"GET /{A} HTTP/1.1\r\nHost: x\r\n\r\n")
    await service.until(lambda: any(one.live for one in service.hub.subscriptions(A)))
    await service.say(1, -2)
    for _ in range(2):
        await head_of(reader)
        assert [event[0] for event in parse(await soon(body_of(reader)))] == [1, 2]
    writer.close()
