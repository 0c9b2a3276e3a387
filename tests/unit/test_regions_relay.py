"""Passing another region's stream on, whole or not at all, and letting go of it."""

import asyncio
import re
from contextlib import AsyncExitStack

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from region_stand_ins import END, PATH, STREAM_HEAD, Pipe, chunk, follow, frame, region

from chatsvc.api.region_relay import ClientGone, Progress, unless
from chatsvc.api.sse import Streams


async def test_the_request_asks_for_no_compression_and_carries_cursor_and_token():
    async with region(STREAM_HEAD + chunk(frame(8, "done")) + END) as (peer, (replica,)):
        await follow(peer, Pipe(), cursor=7)
        (request,) = replica.requests
    assert request.startswith(f"GET {PATH}?last_event_id=7&token=tok+en HTTP/1.1\r\n")
    assert "accept-encoding: identity\r\n" in request
    assert len(re.findall(r"(?m)^x-chatsvc-region: \S+\r$", request)) == 1
    assert "cookie" not in request


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
    written, much = [0], asyncio.Event()
    piece = chunk(b"data: " + b"x" * 65_536 + b"\n\n")

    async def floods(reader, writer):
        writer.write(STREAM_HEAD)
        while written[0] < 1000:
            writer.write(piece)
            await writer.drain()
            written[0] += 1
            if written[0] == 2:
                much.set()

    async with region(floods) as (peer, (replica,)):
        pipe = Pipe(room=0)
        assert await follow(peer, pipe, idle_s=1, once=much) == []
        async with asyncio.timeout(30):
            await replica.left.wait()
    assert pipe.closed
    assert len(pipe.frames) <= 1 << 18
    assert written[0] < 500  # what fits into the sockets' own buffers, and no more


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
