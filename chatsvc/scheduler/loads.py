"""Counts by name that forget who has nothing left: replicas come under ever new names while a process lives."""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

K = TypeVar("K")


class Loads(Counter[K]):
    """A ``Counter`` without zeros."""

    def less(self, key: K) -> None:
        """One less."""
        self[key] -= 1
        if not self[key]:
            del self[key]
