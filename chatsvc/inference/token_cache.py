"""Tokens of texts that come again: a conversation's old messages are tokenized once, and then looked up.

Bounded in bytes; what was used least recently goes first. Safe to use from several threads.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

DEFAULT_BYTES: Final = 64 * 2**20
"""About four million tokens of English, each of which stands in a message and again in a prompt's section: some tens of
long conversations. What was deleted stays in memory until others push it out."""
_SHORT_CHARS: Final = 8
"""Shorter texts are tokenized as fast as they are looked up."""


class TokenCache:
    """Wraps a function from a text to its token ids, which has to give the same ids always."""

    def __init__(self, encode: Callable[[str], Sequence[int]], *, most_bytes: int = DEFAULT_BYTES) -> None:
        self._encode = encode
        self._most_bytes = most_bytes
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0
        """What is kept now."""
        self.misses = 0
        """Characters that had to be tokenized."""

    def __call__(self, text: str) -> Sequence[int]:
        """The token ids of ``text``."""
        if len(text) < _SHORT_CHARS:
            return self._encode(text)
        with self._lock:
            known = self._known.get(text)
            if known is not None:
                self._known.move_to_end(text)
                return known
            self.misses += len(text)
        fresh = array("I", self._encode(text))
        size = _size(text, fresh)
        with self._lock:
            if size <= self._most_bytes and text not in self._known:
                self._known[text] = fresh
                self.bytes += size
                while self.bytes > self._most_bytes:
                    old, ids = self._known.popitem(last=False)
                    self.bytes -= _size(old, ids)
        return fresh

    def missing(self, texts: Sequence[str]) -> int:
        """How many characters of these texts would have to be tokenized."""
        with self._lock:
            return sum(len(text) for text in texts if text not in self._known)


def _size(text: str, ids: array[int]) -> int:
    return sys.getsizeof(text) + sys.getsizeof(ids)
