"""L1, L2 and L13 at the writing end: a pump appends what the replies of one shard have due, in one round trip.

The first delta of a reply goes out at once; then at most one append every ``batch_ms``, or every ``batch_tokens``.
While the log is away text piles up into one delta, so that what is written stays linear in the text.

Nothing is ever appended twice. An entry gets its seq when it is cut and keeps it; until Redis has acknowledged it, it
stays in the reply's queue. After anything but a plain OK the reply is *in doubt*: nothing of it is appended until its
``position`` in the log has been looked at. That place decides:

    a newer attempt                      → fenced, the reply is given up here
    at or behind the last queued entry   → those were written after all: acknowledged
    at the last acknowledged entry       → what is queued goes out again, the same bytes
    before it, or no log at all          → lost. Who still holds the lease starts the log anew with a snapshot (L7)

After a break the lease is asked for in any case: another server may have taken over that never got the mark by which a
newer attempt had fenced this one off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import msgspec
import structlog

from chatsvc.errors import LogUnavailable, StoreUnavailable
from chatsvc.events import Entry
from chatsvc.streamlog.base import Append, AppendResult, Fenced, LogRefuses, StreamLog
from chatsvc.streamlog.reply import ReplyWriter

_logger = structlog.get_logger(__name__)

_LOOK_AGAIN_S: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Waits between looks at a log that is away, and between appends that it refuses."""
_NEVER: Final = float("inf")
_ROUND_S: Final = 0.01
"""A busy pump begins a round trip at most this often, so that what falls due in between shares one."""


class Audience(Protocol):
    """What the writer tells about its replies: in practice the hub."""

    def hold(self, response_id: str) -> None:
        """This process writes this log from now on and will say what is in it."""

    def release(self, response_id: str) -> None:
        """It does so no more."""

    def deliver(self, response_id: str, entries: tuple[Entry, ...]) -> None:
        """These entries are in the log."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How often a reply is appended to."""

    batch_s: float
    batch_tokens: int


Holds = Callable[[str, int], Awaitable[bool]]


class LogPump:
    """Writes the replies of one shard. ``run`` is its loop."""

    def __init__(self, log: StreamLog, audience: Audience | None, *, pace: Pace, holds: Holds) -> None:
        self._log = log
        self._audience = audience
        self._pace = pace
        self._holds = holds
        self.replies: set[ReplyWriter] = set()
        self._dirty: dict[ReplyWriter, None] = {}
        self._doubtful: dict[ReplyWriter, bool] = {}
        """Replies in doubt, and whether the connection broke under them."""
        self._failures = 0
        self._looks = 0
        self._look_at = 0.0
        self._due_at = _NEVER
        self._alarm = asyncio.Event()

    def add(self, reply: ReplyWriter) -> None:
        """Write this reply from now on."""
        self.replies.add(reply)
        if self._audience is not None:
            self._audience.hold(reply.response_id)
        if not reply.opened:
            self._doubt(reply)

    async def run(self) -> None:
        """Pump until cancelled."""
        loop = asyncio.get_running_loop()
        began = float("-inf")
        while True:
            await self._next_round(began)
            began = loop.time()
            if self._doubtful and self._look_at <= began:
                await self._settle()
            if batch := self._collect(loop.time()):
                await self._round(batch)

    async def _next_round(self, last_began: float) -> None:
        """Sleep until something is due, and when the pump is busy a little longer, so that more shares the trip."""
        loop = asyncio.get_running_loop()
        while True:
            self._alarm.clear()
            at = min(self._due_at, self._look_at) if self._doubtful else self._due_at
            at = max(at, last_began + min(_ROUND_S, self._pace.batch_s))
            if at <= loop.time():
                return
            timer = loop.call_at(at, self._alarm.set) if at != _NEVER else None
            try:
                await self._alarm.wait()
            finally:
                if timer is not None:
                    timer.cancel()

    def _collect(self, now: float) -> list[tuple[ReplyWriter, Append]]:
        """Cut what is due, of replies that are in no doubt."""
        batch = []
        self._due_at = _NEVER
        for reply in tuple(self._dirty):
            if reply in self._doubtful:
                continue
            if reply.due_at > now:
                self._due_at = min(self._due_at, reply.due_at)
                continue
            del self._dirty[reply]
            if append := reply.take(now):
                batch.append((reply, append))
        return batch

    async def _round(self, batch: list[tuple[ReplyWriter, Append]]) -> None:
        try:
            results = await self._log.append([append for _, append in batch])
        except LogUnavailable as error:
            _logger.warning("stream log is away", reason=error.detail, open_replies=len(self.replies))
            for reply in self.replies:
                self._doubt(reply, broke=not isinstance(error, LogRefuses))
            self._failures += 1
            return
        self._failures = 0
        for (reply, append), result in zip(batch, results, strict=True):
            if result is AppendResult.OK:
                self._acknowledged(reply, append.entries[-1].seq)
            elif reply in self.replies:
                self._doubt(reply)

    def _acknowledged(self, reply: ReplyWriter, seq: int) -> None:
        entries = reply.acknowledge(seq)
        if entries and self._audience is not None:
            self._audience.deliver(reply.response_id, entries)

    # Doubt -----------------------------------------------------------------------------------------------------------

    def _doubt(self, reply: ReplyWriter, *, broke: bool = False) -> None:
        if not self._doubtful:
            # The first look is at once, but not time and again at a log that answers and takes nothing.
            self._looks = self._failures
            self._look_at = asyncio.get_running_loop().time() + _wait_s(self._failures - 1) if self._failures else 0.0
            self._alarm.set()
        self._doubtful[reply] = broke or self._doubtful.get(reply, False)

    async def _settle(self) -> None:
        """Look at the place of every reply in doubt; those that cannot be looked at now stay in doubt."""
        doubtful = tuple(self._doubtful.items())
        outcomes = await asyncio.gather(*(self._settle_one(*doubt) for doubt in doubtful), return_exceptions=True)
        for (reply, _), outcome in zip(doubtful, outcomes, strict=True):
            if outcome is None:
                self._doubtful.pop(reply, None)
                self.touch(reply, now=True)
            elif not isinstance(outcome, LogUnavailable | StoreUnavailable):
                raise outcome
        if self._doubtful:
            self._look_at = asyncio.get_running_loop().time() + _wait_s(self._looks)
            self._looks += 1
        else:
            _logger.info("stream log is whole again", replies=len(doubtful))

    async def _settle_one(self, reply: ReplyWriter, broke: bool) -> None:
        if not reply.opened:
            try:
                reply.opened_after(await self._log.open(reply.response_id, reply.attempt))
            except Fenced:
                self.fence(reply)
            return
        place = await self._log.position(reply.response_id)
        whole = place is not None and place.attempt == reply.attempt and place.seq >= reply.acknowledged
        # Once sealed the lease is over; what the store was told then is for the store to judge.
        sure = whole and (reply.sealed or not broke)
        overtaken = place is not None and place.attempt > reply.attempt
        if overtaken or not (sure or await self._holds(reply.response_id, reply.attempt)):
            self.fence(reply)
        elif whole and place is not None:
            self._acknowledged(reply, place.seq)
        else:
            _logger.warning("log was lost, starting it anew", run_id=reply.response_id, seq=reply.last_seq)
            reply.start_anew()

    # For replies -----------------------------------------------------------------------------------------------------

    def touch(self, reply: ReplyWriter, *, now: bool) -> None:
        """The reply has something to append: at once, or when its turn comes."""
        if reply not in self.replies:
            return
        if now or reply.pending_tokens >= self._pace.batch_tokens:
            reply.due_at = 0.0
        elif reply not in self._dirty:
            reply.due_at = reply.taken_at + self._pace.batch_s
        self._dirty[reply] = None
        if reply.due_at < self._due_at and reply not in self._doubtful:
            self._due_at = reply.due_at
            self._alarm.set()

    def fence(self, reply: ReplyWriter) -> None:
        """Another attempt holds the log: give the reply up."""
        _logger.info("reply is fenced off", run_id=reply.response_id, attempt=reply.attempt)
        reply.fenced = True
        self.forget(reply)

    def forget(self, reply: ReplyWriter) -> None:
        """Nothing more of this reply is appended. Idempotent."""
        if reply not in self.replies:
            return
        self.replies.discard(reply)
        self._dirty.pop(reply, None)
        self._doubtful.pop(reply, None)
        if self._audience is not None:
            self._audience.release(reply.response_id)
        reply.let_go()

    async def expire(self, response_id: str, ttl_s: float) -> None:
        """Let a log vanish in due time. Without the log there is nothing to expire, or its own long TTL does it."""
        try:
            await self._log.expire([response_id], ttl_s)
        except LogUnavailable as error:
            _logger.warning("log keeps its long time to live", run_id=response_id, reason=error.detail)


def _wait_s(times: int) -> float:
    return _LOOK_AGAIN_S[min(times, len(_LOOK_AGAIN_S) - 1)]
