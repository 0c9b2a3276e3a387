"""A connection to Redis: command bytes in, replies out, strictly in order; and a lane, which makes it again.

redis-py reads the URL and knows credentials and TLS. The socket is driven here because awaiting replies one at a time
costs more than Redis needs to make them: a whole batch goes out in one write and comes back as one list.

A caller that is cancelled leaves its place in the queue of expected replies, so nobody is ever handed another's (L10).
A connection whose answer did not come in time is dropped whole, for the same reason.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from typing import Any, Final

import hiredis
import msgspec
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection, parse_url

from chatsvc.errors import LogUnavailable

_MORE: Final = object()
"""What the parser says when a reply is not complete yet; None is a reply."""


def pack(*args: bytes) -> bytes:
    """One command in the wire form of the protocol (RESP2)."""
    return hiredis.pack_command(args)  # type: ignore[arg-type, no-any-return]


def arguments(*args: bytes) -> bytes:
    """Packed arguments to put into a command whose head is written by hand."""
    return pack(*args).split(b"\r\n", 1)[1]


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where a server is and how to introduce oneself: a TCP, TLS or unix URL as redis-py understands it."""

    host: str = ""
    port: int = 0
    path: str = ""
    tls: ssl.SSLContext | None = None
    greeting: tuple[bytes, ...] = ()
    """Packed commands to send first."""

    @classmethod
    def from_url(cls, url: str) -> Address:
        """Raises ``ValueError`` for what is no Redis URL."""
        options: dict[str, Any] = dict(parse_url(url))
        kind = options.pop("connection_class", Connection)
        known = kind(**options)
        greeting = []
        if known.password:
            greeting.append(pack(b"AUTH", *(part.encode() for part in (known.username, known.password) if part)))
        if known.db:
            greeting.append(pack(b"SELECT", b"%d" % int(known.db)))
        if isinstance(known, UnixDomainSocketConnection):
            return cls(path=known.path, greeting=tuple(greeting))
        tls = known.ssl_context.get() if isinstance(known, SSLConnection) else None
        return cls(host=known.host, port=known.port, tls=tls, greeting=tuple(greeting))


class _Call:
    """Replies that somebody waits for, or waited for."""

    __slots__ = ("future", "replies", "wanted")

    def __init__(self, future: asyncio.Future[list[Any]], wanted: int) -> None:
        self.future = future
        self.wanted = wanted
        self.replies: list[Any] = []


class Wire(asyncio.Protocol):
    """One connection. Replies of Redis that are errors are handed over as ``hiredis.ReplyError`` objects."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader(notEnoughData=_MORE)
        self._calls: deque[_Call] = deque()
        self._transport: asyncio.Transport | None = None
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        reader, calls = self._reader, self._calls
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not _MORE:
                call = calls[0]
                call.replies.append(reply)
                if len(call.replies) == call.wanted:
                    calls.popleft()
                    if not call.future.done():
                        call.future.set_result(call.replies)
        except (hiredis.ProtocolError, IndexError):
            # Bytes that are no reply, or a reply nobody asked for: nothing on this connection can be trusted now.
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        reason = f"the connection to Redis broke: {exc}" if exc else "the connection to Redis was closed"
        while self._calls:
            call = self._calls.popleft()
            if not call.future.done():
                call.future.set_exception(LogUnavailable(reason))

    def call(self, payload: bytes, replies: int) -> asyncio.Future[list[Any]]:
        """Send packed commands; the future gets as many replies, in order, or ``LogUnavailable``."""
        future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        if self.closed or self._transport is None:
            future.set_exception(LogUnavailable("the connection to Redis is closed"))
            return future
        self._calls.append(_Call(future, replies))
        self._transport.write(payload)
        return future

    def abort(self) -> None:
        """Close now. Who still waits gets ``LogUnavailable``."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()


async def dial(address: Address) -> Wire:
    """Connect and introduce oneself. Raises ``OSError``, or ``LogUnavailable`` when Redis turns us away."""
    loop = asyncio.get_running_loop()
    if address.path:
        _, wire = await loop.create_unix_connection(Wire, address.path)
    else:
        _, wire = await loop.create_connection(Wire, address.host, address.port, ssl=address.tls)
    try:
        if address.greeting:
            for reply in await wire.call(b"".join(address.greeting), len(address.greeting)):
                if isinstance(reply, hiredis.ReplyError):
                    raise LogUnavailable(f"Redis refuses the connection: {reply}")
    except BaseException:
        wire.abort()
        raise
    return wire


class Lane:
    """A connection that is made when needed and made again when it broke. Any number of callers at a time."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._wire: Wire | None = None
        self._dialling = asyncio.Lock()
        self._closed = False
        self.broken = 0
        """How many connections broke after they had been made."""

    async def call(self, payload: bytes, replies: int, *, patience_s: float = 0.0) -> list[Any]:
        """Send packed commands and return their replies.

        ``patience_s`` is time that the commands may spend blocked on purpose. Raises ``LogUnavailable`` within that
        and the lane's timeout.
        """
        wire: Wire | None = None
        try:
            async with asyncio.timeout(self._timeout_s + patience_s):
                wire = await self._connected()
                return await wire.call(payload, replies)
        except TimeoutError as late:
            # The answer may still come; it must find nobody.
            self._drop(wire)
            raise LogUnavailable(f"Redis did not answer within {self._timeout_s:g} s") from late
        except OSError as error:
            raise LogUnavailable(f"Redis is not reachable: {error}") from error

    async def _connected(self) -> Wire:
        wire = self._wire
        if wire is not None and not wire.closed:
            return wire
        async with self._dialling:
            if self._wire is not None and self._wire.closed:
                self._drop(self._wire)
            if self._closed:
                raise LogUnavailable("the stream log is closed")
            if self._wire is None:
                self._wire = await dial(self._address)
            return self._wire

    def _drop(self, wire: Wire | None) -> None:
        if wire is None or wire is not self._wire:
            return
        wire.abort()
        self._wire = None
        self.broken += 1

    def notice(self) -> int:
        """``broken``, counting a connection that has closed and that nobody has called on since."""
        if self._wire is not None and self._wire.closed:
            self._drop(self._wire)
        return self.broken

    def drop(self) -> None:
        """Break the connection on purpose."""
        self._drop(self._wire)

    def close(self) -> None:
        """Close for good."""
        self._closed = True
        self._drop(self._wire)
