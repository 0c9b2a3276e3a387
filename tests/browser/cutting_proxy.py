"""A TCP proxy that breaks the connections going through it, as networks do."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

_STREAM_MARK = b"text/event-stream"
_ANSWER_START = b"HTTP/1.1 "
_RETRY = re.compile(rb"retry: \d{4}")


class CuttingProxy:
    """Forwards to a port of this machine.

    With ``cut_after`` set, each connection that carries an event stream is reset once so many bytes of it have come by;
    the browser may use a connection for something else when its stream has ended.
    After ``vanish`` nothing gets through until ``come_back``. ``lead_to`` sends new connections to another server.

    The server's ``retry`` is shortened to a tenth of a second, so that many cuts fit into one reply.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.cuts = 0
        self._cut = asyncio.Condition()
        self.cut_after: int | None = None
        self._clients: set[asyncio.StreamWriter] = set()
        self._gone = False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[CuttingProxy]:
        """Listen on a free port for as long as the block runs."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def have_cut(self, times: int) -> None:
        """Return when so many streams have been cut."""
        async with self._cut:
            await self._cut.wait_for(lambda: self.cuts >= times)

    async def _count(self) -> None:
        async with self._cut:
            self.cuts += 1
            self._cut.notify_all()

    def vanish(self) -> None:
        """Reset every connection, and each new one at once."""
        self._gone = True
        for writer in self._clients:
            writer.transport.abort()

    def come_back(self) -> None:
        """Let connections through again."""
        self._gone = False

    def lead_to(self, target_port: int) -> None:
        """Take new connections elsewhere, as a load balancer does that has noticed."""
        self._target_port = target_port

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._gone:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._forward(reader, up_writer))
                both.create_task(self._answer(up_reader, writer))
        except* ConnectionError:
            pass  # a cut, by us or by the browser: what this proxy is for
        finally:
            self._clients.discard(writer)
            writer.transport.abort()
            up_writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left: int | None = None
        while data := await reader.read(65_536):
            if data.startswith(_ANSWER_START):
                left = self.cut_after if _STREAM_MARK in data else None
            data = _RETRY.sub(b"retry: 0100", data)
            writer.write(data if left is None else data[:left])
            await writer.drain()
            if left is not None:
                left -= len(data)
                if left <= 0:
                    await self._count()
                    raise ConnectionResetError
        raise ConnectionResetError
