"""Processes of a benchmark obey lines on stdin and answer on stdout: their sockets carry nothing but the load."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

LINE_LIMIT = 2**24
Handler = Callable[[dict[str, Any]], Awaitable[Any]]


def say(value: Any) -> None:
    """Answer with one line."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def obey(**handlers: Handler) -> None:
    """Say that we are up, then carry out commands until stdin closes. Each is answered when its handler returns."""
    say("up")
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_LIMIT)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        command = json.loads(line)
        say(await handlers[command.pop("do")](**command))


async def serve(app: Any, port: int, **options: Any) -> None:
    """Serve an ASGI application. Returns once it listens; it ends with the process."""
    options = {"interface": "asgi3", "lifespan": "off", "log_level": "warning", "access_log": False, **options}
    server = uvicorn.Server(uvicorn.Config(app, port=port, backlog=4096, proxy_headers=False, **options))
    serving = asyncio.create_task(server.serve())
    while not server.started and not serving.done():  # noqa: ASYNC110  # the server has no event for it
        await asyncio.sleep(0.01)


def leave() -> None:
    """End now: thousands of streams are open, and nobody waits for their end."""
    os._exit(0)


class Driver:
    """What makes events while it runs."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, *loops: Any) -> None:
        """Run these to the end of the process."""
        self._tasks += [asyncio.create_task(loop) for loop in loops]


class Child:
    """A process that obeys."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, *argv: str) -> Child:
        """Run a Python file; returns once it is up."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=LINE_LIMIT
        )
        child = cls(process)
        assert await child._hear() == "up"
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    async def _hear(self) -> Any:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"process {self.pid} ended before it answered")
        return json.loads(line)

    async def do(self, name: str, **arguments: Any) -> Any:
        """Give one command and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": name, **arguments}).encode() + b"\n")
        return await self._hear()

    async def stop(self) -> None:
        """Close its stdin; it ends by itself, or is killed after a while."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 5)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
