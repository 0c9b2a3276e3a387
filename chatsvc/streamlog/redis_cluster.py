"""The stream log on a Redis Cluster: each partition is a log of its own, on whichever node serves its slot.

All keys of a partition carry its hash tag and so lie in one slot. A partition has its own connections (made when first
used), its own breaks and its own waiting, so a node that is lost takes nobody's replies with it but its own.
``SlotMap`` says where a partition is: by what the nodes say of themselves, asked when a connection broke, and by their
MOVED.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import hiredis
from redis.crc import key_slot

from chatsvc.errors import LogUnavailable
from chatsvc.events import Entry
from chatsvc.streamlog.base import Append, AppendResult, LogSlice, Position, StreamLog
from chatsvc.streamlog.redis import PARTITIONS, RedisLog, partition
from chatsvc.streamlog.redis_tails import Tails
from chatsvc.streamlog.redis_wire import Address, dial, pack, redirection

_FRESH_S: Final = 0.2
"""What the nodes said is believed for so long, however many connections break at once."""
_HEDGE_S: Final = 0.25
"""How long one partition may take with a ping before all others are asked as well."""
_Result = TypeVar("_Result")


class SlotMap:
    """Which node serves each partition. ``patience_s`` is how long one node may take to say."""

    def __init__(self, seeds: Sequence[Address], *, partitions: int, patience_s: float) -> None:
        self._seeds = tuple(seeds)
        self._nodes = list(seeds)
        self._slots = [int(key_slot(b"{p%02d}" % number)) for number in range(partitions)]
        self._places: dict[int, Address] = {}
        self._patience_s = patience_s
        self._asking = asyncio.Lock()
        self._asked_at = float("-inf")

    async def locate(self, number: int, news: str) -> Address:
        """The address of a partition's master. Raises ``LogUnavailable`` when no node names one."""
        if news.startswith("MOVED "):
            host, port = redirection(news)
            before = self._places.get(number, self._seeds[0])
            self._places[number] = before.at(host or before.host, port)
        elif news or number not in self._places:
            await self._ask_nodes()
        if number not in self._places:
            raise LogUnavailable(f"no node of the Redis Cluster serves slot {self._slots[number]}")
        return self._places[number]

    async def _ask_nodes(self) -> None:
        clock = asyncio.get_running_loop().time
        async with self._asking:
            if clock() - self._asked_at < _FRESH_S:
                return
            why = ""
            for node in tuple(self._nodes):
                try:
                    async with asyncio.timeout(self._patience_s):
                        ranges = await self._ask(node)
                except (OSError, LogUnavailable) as error:
                    # A node that does not answer is asked last next time.
                    self._nodes.remove(node)
                    self._nodes.append(node)
                    why = f"{node.host}:{node.port}: {error or 'no answer'}"
                    continue
                self._learn(node, ranges)
                self._asked_at = clock()
                return
            raise LogUnavailable(f"no node of the Redis Cluster answers ({why})")

    async def _ask(self, node: Address) -> list[Any]:
        wire = await dial(node)
        try:
            (ranges,) = await wire.call(pack(b"CLUSTER", b"SLOTS"), 1)
        finally:
            wire.abort()
        if isinstance(ranges, hiredis.ReplyError):
            raise LogUnavailable(str(ranges))
        return list(ranges)

    def _learn(self, asked: Address, ranges: Iterable[Any]) -> None:
        """Take over ``CLUSTER SLOTS``: first slot, last slot, master, replicas. No host: that of the node asked."""
        known = {asked: None}
        for first, last, *nodes in ranges:
            addresses = [asked.at((host or b"").decode() or asked.host, port) for host, port, *_ in nodes]
            known |= dict.fromkeys(addresses)
            for number, slot in enumerate(self._slots):
                if first <= slot <= last:
                    self._places[number] = addresses[0]
        self._nodes = list(known | dict.fromkeys(self._seeds))


class ClusterLog(StreamLog):
    """Keeps S1-S13; ``seeds`` are some nodes of the Cluster, ``timeout_s`` bounds every call."""

    def __init__(self, seeds: Sequence[Address], *, timeout_s: float, partitions: int = PARTITIONS) -> None:
        slots = SlotMap(seeds, partitions=partitions, patience_s=timeout_s / 5)
        self._parts = [
            RedisLog(partial(slots.locate, number), timeout_s=timeout_s, partitions=partitions, home=number)
            for number in range(partitions)
        ]
        self._tails = Tails(self._parts, self._number)
        self._well = 0

    def _number(self, response_id: str) -> int:
        return partition(response_id, len(self._parts))

    def _part(self, response_id: str) -> RedisLog:
        return self._parts[self._number(response_id)]

    def shard(self, response_id: str) -> str:
        return f"p{self._number(response_id):02d}"

    async def open(self, response_id: str, attempt: int) -> int:
        return await self._part(response_id).open(response_id, attempt)

    async def append(self, batch: Sequence[Append]) -> Sequence[AppendResult]:
        results: list[AppendResult] = [AppendResult.LOST] * len(batch)

        async def append(number: int, places: list[int]) -> None:
            appended = await self._parts[number].append([batch[place] for place in places])
            for place, result in zip(places, appended, strict=True):
                results[place] = result

        await _all(append(*group) for group in self._grouped([item.response_id for item in batch]).items())
        return results

    async def position(self, response_id: str) -> Position | None:
        return await self._part(response_id).position(response_id)

    async def read(self, response_id: str, after: int, limit: int = 10_000) -> LogSlice:
        return await self._part(response_id).read(response_id, after, limit)

    async def tail(self, following: Mapping[str, Position], timeout_s: float) -> Mapping[str, Sequence[Entry]]:
        return await self._tails.hear(following, timeout_s)

    def wake(self) -> None:
        self._tails.wake()

    async def expire(self, response_ids: Sequence[str], ttl_s: float) -> None:
        await self._each(response_ids, lambda part, ids: part.expire(ids, ttl_s))

    async def delete(self, response_ids: Sequence[str]) -> None:
        await self._each(response_ids, lambda part, ids: part.delete(ids))

    async def note_read(self, response_ids: Sequence[str]) -> None:
        await self._each(response_ids, lambda part, ids: part.note_read(ids))

    async def unread_s(self, response_ids: Sequence[str]) -> Sequence[float | None]:
        ages: list[float | None] = [None] * len(response_ids)

        async def ask(number: int, places: list[int]) -> None:
            asked = await self._parts[number].unread_s([response_ids[place] for place in places])
            for place, age in zip(places, asked, strict=True):
                ages[place] = age

        groups = self._grouped(response_ids)
        # Marks of a node that is away are as good as lost, and no reason to keep those of the others back.
        outcomes = await asyncio.gather(*(ask(*group) for group in groups.items()), return_exceptions=True)
        failed = [outcome for outcome in outcomes if outcome is not None]
        if unexpected := [error for error in failed if not isinstance(error, LogUnavailable)]:
            raise unexpected[0]
        if failed and len(failed) == len(groups):
            raise failed[0]
        return ages

    async def unbroken_s(self, response_id: str) -> float:
        return await self._part(response_id).unbroken_s(response_id)

    async def ping(self, *, everywhere: bool = False) -> None:
        if everywhere:
            return await _all(part.ping() for part in self._parts)
        # One partition that can be used is enough. The one that answered last is asked first, and soon all others.
        tasks = {asyncio.create_task(self._parts[self._well].ping()): self._well}
        try:
            done, _ = await asyncio.wait(tasks, timeout=_HEDGE_S)
            if not any(task.exception() is None for task in done):
                others = (number for number in range(len(self._parts)) if number != self._well)
                tasks |= {asyncio.create_task(self._parts[number].ping()): number for number in others}
            await self._first_that_answers(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _first_that_answers(self, tasks: Mapping[asyncio.Task[None], int]) -> None:
        waiting = set(tasks)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.exception() is None:
                    self._well = tasks[task]
                    return
        for task in tasks:
            task.result()

    async def aclose(self) -> None:
        await self._tails.aclose()
        for part in self._parts:
            await part.aclose()

    def _grouped(self, response_ids: Sequence[str]) -> dict[int, list[int]]:
        """Places in ``response_ids`` by partition."""
        groups: dict[int, list[int]] = {}
        for place, response_id in enumerate(response_ids):
            groups.setdefault(self._number(response_id), []).append(place)
        return groups

    async def _each(self, response_ids: Sequence[str], call: Callable[[RedisLog, list[str]], Awaitable[None]]) -> None:
        groups = self._grouped(response_ids)
        await _all(
            call(self._parts[number], [response_ids[place] for place in places]) for number, places in groups.items()
        )


async def _all(calls: Iterable[Awaitable[None]]) -> None:
    """Let all calls come to their end, then raise what one of them raised."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
