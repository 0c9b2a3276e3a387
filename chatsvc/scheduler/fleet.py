"""The other replicas, as far as they are known to live: by what was heard of them last. Pure but for reading the time.

Who is silent for ``SILENT_S`` gets nothing more, and what waits for it may be served by others: that is soon, and does
no harm when it was only late, for Postgres decides who has a run. After ``GONE_S`` its runs are out of the accounts.
"""

from __future__ import annotations

from typing import Final

from chatsvc.clock import Clock
from chatsvc.scheduler.news import News, Places, Window
from chatsvc.scheduler.spared import Fullness, together

SILENT_S: Final = 2.0
GONE_S: Final = 10.0


class _Seen:
    __slots__ = ("at", "leaving", "models")

    def __init__(self) -> None:
        self.at = 0.0
        self.leaving = False
        self.models: dict[str, Places] = {}


class Fleet:
    """See the module's docstring. ``me`` is this replica's own name, of which nothing is noted."""

    def __init__(self, me: str, clock: Clock) -> None:
        self._me = me
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._silent: set[str] = set()

    @property
    def me(self) -> str:
        return self._me

    def hear(self, news: News) -> bool:
        """A sign of life. True when it is the first, or the first after a silence."""
        new = not self._lives(news.replica)
        seen = self._seen.setdefault(news.replica, _Seen())
        seen.at, seen.models, seen.leaving = self._clock.monotonic(), news.models, news.leaving
        self._silent.discard(news.replica)
        return new

    def listens(self) -> bool:
        """Whether any other process is there to be told anything."""
        return any(self._lives(name) for name in self._seen)

    def count(self) -> int:
        """How many are."""
        return sum(self._lives(name) for name in self._seen)

    def others(self, model: str) -> bool:
        return any(self.serves(name, model) for name in self._seen)

    def lives(self, replica_id: str) -> bool:
        return self._lives(replica_id)

    def serves(self, replica_id: str, model: str) -> bool:
        return self._places(replica_id, model).slots > 0

    def speed(self, model: str) -> float:
        return sum(self._places(name, model).speed for name in self._seen)

    def window(self, model: str) -> Window | None:
        """What the model takes wherever it is served; None where that is not known."""
        served = [self._places(name, model) for name in self._seen if self.serves(name, model)]
        if not served or not all(places.window for places in served):
            return None
        return Window(
            tokens=min(places.window for places in served), reply_tokens=min(places.reply_tokens for places in served)
        )

    def slots(self, model: str) -> dict[str, int]:
        """Places of the others that serve the model."""
        return {name: self._places(name, model).slots for name in self._seen if self.serves(name, model)}

    def fullness(self, model: str) -> Fullness:
        """How much of the others' engines replies have."""
        served = [self._places(name, model) for name in self._seen]
        return together(Fullness(places.slots, places.sequences, places.tokens) for places in served)

    def fell_silent(self) -> bool:
        """Whether somebody has since the last call."""
        silent = {name for name in self._seen if not self._lives(name)}
        new = silent - self._silent
        self._silent = silent
        return bool(new)

    def take_gone(self) -> list[str]:
        """Those that were silent for so long that they are forgotten, once."""
        now = self._clock.monotonic()
        gone = [name for name, seen in self._seen.items() if now - seen.at > GONE_S]
        for name in gone:
            del self._seen[name]
        return gone

    def _lives(self, name: str) -> bool:
        seen = self._seen.get(name)
        return seen is not None and self._clock.monotonic() - seen.at <= SILENT_S

    def _places(self, name: str, model: str) -> Places:
        if not self._lives(name) or self._seen[name].leaving:
            return Places()
        return self._seen[name].models.get(model, Places())
