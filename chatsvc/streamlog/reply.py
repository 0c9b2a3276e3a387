"""One reply on its way into the log: what was handed over, cut into numbered entries, until Redis has acknowledged it.

    delta ─▶ pending text ─(cut: it is due, or an event or the end follows)─▶ queue of entries ─(acknowledged)─▶ gone
    event ──────────────────────────────────────────────────────────────────▶ queue

A number once given is never given again (L2), whatever becomes of the entry: an old append that still arrives from a
broken connection can then only repeat what is there, or be refused. When the log was lost, a snapshot takes the next
number and stands for all text so far.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol

from chatsvc.events import Delta, Entry, Event, Snapshot, clean_text, entry
from chatsvc.streamlog.base import Append

LOST_REASON: Final = "log_lost"
_LAST_FLUSH_S: Final = 2.0
_PIECES: Final = 256
"""A text in a thousand small pieces takes ten times its size; so many pieces are joined."""
_TEXT_EVENTS: Final = frozenset({Delta.name, Snapshot.name})


class Pump(Protocol):
    """What a reply needs of its writer."""

    def touch(self, reply: ReplyWriter, *, now: bool) -> None:
        """There is something to append."""

    def forget(self, reply: ReplyWriter) -> None:
        """Append no more."""

    async def expire(self, response_id: str, ttl_s: float) -> None:
        """The log may vanish."""


class ReplyWriter:
    """Takes a reply's text and events without ever blocking. Made by ``LogWriter.open``.

    Above the line is the runner's side; below it the pump's.
    """

    __slots__ = (
        "_flushes",
        "_over",
        "_pending",
        "_pump",
        "_queue",
        "_recreate",
        "_said",
        "acknowledged",
        "attempt",
        "due_at",
        "fenced",
        "last_seq",
        "opened",
        "pending_tokens",
        "response_id",
        "sealed",
        "taken_at",
    )

    def __init__(self, pump: Pump, response_id: str, attempt: int, *, last_seq: int, opened: bool) -> None:
        self.response_id = response_id
        self.attempt = attempt
        self.last_seq = last_seq
        """Seq of the last entry handed over; pending text has none yet."""
        self.sealed = False
        """No text follows."""
        self.fenced = False
        """A newer attempt holds the log; whatever is handed over now is dropped."""
        self.opened = opened
        """The fence mark is in the log. Pump's."""
        self.acknowledged = 0
        """Seq of this attempt's last entry that Redis has; 0 for none. Pump's."""
        self.pending_tokens = 0
        self.due_at = 0.0
        self.taken_at = float("-inf")
        self._pump = pump
        self._pending: list[str] = []
        self._said: list[str] = []
        self._queue: deque[Entry] = deque()
        self._flushes: list[tuple[int, asyncio.Future[bool]]] = []
        self._recreate = False
        self._over = False

    @property
    def text(self) -> str:
        """All text handed over so far, pending text included."""
        return "".join(self._said) + "".join(self._pending)

    def checkpoint(self) -> tuple[int, str]:
        """``last_seq`` and the text of all entries up to it."""
        return self.last_seq, "".join(self._said)

    def delta(self, text: str, tokens: int = 1) -> None:
        """More text, of whole characters. Never blocks; after the end or a fence it is dropped."""
        if not text or self._over or self.sealed:
            return
        first = not self._said and not self._pending
        self._pending.append(clean_text(text))
        self.pending_tokens += tokens
        self._pump.touch(self, now=first)

    def event(self, event: Event) -> None:
        """Anything but text, in its place behind the text so far. Due at once."""
        if self._over:
            return
        self._cut()
        self._number(event)
        self._pump.touch(self, now=True)

    def seal(self) -> int:
        """No text follows. Returns the seq that the next event gets, for the store to know before the log does (L4).

        From here on a lost log is not started anew with a snapshot, so that this seq holds: the store has, or will
        have, all that a reader could miss.
        """
        self._cut()
        self.sealed = True
        return self.last_seq + 1

    async def flush(self, timeout_s: float) -> bool:
        """Wait until all that was handed over is acknowledged. False when that takes longer, or never happens."""
        if self._over:
            return False
        self._cut()
        if not self._queue:
            return True
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._flushes.append((self.last_seq, done))
        self._pump.touch(self, now=True)
        try:
            async with asyncio.timeout(timeout_s):
                return await done
        except TimeoutError:
            return False

    async def close(self, ttl_s: float | None) -> None:
        """Flush for a moment, let the log vanish after ``ttl_s`` seconds (None: it goes on later), and forget."""
        if self._over:
            return
        try:
            await self.flush(_LAST_FLUSH_S)
        finally:
            self._pump.forget(self)
        if ttl_s is not None and not self.fenced:
            await self._pump.expire(self.response_id, ttl_s)

    def discard(self) -> None:
        """Forget at once: nothing that is not in the log yet will be, and a lost log is not started anew."""
        self._pump.forget(self)

    # The pump's side -------------------------------------------------------------------------------------------------

    def _number(self, event: Event) -> None:
        self.last_seq += 1
        self._queue.append(entry(event, attempt=self.attempt, seq=self.last_seq))

    def _cut(self) -> None:
        """Make the pending text an entry."""
        if self._pending:
            text = "".join(self._pending)
            self._said.append(text)
            if len(self._said) >= _PIECES:
                self._said = ["".join(self._said)]
            self._pending.clear()
            self.pending_tokens = 0
            self._number(Delta(text=text))

    def take(self, now: float) -> Append | None:
        """All that is queued, pending text cut; it stays queued until acknowledged. None when there is nothing."""
        self._cut()
        if not self._queue:
            return None
        self.taken_at = now
        return Append(response_id=self.response_id, entries=tuple(self._queue), recreate=self._recreate)

    def acknowledge(self, seq: int) -> tuple[Entry, ...]:
        """Entries up to ``seq`` are in the log. Returns those that were queued till now."""
        queue, entries = self._queue, []
        while queue and queue[0].seq <= seq:
            entries.append(queue.popleft())
        if entries:
            self.acknowledged = entries[-1].seq
            self._recreate = False
            if self._flushes:
                self._tell_flushes()
        return tuple(entries)

    def opened_after(self, last_seq: int) -> None:
        """The fence mark is in the log at last, behind the event ``last_seq`` of an earlier attempt."""
        self.opened = True
        if self._queue and self._queue[0].seq <= last_seq:
            # Numbers were given out that the log has seen: only a snapshot leads on from both.
            self.last_seq = max(self.last_seq, last_seq)
            self.start_anew()
        elif not self._queue:
            self.last_seq = max(self.last_seq, last_seq)

    def start_anew(self) -> None:
        """The log was lost, or its end. A snapshot stands for the text; other events not yet in the log follow it."""
        self._recreate = True
        if self.sealed:
            return
        kept = [waiting for waiting in self._queue if waiting.event not in _TEXT_EVENTS]
        self._said.extend(self._pending)
        self._pending.clear()
        self.pending_tokens = 0
        self._queue.clear()
        self._number(Snapshot(text="".join(self._said), reason=LOST_REASON))
        for waiting in kept:
            self.last_seq += 1
            self._queue.append(Entry(self.attempt, self.last_seq, waiting.event, waiting.data))

    def let_go(self) -> None:
        """The writer has forgotten this reply."""
        self._over = True
        self._queue.clear()
        for _, done in self._flushes:
            if not done.done():
                done.set_result(False)
        self._flushes.clear()

    def _tell_flushes(self) -> None:
        waiting = []
        for target, done in self._flushes:
            if target > self.acknowledged:
                waiting.append((target, done))
            elif not done.done():
                done.set_result(True)
        self._flushes = waiting
