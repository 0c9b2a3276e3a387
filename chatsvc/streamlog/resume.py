"""L3 and L7 for one reader, from any cursor, whatever has become of the log in the meantime.

    replay ──▶ live ──▶ replay            the log serves (subscription.py)
      │  │       └────▶ ended elsewhere   it has fallen silent, and the store says that the run is over
      │  └─▶ hole ──▶ replay              the log cannot lead on from the cursor: a snapshot of the text so far
      │       └─────▶ ended elsewhere
      └─▶ away ──▶ replay                 no log can be reached: the reader is kept, and served once that changes
    ended elsewhere ──▶ replay once more ──▶ the stored message as ``snapshot`` and terminal event

Every state is a method that returns the next one. One watchdog per process asks the store about all silent logs in one
query, so a reader never hangs although a terminal append was lost, and silence costs next to nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Final, Protocol

import msgspec
import structlog

from chatsvc.errors import LogUnavailable, NotFound, StoreUnavailable
from chatsvc.events import Entry, Event, Snapshot, entry
from chatsvc.run import RunStatus
from chatsvc.streamlog.hub import Hub
from chatsvc.streamlog.snapshot import text_through
from chatsvc.streamlog.subscription import PAGE, Level, Overrun, Sink, Subscription

_logger = structlog.get_logger(__name__)

GAP_REASON: Final = "gap"
STORED_REASON: Final = "stored"
TICK_S: Final = 1.0
_SILENT_TICKS: Final = 2


class StoredReply(msgspec.Struct, frozen=True, kw_only=True):
    """What the store knows of a reply."""

    status: RunStatus
    text: str
    """The final text once ended; of the last checkpoint before."""
    text_seq: int
    """Seq of the event that ``text`` reaches up to, while running."""
    terminal: Event | None
    """How it ended; None before."""
    last_seq: int
    """Seq of the terminal event once ended."""


class ReplySource(Protocol):
    """The store, as far as readers need it. Both raise ``StoreUnavailable``."""

    async def reply(self, response_id: str) -> StoredReply:
        """Raises ``NotFound`` when there is no such reply (any more)."""
        ...

    async def ended(self, response_ids: Collection[str]) -> Collection[str]:
        """Those of these replies that have ended, or exist no more. One query."""
        ...


class Reader(Sink, Protocol):
    """A sink that may also close on its own: the client is gone, or the server shuts down."""

    @property
    def closed(self) -> bool:
        """Nothing more is wanted."""
        ...

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call this when ``closed`` becomes true."""
        ...


_State = Callable[["_Following"], Awaitable["_State | None"]]


class Resumer:
    """Serves readers. ``run`` is the watchdog over all of them; the composition root owns its task."""

    def __init__(self, hub: Hub, source: ReplySource, *, tick_s: float = TICK_S) -> None:
        self._hub = hub
        self._source = source
        self._tick_s = tick_s
        self._following: set[_Following] = set()

    async def follow(self, response_id: str, cursor: int, reader: Reader, *, ended: bool = False) -> None:
        """Hand the reader every event after ``cursor`` (0: from the start), to the end.

        ``ended``: the store says so. Then an empty log is one that is gone, and nothing will come of waiting for it.
        Returns after the terminal event, when the reader has closed or was cut, and when the reply was deleted.
        """
        with self._hub.subscribe(response_id, cursor, reader) as subscription:
            reader.on_close(subscription.nudge)
            following = _Following(subscription, reader, self._source, ended=ended)
            self._following.add(following)
            try:
                await following.to_the_end()
            finally:
                self._following.discard(following)

    async def run(self) -> None:
        """Look after silent readers until cancelled."""
        while True:
            await asyncio.sleep(self._tick_s)
            await self.tick()

    async def tick(self) -> None:
        """One look: tell readers whose run has ended in the store, and let those try again that wait for a log."""
        self._hub.tick += 1
        silent = [one for one in self._following if self._hub.tick - one.subscription.tick >= _SILENT_TICKS]
        if not silent:
            return
        try:
            ended = set(await self._source.ended({one.subscription.response_id for one in silent}))
        except StoreUnavailable as error:
            _logger.warning("silent streams not looked after", reason=error.detail, streams=len(silent))
            ended = set()
        for one in silent:
            one.subscription.tick = self._hub.tick
            one.over = one.subscription.response_id in ended
            if one.over or not one.subscription.live:
                one.subscription.nudge()


class _Following:
    """One reader on its way through the states."""

    __slots__ = ("ended", "over", "reader", "source", "subscription")

    def __init__(self, subscription: Subscription, reader: Reader, source: ReplySource, *, ended: bool) -> None:
        self.ended = ended
        """The run had ended when the reader came. Its log may lack the last events for a moment more."""
        self.subscription = subscription
        self.reader = reader
        self.source = source
        self.over = False
        """The store says that the run has ended."""

    async def to_the_end(self) -> None:
        """Go from state to state until there is none."""
        state: _State | None = _replay
        try:
            while state is not None and not self.reader.closed:
                state = await state(self)
        except Overrun:
            if not self.subscription.cut:
                return  # it has left by itself
            _logger.info("slow reader cut", run_id=self.subscription.response_id, cursor=self.subscription.cursor)
        except NotFound:
            _logger.info("reply deleted under its reader", run_id=self.subscription.response_id)


async def _replay(one: _Following) -> _State | None:
    try:
        level = await one.subscription.replay()
    except LogUnavailable:
        return _ended_elsewhere if one.over else _away
    gone = one.ended and level is Level.LIVE and not one.subscription.cursor
    if gone or (one.over and level is not Level.ENDED):
        return _ended_elsewhere
    return _AFTER_REPLAY[level]


async def _live(one: _Following) -> _State | None:
    subscription = one.subscription
    await subscription.wait()
    if subscription.ended:
        return None
    if subscription.cut:
        raise Overrun(subscription.response_id)
    return _live if subscription.live and not one.over else _replay


async def _away(one: _Following) -> _State | None:
    await one.subscription.wait()
    return _replay


async def _hole(one: _Following) -> _State | None:
    if one.ended:
        return _ended_elsewhere  # the store has all of it; the log may have less than the reader
    subscription = one.subscription
    try:
        entries, last = await _whole_log(subscription)
        found = text_through(entries)
        if not _leads_on(found, subscription.cursor):
            stored = await one.source.reply(subscription.response_id)
            if stored.status.ended:
                return _ended_elsewhere
            found = text_through(entries, seq=stored.text_seq, text=stored.text)
            # A checkpoint may lead a reader forward; back only where the log itself goes on from there.
            if found is not None and found[0] < subscription.cursor and not 0 < last <= found[0]:
                found = None
    except LogUnavailable:
        return _away
    except StoreUnavailable:
        found = None
    if found is None or not _leads_on(found, subscription.cursor):
        # The next checkpoint, or the writer's own snapshot, will do.
        await subscription.wait()
        return _ended_elsewhere if one.over else _hole
    seq, text = found
    subscription.push(_frame(Snapshot(text=text, reason=GAP_REASON), seq), seq)
    return _replay


def _leads_on(found: tuple[int, str] | None, cursor: int) -> bool:
    return found is not None and found[0] not in (0, cursor)


async def _ended_elsewhere(one: _Following) -> _State | None:
    subscription = one.subscription
    try:
        stored = await one.source.reply(subscription.response_id)
    except StoreUnavailable:
        await subscription.wait()
        return _ended_elsewhere
    if not stored.status.ended:
        one.over = False
        return _replay
    if stored.terminal is None or subscription.cursor >= stored.last_seq:
        return None
    before = stored.last_seq - 1
    frames = b""
    if subscription.cursor < before or (not subscription.cursor and stored.text):
        frames = _frame(Snapshot(text=stored.text, reason=STORED_REASON), before)
    subscription.push(frames + _frame(stored.terminal, stored.last_seq), stored.last_seq)
    subscription.ended = True
    return None


_AFTER_REPLAY: Final[dict[Level, _State | None]] = {Level.LIVE: _live, Level.HOLE: _hole, Level.ENDED: None}


async def _whole_log(subscription: Subscription) -> tuple[list[Entry], int]:
    """All entries, and the last one's seq."""
    entries: list[Entry] = []
    while True:
        page = await subscription.page(entries[-1].seq if entries else 0)
        entries += page.entries
        if len(page.entries) < PAGE:
            return entries, page.last


def _frame(event: Event, seq: int) -> bytes:
    return entry(event, attempt=0, seq=seq).frame()
