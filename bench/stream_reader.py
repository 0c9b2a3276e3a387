"""The load reader: many SSE connections in one lean process that is not counted.

It looks at bytes only: events are counted by their ``data:`` lines, latency is taken from a monotonic timestamp that
the event's text begins with (``@<ns>@``), where there is one.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from typing import Any

import uvloop
from control import leave, obey

CONNECT_PATIENCE_S = 60.0


class Tally:
    """What came in since the last mark, and since the beginning."""

    def __init__(self) -> None:
        self.events = 0
        self.latencies = array("d")
        self.open = 0
        self.ready = 0
        self.first_delta: dict[int, float] = {}


class Stream(asyncio.Protocol):
    """One SSE connection."""

    __slots__ = ("_number", "_request", "_silent", "_started", "_tally", "transport")

    def __init__(self, tally: Tally, number: int, path: str) -> None:
        self._tally = tally
        self._number = number
        self._request = f"GET {path} HTTP/1.1\r\nHost: bench\r\nAccept: text/event-stream\r\n\r\n".encode()
        self._started = False
        self._silent = True

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._tally.open += 1
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        tally = self._tally
        if not self._started:
            self._started = True
            tally.ready += 1
        if self._silent and b"event: delta" in data:
            self._silent = False
            tally.first_delta[self._number] = time.monotonic()
        tally.events += data.count(b"data: ")
        if (start := data.find(b"@")) >= 0:
            end = data.find(b"@", start + 1)
            tally.latencies.append((time.monotonic_ns() - int(data[start + 1 : end])) / 1e6)

    def connection_lost(self, exc: Exception | None) -> None:
        self._tally.open -= 1


class Reader:
    """Carries out the commands."""

    def __init__(self) -> None:
        self._tally = Tally()
        self._streams: list[Stream] = []

    async def connect(self, port: int, paths: list[str]) -> Any:
        """Open a stream for each path; returns when all have answered."""
        loop = asyncio.get_running_loop()
        for path in paths:
            number = len(self._streams)
            _, stream = await loop.create_connection(
                lambda number=number, path=path: Stream(self._tally, number, path), "127.0.0.1", port
            )
            self._streams.append(stream)
        until = loop.time() + CONNECT_PATIENCE_S
        while self._tally.ready < len(self._streams) and loop.time() < until:  # noqa: ASYNC110  # nobody tells us
            await asyncio.sleep(0.05)
        return {"ready": self._tally.ready}

    async def mark(self) -> Any:
        """What came since the last mark."""
        tally = self._tally
        found: dict[str, Any] = {"events": tally.events, "open": tally.open}
        latencies = sorted(tally.latencies)
        for name, share in (("p50", 0.50), ("p99", 0.99)):
            found[name] = latencies[min(int(len(latencies) * share), len(latencies) - 1)] if latencies else None
        tally.events = 0
        tally.latencies = array("d")
        return found

    async def firsts(self) -> Any:
        """When each stream had its first delta, by its number, in monotonic seconds."""
        return self._tally.first_delta


async def main() -> None:
    reader = Reader()
    await obey(connect=reader.connect, mark=reader.mark, firsts=reader.firsts)
    leave()


uvloop.run(main())
