"""One HTTP/1.1 request to another region, its answer read as it comes.

A client of our own: what is asked is three fixed routes, what matters is that a byte is passed on when it arrives,
that little is read ahead of a slow reader, and that closing means closed at once. The parser is the one that the server
uses. One connection a request; an answer without a length or chunks is not taken, since its end could not be told from
a break.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

import httptools

READ_BYTES: Final = 64 * 1024
_MAX_HEAD_BYTES: Final = 64 * 1024
_PORTS: Final = {"http": 80, "https": 443}


class ConnectionFailed(Exception):
    """No answer, or no more of it. The text says why, and holds nothing of the request."""


class Answer:
    """An answer whose head has come. ``read`` its body; it is closed with the block that opened it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self._reader = reader
        self._writer = writer
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._head_done = False
        self._complete = False

    @property
    def media_type(self) -> str:
        """Of the body, in lower case and without parameters."""
        return self.headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()

    async def read(self, within_s: float) -> bytes:
        """What has come of the body, at least one byte; empty at its end. Raises ``ConnectionFailed``."""
        while not self._body and not self._complete:
            await self._feed(within_s)
        body = b"".join(self._body)
        self._body.clear()
        return body

    async def whole(self, within_s: float, *, most: int) -> bytes:
        """The rest of the body. Raises ``ConnectionFailed``, also when it has more than ``most`` bytes."""
        body = b""
        async with _limit(within_s, "the answer did not end"):
            while part := await self.read(within_s):
                body += part
                if len(body) > most:
                    raise ConnectionFailed(f"the answer has more than {most} bytes")
        return body

    def abort(self) -> None:
        """Close at once: whoever waits in ``read`` is told. Idempotent."""
        self._writer.transport.abort()

    async def read_head(self, within_s: float) -> None:
        """Wait for status and headers. Raises ``ConnectionFailed``."""
        read = 0
        async with _limit(within_s, "nothing was answered"):
            while not self._head_done:
                read += await self._feed(within_s)
                if read > _MAX_HEAD_BYTES and not self._head_done:
                    raise ConnectionFailed("the answer's head does not end")

    async def _feed(self, within_s: float) -> int:
        try:
            async with asyncio.timeout(within_s):
                data = await self._reader.read(READ_BYTES)
            if not data:
                raise ConnectionFailed("the connection was closed")
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ConnectionFailed("what was answered is no HTTP") from error
        except TimeoutError as error:
            raise ConnectionFailed(f"the connection fell silent for {within_s:g} s") from error
        except OSError as error:
            raise ConnectionFailed(error.strerror or type(error).__name__) from error
        return len(data)

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._head_done = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._complete = True


class RegionClient:
    """Asks. Holds no connection of its own."""

    def __init__(self, *, connect_s: float = 2.0, first_byte_s: float = 5.0) -> None:
        self._connect_s = connect_s
        self._first_byte_s = first_byte_s
        self._tls: ssl.SSLContext | None = None

    @asynccontextmanager
    async def open(self, method: str, url: str, headers: Mapping[str, str]) -> AsyncIterator[Answer]:
        """Send a request without a body. Raises ``ConnectionFailed`` before the block, never after it."""
        parts = urlsplit(url)
        port = parts.port or _PORTS[parts.scheme]
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        lines = [f"{method} {target} HTTP/1.1", f"host: {parts.netloc}", "accept-encoding: identity"]
        lines += ["connection: close", *(f"{name}: {value}" for name, value in headers.items())]
        if method != "GET":
            lines.append("content-length: 0")
        try:
            async with _limit(self._connect_s, "no connection was made"):
                reader, writer = await asyncio.open_connection(
                    parts.hostname, port, ssl=self._context() if parts.scheme == "https" else None, limit=READ_BYTES
                )
        except OSError as error:
            raise ConnectionFailed(error.strerror or type(error).__name__) from error
        answer = Answer(reader, writer)
        try:
            writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
            await answer.read_head(self._first_byte_s)
            yield answer
        finally:
            # The other side notices by the closed connection; there is nothing to wait for.
            answer.abort()

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


@asynccontextmanager
async def _limit(seconds: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise ConnectionFailed(f"{what} within {seconds:g} s") from error
