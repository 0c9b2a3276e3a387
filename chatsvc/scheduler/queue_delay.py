"""How long the runs of one model wait: what the degradation ladder goes by. Pure.

A tier's delay is the median over its runs that have begun since the last look, with how long they had waited, and over
those that wait, with twice as long as they have so far: who is found waiting is halfway, on the average. One user's
pile, or a few who are lucky, do not make the median.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Final

from chatsvc.limits import TierName

RATE_WINDOW_S: Final = 30.0
"""Runs that began in the last so many seconds say how fast a tier's queue moves."""


class _Tier:
    """One tier. Times are seconds of one clock that never goes back."""

    def __init__(self) -> None:
        self.begun: list[float] = []
        """How long those had waited that have begun since the last look."""
        self.begun_at: deque[float] = deque()
        self.since: list[float] = []
        """Since when those waited who did at the last look, the first of them first."""


class QueueDelays:
    """All tiers of one model."""

    def __init__(self) -> None:
        self._tiers: Final = {tier: _Tier() for tier in TierName}

    def begins(self, tier: TierName, waited_s: float, now: float) -> None:
        """A run has begun, here or elsewhere; ``waited_s`` 0: at once."""
        seen = self._tiers[tier]
        seen.begun.append(waited_s)
        seen.begun_at.append(now)

    def look(self, now: float, waiting: Iterable[tuple[TierName, float]]) -> dict[TierName, float]:
        """Each tier's delay since the last look, without the tiers of which nobody was here.

        ``waiting``: the tier of each run that waits, and since when.
        """
        since: dict[TierName, list[float]] = {tier: [] for tier in self._tiers}
        for tier, at in waiting:
            since[tier].append(at)
        delays = {}
        for tier, seen in self._tiers.items():
            waits = [*seen.begun, *(2 * (now - at) for at in since[tier])]
            if waits:
                delays[tier] = median(waits)
            seen.begun = []
            seen.since = sorted(since[tier])
            while seen.begun_at and seen.begun_at[0] <= now - RATE_WINDOW_S:
                seen.begun_at.popleft()
        return delays

    @property
    def waiting(self) -> dict[TierName, int]:
        """How many of each tier waited at the last look."""
        return {tier: len(seen.since) for tier, seen in self._tiers.items()}

    def expected_s(self, tier: TierName, now: float, deadline_s: float) -> float:
        """How long a run of the tier would wait that came now: those who wait, at the pace at which they lately begin.

        While none begins, as long as the oldest has waited. Who waits is known from the last look.
        """
        since = self._tiers[tier].since
        paced_s = self.paced_s(tier, now, deadline_s)
        return paced_s if paced_s is not None else now - since[0]

    def paced_s(self, tier: TierName, now: float, deadline_s: float) -> float | None:
        """What those who wait take at the pace at which they lately begin. None: some wait and none begins.

        Who has waited for more than ``deadline_s`` is being refused, and not counted.
        """
        seen = self._tiers[tier]
        if not seen.begun_at:
            return None if seen.since else 0.0
        ahead = len(seen.since) - bisect_left(seen.since, now - deadline_s)
        # From the first of them till now, so many began: the window may be younger than its length.
        return ahead * max(now - seen.begun_at[0], 1.0) / len(seen.begun_at)
