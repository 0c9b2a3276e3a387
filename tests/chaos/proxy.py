"""A TCP proxy in front of a replica that breaks connections as networks do: at any byte, by RST, FIN or silence."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

NO_LINGER = struct.pack("ii", 1, 0)


@dataclass
class Fate:
    """What becomes of one connection: the way it breaks and after how many bytes of the answer, or of the request."""

    kind: str
    after: int
    upward: bool
    stall_s: float


def draw_fate(draw: random.Random) -> Fate:
    """Half of all connections are left alone. Some break before the first byte, most in the middle of a stream."""
    kind = draw.choices(("none", "rst", "fin", "stall", "pause"), (50, 18, 18, 6, 8))[0]
    after = 0 if draw.random() < 0.1 else int(draw.expovariate(1 / 2500))
    upward = draw.random() < 0.06
    return Fate(kind, draw.randrange(400) if upward else after, upward, draw.uniform(0.2, 3))


class Proxy:
    """Forwards to one port of this machine. ``calm`` leaves everything alone from then on."""

    def __init__(self, target_port: int, draw: random.Random) -> None:
        self._target_port = target_port
        self._draw = draw
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.cuts: Counter[str] = Counter()
        self.calm = False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        """Listen on a free port for as long as the block runs."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=1024)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fate = draw_fate(self._draw)
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()  # the replica is down, and so is this address
            return
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass(reader, up_writer, fate if fate.upward else None))
                both.create_task(self._pass(up_reader, writer, None if fate.upward else fate))
        except* OSError:
            pass  # a cut: what this proxy is for
        finally:
            for end in (writer, up_writer):
                if fate.kind == "rst":
                    _reset(end)
                else:
                    end.close()
            for end in (writer, up_writer):
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fate: Fate | None) -> None:
        left = fate.after if fate is not None and fate.kind != "none" else None
        while data := await reader.read(65_536):
            if left is not None and fate is not None and not self.calm and left < len(data):
                writer.write(data[:left])
                await writer.drain()
                data, left = data[left:], None
                await self._strike(fate)
            elif left is not None:
                left -= len(data)
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError

    async def _strike(self, fate: Fate) -> None:
        """Break the connection; a pause only holds it up."""
        self.cuts[fate.kind] += 1
        if fate.kind in {"stall", "pause"}:
            await asyncio.sleep(fate.stall_s)
        if fate.kind != "pause":
            raise ConnectionResetError


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    raw: socket.socket | None = writer.get_extra_info("socket")
    if raw is not None:
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    writer.transport.abort()
