"""The wire of a reply's stream: headers, ``retry``, frames, heartbeats, and an end that is noticed on both sides.

Two ways to the socket, one behaviour. Behind our own server (``direct.py``) a frame is written to the transport as it
comes: no task wakes up, nothing is queued here. Behind any other ASGI server frames go through an outbox and ``send``.

Heartbeats are one newline after ``: ping``, only ever between events: a blank line after it would dispatch an empty
event in clients that are not strict. One ticker serves all streams.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, Protocol

from chatsvc.api.direct import DirectPipe, protocol_of
from chatsvc.streamlog.outbox import Outbox
from chatsvc.streamlog.resume import Resumer

HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store, no-transform"),
    (b"x-accel-buffering", b"no"),
)
PING: Final = b": ping\n"
_RETRY_MS: Final = (1000, 3000)
_TICKS_PER_HEARTBEAT: Final = 8
_BUFFER_BYTES: Final = 256 * 1024
_ALL_BUFFERS_BYTES: Final = 256 * 1024 * 1024
"""What all streams together may hold back; above it the slowest are cut, so that many slow readers are no flood."""
_Send = Callable[[Any], Awaitable[None]]
_Receive = Callable[[], Awaitable[Any]]


def retry_line() -> bytes:
    """How long the client is to wait before it reconnects, in ms, drawn anew so that many do not return in step.

    One line without a blank one after it, for the same reason as heartbeats.
    """
    return b"retry: %d\n" % random.randint(*_RETRY_MS)  # noqa: S311  # spreads load, hides nothing


class Streams:
    """All open streams of this process. ``run`` is their heartbeat; the composition root owns its task."""

    def __init__(
        self,
        resumer: Resumer,
        *,
        heartbeat_s: float,
        buffer_events: int,
        buffer_bytes: int = _BUFFER_BYTES,
        all_buffers_bytes: int = _ALL_BUFFERS_BYTES,
        most: int = sys.maxsize,
    ) -> None:
        """``most`` streams are open at a time; ``full`` says when there are so many."""
        self.resumer = resumer
        self._buffer_events = buffer_events
        self._buffer_bytes = buffer_bytes
        self._all_buffers_bytes = all_buffers_bytes
        self._most = most
        self.tick = 0
        self.cut = 0
        """Clients cut because they were too slow, ever."""
        self.closing = False
        self._heartbeat_s = heartbeat_s
        self._open: dict[Stream, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def full(self) -> bool:
        """One more would be too many: it had better be put off, or find another process."""
        return len(self._open) >= self._most

    def open(self, scope: Mapping[str, Any], receive: _Receive, send: _Send) -> Stream:
        """A stream that answers this request; ``run`` it."""
        protocol = protocol_of(scope)
        if protocol is not None:
            return Stream(self, send, DirectPipe(protocol, self, max_bytes=self._buffer_bytes))
        outbox = Outbox(max_events=self._buffer_events, max_bytes=self._buffer_bytes)
        return Stream(self, send, _RelayedPipe(outbox, self, receive, send))

    async def run(self) -> None:
        """Write heartbeats until cancelled."""
        while True:
            await asyncio.sleep(self._heartbeat_s / _TICKS_PER_HEARTBEAT)
            self.beat()

    def beat(self) -> None:
        """One tick: streams that were silent for a whole heartbeat get their line."""
        self.tick += 1
        for stream in self._open:
            if stream.beats and self.tick - stream.pipe.tick >= _TICKS_PER_HEARTBEAT:
                stream.pipe.write(PING)
        self._bound(self.buffered)

    @property
    def buffered(self) -> int:
        """Bytes held back for clients that have not taken them yet, all together."""
        return sum(stream.pipe.held for stream in self._open)

    def _bound(self, held: int) -> None:
        """Cut those who hold most until all together hold little enough."""
        if held <= self._all_buffers_bytes:
            return
        for stream in sorted(self._open, key=lambda stream: stream.pipe.held, reverse=True):
            if held <= self._all_buffers_bytes:
                return
            held -= stream.pipe.held
            stream.pipe.cut()

    def close(self) -> None:
        """The server shuts down: end all streams, now and as they come. Clients reconnect elsewhere."""
        self.closing = True
        for stream in tuple(self._open):
            stream.let_go()

    def without(self, stays: Callable[[str], bool]) -> list[Stream]:
        """Open streams in the order in which they came, but for those of replies that ``stays`` is true of."""
        return [stream for stream in self._open if not stays(stream.response_id)]

    def entered(self, stream: Stream) -> None:
        self._open[stream] = None

    def left(self, stream: Stream) -> None:
        self._open.pop(stream, None)


class _Pipe(Protocol):
    """A way to the socket; a reader's sink."""

    tick: int
    """The streams' tick when something was last written."""

    @property
    def closed(self) -> bool: ...
    @property
    def held(self) -> int:
        """Bytes that the client has not taken yet."""
        ...

    def on_close(self, callback: Callable[[], None]) -> None: ...
    def write(self, frames: bytes) -> bool: ...
    async def drain(self) -> None: ...
    def close(self) -> None: ...
    def cut(self) -> None:
        """Drop a client that is too slow. It resumes by its cursor."""
        ...

    async def carry(self, following: Coroutine[Any, Any, None]) -> bool:
        """See the reader through. False when the client is gone or was cut, so that there is no end to write."""
        ...


class _RelayedPipe:
    """A sink that passes frames on through ASGI, for servers that are not ours."""

    def __init__(self, outbox: Outbox, streams: Streams, receive: _Receive, send: _Send) -> None:
        self._outbox = outbox
        self._streams = streams
        self._receive = receive
        self._send = send
        self._gone = False
        self.tick = streams.tick
        self.on_close = outbox.on_close
        self.drain = outbox.drain
        self.close = outbox.close

    @property
    def closed(self) -> bool:
        return self._outbox.closed

    @property
    def held(self) -> int:
        return self._outbox.held

    def cut(self) -> None:
        self._streams.cut += 1
        self._gone = True
        self._outbox.close()

    def write(self, frames: bytes) -> bool:
        self.tick = self._streams.tick
        if self._outbox.closed:
            return False
        if self._outbox.write(frames):
            return True
        self.cut()
        return False

    async def carry(self, following: Coroutine[Any, Any, None]) -> bool:
        tasks = (asyncio.create_task(self._follow(following)), asyncio.create_task(self._watch()))
        try:
            while frames := await self._outbox.take():
                await self._send({"type": "http.response.body", "body": frames, "more_body": True})
            await tasks[0]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return not self._gone

    async def _follow(self, following: Coroutine[Any, Any, None]) -> None:
        try:
            await following
        finally:
            self._outbox.finish()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._outbox.close()


class Stream:
    """One answer being streamed."""

    __slots__ = ("_early", "_send", "_streams", "beats", "pipe", "response_id")

    def __init__(self, streams: Streams, send: _Send, pipe: _Pipe) -> None:
        self._streams = streams
        self._send = send
        self._early: list[bytes] | None = []
        self.beats = True
        """Heartbeats are written here, and not by who feeds the pipe."""
        self.pipe = pipe
        self.response_id = ""
        """The reply that is read; empty when another region sends it."""

    def let_go(self) -> None:
        """End the answer between two events, so that the client comes back with its cursor, on a new connection.

        What another region sends may end within an event, which clients then drop.
        """
        self.pipe.close()

    def push_passing(self, frame: bytes) -> None:
        """Hand over an event that has no id and is not in the log; before ``run`` it waits for the headers."""
        if self._early is not None:
            self._early.append(frame)
        elif not self.pipe.closed:
            self.pipe.write(frame)

    async def run(self, response_id: str, cursor: int, *, ended: bool = False) -> None:
        """Answer with every event after ``cursor``. Returns at the end of the reply, or of the connection."""
        self.response_id = response_id
        await self._send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        early, self._early = self._early or [], None
        await self._carry(
            retry_line() + b"".join(early),
            lambda: self._streams.resumer.follow(response_id, cursor, self.pipe, ended=ended),
        )

    async def relay(self, feed: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Answer with what ``feed`` writes to the pipe: a whole stream made elsewhere, ``retry`` and heartbeats in it.

        Returns when ``feed`` does, or when the client is gone.
        """
        self.beats = False  # between two writes there may be half an event
        await self._send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        await self._carry(b"", feed)

    async def _carry(self, first: bytes, feed: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await self._send({"type": "http.response.body", "body": first, "more_body": True})
        if self._streams.closing:
            self.let_go()
        self._streams.entered(self)
        try:
            if await self.pipe.carry(feed()):
                # Waits for a client that is behind: until then it is one of those that something is held back for.
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._streams.left(self)
