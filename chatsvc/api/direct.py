"""A shorter way to the socket, behind our own server: frames are written to the transport as they come.

ASGI's ``send`` wakes a task and walks through several coroutines for every event; for a stream that is most of its
cost (``docs/benchmarks.md``). So the server's protocol lends a stream its transport between the first body part and the
last, which still go through ``send``: the server frames the response, handles keep-alive and shutdown as ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Final, Protocol

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from chatsvc.api.errors import PROBLEM, problem_bytes, problem_headers
from chatsvc.errors import HeadTooLarge
from chatsvc.streamlog.subscription import Overrun

_log = structlog.get_logger(__name__)

_EXTENSION: Final = "chatsvc.socket"
_TELL_EVERY_S: Final = 10.0
REQUEST_S: Final = 60.0
"""A request, body included, that has not come whole after so many seconds is given up, and its connection closed."""

HEAD_BYTES: Final = 65_536
"""A request whose line and headers are longer is refused, as is one with so much around its body.

The parser keeps all of it until the head has come whole, before anybody knows who is calling. Proxies let 8 to 32 KiB
through by default, so what is refused is no cookie and no token.
"""


class Places:
    """How many connections the process takes: beyond its limit of files the kernel would refuse everything."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.for_streams = most - most // 16
        """Open streams beyond these are put off in good order, for which connections are needed too."""
        self.refused = 0
        """Connections closed at once because there was no place for them, ever."""
        self._told_at = -_TELL_EVERY_S

    def refuse(self, now: float) -> None:
        """Count one, and say so now and then."""
        self.refused += 1
        if now - self._told_at >= _TELL_EVERY_S:
            self._told_at = now
            _log.error(
                "out of file descriptors: connections are refused; raise the limit (ulimit -n) or run more processes",
                most=self.most,
                refused=self.refused,
            )


class StreamingProtocol(HttpToolsProtocol):
    """To be given to uvicorn as ``Config(http=...)``. Offers itself in the scope, and tells when the client is gone."""

    lost: Callable[[], None] | None = None
    _patience: asyncio.TimerHandle | None = None
    _within = False
    """A request has begun and has not come whole."""
    _unread = 0
    """Bytes that came for it since the read it began in, or since the last piece of its body."""
    _too_large = False

    def __init__(self, *args: Any, places: Places | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._places = places

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._places is not None and len(self.connections) > self._places.most:
            self._places.refuse(self.loop.time())
            transport.abort()
            return
        self._expect_request()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {_EXTENSION: self}  # type: ignore[dict-item]
        # Where in a read it begins is not known; what is not counted for that reason is one read, which is bounded.
        self._within, self._unread = True, 0

    def data_received(self, data: bytes) -> None:
        if self._patience is None:
            self._expect_request()
        if self._within:
            self._unread += len(data)
        super().data_received(data)
        if self._unread > HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_headers_complete(self) -> None:
        # ": " and the end of the line are four bytes.
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > HEAD_BYTES:
            self._too_large = True
            raise ValueError("the head of a request is too large")  # stops the parser, which then has us say so
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._within, self._unread = False, 0
        super().on_message_complete()
        self._expect_nothing()

    def send_400_response(self, msg: str) -> None:
        if self._too_large:
            self._refuse()
        elif self._may_answer:
            super().send_400_response(msg)
        else:
            self.drop()

    @property
    def _may_answer(self) -> bool:
        """Whether an answer to what is coming in would be taken for that, and not for a part of another one."""
        if self.cycle is None:
            return True
        if self.cycle.scope is self.scope:  # its own head was whole, so it may be being answered already
            return not self.cycle.response_started and not self.pipeline
        return self.cycle.response_complete

    def _refuse(self) -> None:
        """Say that the request's head is too large, and end the connection: what follows is more of the same."""
        if not self._may_answer:
            self.drop()
            return
        error = HeadTooLarge(
            f"The request's line and headers may have {HEAD_BYTES} bytes together. Send fewer cookies."
        )
        body = problem_bytes(error)
        lines = [
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
            f"content-type: {PROBLEM}",
            f"content-length: {len(body)}",
            *(f"{name}: {value}" for name, value in problem_headers(error).items()),
            "connection: close",
        ]
        self.transport.write("".join(f"{line}\r\n" for line in (*lines, "")).encode() + body)
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._expect_nothing()
        if self.lost is not None:
            self.lost()

    def drop(self) -> None:
        """Cut the connection. Nobody is left who could miss the end of the answer, so the server need not either."""
        if self.cycle is not None:
            self.cycle.disconnected = True
        self.transport.abort()

    def _expect_request(self) -> None:
        """Start the clock. The server itself waits for ever, also for a client that sends a byte a second, or none."""
        self._patience = self.loop.call_later(REQUEST_S, self._give_up)

    def _expect_nothing(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        answering = self.cycle is not None and not (self.cycle.response_complete or self.cycle.more_body)
        if answering or self.flow.read_paused:
            self._expect_request()  # what else came, if anything, can wait
        else:
            self.transport.close()


def protocol_of(scope: Mapping[str, Any]) -> StreamingProtocol | None:
    """The protocol behind a request, when it is ours and frames an answer of unknown length in chunks, as we do."""
    found = (scope.get("extensions") or {}).get(_EXTENSION)
    chunked = scope["http_version"] == "1.1" and scope["method"] != "HEAD"
    return found if chunked and isinstance(found, StreamingProtocol) else None


class Ticking(Protocol):
    """Whose ticks say when a stream was last written to, and who counts those that were cut."""

    tick: int
    cut: int


class DirectPipe:
    """A reader's sink that writes to the transport. What it may hold back is bounded by ``max_bytes`` and one frame."""

    __slots__ = ("_callback", "_gone", "_max_bytes", "_protocol", "_ticking", "closed", "tick")

    def __init__(self, protocol: StreamingProtocol, ticking: Ticking, *, max_bytes: int) -> None:
        self._protocol = protocol
        self._ticking = ticking
        self._max_bytes = max_bytes
        self._callback: Callable[[], None] | None = None
        self._gone = False
        self.closed = False
        self.tick = ticking.tick

    @property
    def held(self) -> int:
        """Bytes that wait for the client to read, beyond what the kernel holds."""
        size: int = self._protocol.transport.get_write_buffer_size()
        return size

    def on_close(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    def cut(self) -> None:
        """The client does not read what it asked for: drop it, with all that waits for it."""
        self._ticking.cut += 1
        self._lose()
        self._protocol.drop()

    def write(self, frames: bytes) -> bool:
        if self.closed:
            return False
        transport = self._protocol.transport
        if transport.get_write_buffer_size() > self._max_bytes:
            self.cut()
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(frames), frames))
        self.tick = self._ticking.tick
        return True

    async def drain(self) -> None:
        if self._protocol.flow.write_paused and not self.closed:
            await self._protocol.flow.drain()
        if self.closed:
            raise Overrun

    def close(self) -> None:
        """The server wants the stream to end, and its connection too.

        A client that does not read would hold it up.
        """
        self.closed = True
        # The next request would come to this process again; over a new connection it may find another one.
        self._protocol.cycle.keep_alive = False
        if self._protocol.flow.write_paused:
            self._gone = True
            self._protocol.drop()
        if self._callback is not None:
            self._callback()

    def _lose(self) -> None:
        self._gone = True
        self.closed = True
        if self._callback is not None:
            self._callback()

    async def carry(self, following: Awaitable[None]) -> bool:
        """See the reader through. False when the client is gone or was cut, so that there is no end to write."""
        protocol = self._protocol
        protocol.lost = self._lose
        if protocol.transport.is_closing():
            self._lose()
            protocol.drop()
        try:
            await following
        finally:
            protocol.lost = None
            self._callback = None
            # Whatever comes now would follow the last chunk, and be taken for the next answer.
            self.closed = True
        return not self._gone
