"""A client held in the hand: it reads when it is told to, resets its connection, or stops answering without a word."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct
from collections.abc import AsyncIterator
from typing import Self

from reader import Rendered, events_of

_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A packet filter of one instruction (BPF_RET | BPF_K): keep 0 bytes of whatever comes."""


class RawReader:
    """One connection to a server on this machine."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self.seen = b""
        """All that was read, headers and chunk sizes included."""

    @classmethod
    async def connect(cls, port: int, *, receive_buffer: int | None = None) -> Self:
        """``receive_buffer``: bytes that the kernel takes in for a client that does not read; at least about 2 KB."""
        sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    async def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        await self._loop.sock_sendall(self._sock, data)

    async def ask(self, path: str, *headers: str, method: str = "GET") -> None:
        """Send a request without a body."""
        lines = (f"{method} {path} HTTP/1.1", "Host: localhost", *headers)
        await self.send("".join(f"{line}\r\n" for line in (*lines, "")).encode("latin-1"))

    async def read(self, most: int = 65536) -> bytes:
        """What is there, or comes next; empty at the end. Raises ``ConnectionError`` after a reset."""
        data = await self._loop.sock_recv(self._sock, most)
        self.seen += data
        return data

    async def until(self, mark: bytes) -> None:
        """Read until the mark has come. Raises ``ConnectionError`` when the connection ends before."""
        while mark not in self.seen:
            if not await self.read():
                raise ConnectionResetError(f"ended after {self.seen[-200:]!r}")

    async def to_the_end(self) -> None:
        """Read until the server ends or resets the connection."""
        try:
            while await self.read():
                pass
        except ConnectionError:
            pass  # a reset is an end too

    @property
    def status(self) -> int:
        """The answer's status; 0 while there is none."""
        line = self.seen.split(b"\r\n", 1)[0].split(b" ")
        return int(line[1]) if len(line) > 1 else 0

    async def rendered(self, cursor: int = 0) -> Rendered:
        """What a user who came with a cursor saw of the events that came whole."""

        async def whole() -> AsyncIterator[bytes]:
            yield dechunked(self.seen.partition(b"\r\n\r\n")[2])

        rendered = Rendered(connections=1, last_id=cursor)
        async for event in events_of(whole()):
            rendered.take(event)
        return rendered

    def reset(self) -> None:
        """Close so that the other side gets an RST."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()

    def vanish(self) -> None:
        """From now on the kernel drops whatever arrives, so nothing is acknowledged: the peer's network is gone."""
        program = ctypes.create_string_buffer(_DROP_ALL)
        self._sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))

    def close(self) -> None:
        """Close in good order. Idempotent."""
        self._sock.close()


def dechunked(body: bytes) -> bytes:
    """The content of a chunked body, which may break off anywhere."""
    content = b""
    while body:
        size, found, body = body.partition(b"\r\n")
        if not found:
            break
        content += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    return content


async def figures(client, server) -> dict[str, float]:
    """What ``/metrics`` says now, by name with labels."""
    answer = await client.get(f"{server.base_url}/metrics")
    lines = (line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


async def settled(client, server, condition, patience_s: float = 60.0) -> dict[str, float]:
    """Wait until a condition on the figures holds; returns them. Fails with the figures when it never does."""
    until = asyncio.get_running_loop().time() + patience_s
    while not condition(found := await figures(client, server)):
        if asyncio.get_running_loop().time() > until:
            raise AssertionError(found)
        await asyncio.sleep(0.05)
    return found
