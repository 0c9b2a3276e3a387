"""Fan-out: one multiplexed tail per process, however many readers; each entry framed once for all of them.

A log that this process writes itself is not tailed: its writer says what Redis has acknowledged (``hold``, ``deliver``,
``release``). All other logs that somebody reads share one ``tail``. Either way a reader gets the same entries under
the same ids (L3). A reader costs Redis one replay, never a connection or a waiting command.

Slow readers are cut where their sink is full, and resume by their cursor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Final

import structlog

from chatsvc.errors import LogUnavailable
from chatsvc.events import Entry
from chatsvc.streamlog.base import LogSlice, Position, StreamLog
from chatsvc.streamlog.subscription import Sink, Subscription

_logger = structlog.get_logger(__name__)

_TAIL_S: Final = 5.0
"""A tail that hears nothing asks again after this long, so that a connection that died without a word is noticed."""
_TAIL_PACE_S: Final = 0.01
"""A busy tail asks at most this often: each call names all followed logs, so it should bring home many entries."""
_RETRY_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)


class _Channel:
    """A log that somebody reads here. ``reached`` is where to tail from; None until it has been read once."""

    __slots__ = ("reached", "subscriptions")

    def __init__(self) -> None:
        self.subscriptions: set[Subscription] = set()
        self.reached: Position | Entry | None = None


class Hub:
    """Hands the entries of any number of logs to any number of readers. ``run`` is the tail; its owner is ``app``."""

    def __init__(self, log: StreamLog) -> None:
        self.log = log
        self.tick = 0
        """Counts seconds, roughly; moved by the watchdog of ``resume``."""
        self.delivered = 0
        """Entries handed to readers live, ever."""
        self.cut = 0
        """Readers cut because they were too slow, ever."""
        self._channels: dict[str, _Channel] = {}
        self._left: set[str] = set()
        self._held: dict[str, int] = {}
        self._more = asyncio.Event()

    @property
    def subscribers(self) -> int:
        """Readers attached now."""
        return sum(len(channel.subscriptions) for channel in self._channels.values())

    @property
    def followed(self) -> int:
        """Logs that are tailed now."""
        return len(self._following())

    # Readers ---------------------------------------------------------------------------------------------------------

    def subscribe(self, response_id: str, after: int, sink: Sink) -> Subscription:
        """Attach a reader; nothing is handed over until it replays."""
        subscription = Subscription(self, response_id, after, sink)
        self._channels.setdefault(response_id, _Channel()).subscriptions.add(subscription)
        return subscription

    def subscriptions(self, response_id: str) -> Collection[Subscription]:
        """The readers of one log."""
        channel = self._channels.get(response_id)
        return channel.subscriptions if channel else ()

    def take_read(self) -> set[str]:
        """Ids of all logs that somebody reads here now, or read at any time since this was asked last."""
        read = self._left | self._channels.keys()
        self._left.clear()
        return read

    def leave(self, subscription: Subscription) -> None:
        channel = self._channels.get(subscription.response_id)
        if channel is None or subscription not in channel.subscriptions:
            return
        channel.subscriptions.discard(subscription)
        self.cut += subscription.cut
        if not channel.subscriptions:
            del self._channels[subscription.response_id]
            self._left.add(subscription.response_id)

    def settle(self, subscription: Subscription, page: LogSlice) -> None:
        channel = self._channels.get(subscription.response_id)
        if channel is not None and channel.reached is None:
            channel.reached = page.position
            self._follow_more(subscription.response_id)

    # The writer of this process --------------------------------------------------------------------------------------

    def hold(self, response_id: str) -> None:
        self._held[response_id] = self._held.get(response_id, 0) + 1

    def release(self, response_id: str) -> None:
        self._held[response_id] -= 1
        if not self._held[response_id]:
            del self._held[response_id]
            self._follow_more(response_id)

    def deliver(self, response_id: str, entries: Sequence[Entry]) -> None:
        channel = self._channels.get(response_id)
        if channel is None:
            return
        if channel.reached is not None:
            channel.reached = entries[-1]
        frames = [entry.frame() for entry in entries]
        self.delivered += len(entries) * len(channel.subscriptions)
        for subscription in channel.subscriptions:
            subscription.deliver(entries, frames)

    # The tail --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Tail what is read here and written elsewhere, until cancelled."""
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            self._more.clear()
            following = self._following()
            if not following:
                await self._more.wait()
                continue
            began = loop.time()
            try:
                heard = await self.log.tail(following, _TAIL_S)
                failures = 0
            except LogUnavailable as error:
                if not failures:
                    _logger.warning("tail broke", reason=error.detail, followed=len(following))
                await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
                failures += 1
                continue
            for response_id, entries in heard.items():
                self.deliver(response_id, entries)
            await asyncio.sleep(began + _TAIL_PACE_S - loop.time())

    def _following(self) -> dict[str, Position]:
        return {
            response_id: Position(channel.reached.attempt, channel.reached.seq)
            for response_id, channel in self._channels.items()
            if channel.reached is not None and response_id not in self._held
        }

    def _follow_more(self, response_id: str) -> None:
        if response_id in self._channels and response_id not in self._held:
            self._more.set()
            self.log.wake()
