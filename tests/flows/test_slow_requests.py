"""Requests that never come whole, and more of everything than there is place for, around a small application."""

import asyncio
import functools

import msgspec
import pytest
import uvicorn
from raw_reader import RawReader
from streaming import FragileLog, Shelf, append, delta, soon

from chatsvc.api import direct
from chatsvc.api.direct import Places, StreamingProtocol
from chatsvc.api.listener import bound
from chatsvc.api.sse import Streams
from chatsvc.streamlog.hub import Hub
from chatsvc.streamlog.resume import Resumer

A = "resp_local_a"
PATIENCE_S = 0.6


class Service:
    """Streams of one reply, and anything else is answered once its body has come, or before (``/early``)."""

    def __init__(self, **bounds):
        self.log = FragileLog()
        self.hub = Hub(self.log)
        shelf = Shelf()
        shelf.running(A)
        resumer = Resumer(self.hub, shelf.source)
        self.streams = Streams(resumer, heartbeat_s=60, buffer_events=200, **bounds)
        self.port = 0

    async def app(self, scope, receive, send):
        if scope["path"] == f"/{A}":
            await self.streams.open(scope, receive, send).run(A, 0)
            return
        more = scope["path"] != "/early"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture
async def serve():
    """Start services; their servers end with the test."""
    servers, stack = [], []

    async def start(places=None, **bounds):
        service = Service(**bounds)
        listener = bound("127.0.0.1", 0, heartbeat_s=60)
        stack.append(listener)
        sock = listener.__enter__()
        config = uvicorn.Config(
            service.app,
            http=functools.partial(StreamingProtocol, places=places),
            lifespan="off",
            log_config=None,
            interface="asgi3",
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        servers.append((server, asyncio.create_task(server.serve(sockets=[sock]))))
        while not server.started:
            await asyncio.sleep(0.005)
        service.port = sock.getsockname()[1]
        service.server = server
        await service.log.open(A, 1)
        service.hub.hold(A)
        return service

    yield start
    for server, task in servers:
        server.should_exit = True
        await soon(task)
    for listener in stack:
        listener.__exit__(None, None, None)


async def open_connections(service, count):
    """Wait until the server has so many."""

    async def wait():
        while len(service.server.server_state.connections) != count:
            await asyncio.sleep(0.005)

    await soon(wait())


async def drip(reader, data):
    """Send a byte now and then, for as long as the server takes them."""
    try:
        for byte in data:
            await reader.send(bytes([byte]))
            await asyncio.sleep(PATIENCE_S / 10)
    except ConnectionError:
        return


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (b"", b""),
        (b"", b"GET /a-long-path-that-comes-a-byte-at-a-time HTTP/1.1\r\n"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n", b"X-Header: a header that never ends, and never will"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n", b"a body that takes its time, and more"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nbegun", b""),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n"),
    ],
    ids=["nothing", "line", "headers", "body", "silent body", "after an answer"],
)
async def test_a_request_that_does_not_come_whole_is_given_up(serve, monkeypatch, first, then):
    """A slow loris: connections that send a byte a second, or nothing, do not stay."""
    monkeypatch.setattr(direct, "REQUEST_S", PATIENCE_S)
    service = await serve()
    reader = await RawReader.connect(service.port)
    await reader.send(first)
    dripping = asyncio.create_task(drip(reader, then))
    await open_connections(service, 1)
    began = asyncio.get_running_loop().time()
    await open_connections(service, 0)
    assert asyncio.get_running_loop().time() - began < 5 * PATIENCE_S
    await soon(dripping)
    reader.close()


async def test_a_stream_is_not_given_up_however_long_it_takes(serve, monkeypatch):
    """Nor when the client sends something behind its request, whole or in part."""
    monkeypatch.setattr(direct, "REQUEST_S", PATIENCE_S)
    service = await serve()
    readers = [await RawReader.connect(service.port) for _ in range(3)]
    for reader, more in zip(readers, (b"", b"\r\n", b"GET / HTTP/1.1\r\nHo"), strict=True):
        await reader.send(f"GET /{A} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await reader.until(b"retry: ")
        await reader.send(more)
    await asyncio.sleep(3 * PATIENCE_S)
    assert service.hub.subscribers == 3
    await service.log.append([append(A, delta(1))])
    service.hub.deliver(A, [delta(1)])
    for reader in readers:
        await soon(reader.until(b"<1>"))
        reader.close()


A_KIB = b"X-Filler: " + b"x" * 1012 + b"\r\n"
LINE = b"GET / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


async def sent_until_refused(reader, first, more, most=64_000_000):
    """Send more and more until the server ends the connection; how many bytes it took in, at most."""
    sent = 0
    try:
        await reader.send(first)
        while sent < most:
            await reader.send(more)
            sent += len(more)
    except ConnectionError:
        pass
    await reader.to_the_end()
    return sent


@pytest.mark.parametrize(
    ("first", "more"),
    [
        (b"GET /", b"x" * 65536),
        (LINE, A_KIB * 64),
        (LINE + b"X-Endless: ", b"x" * 65536),
        (CHUNKED + b"1;", b"x" * 65536),
        (CHUNKED + b"1\r\nx\r\n0\r\n", A_KIB * 64),
        (CHUNKED + b"1\r\nx\r\n0\r\nX-Endless: ", b"x" * 65536),
    ],
    ids=["line", "headers", "one header", "chunk", "trailers", "one trailer"],
)
async def test_a_request_without_an_end_is_refused_before_it_fills_the_memory(serve, first, more):
    service = await serve()
    reader = await RawReader.connect(service.port)
    # What the two kernels hold between them is far below what one connection could send.
    assert await soon(sent_until_refused(reader, first, more)) < 32_000_000
    assert reader.status in {431, 0}  # a reset may outrun the answer
    await open_connections(service, 0)
    reader.close()


async def test_a_head_that_is_too_large_is_told_so(serve):
    service = await serve()
    reader = await RawReader.connect(service.port)
    await reader.send(LINE + A_KIB * 64 + b"\r\n")
    await soon(reader.to_the_end())
    assert reader.status == 431
    head, _, body = reader.seen.partition(b"\r\n\r\n")
    assert b"content-type: application/problem+json" in head
    assert b"connection: close" in head
    assert msgspec.json.decode(body)["code"] == "head_too_large"
    reader.close()


async def test_every_request_on_a_connection_has_a_head_of_its_own_to_fill(serve):
    """One after the other, and several at once."""
    service = await serve()
    reader = await RawReader.connect(service.port)
    request = LINE + A_KIB * 60 + b"\r\n"
    for number in range(1, 4):
        for start in range(0, len(request), 4096):
            await reader.send(request[start : start + 4096])
            await asyncio.sleep(0)  # the server is in this loop, and reads what is there
        await soon(answers(reader, number))
    await asyncio.gather(reader.send(request * 5), soon(answers(reader, 8)))
    await reader.send(LINE + A_KIB * 70 + b"\r\n")
    await soon(reader.to_the_end())
    assert reader.seen.count(b"HTTP/1.1 204 ") == 8
    assert reader.seen.count(b"HTTP/1.1 431 ") == 1
    reader.close()


async def answers(reader, count):
    """Read until so many requests were answered."""
    while reader.seen.count(b"HTTP/1.1 204 ") < count:
        assert await reader.read()


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_may_be_larger_than_a_head(serve, chunked):
    service = await serve()
    reader = await RawReader.connect(service.port)
    piece = b"x" * 10_000
    pieces = [b"2710\r\n" + piece + b"\r\n"] * 100 + [b"0\r\n\r\n"] if chunked else [piece] * 100
    length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 1000000"
    await reader.send(b"POST / HTTP/1.1\r\nHost: x\r\n" + length + b"\r\n\r\n")
    for sent in pieces:
        await reader.send(sent)
    await soon(answers(reader, 1))
    reader.close()


@pytest.mark.parametrize("more", [A_KIB * 64, b"no header\r\n\r\n"], ids=["too large", "not a request"])
async def test_nothing_is_written_into_a_stream_when_what_follows_it_is_refused(serve, more):
    service = await serve()
    reader = await RawReader.connect(service.port)
    await reader.ask(f"/{A}")
    await reader.until(b"retry: ")
    await soon(sent_until_refused(reader, LINE, more))
    assert reader.seen.count(b"HTTP/1.1") == 1
    await open_connections(service, 0)
    assert service.hub.subscribers == 0
    reader.close()


async def test_a_request_that_was_answered_already_is_not_answered_again_for_its_trailers(serve):
    service = await serve()
    reader = await RawReader.connect(service.port)
    await reader.send(CHUNKED.replace(b"POST /", b"POST /early"))
    await soon(answers(reader, 1))
    await soon(sent_until_refused(reader, b"0\r\n", A_KIB * 64))
    assert reader.seen.count(b"HTTP/1.1") == 1
    await open_connections(service, 0)
    reader.close()


async def test_connections_beyond_the_limit_are_closed_and_those_there_are_stay(serve):
    places = Places(3)
    service = await serve(places)
    kept = [await RawReader.connect(service.port) for _ in range(3)]
    await open_connections(service, 3)
    beyond = await RawReader.connect(service.port)
    assert await soon(beyond.read()) == b""
    beyond.close()
    assert places.refused == 1
    for reader in kept:
        await reader.ask("/")
        await soon(reader.until(b"\r\n\r\n"))
        assert reader.status == 204
        reader.close()
    await open_connections(service, 0)
    again = await RawReader.connect(service.port)
    await again.ask("/")
    await soon(again.until(b"\r\n\r\n"))
    again.close()


async def test_streams_are_full_before_connections_are(serve):
    places = Places(320)
    assert places.for_streams == 300
    service = await serve(most=2)
    assert not service.streams.full
    readers = [await RawReader.connect(service.port) for _ in range(2)]
    for reader in readers:
        await reader.ask(f"/{A}")
        await soon(reader.until(b"retry: "))
    assert service.streams.full
    readers[0].close()
    await open_connections(service, 1)
    assert not service.streams.full


async def test_what_all_slow_readers_hold_back_together_is_bounded_too(serve):
    """Each within its own bound, or beyond it by one long replay; the sum is what fills the memory."""
    service = await serve(all_buffers_bytes=2_500_000)
    await service.log.append([append(A, delta(1, "x" * 1_000_000), recreate=True)])
    stuck = [await RawReader.connect(service.port, receive_buffer=2048) for _ in range(5)]
    for reader in stuck:
        await reader.ask(f"/{A}")
    quick = await RawReader.connect(service.port)
    await quick.ask(f"/{A}")
    await soon(quick.until(b'x"}\n\n'))
    assert service.streams.buffered > 4_000_000
    service.streams.beat()
    assert 1_000_000 < service.streams.buffered <= 2_500_000
    await open_connections(service, 3)
    service.hub.deliver(A, [delta(2)])
    await soon(quick.until(b"<2>"))
    for reader in (*stuck, quick):
        reader.close()
