"""A connection to Redis: command bytes in, replies out, strictly in order; and a lane, which makes it again.

redis-py reads the URL and knows credentials and TLS. The socket is driven here because awaiting replies one at a time
costs more than Redis needs to make them: a whole batch goes out in one write and comes back as one list.

A caller that is cancelled leaves its place in the queue of expected replies, so nobody is ever handed another's (L10).
A connection whose answer did not come in time is dropped whole, for the same reason.

A lane asks where to connect each time, and says what became of the last connection. So it follows a fail-over: a server
that says it is no master (any more) is left.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

import hiredis
import msgspec
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection, parse_url

from chatsvc.errors import LogUnavailable

_MORE: Final = object()
"""What the parser says when a reply is not complete yet; None is a reply."""
_LEAVE: Final = ("MOVED ", "READONLY ", "CLUSTERDOWN ", "UNBLOCKED ")
"""Errors after which the server is to be looked for anew."""
_ASK: Final = "ASK "
_RUN_ID: Final = re.compile(rb"^run_id:(\w+)", re.MULTILINE)
_ASKING: Final = b"*1\r\n$6\r\nASKING\r\n"
LOST: Final = "lost"
"""What a lane tells of a connection that broke, or could not be made."""


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
    must_be_master: bool = False
    """Turn away from a server that says it is a replica."""

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

    def at(self, host: str, port: int) -> Address:
        """Another server that is spoken to in the same way."""
        return msgspec.structs.replace(self, host=host, port=port)

    async def locate(self, news: str) -> Address:
        """This address."""
        return self


Locate = Callable[[str], Awaitable[Address]]
"""Says where to connect. It is told what became of the last connection: "" when there was none, else an error of Redis
that sends one elsewhere, or ``LOST``. Raises ``LogUnavailable``."""


def redirection(error: str) -> tuple[str, int]:
    """Host ("": the same as before) and port of ``MOVED <slot> <host>:<port>``, and of ``ASK``."""
    host, _, port = error.split()[2].rpartition(":")
    return host.strip("[]"), int(port)


class _Signs:
    """What the errors on one connection say about where to be. An object of its own: a parser must not own a wire."""

    __slots__ = ("asked", "leave")

    def __init__(self) -> None:
        self.leave = ""
        """The error after which this server is to be left."""
        self.asked = False
        """Some keys are being moved away from here."""

    def error(self, text: str) -> hiredis.ReplyError:
        if text.startswith(_LEAVE):
            self.leave = text
        elif text.startswith(_ASK):
            self.asked = True
        return hiredis.ReplyError(text)


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
        self.signs = _Signs()
        self._reader = hiredis.Reader(notEnoughData=_MORE, replyError=self.signs.error)
        self._calls: deque[_Call] = deque()
        self._transport: asyncio.Transport | None = None
        self.closed = False
        self.server_id: bytes | None = None
        """What the server calls itself since its start; None: not asked yet."""

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
        if address.must_be_master:
            (role,) = await wire.call(pack(b"ROLE"), 1)
            # Who may not ask is not told; a replica would then refuse the first command that writes.
            if not isinstance(role, hiredis.ReplyError) and role[0] != b"master":
                raise LogUnavailable(f"{address.host}:{address.port} is no master (yet)")
    except BaseException:
        wire.abort()
        raise
    return wire


class _Dialling:
    """A connection that is being made for all who wait for it. It has a time of its own, whoever gives up meanwhile:

    else, with many callers, each would begin anew with what little is left of its own time, and none come to an end.
    """

    def __init__(self, make: Callable[[], Awaitable[Wire]], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._task = asyncio.get_running_loop().create_task(self._in_time(make))
        self._task.add_done_callback(lambda _: self.failed)  # so that it is known, though nobody should wait any more

    async def _in_time(self, make: Callable[[], Awaitable[Wire]]) -> Wire:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await make()
        except TimeoutError as late:
            raise LogUnavailable(f"Redis did not answer within {self._timeout_s:g} s") from late
        except OSError as error:
            raise LogUnavailable(f"Redis is not reachable: {error}") from error

    @property
    def under_way(self) -> bool:
        return not self._task.done()

    @property
    def failed(self) -> bool:
        return self._task.done() and (self._task.cancelled() or self._task.exception() is not None)

    async def wire(self) -> Wire:
        """The connection, once it is made. Raises ``LogUnavailable``, also when it was given up."""
        if not self._task.done():
            # Neither ends with the other: not the task with a caller that is cancelled, nor the caller with the task.
            await asyncio.wait((self._task,))
        if self._task.cancelled():
            raise LogUnavailable("the connection to Redis was given up before it was made")
        return self._task.result()

    def abort(self) -> None:
        """Close it, made or not."""
        if self._task.done():
            if not self.failed:
                self._task.result().abort()
        else:
            self._task.cancel()


class Lane:
    """A connection that is made when needed and made again when it broke. Any number of callers at a time.

    ``repeats`` says that all commands here may be sent twice: then they are, when the first server sent us elsewhere.
    """

    def __init__(self, locate: Locate, timeout_s: float, *, repeats: bool = False) -> None:
        self._locate = locate
        self._timeout_s = timeout_s
        self._repeats = repeats
        self._wire: Wire | None = None
        self._address = Address()
        self._asides: dict[tuple[str, int], _Dialling] = {}
        self._news = ""
        self._dialling: _Dialling | None = None
        self._closed = False
        self.broken = 0
        """How many connections broke after they had been made."""

    async def call(self, commands: Sequence[bytes], *, patience_s: float = 0.0) -> list[Any]:
        """Send packed commands and return their replies.

        ``patience_s`` is time that the commands may spend blocked on purpose. Raises ``LogUnavailable`` within that
        and the lane's timeout.
        """
        wire: Wire | None = None
        clock = asyncio.get_running_loop().time
        sent_at = clock()
        try:
            async with asyncio.timeout(self._timeout_s + patience_s):
                wire = await self._connected()
                sent_at = clock()
                replies = await wire.call(b"".join(commands), len(commands))
                if wire.signs.leave and self._repeats:
                    wire = None
                    wire = await self._connected()
                    sent_at = clock()
                    replies = await wire.call(b"".join(commands), len(commands))
                if wire.signs.asked:
                    for number, place in _asked(replies):
                        main, wire = wire, None
                        aside = await self._aside(main, place)
                        wire, sent_at = main, clock()
                        _, replies[number] = await aside.call(_ASKING + commands[number], 2)
                return replies
        except TimeoutError as late:
            # The answer may still come; it must find nobody. Who spent the time on waiting for the connection says
            # nothing against it: with many such callers it would break as soon as it is made.
            if clock() - sent_at >= self._timeout_s / 2:
                self._drop(wire)
            raise LogUnavailable(f"Redis did not answer within {self._timeout_s:g} s") from late

    async def server_id(self) -> bytes:
        """What the server calls itself: another name after every start, and another than a replica's of it.

        Raises ``LogUnavailable``.
        """
        wire = self._wire
        if wire is None or wire.closed or wire.signs.leave or wire.server_id is None:
            (info,) = await self.call([pack(b"INFO", b"server")])
            found = None if isinstance(info, hiredis.ReplyError) else _RUN_ID.search(info)
            # Where that may not be asked all servers have one name.
            server_id = found[1] if found else b""
            if self._wire is None:
                return server_id
            self._wire.server_id = server_id
            return server_id
        return wire.server_id

    async def _connected(self) -> Wire:
        wire = self._wire
        if wire is not None and not wire.closed and not wire.signs.leave:
            return wire
        self.notice()
        if self._closed:
            raise LogUnavailable("the stream log is closed")
        if self._dialling is None or not self._dialling.under_way:
            self._dialling = _Dialling(self._dial, self._timeout_s)
        return await self._dialling.wire()

    async def _dial(self) -> Wire:
        news, self._news = self._news, LOST
        self._address = await self._locate(news)
        self._wire = wire = await dial(self._address)
        self._news = ""
        return wire

    async def _aside(self, main: Wire, place: tuple[str, int]) -> Wire:
        """A slot is moving to another node: keys that are there already are asked for there, without leaving here."""
        if main is not self._wire:
            raise LogUnavailable("the connection to Redis broke")
        dialling = self._asides.get(place)
        if dialling is None or dialling.failed:
            host, port = place
            make = partial(dial, self._address.at(host or self._address.host, port))
            dialling = self._asides[place] = _Dialling(make, self._timeout_s)
        wire = await dialling.wire()
        if wire.closed:
            # That counts as a break here: the other node may have come back with less.
            self._drop(main)
        return wire

    def _drop(self, wire: Wire | None) -> None:
        if wire is None or wire is not self._wire:
            return
        wire.abort()
        for aside in self._asides.values():
            aside.abort()
        self._asides.clear()
        self._wire = None
        self._news = wire.signs.leave or LOST
        self.broken += 1

    def notice(self) -> int:
        """``broken``, counting a connection that has closed, or is to be left, and that nobody has called on since."""
        if self._wire is not None and (self._wire.closed or self._wire.signs.leave):
            self._drop(self._wire)
        return self.broken

    def drop(self, *, also_unmade: bool = True) -> None:
        """Break the connection on purpose, and unless told otherwise one that is being made."""
        self._drop(self._wire)
        if also_unmade and self._dialling is not None and self._dialling.under_way:
            self._dialling.abort()
            self._dialling = None

    def close(self) -> None:
        """Close for good."""
        self._closed = True
        self.drop()


def _asked(replies: Sequence[Any]) -> list[tuple[int, tuple[str, int]]]:
    """Which replies send their command to another node, and to which."""
    return [
        (number, redirection(str(reply)))
        for number, reply in enumerate(replies)
        if isinstance(reply, hiredis.ReplyError) and str(reply).startswith(_ASK)
    ]
