"""Time as a process has it that may be stopped for a while: a machine that stands is no fault of who was to answer."""

from __future__ import annotations

import threading
import time
from typing import Final, Self

_TICK_S: Final = 0.02
_MOST_S: Final = 0.1
"""Counts of a longer gap between two ticks: then no thread of this process ran."""


class Awake:
    """Counts, for the length of a block, the ``seconds`` in which this process ran or could have run.

    By a thread of its own, so that an event loop that is blocked counts as well.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _count(self) -> None:
        last, over = time.monotonic(), False
        while not over:
            over = self._over.wait(_TICK_S)
            now = time.monotonic()
            self.seconds += min(now - last, _MOST_S)
            last = now
