"""Time, as a thing that can be handed in. Nothing below ``app`` asks the operating system for the time directly."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol, runtime_checkable


@runtime_checkable  # the API's framework checks what it hands to a route
class Clock(Protocol):
    """Wall clock and monotonic clock."""

    def now(self) -> datetime:
        """The time of day, timezone-aware, UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds since an arbitrary point; never goes back."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()
