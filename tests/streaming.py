"""Doubles and readers for tests of the stream: what a client sees, a store in memory, a log that can be hurt."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

from chatsvc.errors import LogUnavailable, NotFound, StoreUnavailable
from chatsvc.events import Delta, Done, entry
from chatsvc.limits import Usage
from chatsvc.run import RunStatus
from chatsvc.streamlog.base import Append
from chatsvc.streamlog.memory import MemoryLog
from chatsvc.streamlog.resume import StoredReply

PATIENCE_S = 60.0
DONE = Done(message_id="msg_1", finish_reason="stop", usage=Usage(output_tokens=3))


async def soon(awaitable):
    """Await what must happen; fail the test rather than hang."""
    async with asyncio.timeout(PATIENCE_S):
        return await awaitable


async def until(condition):
    """Look again and again until it holds; fail the test rather than hang."""

    async def holds():
        while not condition():
            await asyncio.sleep(0.001)

    await soon(holds())


def delta(seq, text=None, attempt=1):
    """An entry with some text."""
    return entry(Delta(text=f"<{seq}>" if text is None else text), attempt=attempt, seq=seq)


def append(response_id, *entries, recreate=False):
    """One ``Append``."""
    return Append(response_id=response_id, entries=tuple(entries), recreate=recreate)


def parse(frames):
    """SSE bytes as a list of (id or None, event, data); comments and ``retry`` are left out. Strict about the form."""
    events = []
    for block in frames.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith((":", "retry:"))]
        if not lines:
            continue
        fields = dict(line.split(": ", 1) for line in lines)
        assert len(fields) == len(lines), f"a field came twice in {block!r}"
        event_id = fields.get("id")
        events.append((None if event_id is None else int(event_id), fields["event"], json.loads(fields["data"])))
    return events


def text_of(events):
    """The text that a client shows after these events."""
    text = ""
    for _, name, data in events:
        if name == "delta":
            text += data["text"]
        elif name == "snapshot":
            text = data["text"]
    return text


class Client:
    """A reader's sink that keeps everything, and can be waited for."""

    def __init__(self, *, room=None):
        self.frames = b""
        self.closed = False
        self.room = room
        self.drains = 0
        self._callbacks = []
        self._news = asyncio.Event()

    def write(self, frames):
        if self.closed or (self.room is not None and len(self.frames) >= self.room):
            return False
        self.frames += frames
        self._news.set()
        return True

    async def drain(self):
        self.drains += 1

    def on_close(self, callback):
        self._callbacks.append(callback)

    def close(self):
        self.closed = True
        for callback in self._callbacks:
            callback()

    @property
    def events(self):
        return parse(self.frames)

    @property
    def ids(self):
        return [seq for seq, _, _ in self.events if seq is not None]

    @property
    def text(self):
        return text_of(self.events)

    async def until(self, condition):
        """Wait until ``condition(client)`` is true."""

        async def wait():
            while not condition(self):
                self._news.clear()
                await self._news.wait()

        await soon(wait())


class Shelf:
    """A store in memory: replies by id. ``away`` makes it unreachable."""

    def __init__(self):
        self.replies = {}
        self.away = False
        self.asked = 0
        self.looked_up = 0

    def running(self, response_id, text="", text_seq=0, status=RunStatus.STREAMING):
        self.replies[response_id] = StoredReply(
            status=status, text=text, text_seq=text_seq, terminal=None, last_seq=text_seq
        )

    def ended(self, response_id, text, last_seq, terminal=DONE, status=RunStatus.COMPLETE):
        self.replies[response_id] = StoredReply(
            status=status, text=text, text_seq=last_seq, terminal=terminal, last_seq=last_seq
        )

    async def reply(self, response_id):
        self.looked_up += 1
        self._check()
        if response_id not in self.replies:
            raise NotFound("no such reply")
        return self.replies[response_id]

    async def ended_among(self, response_ids):
        self.asked += 1
        self._check()
        return {
            response_id
            for response_id in response_ids
            if response_id not in self.replies or self.replies[response_id].status.ended
        }

    def _check(self):
        if self.away:
            raise StoreUnavailable("the shelf is away")

    @property
    def source(self):
        """As a ``ReplySource``."""
        shelf = self

        class Source:
            async def reply(self, response_id):
                return await shelf.reply(response_id)

            async def ended(self, response_ids):
                return await shelf.ended_among(response_ids)

        return Source()


class FragileLog(MemoryLog):
    """A memory log that can be away, lose what it holds, or break with the outcome of an append unknown."""

    def __init__(self):
        super().__init__()
        self.away = False
        self.swallow_answers = 0
        """So many appends are carried out, but their answer is lost."""
        self.batches = []
        """What was appended, round trip by round trip, also when it failed."""
        self._appended = asyncio.Event()

    async def appends(self, count):
        """Wait for so many round trips in all."""

        async def wait():
            while len(self.batches) < count:
                self._appended.clear()
                await self._appended.wait()

        await soon(wait())

    def _check(self):
        if self.away:
            raise LogUnavailable("the log is away")

    async def open(self, response_id, attempt):
        self._check()
        return await super().open(response_id, attempt)

    async def append(self, batch):
        self.batches.append(list(batch))
        self._appended.set()
        self._check()
        results = await super().append(batch)
        if self.swallow_answers:
            self.swallow_answers -= 1
            raise LogUnavailable("the connection broke")
        return results

    async def position(self, response_id):
        self._check()
        return await super().position(response_id)

    async def read(self, response_id, after, limit=10_000):
        self._check()
        return await super().read(response_id, after, limit)

    async def expire(self, response_ids, ttl_s):
        self._check()
        await super().expire(response_ids, ttl_s)

    def lose_everything(self):
        """As a server that restarted empty."""
        self._logs.clear()

    def lose_after(self, response_id, seq):
        """As a server that restarted with an older copy; the fence mark stays."""
        log = self._logs[response_id]
        log.entries = [kept for kept in log.entries if kept.seq <= seq]
        log.top = type(log.top)(log.top.attempt, log.entries[-1].seq if log.entries else 0)

    def trim_before(self, response_id, seq):
        """As an operator who trims streams."""
        log = self._logs[response_id]
        log.entries = [kept for kept in log.entries if kept.seq >= seq]


@asynccontextmanager
async def running(*loops):
    """Run parts' loops for the length of a block; what they raise is raised here."""
    tasks = [asyncio.ensure_future(loop) for loop in loops]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
