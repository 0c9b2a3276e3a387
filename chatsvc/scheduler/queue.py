"""Who is next. The queue of one process: pure, no I/O, no clock.

``RunQueue`` is the seam at which the order is decided. ``FifoQueue`` serves first come, first served, per model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec


class Waiting(msgspec.Struct, frozen=True):
    """A run that waits. Ids begin with their time of creation, so sorting by id is sorting by age."""

    run_id: str
    model: str


class RunQueue(Protocol):
    """What the dispatcher needs of any order of service."""

    def put(self, run: Waiting) -> None:
        """Let a run wait. Putting one that is there already changes nothing."""
        ...

    def take(self, free: Mapping[str, int]) -> list[Waiting]:
        """Remove and return the runs to start now: at most ``free[model]`` of each model, the next first."""
        ...

    def discard(self, run_id: str) -> None:
        """Forget a run; unknown ids are fine."""
        ...

    def waits_for(self, model: str) -> bool:
        """Whether any run waits for this model."""
        ...

    def ids(self) -> set[str]:
        """The runs that wait."""
        ...

    def __len__(self) -> int:
        """How many wait."""
        ...


class FifoQueue:
    """First come, first served. O(1) per operation; a run put back keeps its id but goes to the end of the line."""

    def __init__(self) -> None:
        # Insertion-ordered dicts are queues with O(1) removal from the middle.
        self._by_model: dict[str, dict[str, Waiting]] = {}
        self._model_of: dict[str, str] = {}

    def put(self, run: Waiting) -> None:
        if run.run_id not in self._model_of:
            self._model_of[run.run_id] = run.model
            self._by_model.setdefault(run.model, {})[run.run_id] = run

    def take(self, free: Mapping[str, int]) -> list[Waiting]:
        taken: list[Waiting] = []
        for model, slots in free.items():
            line = self._by_model.get(model, {})
            taken.extend(run for _, run in zip(range(slots), line.values(), strict=False))
        for run in taken:
            self.discard(run.run_id)
        return taken

    def discard(self, run_id: str) -> None:
        model = self._model_of.pop(run_id, None)
        if model is not None:
            del self._by_model[model][run_id]

    def waits_for(self, model: str) -> bool:
        return bool(self._by_model.get(model))

    def ids(self) -> set[str]:
        return set(self._model_of)

    def __len__(self) -> int:
        return len(self._model_of)
