"""A stream log inside this process: the reference model the contract suite compares Redis against.

Also what a single process without Redis runs on. Nothing survives the process; nothing is seen by another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from chatsvc.clock import Clock, SystemClock
from chatsvc.events import Entry
from chatsvc.streamlog.base import READ_MARK_TTL_S, Append, AppendResult, Fenced, LogSlice, Position, StreamLog

_NOWHERE = Position(0, 0)


class _Log:
    """One response's entries. ``top`` and ``oldest`` also count fence marks, which are not kept otherwise."""

    __slots__ = ("entries", "expires_at", "oldest", "top")

    def __init__(self, oldest: int) -> None:
        self.oldest = oldest
        self.entries: list[Entry] = []
        self.top = _NOWHERE
        self.expires_at: float | None = None

    def first_after(self, position: Position) -> int:
        """Index of the first entry behind a place. Readers are nearly always at the end, so look from there."""
        index = len(self.entries)
        while index and (self.entries[index - 1].attempt, self.entries[index - 1].seq) > (
            position.attempt,
            position.seq,
        ):
            index -= 1
        return index


class MemoryLog(StreamLog):
    """Keeps S1-S13; S10 cannot happen."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._logs: dict[str, _Log] = {}
        self._read_at: dict[str, float] = {}
        self._since = self._clock.monotonic()
        self._changed = asyncio.Event()
        self._woken = False

    def shard(self, response_id: str) -> str:
        return ""

    async def open(self, response_id: str, attempt: int) -> int:
        self._sweep()
        log = self._logs.setdefault(response_id, _Log(attempt))
        if log.top.attempt > attempt:
            raise Fenced(response_id)
        log.top = max(log.top, Position(attempt, 0))
        log.expires_at = None
        return log.entries[-1].seq if log.entries else 0

    async def append(self, batch: Sequence[Append]) -> Sequence[AppendResult]:
        results = [self._append(item) for item in batch]
        self._changed.set()
        return results

    def _append(self, item: Append) -> AppendResult:
        log = self._find(item.response_id)
        first, last = item.entries[0], item.entries[-1]
        if log is None:
            if not item.recreate:
                return AppendResult.LOST
            log = self._logs[item.response_id] = _Log(first.attempt)
        if Position(first.attempt, first.seq) <= log.top:
            return AppendResult.FENCED
        log.entries.extend(item.entries)
        log.top = Position(last.attempt, last.seq)
        return AppendResult.OK

    async def position(self, response_id: str) -> Position | None:
        log = self._find(response_id)
        return log.top if log else None

    async def read(self, response_id: str, after: int, limit: int = 10_000) -> LogSlice:
        log = self._find(response_id)
        if log is None:
            return LogSlice(entries=(), first=0, last=0, position=_NOWHERE, oldest_attempt=0)
        wanted = [entry for entry in log.entries if entry.seq > after][:limit]
        full = len(wanted) == limit
        return LogSlice(
            entries=tuple(wanted),
            first=log.entries[0].seq if log.entries else 0,
            last=log.entries[-1].seq if log.entries else 0,
            position=Position(wanted[-1].attempt, wanted[-1].seq) if full and wanted else log.top,
            oldest_attempt=log.oldest,
        )

    async def tail(self, following: Mapping[str, Position], timeout_s: float) -> Mapping[str, Sequence[Entry]]:
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._changed.clear()
                    found = self._news(following)
                    if found or self._woken:
                        return found
                    await self._changed.wait()
        except TimeoutError:
            return {}
        finally:
            self._woken = False

    def _news(self, following: Mapping[str, Position]) -> dict[str, Sequence[Entry]]:
        found: dict[str, Sequence[Entry]] = {}
        for response_id, position in following.items():
            log = self._find(response_id)
            if log is not None and (index := log.first_after(position)) < len(log.entries):
                found[response_id] = tuple(log.entries[index:])
        return found

    def wake(self) -> None:
        self._woken = True
        self._changed.set()

    async def expire(self, response_ids: Sequence[str], ttl_s: float) -> None:
        for response_id in response_ids:
            if log := self._find(response_id):
                log.expires_at = self._clock.monotonic() + ttl_s

    async def delete(self, response_ids: Sequence[str]) -> None:
        for response_id in response_ids:
            self._logs.pop(response_id, None)
            self._read_at.pop(response_id, None)

    async def note_read(self, response_ids: Sequence[str]) -> None:
        now = self._clock.monotonic()
        self._read_at = {rid: at for rid, at in self._read_at.items() if now - at < READ_MARK_TTL_S}
        self._read_at |= dict.fromkeys(response_ids, now)

    async def unread_s(self, response_ids: Sequence[str]) -> Sequence[float | None]:
        now = self._clock.monotonic()
        ages = [now - self._read_at[rid] if rid in self._read_at else None for rid in response_ids]
        return [age if age is not None and age < READ_MARK_TTL_S else None for age in ages]

    async def unbroken_s(self, response_id: str) -> float:
        return self._clock.monotonic() - self._since

    async def ping(self, *, everywhere: bool = False) -> None:
        return

    async def aclose(self) -> None:
        self._logs.clear()
        self.wake()

    def _find(self, response_id: str) -> _Log | None:
        log = self._logs.get(response_id)
        if log is not None and log.expires_at is not None and log.expires_at <= self._clock.monotonic():
            del self._logs[response_id]
            return None
        return log

    def _sweep(self) -> None:
        now = self._clock.monotonic()
        expired = [key for key, log in self._logs.items() if log.expires_at is not None and log.expires_at <= now]
        for key in expired:
            del self._logs[key]
