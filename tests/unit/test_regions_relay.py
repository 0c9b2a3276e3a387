"""Asking another region and passing its stream on, against stand-ins that answer, break and fall silent as told.

Over 400 lines: the stand-ins for the far side serve all cases.
"""

import asyncio
import re
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chatsvc.api.region_client import ConnectionFailed, RegionClient
from chatsvc.api.region_peer import Peer, RegionUnreachable
from chatsvc.api.region_relay import ClientGone, Progress, StreamRequest, relay, unless
from chatsvc.api.region_trust import RegionTrust
from chatsvc.api.sse import Streams
from chatsvc.clock import SystemClock
from chatsvc.streamlog.subscription import Overrun

PATH = "/v1/responses/resp_eu_0/stream"
JSON = b'{"status":"complete"}'
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def answer(status, body, media_type="application/json"):
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {media_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def problem(status, code):
    return answer(status, msgspec.json.encode({"code": code}), "application/problem+json")


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def frame(seq, name="delta"):
    return b"id: %d\nevent: %b\ndata: {}\n\n" % (seq, name.encode())


class StandIn:
    """Answers every request with ``script``: bytes, then whatever else it awaits. Remembers requests."""

    def __init__(self, script):
        self.script = script
        self.requests = []
        self.left = asyncio.Event()
        """A client closed its connection."""

    @asynccontextmanager
    async def running(self):
        tasks = set()

        async def serve(reader, writer):
            tasks.add(asyncio.current_task())
            try:
                self.requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
                if callable(self.script):
                    await self.script(reader, writer)
                else:
                    writer.write(self.script)
                await writer.drain()
                await reader.read()
                self.left.set()
            except OSError:
                self.left.set()
            finally:
                writer.transport.abort()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def region(*scripts, first_byte_s=5.0):
    """A peer whose replicas do as they are told, asked in the order given."""
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(StandIn(script).running()) for script in scripts]
        clock = SystemClock()
        peer = Peer(
            "eu",
            [replica.url for replica in replicas],
            client=RegionClient(connect_s=2, first_byte_s=first_byte_s),
            trust=RegionTrust("s" * 32, clock, region="us"),
            monotonic=clock.monotonic,
        )
        peer._in_turn = lambda: list(peer._replicas)
        yield peer, replicas


class Pipe:
    """A client that takes as much as it is allowed to."""

    def __init__(self, room=1 << 30):
        self.frames = b""
        self.closed = False
        self.room = room
        self.news = asyncio.Event()
        self._callback = None

    def on_close(self, callback):
        self._callback = callback

    def write(self, frames):
        self.frames += frames
        self.news.set()
        return not self.closed

    async def drain(self):
        while len(self.frames) > self.room and not self.closed:
            await asyncio.sleep(3600)
        if self.closed:
            raise Overrun

    def close(self):
        self.closed = True
        self._callback()

    async def until(self, part):
        while part not in self.frames:
            self.news.clear()
            await self.news.wait()


async def follow(peer, pipe, *, cursor=0, idle_s=5.0):
    """As ``Regions`` does; what was noted."""
    noted = []
    request = StreamRequest(peer, PATH, "tok en", None)
    async with asyncio.timeout(30), AsyncExitStack() as stack:
        first, _ = await stack.enter_async_context(request.ask(cursor))
        await relay(request, first, pipe, stack, cursor=cursor, idle_s=idle_s, note=noted.append)
    return noted


async def get(peer):
    async with asyncio.timeout(30), peer.ask("GET", "/v1/responses/resp_eu_0", None) as (found, body):
        return found.status, body


# --- one answer ---


@pytest.mark.parametrize(
    "bad",
    [
        problem(503, "store_unavailable"),
        answer(502, b"<h1>Bad gateway</h1>", "text/html"),
        answer(200, b"<h1>Sign in</h1>", "text/html"),
        answer(302, b"", "text/html"),
        problem(401, "region_refused"),
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{}",
        answer(200, b" " * (2 << 20)),
        b"",
    ],
    ids=["503", "gateway", "page", "redirect", "refused", "nonsense", "short", "too long", "silence"],
)
async def test_a_replica_that_gives_nothing_fit_to_pass_on_is_passed_over(bad):
    async def say(reader, writer):
        writer.write(bad)
        await writer.drain()
        if bad:
            writer.close()

    async with region(say, answer(200, JSON), first_byte_s=0.2) as (peer, replicas):
        assert await get(peer) == (200, JSON)
        assert [len(replica.requests) for replica in replicas] == [1, 1]


@pytest.mark.parametrize(
    ("good", "status"),
    [
        (answer(200, JSON), 200),
        (answer(202, JSON), 202),
        (problem(404, "not_found"), 404),
        (problem(401, "not_authenticated"), 401),
        (problem(508, "loop_detected"), 508),
        (b"HTTP/1.1 204 X\r\n\r\n", 204),
    ],
)
async def test_what_a_server_of_ours_says_is_passed_on_and_no_other_is_asked(good, status):
    async with region(good, answer(200, b"{}")) as (peer, replicas):
        assert (await get(peer))[0] == status
        assert replicas[1].requests == []


async def test_when_all_replicas_fail_their_own_words_are_passed_on_if_they_have_any():
    async with region(problem(503, "store_unavailable"), answer(502, b"", "text/html")) as (peer, _):
        assert await get(peer) == (503, b'{"code":"store_unavailable"}')
    async with region(answer(502, b"", "text/html")) as (peer, _):
        with pytest.raises(RegionUnreachable):
            await get(peer)


async def test_nobody_there_is_unreachable_at_once():
    async with region(b"") as (peer, _):
        pass
    with pytest.raises(RegionUnreachable):
        await get(peer)


async def test_the_request_asks_for_no_compression_and_carries_cursor_and_token():
    async with region(STREAM_HEAD + chunk(frame(8, "done")) + END) as (peer, (replica,)):
        await follow(peer, Pipe(), cursor=7)
        (request,) = replica.requests
    assert request.startswith(f"GET {PATH}?last_event_id=7&token=tok+en HTTP/1.1\r\n")
    assert "accept-encoding: identity\r\n" in request
    assert len(re.findall(r"(?m)^x-chatsvc-region: \S+\r$", request)) == 1
    assert "cookie" not in request


async def test_replicas_that_failed_are_asked_last_for_a_while():
    clock = SystemClock()
    trust = RegionTrust("s" * 32, clock, region="us")
    now = [0.0]
    peer = Peer("eu", ["http://a", "http://b"], client=RegionClient(), trust=trust, monotonic=lambda: now[0])
    assert {tuple(peer._in_turn()) for _ in range(100)} == {("http://a", "http://b"), ("http://b", "http://a")}
    peer._note_failure("http://a", "because")
    assert {tuple(peer._in_turn()) for _ in range(100)} == {("http://b", "http://a")}
    now[0] = 6.0
    assert len({tuple(peer._in_turn()) for _ in range(100)}) == 2


async def test_a_body_is_read_whatever_the_pieces_it_comes_in():
    whole = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    whole += chunk(JSON[:5]) + chunk(JSON[5:]) + END

    async def byte_by_byte(reader, writer):
        for at in range(len(whole)):
            writer.write(whole[at : at + 1])
            await asyncio.sleep(0)

    async with region(byte_by_byte) as (peer, _):
        assert await get(peer) == (200, JSON)


# --- a stream ---


async def test_bytes_are_passed_on_as_they_come_and_the_end_is_seen():
    raw = b"retry: 1234\n: ping\n" + frame(1) + b": ping\n" + frame(2, "done")
    async with region(STREAM_HEAD + chunk(raw) + END) as (peer, _):
        pipe = Pipe()
        assert await follow(peer, pipe) == []
    assert pipe.frames == raw


async def test_a_stream_that_breaks_between_events_goes_on_from_the_next_replica():
    async def breaks(reader, writer):
        writer.write(STREAM_HEAD + chunk(b"retry: 1000\n" + frame(1) + frame(2)))
        await writer.drain()
        writer.close()

    rest = STREAM_HEAD + chunk(b"retry: 2000\n" + frame(3) + frame(4, "done")) + END
    async with region(breaks, rest) as (peer, (first, second)):
        pipe = Pipe()
        peer._in_turn = iter([[first.url], [second.url]]).__next__
        assert await follow(peer, pipe) == ["moved"]
        assert "last_event_id=2&" in second.requests[0]
    assert [int(seq) for seq in re.findall(rb"id: (\d+)", pipe.frames)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "sent",
    [frame(1) + frame(2)[:-1], frame(1) + b"id: 2\n", frame(1) + b"id", b"retry: 1000\n"],
    ids=["amid an event", "after a line", "amid a line", "before any event"],
)
async def test_a_stream_that_breaks_elsewhere_is_ended_without_an_event(sent):
    async def breaks(reader, writer):
        writer.write(STREAM_HEAD + chunk(sent) + END)

    async with region(breaks) as (peer, (replica,)):
        pipe = Pipe()
        assert await follow(peer, pipe) == ["lost"]
        assert len(replica.requests) == 1
    assert pipe.frames == sent


async def test_a_region_that_takes_connections_and_brings_nothing_is_not_asked_for_ever():
    async with region(b"") as (peer, (replica,)):

        async def once_then_empty(reader, writer):
            writer.write(STREAM_HEAD + (chunk(frame(1)) if len(replica.requests) == 1 else b"") + END)

        replica.script = once_then_empty
        assert await follow(peer, Pipe()) == ["moved", "lost"]
        assert len(replica.requests) == 2


async def test_a_stream_that_falls_silent_is_lost():
    async def silent(reader, writer):
        writer.write(STREAM_HEAD + chunk(b"retry: 1000\n"))

    async with region(silent) as (peer, _):
        assert await follow(peer, Pipe(), idle_s=0.1) == ["lost"]


async def test_a_client_that_leaves_closes_the_connection_to_the_other_region_at_once():
    async with region(STREAM_HEAD + chunk(frame(1))) as (peer, (replica,)):
        pipe = Pipe()
        following = asyncio.create_task(follow(peer, pipe))
        await pipe.until(frame(1))
        pipe.close()
        async with asyncio.timeout(30):
            assert await following == []
            await replica.left.wait()


async def test_a_client_that_leaves_while_the_region_is_still_thinking_leaves_nothing_behind():
    asked = asyncio.Event()

    async def thinks(reader, writer):
        asked.set()

    async with region(thinks) as (peer, (replica,)):
        async with AsyncExitStack() as stack:
            asking = stack.enter_async_context(peer.ask("GET", PATH, None))
            with pytest.raises(ClientGone):
                await unless(asked.wait(), asking)
        async with asyncio.timeout(30):
            await replica.left.wait()


async def test_a_client_that_reads_nothing_is_not_read_ahead_of_and_is_let_go():
    written = [0]
    piece = chunk(b"data: " + b"x" * 65_536 + b"\n\n")

    async def floods(reader, writer):
        writer.write(STREAM_HEAD)
        while written[0] < 1000:
            writer.write(piece)
            await writer.drain()
            written[0] += 1

    async with region(floods) as (peer, (replica,)):
        pipe = Pipe(room=0)
        assert await follow(peer, pipe, idle_s=0.3) == []
        async with asyncio.timeout(30):
            await replica.left.wait()
    assert pipe.closed
    assert len(pipe.frames) <= 1 << 18
    assert written[0] < 500  # what fits into the sockets' own buffers, and no more


async def test_an_answer_that_never_begins_is_given_up():
    async def silent(reader, writer):
        await reader.read()

    async with StandIn(silent).running() as replica:
        client = RegionClient(connect_s=1, first_byte_s=0.1)
        with pytest.raises(ConnectionFailed, match="nothing was answered"):
            async with asyncio.timeout(30), client.open("GET", replica.url + "/", {}):
                pass


async def test_an_answer_whose_head_does_not_end_is_given_up():
    async def floods(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"x-more: y\r\n" * 1000)
            await writer.drain()

    async with StandIn(floods).running() as replica:
        with pytest.raises(ConnectionFailed, match="head does not end"):
            async with RegionClient().open("GET", replica.url + "/", {}):
                pass


async def test_no_heartbeat_of_ours_falls_into_an_event_that_is_being_passed_on():
    streams = Streams(resumer=None, heartbeat_s=15, buffer_events=9)
    sent, half_way, go_on = [], asyncio.Event(), asyncio.Event()

    async def send(message):
        sent.append(message.get("body", b""))
        if b"id: 1" in sent[-1]:
            half_way.set()

    async def feed():
        stream.pipe.write(frame(1)[:9])
        await go_on.wait()
        stream.pipe.write(frame(1)[9:])

    stream = streams.open({"http_version": "1.0", "method": "GET"}, asyncio.Event().wait, send)
    relaying = asyncio.create_task(stream.relay(feed))
    async with asyncio.timeout(30):
        await half_way.wait()
        for _ in range(100):
            streams.beat()
        go_on.set()
        await relaying
    assert b"".join(sent) == frame(1)


# --- where a stream stands ---


@given(st.lists(st.sampled_from(["delta", "ping", "queued", "start", "retry"]), max_size=12), st.booleans(), st.data())
@example(["delta"], True, None)
def test_however_a_stream_is_split_progress_knows_where_it_stands(names, ended, data):
    pieces, ids, seq = [], {0: 0}, 0
    boundaries = {0}
    for name in [*names, *(["done"] if ended else [])]:
        if name in {"delta", "start", "done"}:
            seq += 1
            pieces.append(frame(seq, name))
        else:
            pieces.append({"ping": b": ping\n", "retry": b"retry: 1000\n"}.get(name, b"event: queued\ndata: {}\n\n"))
        boundaries.add(sum(map(len, pieces)))
        ids[sum(map(len, pieces))] = seq
    raw = b"".join(pieces)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw))))) if data else []
    progress = Progress(0)
    for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        progress.take(raw[begin:end])
        assert progress.between_events == (end in boundaries)
        assert progress.last_id == ids[max(at for at in boundaries if at <= end)]
    assert progress.ended == ended


@given(st.text(), st.data())
def test_text_that_looks_like_events_moves_nothing(text, data):
    raw = b"id: 1\nevent: delta\ndata: " + msgspec.json.encode({"text": f"\nid: 9\n\nevent: done\n\n{text}"}) + b"\n\n"
    at = data.draw(st.integers(0, len(raw)))
    progress = Progress(0)
    progress.take(raw[:at])
    progress.take(raw[at:])
    assert (progress.last_id, progress.ended, progress.between_events) == (1, False, True)
