"""How full a model would be without the ladder's last step: what that step keeps away is counted, not guessed. Pure.

While a step keeps work away, short waits say nothing about whether it is still needed: they are short because of it.
So each run that is taken in is counted twice, as it was taken in and as it would have been a step lower. How much of
the engines a run needs is learnt from how full they are of what is taken in, while nobody waits too long; it holds for
any number of places, so it is known at once when replicas go or come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

LEAST_RUNS: Final = 10
"""Fewer say nothing about how much of the engines a run needs."""
LEAST_S: Final = 10.0
"""Nor does less time say how much is asked for."""


class Fullness(NamedTuple):
    """How much of what serves a model is taken, over all replicas that are known."""

    places: int = 0
    """Replies that can be written at the same time; 0: nothing is known."""
    sequences: float = 0.0
    """The share of these places that is taken."""
    tokens: float = 0.0
    """The share of the KV cache that is kept for runs under way; 0 where the engines do not tell."""


def together(parts: Iterable[Fullness]) -> Fullness:
    """Several engines as one."""
    known = [part for part in parts if part.places]
    places = sum(part.places for part in known)
    return Fullness(
        places,
        sum(part.places * part.sequences for part in known) / max(places, 1),
        sum(part.places * part.tokens for part in known) / max(places, 1),
    )


class Need(NamedTuple):
    """What runs ask of a model: how many they are, and tokens of prompts and longest replies."""

    runs: int = 0
    tokens: int = 0


class _Rate(NamedTuple):
    runs: float
    tokens: float


class Spared:
    """What is asked of one model, with its step and without."""

    def __init__(self, window_s: float) -> None:
        """``window_s``: over how many seconds it is looked back."""
        self._window_s: Final = window_s
        self._since: float | None = None
        self._taken: deque[tuple[float, Need, Need]] = deque()
        self._seen: deque[tuple[float, Fullness]] = deque()
        self._each: _Rate | None = None
        """Places, and places' worth of KV cache, that are taken by one run, or one token, a second."""

    def restart(self, now: float) -> None:
        """The step is another one now: what was counted is past. What a run needs is still known."""
        self._since = now
        self._taken.clear()
        self._seen.clear()

    def take_in(self, now: float, here: Need, below: Need) -> None:
        """A run was taken in that asks so much of this model, and would have asked ``below`` a step lower."""
        self._begin(now)
        self._taken.append((now, here, below))

    def look(self, now: float, full: Fullness, *, in_time: bool) -> float:
        """The share of what there is that would be taken without the step; 0.0: not known.

        ``in_time``: nobody waits too long, so what is taken in is what is served.
        """
        since = self._begin(now)
        self._seen.append((now, full))
        for line in (self._taken, self._seen):
            while line and line[0][0] <= now - self._window_s:
                line.popleft()
        seconds = min(now - since, self._window_s)
        if seconds < min(LEAST_S, self._window_s):
            return 0.0
        if in_time and sum(here.runs for _, here, _ in self._taken) >= LEAST_RUNS:
            self._each = self._learn(seconds)
        if self._each is None or not full.places:
            return 0.0
        runs = sum(below.runs for _, _, below in self._taken) / seconds
        tokens = sum(below.tokens for _, _, below in self._taken) / seconds
        return max(self._each.runs * runs, self._each.tokens * tokens) / full.places

    def _begin(self, now: float) -> float:
        """Since when it is counted: since the first that is heard, for a clock does not begin at 0."""
        if self._since is None:
            self._since = now
        return self._since

    def _learn(self, seconds: float) -> _Rate:
        runs = sum(here.runs for _, here, _ in self._taken) / seconds
        tokens = sum(here.tokens for _, here, _ in self._taken) / seconds
        places = sum(full.sequences * full.places for _, full in self._seen) / len(self._seen)
        cache = sum(full.tokens * full.places for _, full in self._seen) / len(self._seen)
        return _Rate(places / runs, cache / max(tokens, 1.0))
