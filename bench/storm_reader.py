"""Many clients that follow streams as an EventSource does, in one lean process: they come back by themselves.

The rules: an event counts once it is whole; after a cut the client waits as long as the stream's ``retry`` line said,
takes the next door, and goes on after the last id. Each client checks that its ids rise by one.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from typing import Any

import uvloop
from control import leave, obey

CONNECT_PATIENCE_S = 120.0
_EVENT = re.compile(rb"id: (\d+)\nevent: (\w+)\ndata: [^\n]*\n\n")
_RETRY = re.compile(rb"\nretry: (\d+)\n")
_DEFAULT_RETRY_MS = 3000


class Crowd:
    """All clients: which doors they know, and what they saw."""

    def __init__(self) -> None:
        self.doors: list[int] = []
        self._turns = itertools.count()
        self.events = 0
        self.lost = 0
        self.repeated = 0
        self.snapshots = 0
        self.refused = 0
        self.ended = 0
        self.bad_answers = 0
        self.arrivals: list[float] = []
        """When a client that had been cut was answered, in monotonic seconds."""
        self.again: list[float] = []
        """Seconds from a cut to the first event after it."""

    def door(self) -> int:
        return self.doors[next(self._turns) % len(self.doors)]


class Client(asyncio.Protocol):
    """One reader, over all its connections."""

    def __init__(self, crowd: Crowd, path: str) -> None:
        self._crowd = crowd
        self._path = path
        self._buffer = b""
        self._answered = False
        self._cut_at: float | None = None
        self._retry_ms = _DEFAULT_RETRY_MS
        self._tasks: set[asyncio.Task[None]] = set()
        self.last_id = 0
        self.served = False

    async def connect(self) -> None:
        """Connect, as often as it takes."""
        while True:
            try:
                await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", self._crowd.door())
            except OSError:
                self._crowd.refused += 1
                await asyncio.sleep(self._retry_ms / 1000)
            else:
                return

    def connection_made(self, transport: Any) -> None:
        self._buffer = b""
        self._answered = False
        cursor = f"Last-Event-ID: {self.last_id}\r\n" if self.last_id else ""
        transport.write(
            f"GET {self._path} HTTP/1.1\r\nHost: bench\r\nAccept: text/event-stream\r\n{cursor}\r\n".encode()
        )

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._answered:
            if not (retry := _RETRY.search(self._buffer)):
                return
            self._answered = True
            self._crowd.bad_answers += not self._buffer.startswith(b"HTTP/1.1 200 ")
            self._retry_ms = int(retry[1])
            if self._cut_at is not None:
                self._crowd.arrivals.append(time.monotonic())
        end = 0
        for event in _EVENT.finditer(self._buffer):
            end = event.end()
            self._take(int(event[1]), event[2])
        self._buffer = self._buffer[end:]

    def _take(self, seq: int, name: bytes) -> None:
        crowd = self._crowd
        if self._cut_at is not None:
            crowd.again.append(time.monotonic() - self._cut_at)
            self._cut_at = None
        crowd.events += 1
        if name == b"snapshot":
            crowd.snapshots += 1
        elif seq <= self.last_id:
            crowd.repeated += 1
        else:
            crowd.lost += seq - self.last_id - 1
        self.last_id = seq
        self.served = True
        crowd.ended += name in {b"done", b"error"}

    def connection_lost(self, exc: Exception | None) -> None:
        self._cut_at = self._cut_at or time.monotonic()
        task = asyncio.get_running_loop().create_task(self._come_back())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _come_back(self) -> None:
        await asyncio.sleep(self._retry_ms / 1000)
        await self.connect()


class Readers:
    """Carries out the commands."""

    def __init__(self) -> None:
        self._crowd = Crowd()
        self._clients: list[Client] = []

    async def doors(self, ports: list[int]) -> Any:
        """Where clients go from now on, in turn."""
        self._crowd.doors = ports

    async def connect(self, paths: list[str]) -> Any:
        """A client for each path; returns when all have had an event."""
        fresh = [Client(self._crowd, path) for path in paths]
        self._clients += fresh
        await asyncio.gather(*(client.connect() for client in fresh))
        until = time.monotonic() + CONNECT_PATIENCE_S
        while not all(client.served for client in fresh) and time.monotonic() < until:  # noqa: ASYNC110  # nobody tells us
            await asyncio.sleep(0.05)
        return {"served": sum(client.served for client in fresh)}

    async def returned(self, patience_s: float) -> Any:
        """Wait until all that were cut have had an event again; tells how many had."""
        until = time.monotonic() + patience_s
        while len(self._crowd.again) < len(self._clients) and time.monotonic() < until:  # noqa: ASYNC110  # nobody tells us
            await asyncio.sleep(0.05)
        return {"returned": len(self._crowd.again)}

    async def seen(self) -> Any:
        """All that was counted, since the beginning."""
        crowd = self._crowd
        return {
            "events": crowd.events,
            "lost": crowd.lost,
            "repeated": crowd.repeated,
            "snapshots": crowd.snapshots,
            "refused": crowd.refused,
            "ended": crowd.ended,
            "bad_answers": crowd.bad_answers,
            "arrivals": crowd.arrivals,
            "again": crowd.again,
            "last_ids": sum(client.last_id for client in self._clients),
        }


async def main() -> None:
    readers = Readers()
    await obey(doors=readers.doors, connect=readers.connect, returned=readers.returned, seen=readers.seen)
    leave()


uvloop.run(main())
