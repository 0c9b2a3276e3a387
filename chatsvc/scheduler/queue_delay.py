"""How long the runs of one model wait in this process: what the degradation ladder goes by. Pure.

A tier's delay is the median over its runs that have begun since the last look, with how long they had waited, and over
those that wait, with twice as long as they have so far: who is found waiting is halfway, on the average. One user's
pile, or a few who are lucky, do not make the median.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from statistics import median
from typing import Final

from chatsvc.limits import TierName

RATE_WINDOW_S: Final = 30.0
"""Runs that began in the last so many seconds say how fast a tier's queue moves."""


class QueueDelay:
    """One tier of one model. Times are seconds of one clock that never goes back."""

    def __init__(self) -> None:
        self._waiting: dict[str, float] = {}
        """Since when each run waits, the oldest first."""
        self._begun: list[float] = []
        self._begun_at: deque[float] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def waits(self, run_id: str, now: float) -> None:
        """A run waits from now on; one that does already changes nothing."""
        self._waiting.setdefault(run_id, now)

    def begins(self, run_id: str, waited_s: float, now: float) -> None:
        """A run has begun; ``waited_s`` 0: at once."""
        self._waiting.pop(run_id, None)
        self._begun.append(waited_s)
        self._begun_at.append(now)

    def look(self, now: float, waiting: Collection[str]) -> float | None:
        """The delay since the last look; None when nobody of the tier was here. Forgets runs not among the waiting."""
        self._waiting = {run_id: since for run_id, since in self._waiting.items() if run_id in waiting}
        begun, self._begun = self._begun, []
        while self._begun_at and self._begun_at[0] <= now - RATE_WINDOW_S:
            self._begun_at.popleft()
        waits = [*begun, *(2 * (now - since) for since in self._waiting.values())]
        return median(waits) if waits else None

    def overdue(self, now: float, deadline_s: float) -> Iterable[str]:
        """The runs that have waited for longer than this."""
        for run_id, since in self._waiting.items():
            if now - since <= deadline_s:
                return
            yield run_id

    def expected_s(self, now: float) -> float:
        """How long a run of the tier would wait that came now: those who wait, at the pace at which they lately begin.

        While none begins, as long as the oldest has waited.
        """
        if not self._waiting:
            return 0.0
        recent = [at for at in self._begun_at if at > now - RATE_WINDOW_S]
        if not recent:
            return now - next(iter(self._waiting.values()))
        # From the first of them till now, so many began: the window may be younger than its length.
        seconds = max(now - recent[0], 1.0)
        return len(self._waiting) * seconds / len(recent)


class QueueDelays:
    """All tiers of one model."""

    def __init__(self) -> None:
        self.tiers: Final = {tier: QueueDelay() for tier in TierName}

    def look(self, now: float, waiting: Collection[str]) -> dict[TierName, float]:
        """Each tier's delay since the last look, without the tiers of which nobody was here."""
        seen = ((tier, delay.look(now, waiting)) for tier, delay in self.tiers.items())
        return {tier: delay_s for tier, delay_s in seen if delay_s is not None}
