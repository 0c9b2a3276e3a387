"""A shorter way to the socket, behind our own server: frames are written to the transport as they come.

ASGI's ``send`` wakes a task and walks through several coroutines for every event; for a stream that is most of its
cost (``docs/benchmarks.md``). So the server's protocol lends a stream its transport between the first body part and the
last, which still go through ``send``: the server frames the response, handles keep-alive and shutdown as ever.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from chatsvc.streamlog.subscription import Overrun

_EXTENSION: Final = "chatsvc.socket"


class StreamingProtocol(HttpToolsProtocol):
    """To be given to uvicorn as ``Config(http=...)``. Offers itself in the scope, and tells when the client is gone."""

    lost: Callable[[], None] | None = None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {_EXTENSION: self}  # type: ignore[dict-item]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.lost is not None:
            self.lost()


def protocol_of(scope: Mapping[str, Any]) -> StreamingProtocol | None:
    """The protocol behind a request, when it is ours and frames an answer of unknown length in chunks, as we do."""
    found = (scope.get("extensions") or {}).get(_EXTENSION)
    chunked = scope["http_version"] == "1.1" and scope["method"] != "HEAD"
    return found if chunked and isinstance(found, StreamingProtocol) else None


class Ticking(Protocol):
    """Whose ticks say when a stream was last written to."""

    tick: int


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

    def on_close(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    def write(self, frames: bytes) -> bool:
        if self.closed:
            return False
        transport = self._protocol.transport
        if transport.get_write_buffer_size() > self._max_bytes:
            self._lose()
            transport.abort()
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
        """The server wants the stream to end. A client that does not read would hold it up."""
        self.closed = True
        if self._protocol.flow.write_paused:
            self._gone = True
            self._protocol.transport.abort()
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
        try:
            await following
        finally:
            protocol.lost = None
            self._callback = None
            # Whatever comes now would follow the last chunk, and be taken for the next answer.
            self.closed = True
        return not self._gone
