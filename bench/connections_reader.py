"""A share of the connections, in a process that is not counted: what arrived, in which order, how late.

Streams are told apart by what they read: talkers get events all the time, the others hardly more than heartbeats.
Each keeps the id of its last event, so that a lost or repeated one shows at once; latency is taken from the stamp at
the beginning of a delta's text (``@<ns>@``), of events that came after the last mark.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from typing import Any

import uvloop
from control import leave, obey

PATIENCE_S = 120.0
AT_ONCE = 64
_ID = re.compile(rb"id: (\d+)\n")
_STAMP = re.compile(rb'"@(\d+)@')
PING = b": ping\n"


class Tally:
    """Of all streams of this process, since the last mark."""

    def __init__(self) -> None:
        self.events = 0
        self.lost = 0
        self.repeated = 0
        self.late: Counter[int] = Counter()
        """Events by how long they were under way, in tenths of a millisecond."""


class Stream(asyncio.Protocol):
    """One SSE connection."""

    __slots__ = ("_begun", "_request", "_rest", "_tally", "answered", "closed", "ended", "idle", "last_id", "pings")

    def __init__(self, tally: Tally, path: str, *, idle: bool) -> None:
        self._tally = tally
        self.idle = idle
        self._request = f"GET {path} HTTP/1.1\r\nHost: bench\r\nAccept: text/event-stream\r\n\r\n".encode()
        self._begun = False
        self._rest = b""
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.last_id = 0
        self.pings = 0
        self.ended = False
        self.closed = False

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        data = self._rest + data
        if not self._begun:
            head, found, data = data.partition(b"\r\n\r\n")
            if not found:
                self._rest = head
                return
            self._begun = True
            if not self.answered.done():
                if head.startswith(b"HTTP/1.1 200 "):
                    self.answered.set_result(None)
                else:
                    self.answered.set_exception(RuntimeError(head.decode("latin-1")))
        # A line may have come in part; chunk sizes stand on lines of their own, between events.
        whole = data.rfind(b"\n") + 1
        data, self._rest = data[:whole], data[whole:]
        tally = self._tally
        for found_id in _ID.findall(data):
            seq = int(found_id)
            tally.events += 1
            tally.lost += max(0, seq - self.last_id - 1)
            tally.repeated += seq <= self.last_id
            self.last_id = max(seq, self.last_id)
        for stamp in _STAMP.findall(data):
            tally.late[(now - int(stamp)) // 100_000] += 1
        if PING in data:
            self.pings += data.count(PING)
        if b"event: done\n" in data:
            self.ended = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if not self.answered.done():
            self.answered.set_exception(exc or ConnectionError("closed before an answer"))


class Reader:
    """Carries out the commands."""

    def __init__(self) -> None:
        self._tally = Tally()
        self._streams: list[Stream] = []

    async def connect(self, port: int, source: str, paths: list[str], idle: bool) -> Any:
        """Open a stream for each path, from one source address; returns when all have answered."""
        loop = asyncio.get_running_loop()
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(path: str) -> None:
            async with turns, asyncio.timeout(PATIENCE_S):
                _, stream = await loop.create_connection(
                    lambda: Stream(self._tally, path, idle=idle), "127.0.0.1", port, local_addr=(source, 0)
                )
                self._streams.append(stream)
                await stream.answered

        outcomes = await asyncio.gather(*(one(path) for path in paths), return_exceptions=True)
        faults = [repr(outcome) for outcome in outcomes if outcome is not None]
        return {"open": len(paths) - len(faults), "faults": faults[:3]}

    async def mark(self) -> Any:
        """What came since the last mark, and how things stand."""
        tally = self._tally
        found = {
            "events": tally.events,
            "lost_events": tally.lost,
            "repeated_events": tally.repeated,
            "late": list(tally.late.items()),
            "pings": list(Counter(stream.pings for stream in self._streams if stream.idle).items()),
            "open": sum(not stream.closed for stream in self._streams),
            "broken": sum(stream.closed and not stream.ended for stream in self._streams),
            "ended": sum(stream.ended for stream in self._streams),
        }
        tally.events = tally.lost = tally.repeated = 0
        tally.late = Counter()
        for stream in self._streams:
            stream.pings = 0
        return found


async def main() -> None:
    reader = Reader()
    await obey(connect=reader.connect, mark=reader.mark)
    leave()


uvloop.run(main())
