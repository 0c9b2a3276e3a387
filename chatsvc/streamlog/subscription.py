"""L3 for one reader: every entry of one log once, in order, first from the log, then live.

    replaying ──(level with the log)──▶ live ──(an entry is missing in between)──▶ replaying
        │                                │
        ├──(the log cannot lead on from the cursor)──▶ hole         what happens then is resume.py's
        └────────────────────────────────┴──(terminal entry)──▶ ended

While it replays, live entries are not kept: it is enough to know that there were some, for they are in the log by
then. Whoever has seen one during a read reads again. So nothing is missed at the seam and nothing comes twice, and
a reader that is far behind costs no memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import Enum
from typing import Final, Protocol

from chatsvc.events import Entry, Snapshot
from chatsvc.streamlog.base import LogSlice, StreamLog

PAGE: Final = 1000
"""Entries asked for at a time while replaying."""


class Sink(Protocol):
    """Where a reader's frames go. What it holds back for a slow client is bounded."""

    def write(self, frames: bytes) -> bool:
        """Take whole SSE events. False when the client is too far behind: the stream is to be cut, it resumes."""
        ...

    async def drain(self) -> None:
        """Return when the client has taken enough for another page. Raises ``Overrun`` once it never will."""
        ...


class Overrun(Exception):
    """The client fell too far behind, or is gone. It resumes by its cursor."""


class Level(Enum):
    """Where replaying has led."""

    LIVE = "live"
    """Level with the log; entries come as they are appended."""
    ENDED = "ended"
    """The terminal entry has been handed over."""
    HOLE = "hole"
    """The log holds nothing that leads on from the cursor (L7)."""


class Feed(Protocol):
    """What a subscription needs of its hub."""

    log: StreamLog
    tick: int

    def settle(self, subscription: Subscription, page: LogSlice) -> None:
        """The log has been read up to the page's position: follow it from there, unless it is followed already."""

    def leave(self, subscription: Subscription) -> None:
        """The reader is gone."""


class Subscription:
    """One reader of one log. Made by ``Hub.subscribe``; ``close`` it, or use it in ``with``."""

    __slots__ = ("_feed", "_nudge", "_nudged", "_seen", "cursor", "cut", "ended", "live", "response_id", "sink", "tick")

    def __init__(self, feed: Feed, response_id: str, after: int, sink: Sink) -> None:
        self._feed = feed
        self.response_id = response_id
        self.cursor = after
        """Seq of the last event handed to the sink."""
        self.sink = sink
        self.live = False
        self.ended = False
        self.cut = False
        """The sink takes no more."""
        self.tick = feed.tick
        """The hub's tick when something last came live."""
        self._seen = 0
        self._nudge: asyncio.Future[None] | None = None
        self._nudged = False

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Be told no more. Idempotent."""
        self.live = False
        self._feed.leave(self)

    async def replay(self) -> Level:
        """Read the log from the cursor on, until level. Raises ``LogUnavailable`` and ``Overrun``."""
        self.live = False
        while True:
            await self.sink.drain()
            page = await self.page(self.cursor)
            if level := self._serve(page):
                return level

    async def page(self, after: int) -> LogSlice:
        """Part of the log after ``after``. What is appended from now on is noticed."""
        self._seen = 0
        page = await self._feed.log.read(self.response_id, after, PAGE)
        if len(page.entries) < PAGE:
            self._feed.settle(self, page)
        return page

    def _serve(self, page: LogSlice) -> Level | None:
        """Hand a page over. None when there is more to read."""
        if page.last < self.cursor:
            return Level.HOLE
        frames = []
        cursor = self.cursor
        for entry in page.entries:
            if entry.seq != cursor + 1 and entry.event != Snapshot.name:
                break
            cursor = entry.seq
            frames.append(entry.frame())
        if frames:
            self.push(b"".join(frames), cursor)
        if frames and page.entries[len(frames) - 1].terminal:
            self.ended = True
            return Level.ENDED
        if len(frames) < len(page.entries):
            return Level.HOLE
        if len(page.entries) == PAGE or self._seen > self.cursor:
            return None
        self.live = True
        self.tick = self._feed.tick
        return Level.LIVE

    def push(self, frames: bytes, cursor: int) -> None:
        """Hand frames over that end with event ``cursor``. Raises ``Overrun``."""
        if not self.sink.write(frames):
            self.cut = True
            raise Overrun(self.response_id)
        self.cursor = cursor

    def push_passing(self, frame: bytes) -> None:
        """Hand over an event without id that is not in the log. Dropped after the end and when the buffer is full."""
        if not (self.ended or self.cut):
            self.sink.write(frame)

    def deliver(self, entries: Sequence[Entry], frames: Sequence[bytes]) -> None:
        """Entries that are in the log, and their frames. Called by the hub."""
        if not self.live:
            self._seen = entries[-1].seq
            self.nudge()
            return
        self.tick = self._feed.tick
        cursor = self.cursor
        for entry, frame in zip(entries, frames, strict=True):
            seq = entry.seq
            if seq <= cursor:
                continue
            if seq != cursor + 1 and entry.event != Snapshot.name:
                self._stop_live()
                return
            if not self.sink.write(frame):
                self.cut = True
                self._stop_live()
                return
            self.cursor = cursor = seq
        if entries[-1].terminal and cursor == entries[-1].seq:
            self.ended = True
            self._stop_live()

    def _stop_live(self) -> None:
        self.live = False
        self.nudge()

    def nudge(self) -> None:
        """End the running or next ``wait``."""
        self._nudged = True
        if self._nudge is not None and not self._nudge.done():
            self._nudge.set_result(None)

    async def wait(self) -> None:
        """Wait until something happened that is not simply the next entry: the end, a gap, a cut, a nudge."""
        if not self._nudged:
            self._nudge = asyncio.get_running_loop().create_future()
            try:
                await self._nudge
            finally:
                self._nudge = None
        self._nudged = False
