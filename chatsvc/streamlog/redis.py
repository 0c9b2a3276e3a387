"""The stream log on Redis (6.2 or later) or Valkey: one Redis Stream per response.

    key      resp:{p07}:<response id>      one hash tag per partition, so that one XREAD can follow many in a cluster
    id       <attempt>-<seq>               a fence mark is <attempt>-0
    fields   <event> <its JSON>            one pair; of a mark: fence <attempt>

Redis only accepts ids above the last one. So a mark written at ``open`` refuses every earlier attempt for good (S1),
a repeated append refuses itself (S2), and NOMKSTREAM refuses an append to a log that vanished (S3): each check is part
of the one command that writes. Only an append of several entries is a script: as a plain pipeline it could be refused
at its first entry and taken at its second (S5).

Three connections per process, whatever the number of readers: appends, everything short, and the tail. They go to one
server, or to the one that Sentinel says is the master; a Cluster has a set of them per partition (redis_cluster.py).

``open`` and ``position`` share the connection of the appends: so they speak of the very server that the next append
goes to, and if that changes in between, the append says so (S10).
"""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import hiredis

from chatsvc.errors import LogUnavailable
from chatsvc.events import MAX_SEQ, Entry
from chatsvc.streamlog.base import (
    READ_MARK_TTL_S,
    Append,
    AppendResult,
    Fenced,
    LogRefuses,
    LogSlice,
    Position,
    StreamLog,
)
from chatsvc.streamlog.redis_wire import Lane, Locate, arguments, pack

PARTITIONS: Final = 16
_NOWHERE: Final = Position(0, 0)
_RUNNING_TTL_S: Final = 24 * 3600
"""A log whose writer never came back vanishes after this long."""
_WAKE_TTL_S: Final = 3600
_BORN_TTL_MS: Final = 365 * 24 * 3600 * 1000
"""How long the mark lives by whose age a loss is dated: longer than any reply."""
_TAIL_COUNT: Final = 500
_KEYS_CACHED: Final = 20_000
_EDGE: Final = 4
"""Raw entries looked at to find a log's first or last event; more only when all of them are fence marks."""

# KEYS[1] the log; ARGV[1] seconds to live when it may be started anew, else empty; then id, event, JSON of each entry.
# The script runs alone; once its first id is taken the rest, which are higher, cannot be refused.
_APPEND_SCRIPT: Final = b"""
for i = 2, #ARGV, 3 do
  local added
  if ARGV[1] == '' then
    added = redis.pcall('XADD', KEYS[1], 'NOMKSTREAM', ARGV[i], ARGV[i + 1], ARGV[i + 2])
  else
    added = redis.pcall('XADD', KEYS[1], ARGV[i], ARGV[i + 1], ARGV[i + 2])
  end
  if type(added) ~= 'string' then return added end
end
if ARGV[1] ~= '' then redis.call('EXPIRE', KEYS[1], ARGV[1]) end
return 'OK'
"""


def partition(response_id: str, partitions: int) -> int:
    """The partition that a reply's keys are in."""
    return zlib.crc32(response_id.encode()) % partitions


def _refused(reply: Any) -> bool:
    return isinstance(reply, hiredis.ReplyError) and "equal or smaller" in str(reply)


def _checked(reply: Any) -> Any:
    """OOM, LOADING, READONLY, MISCONF, no permission: for now Redis is as good as away."""
    if isinstance(reply, hiredis.ReplyError):
        raise LogRefuses(f"Redis refuses: {reply}")
    return reply


def _position(raw_id: bytes) -> Position:
    attempt, _, seq = raw_id.partition(b"-")
    return Position(int(attempt), int(seq))


def _place(entry: Entry) -> tuple[int, int]:
    return entry.attempt, entry.seq


def _entries(raw: Sequence[Any], after: int) -> list[Entry]:
    """Entries with seq > ``after``; marks have seq 0 and so drop out."""
    found = []
    for raw_id, (event, data, *_) in raw:
        attempt, _, seq = raw_id.partition(b"-")
        if (number := int(seq)) > after:
            found.append(Entry(int(attempt), number, event.decode(), data))
    return found


class RedisLog(StreamLog):
    """Keeps S1-S13 on the one server that ``locate`` finds; ``timeout_s`` bounds every call.

    ``home`` is a partition that this server holds.
    """

    def __init__(self, locate: Locate, *, timeout_s: float, partitions: int = PARTITIONS, home: int = 0) -> None:
        self._partitions = partitions
        self._home = home
        self._writes = Lane(locate, timeout_s)
        # A command sent twice here is refused or does no harm.
        self._reads = Lane(locate, timeout_s, repeats=True)
        self._tails = Lane(locate, timeout_s)
        self._breaks_told = 0
        self._keys: dict[str, bytes] = {}
        self._wake_key = arguments(b"wake:{p%02d}:%b" % (home, os.urandom(8).hex().encode()))
        self._woken_to = b"0-0"
        self._waking: asyncio.Task[None] | None = None
        self._wake_wanted = False

    def shard(self, response_id: str) -> str:
        return ""

    async def open(self, response_id: str, attempt: int) -> int:
        key = self._key(response_id)
        born = self._born(await self._writes.server_id())
        mark, top, *_ = await self._writes.call(
            [
                _command(b"XADD", key, b"%d-0" % attempt, b"fence", b"%d" % attempt),
                _command(b"XREVRANGE", key, b"+", b"-", b"COUNT", b"%d" % _EDGE),
                _command(b"EXPIRE", key, b"%d" % _RUNNING_TTL_S),
                pack(b"SET", born, b"1", b"NX", b"PX", b"%d" % _BORN_TTL_MS),
            ]
        )
        if not _refused(mark):
            _checked(mark)
        elif _checked(top) and _position(top[0][0]).attempt > attempt:
            raise Fenced(response_id)
        last = await self._last(key, top)
        return last.seq if last else 0

    async def append(self, batch: Sequence[Append]) -> Sequence[AppendResult]:
        if (breaks := self._writes.notice()) != self._breaks_told:
            # The server may have come back with less than it acknowledged, or another may have taken its place; a
            # plain append would bury the hole.
            self._breaks_told = breaks
            raise LogUnavailable("the connection to Redis broke since the last append")
        try:
            replies = await self._writes.call([self._pack(item) for item in batch])
        except LogUnavailable:
            self._breaks_told = self._writes.notice()
            raise
        return [_judge(reply) for reply in replies]

    def _pack(self, item: Append) -> bytes:
        key = self._key(item.response_id)
        if len(item.entries) == 1 and not item.recreate:
            entry = item.entries[0]
            place = b"%d-%d" % (entry.attempt, entry.seq)
            event, data = entry.event.encode(), entry.data
            return b"*6\r\n$4\r\nXADD\r\n%b$10\r\nNOMKSTREAM\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (
                key,
                len(place),
                place,
                len(event),
                event,
                len(data),
                data,
            )
        args = [b"%d" % _RUNNING_TTL_S if item.recreate else b""]
        for entry in item.entries:
            args += (b"%d-%d" % (entry.attempt, entry.seq), entry.event.encode(), entry.data)
        return b"*%d\r\n%b%b%b" % (
            4 + len(args),
            arguments(b"EVAL", _APPEND_SCRIPT, b"1"),
            key,
            arguments(*args),
        )

    async def position(self, response_id: str) -> Position | None:
        command = _command(b"XREVRANGE", self._key(response_id), b"+", b"-", b"COUNT", b"1")
        (top,) = await self._writes.call([command])
        return _position(top[0][0]) if _checked(top) else None

    async def read(self, response_id: str, after: int, limit: int = 10_000) -> LogSlice:
        key = self._key(response_id)
        after = min(after, MAX_SEQ)
        count = b"%d" % limit
        # The end is looked at before the range: what is appended in between lies after ``position``, never before it.
        bottom, top, page = await self._reads.call(
            [
                _command(b"XRANGE", key, b"-", b"+", b"COUNT", b"%d" % _EDGE),
                _command(b"XREVRANGE", key, b"+", b"-", b"COUNT", b"%d" % _EDGE),
                _command(b"XRANGE", key, b"(1-%d" % after, b"+", b"COUNT", count),
            ]
        )
        entries = _entries(_checked(page), after)
        end = max([_position(raw[0]) for raw in (*top[:1], *page[-1:])], default=_NOWHERE)
        while len(entries) < limit and len(page) == limit:
            # Marks and what is not after the cursor took up the page.
            (page,) = await self._reads.call([_command(b"XRANGE", key, b"(" + page[-1][0], b"+", b"COUNT", count)])
            entries += _entries(_checked(page), after)
            end = _position(page[-1][0]) if page else end
        if len(entries) >= limit:
            entries = entries[:limit]
            end = Position(entries[-1].attempt, entries[-1].seq)
        newest = [entry for entry in (await self._last(key, top), *entries[-1:]) if entry is not None]
        return LogSlice(
            entries=tuple(entries),
            first=await self._first_seq(key, bottom),
            last=max(newest, key=_place).seq if newest else 0,
            position=end,
            oldest_attempt=_position(bottom[0][0]).attempt if bottom else 0,
        )

    async def _last(self, key: bytes, top: Sequence[Any]) -> Entry | None:
        """The last event, given the last few raw entries; looks further when those are all marks."""
        while not (found := _entries(_checked(top), 0)) and len(top) >= _EDGE:
            command = _command(b"XREVRANGE", key, b"(" + top[-1][0], b"-", b"COUNT", b"100")
            (top,) = await self._reads.call([command])
        return found[0] if found else None

    async def _first_seq(self, key: bytes, bottom: Sequence[Any]) -> int:
        while not (found := _entries(_checked(bottom), 0)) and len(bottom) >= _EDGE:
            command = _command(b"XRANGE", key, b"(" + bottom[-1][0], b"+", b"COUNT", b"100")
            (bottom,) = await self._reads.call([command])
        return found[0].seq if found else 0

    async def tail(self, following: Mapping[str, Position], timeout_s: float) -> Mapping[str, Sequence[Entry]]:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        places = {self._key(rid): b"%d-%d" % (place.attempt, place.seq) for rid, place in following.items()}
        try:
            while (left := until - loop.time()) > 0:
                heard = await self._xread(places, left)
                found, woken = self._sort(heard, places)
                if found or woken:
                    return found
        except (LogUnavailable, asyncio.CancelledError):
            # A command may still be blocked there, and a new server counts its wakes anew.
            self._tails.drop(also_unmade=False)
            self._woken_to = b"0-0"
            raise
        return {}

    async def _xread(self, places: Mapping[bytes, bytes], patience_s: float) -> Sequence[Any]:
        ids = arguments(self._woken_to, *places.values())
        head = arguments(b"XREAD", b"COUNT", b"%d" % _TAIL_COUNT, b"BLOCK", b"%d" % max(1, int(patience_s * 1000)))
        command = b"*%d\r\n%b$7\r\nSTREAMS\r\n%b%b%b" % (
            8 + 2 * len(places),
            head,
            self._wake_key,
            b"".join(places),
            ids,
        )
        (heard,) = await self._tails.call([command], patience_s=patience_s)
        return _checked(heard) or ()

    def _sort(self, heard: Sequence[Any], places: dict[bytes, bytes]) -> tuple[dict[str, Sequence[Entry]], bool]:
        """Entries by response, and whether ``wake`` was called. Moves ``places`` past marks: they are not told."""
        found: dict[str, Sequence[Entry]] = {}
        woken = False
        for key, raw in heard:
            if key.startswith(b"wake:"):
                self._woken_to = raw[-1][0]
                woken = True
                continue
            response_id = key[key.index(b"}:") + 2 :].decode()
            places[self._key(response_id)] = raw[-1][0]
            if entries := _entries(raw, 0):
                found[response_id] = entries
        return found, woken

    def wake(self) -> None:
        self._wake_wanted = True
        if self._waking is None or self._waking.done():
            self._waking = asyncio.get_running_loop().create_task(self._wake())

    async def _wake(self) -> None:
        commands = [
            _command(b"XADD", self._wake_key, b"MAXLEN", b"1", b"*", b"w", b"1"),
            _command(b"EXPIRE", self._wake_key, b"%d" % _WAKE_TTL_S),
        ]
        while self._wake_wanted:
            # One more may be wanted while this one is under way: the tail may have used it up before that.
            self._wake_wanted = False
            try:
                await self._each(commands)
            except LogUnavailable:
                # Then the tail is in no better state; breaking it ends the wait just the same.
                self._tails.drop()

    async def expire(self, response_ids: Sequence[str], ttl_s: float) -> None:
        ttl = b"%d" % max(1, int(ttl_s * 1000))
        await self._each([_command(b"PEXPIRE", self._key(rid), ttl) for rid in response_ids])
        self._forget(response_ids)

    async def delete(self, response_ids: Sequence[str]) -> None:
        await self._each([_command(b"UNLINK", self._key(rid)) for rid in response_ids])
        await self._each([pack(b"UNLINK", self._mark(rid)) for rid in response_ids])
        self._forget(response_ids)

    async def _each(self, commands: Sequence[bytes]) -> None:
        if commands:
            for reply in await self._reads.call(commands):
                _checked(reply)

    async def note_read(self, response_ids: Sequence[str]) -> None:
        ttl = b"%d" % (READ_MARK_TTL_S * 1000)
        await self._each([pack(b"SET", self._mark(rid), b"1", b"PX", ttl) for rid in response_ids])

    async def unread_s(self, response_ids: Sequence[str]) -> Sequence[float | None]:
        if not response_ids:
            return []
        # How long a mark still lives tells how old it is, by one clock: the server's.
        commands = [pack(b"PTTL", self._mark(rid)) for rid in response_ids]
        left = [_checked(reply) for reply in await self._reads.call(commands)]
        return [READ_MARK_TTL_S - ms / 1000 if ms >= 0 else None for ms in left]

    async def unbroken_s(self, response_id: str) -> float:
        server = await self._writes.server_id()
        (left,) = await self._writes.call([pack(b"PTTL", self._born(server))])
        if await self._writes.server_id() != server:
            return 0.0
        # What still lives of it tells how old it is, by the server's clock. A server that came back, or that took over
        # from another, has none of its own name: what it has of the other's may be less than the other had.
        return (_BORN_TTL_MS - left) / 1000 if _checked(left) >= 0 else 0.0

    async def ping(self, *, everywhere: bool = False) -> None:
        # A command with a key: a Cluster's node answers PING also while the Cluster is down.
        await self._each([_command(b"EXISTS", self._wake_key)])

    async def aclose(self) -> None:
        if self._waking is not None:
            self._waking.cancel()
            await asyncio.gather(self._waking, return_exceptions=True)
        for lane in (self._writes, self._reads, self._tails):
            lane.close()

    def _born(self, server: bytes) -> bytes:
        """The key that is as old as what this server keeps since its start: the first log opened there makes it."""
        return b"born:{p%02d}:%b" % (self._home, server)

    def _mark(self, response_id: str) -> bytes:
        """The key of the mark that somebody reads this reply, in its log's partition."""
        return b"read:{p%02d}:%b" % (partition(response_id, self._partitions), response_id.encode())

    def _key(self, response_id: str) -> bytes:
        """The key as a packed argument."""
        key = self._keys.get(response_id)
        if key is None:
            if len(self._keys) >= _KEYS_CACHED:
                self._keys.clear()
            name = b"resp:{p%02d}:%b" % (partition(response_id, self._partitions), response_id.encode())
            key = self._keys[response_id] = b"$%d\r\n%b\r\n" % (len(name), name)
        return key

    def _forget(self, response_ids: Sequence[str]) -> None:
        for response_id in response_ids:
            self._keys.pop(response_id, None)


def _command(name: bytes, key: bytes, *args: bytes) -> bytes:
    """A command whose first argument is a key that is packed already."""
    head = b"*%d\r\n$%d\r\n%b\r\n%b" % (2 + len(args), len(name), name, key)
    return head + arguments(*args) if args else head


def _judge(reply: Any) -> AppendResult:
    if reply is None:
        return AppendResult.LOST
    if _refused(reply):
        return AppendResult.FENCED
    _checked(reply)
    return AppendResult.OK
