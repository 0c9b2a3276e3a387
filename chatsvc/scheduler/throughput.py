"""How long a reply holds a slot, as a running estimate per model: what honest waiting times are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from chatsvc.clock import Clock

_NEWEST_SHARE: Final = 0.1
"""Weight of the newest reply in the exponential average: about the last twenty replies count."""


class Throughput:
    """Measures replies and predicts waits."""

    def __init__(self, clock: Clock, slots: Mapping[str, int]) -> None:
        self._clock = clock
        self._slots = slots
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, model: str) -> Iterator[None]:
        """Time one reply, whatever its end."""
        began = self._clock.monotonic()
        try:
            yield
        finally:
            self.observe(model, self._clock.monotonic() - began)

    def observe(self, model: str, seconds: float) -> None:
        """Take one reply's time in its slot into the estimate."""
        known = self._seconds.get(model)
        self._seconds[model] = seconds if known is None else known + _NEWEST_SHARE * (seconds - known)

    def wait_s(self, model: str, position: int) -> float | None:
        """Expected seconds until the run at ``position`` (1 = next) starts; None before the first reply was measured.

        With ``s`` slots each held for ``d`` seconds a slot is freed every ``d / s`` seconds.
        """
        seconds = self._seconds.get(model)
        slots = self._slots.get(model)
        if seconds is None or not slots:
            return None
        return round(position * seconds / slots, 1)
