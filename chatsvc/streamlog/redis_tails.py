"""One tail over many logs that each wait on a server of their own (S7).

Every part has one blocked read at a time, which outlives the call that began it: a busy part must not cost the quiet
ones their connections. A part whose followed logs have changed is woken and asks again; what it heard until then counts
where the caller still follows from the same place. A part whose server is away is tried again, ever more slowly, while
the others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from chatsvc.errors import LogUnavailable
from chatsvc.events import Entry
from chatsvc.streamlog.base import Position, StreamLog

_READ_S: Final = 5.0
"""A read that hears nothing asks again after this long, so that a connection that died without a word is noticed."""
_RETRY_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)

_Heard = Mapping[str, Sequence[Entry]]


class _Read:
    """A read under way: where from, whether it has been asked for, and whether it has been told to come back."""

    __slots__ = ("asked", "task", "wanted", "woken")

    def __init__(self, wanted: Mapping[str, Position]) -> None:
        self.wanted = wanted
        self.asked = False
        self.woken = False
        self.task: asyncio.Task[_Heard]


class Tails:
    """The tails of ``parts``; ``number`` says which of them holds a log."""

    def __init__(self, parts: Sequence[StreamLog], number: Callable[[str], int]) -> None:
        self._parts = parts
        self._number = number
        self._reads: dict[int, _Read] = {}
        self._failures: dict[int, int] = {}
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Make the running ``hear``, or else the next, return soon."""
        self._woken.set()

    async def hear(self, following: Mapping[str, Position], timeout_s: float) -> _Heard:
        """As ``StreamLog.tail``. Raises ``LogUnavailable`` when no part that holds one of the logs can be read."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        groups: dict[int, dict[str, Position]] = {}
        for response_id, place in following.items():
            groups.setdefault(self._number(response_id), {})[response_id] = place
        woken = loop.create_task(self._woken.wait())
        try:
            while True:
                found = self._gather(groups)
                if found:
                    return found
                if self._woken.is_set() or (left := until - loop.time()) <= 0:
                    return {}
                reads = [self._reads[number].task for number in groups]
                await asyncio.wait([woken, *reads], timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._woken.clear()
            woken.cancel()

    def _gather(self, groups: Mapping[int, dict[str, Position]]) -> dict[str, Sequence[Entry]]:
        """Take what reads have brought, and have one under way for every group."""
        found: dict[str, Sequence[Entry]] = {}
        failed: list[LogUnavailable] = []
        for number, wanted in groups.items():
            read = self._reads.get(number)
            if read is not None and read.task.done():
                del self._reads[number]
                heard = self._outcome(number, read, failed)
                same = {key: entries for key, entries in heard.items() if wanted.get(key) == read.wanted.get(key)}
                found |= same
                if same:
                    continue
                read = None
            if read is None:
                read = self._reads[number] = _Read(dict(wanted))
                read.task = asyncio.create_task(self._read(number, read))
            elif not read.asked:
                # It waits for its next try. Begun anew for every reply that begins, that wait might never end.
                read.wanted = dict(wanted)
            elif read.wanted != wanted and not read.woken:
                read.woken = True
                self._parts[number].wake()
        if failed and not found and all(self._failures.get(number) for number in groups):
            raise failed[0]
        return found

    def _outcome(self, number: int, read: _Read, failed: list[LogUnavailable]) -> _Heard:
        error = read.task.exception()
        if error is None:
            self._failures.pop(number, None)
            return read.task.result()
        if not isinstance(error, LogUnavailable):
            raise error
        self._failures[number] = self._failures.get(number, 0) + 1
        failed.append(error)
        return {}

    async def _read(self, number: int, read: _Read) -> _Heard:
        if failures := self._failures.get(number):
            await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S)) - 1])
        read.asked = True
        return await self._parts[number].tail(read.wanted, _READ_S)

    async def aclose(self) -> None:
        """End all reads."""
        tasks = [read.task for read in self._reads.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._reads.clear()
