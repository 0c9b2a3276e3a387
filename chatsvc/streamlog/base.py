"""The contract of a stream log. ``memory`` and ``redis`` keep it alike; the suite is ``tests/contracts/``.

What an implementer owes:

- **S1 fencing.** After ``open(id, a)`` returned, every append by an attempt < a is refused with FENCED, for ever (L1).
- **S2 order.** Within an attempt sequence numbers only rise. An append whose first seq is not above the log's last
  one is refused with FENCED and changes nothing.
- **S3 loss is seen.** An append to a log that is not there (expired, deleted, server restarted empty) is refused with
  LOST unless it says ``recreate``; it never starts a log in the middle by accident.
- **S4 one round trip.** ``append`` takes the due entries of any number of responses and costs one round trip
  (one per shard, all at the same time).
- **S5 whole or refused.** The entries of one ``Append`` are all in the log or none is, unless the connection broke;
  then ``LogUnavailable`` is raised and ``position`` tells the truth.
- **S6 same bytes.** ``read`` and ``tail`` return the entries as appended, byte for byte, in order. Fence marks (seq 0)
  are never returned.
- **S7 tail is a hint of nothing missed.** ``tail`` returns as soon as any followed log has entries after its position,
  or ``wake`` was called, or the timeout passed. It never skips: what it returns for a log is a run of entries
  starting right after the given position.
- **S8 cancellation is safe.** Cancelling any call leaves nothing that another call could take for its own (L10).
- **S9 expiry.** After ``expire(ids, ttl_s)`` the logs are gone once ttl_s has passed; ``delete`` removes them now, and
  what was noted of their readers (S11).
- **S10 away is said.** When the server cannot be reached a call raises ``LogUnavailable`` within its timeout. So does
  the first ``append`` after the connection broke, though it be whole again: the server may have come back with less
  than it acknowledged, or a replica of it that has less, and the writer has to look at ``position`` before it goes on.
  What is away is a shard: a call that names logs of one ``shard`` only waits for no server but theirs.
- **S11 presence.** ``note_read`` says that somebody reads these replies now; ``unread_s`` says how long ago that was
  said last: None where it never was, where the mark was lost with the server, or is over an hour old.
- **S12 loss can be dated.** ``unbroken_s`` says for how many seconds at least nothing was lost where this log lies (a
  restarted server that has come back empty, say). 0 when that is not known. Every ``open`` begins to count, where
  nothing counts yet.
- **S13 the oldest is known.** ``read`` says the attempt of the oldest thing in the log, be it only a fence mark. A log
  that was lost and begun anew does not hold the mark of an attempt from before that.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final

import msgspec

from chatsvc.errors import LogUnavailable
from chatsvc.events import Entry

READ_MARK_TTL_S: Final = 3600
"""How long a mark of ``note_read`` is kept."""


class Position(msgspec.Struct, frozen=True, order=True, gc=False):
    """A place in a log: ordered by attempt, then seq. ``Position(0, 0)`` is before everything."""

    attempt: int
    seq: int


class Append(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Entries of one response, in order, all of one attempt. ``recreate`` permits starting a log that was lost."""

    response_id: str
    entries: tuple[Entry, ...]
    recreate: bool = False


class AppendResult(Enum):
    """What became of an ``Append``."""

    OK = "ok"
    FENCED = "fenced"
    """A newer attempt holds the log, or the entries are already in it. See ``position`` to tell."""
    LOST = "lost"
    """There is no such log (any more)."""


class LogSlice(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a log: ``entries`` with seq > the cursor asked for; ``first`` and ``last`` are what the whole log holds.

    ``first`` and ``last`` are seqs of events, 0 when the log is missing or has no event yet. ``position`` is where to
    tail from: the place of the last entry here when there are as many as asked for, else the end of the log.
    ``oldest_attempt`` is that of the first entry or fence mark in the whole log, 0 when the log is missing.
    """

    entries: tuple[Entry, ...]
    first: int
    last: int
    position: Position
    oldest_attempt: int


class StreamLog(abc.ABC):
    """See the module's docstring for what each method owes (S1–S13)."""

    @abc.abstractmethod
    def shard(self, response_id: str) -> str:
        """Logs of one shard are on one server, and away together (S10). A log's shard never changes."""

    @abc.abstractmethod
    async def open(self, response_id: str, attempt: int) -> int:
        """Fence off all earlier attempts, creating the log when missing. Returns the last event's seq in it (0: none).

        Raises ``errors.LogUnavailable``; raises ``Fenced`` when a newer attempt has opened it.
        """

    @abc.abstractmethod
    async def append(self, batch: Sequence[Append]) -> Sequence[AppendResult]:
        """Append the due entries of many responses in one round trip. Results in the order of the batch."""

    @abc.abstractmethod
    async def position(self, response_id: str) -> Position | None:
        """The place of the last entry, fence marks included; None when there is no log."""

    @abc.abstractmethod
    async def read(self, response_id: str, after: int, limit: int = 10_000) -> LogSlice:
        """At most ``limit`` entries with seq > ``after``, of any attempt. A missing log gives an empty slice."""

    @abc.abstractmethod
    async def tail(self, following: Mapping[str, Position], timeout_s: float) -> Mapping[str, Sequence[Entry]]:
        """Wait for entries after the given positions, for all followed logs together (S7). One caller at a time."""

    @abc.abstractmethod
    def wake(self) -> None:
        """Make the running ``tail`` return soon, so that it can be called again with other logs. Never blocks."""

    @abc.abstractmethod
    async def expire(self, response_ids: Sequence[str], ttl_s: float) -> None:
        """Let these logs vanish after ``ttl_s`` seconds."""

    @abc.abstractmethod
    async def delete(self, response_ids: Sequence[str]) -> None:
        """Remove these logs now."""

    @abc.abstractmethod
    async def note_read(self, response_ids: Sequence[str]) -> None:
        """Somebody reads these replies now (S11)."""

    @abc.abstractmethod
    async def unread_s(self, response_ids: Sequence[str]) -> Sequence[float | None]:
        """Seconds since each was last noted as read (S11), in the order asked."""

    @abc.abstractmethod
    async def unbroken_s(self, response_id: str) -> float:
        """For how many seconds, at least, nothing was lost where this log lies (S12)."""

    @abc.abstractmethod
    async def ping(self, *, everywhere: bool = False) -> None:
        """Return when a log can be used, or ``everywhere`` those of all shards. Raises ``errors.LogUnavailable``."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Close all connections. Idempotent."""


class LogRefuses(LogUnavailable):
    """The server answers and takes nothing: out of memory, say. What it holds is what it has acknowledged."""


class Fenced(Exception):
    """Another attempt holds this log; the caller has lost its lease (L1)."""
