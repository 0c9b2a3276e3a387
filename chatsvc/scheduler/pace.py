"""How fast a model serves: what honest waiting times are made of. Pure but for reading the time.

A run starts when another one ends. While the engine is full, its ``n`` runs share the service that it delivers in a
second evenly, so the one with the least left ends first, and so on; runs behind those ``n`` wait for whole runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from chatsvc.clock import Clock

_WINDOW_S: Final = 30.0
"""What was delivered in the last so many seconds says how fast the engine is: enough to even out the steps in which
replies are accounted for, short enough to follow a change."""
_LEAST_S: Final = 2.0
"""Less says nothing."""


class Pace:
    """The service that an engine delivers in a second while it is full."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps: deque[tuple[float, float]] = deque()
        self._served = 0.0
        self._since = clock.monotonic()

    def idle(self) -> None:
        """The engine has a free place now: what it delivers is not what it can."""
        self._steps.clear()
        self._served = 0.0
        self._since = self._clock.monotonic()

    def delivered(self, service: float) -> None:
        """So much was delivered."""
        now = self._clock.monotonic()
        self._steps.append((now, service))
        self._served += service
        while self._steps and self._steps[0][0] < now - _WINDOW_S:
            self._since, gone = self._steps.popleft()
            self._served -= gone

    def per_second(self) -> float | None:
        """Service delivered in a second; None before enough was seen."""
        seconds = self._clock.monotonic() - self._since
        return self._served / seconds if seconds >= _LEAST_S and self._served > 0 else None

    def wait_s(
        self,
        position: int,
        service_ahead: float,
        left: Sequence[float],
        *,
        elsewhere: float = 0.0,
        here: bool = True,
    ) -> float | None:
        """Expected seconds until the run at ``position`` starts, 1 being next.

        ``service_ahead`` is what the runs before it are expected to cost, ``left`` what those under way still will,
        least first. ``elsewhere`` is what other replicas deliver in a second; without an engine ``here`` it is all.
        None before the speed is known.
        """
        # What is not known of this engine counts as nothing, as it does for those that hear of it.
        speed = elsewhere + ((self.per_second() or 0.0) if here else 0.0)
        if not left or speed <= 0:
            return None
        if position <= len(left):
            return round(left[position - 1] * len(left) / speed, 1)
        mean = service_ahead / (position - 1)
        return round((left[-1] * len(left) + (position - len(left)) * mean) / speed, 1)
