"""Where waiting runs stand: what an honest position and an honest waiting time are made of."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

import msgspec


class Standing(msgspec.Struct, frozen=True):
    """Where one run stands."""

    position: int
    """1: next."""
    service_ahead: float
    """Expected service of all runs that go before it. Divided by the service delivered in a second, by this user's
    replies and all others', it says how long the run waits."""


class Standings:
    """All waiting runs in the order in which they would start if nobody came and predictions were right."""

    def __init__(self, entries: Iterable[tuple[float, str, float]]) -> None:
        """``entries``: counter at which a run is next, its id, its expected service."""
        ordered = sorted(entries)
        self._tags = [tag for tag, _, _ in ordered]
        self._ahead = [0.0, *accumulate(service for _, _, service in ordered)]
        self._index = {run_id: index for index, (_, run_id, _) in enumerate(ordered)}

    def of(self, run_id: str) -> Standing | None:
        """Where a run stands; None when it was not waiting."""
        index = self._index.get(run_id)
        return None if index is None else Standing(index + 1, self._ahead[index])

    def at(self, tag: float) -> Standing:
        """Where a run with this counter would stand."""
        index = bisect_left(self._tags, tag)
        return Standing(index + 1, self._ahead[index])
