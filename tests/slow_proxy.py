"""A TCP proxy that holds every answer back for a while, as a server at the end of its strength does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class SlowProxy:
    """Forwards to a port of this machine. What the server says reaches the client ``delay_s`` later, in order.

    Commands are not held back, so a batch costs the delay once, not once for each command.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.delay_s = 0.0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[SlowProxy]:
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

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(OSError):
                await self._relay(reader, writer)
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target_port)
        answers: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        directions = [
            asyncio.ensure_future(self._ask(reader, back)),
            asyncio.ensure_future(self._listen(there, answers)),
            asyncio.ensure_future(self._answer(answers, writer)),
        ]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            back.transport.abort()

    async def _ask(self, reader: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            back.write(data)
            await back.drain()

    async def _listen(self, there: asyncio.StreamReader, answers: asyncio.Queue[tuple[float, bytes]]) -> None:
        while data := await there.read(65536):
            answers.put_nowait((asyncio.get_running_loop().time() + self.delay_s, data))
        answers.put_nowait((0.0, b""))
        await asyncio.Event().wait()  # what is still on its way is delivered first

    async def _answer(self, answers: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            at, data = await answers.get()
            if not data:
                return
            await asyncio.sleep(at - asyncio.get_running_loop().time())
            writer.write(data)
            await writer.drain()
