"""How much of a conversation's prompt this replica is likely to have cached: what it served last of it. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

_MOST: Final = 20_000
"""Conversations remembered."""


class Warmth:
    """One model's conversations, those served last at the end. ``kv_tokens`` is what the cache holds; None: not known.

    An engine's cache forgets what was used least recently, and so does this.
    """

    def __init__(self, kv_tokens: int | None) -> None:
        self._kv_tokens = kv_tokens
        self._tokens: OrderedDict[str, int] = OrderedDict()
        self._total = 0

    def served(self, conversation_id: str, tokens: int) -> None:
        """A turn of so many tokens, prompt and reply, was served here."""
        self._total += tokens - self._tokens.pop(conversation_id, 0)
        self._tokens[conversation_id] = tokens
        while len(self._tokens) > _MOST or (self._kv_tokens is not None and self._total > self._kv_tokens):
            self._total -= self._tokens.popitem(last=False)[1]

    def cached(self, conversation_id: str) -> int:
        """Tokens that a next turn's prompt is likely to find."""
        return self._tokens.get(conversation_id, 0)

    def cold(self) -> None:
        """The engine was started anew."""
        self._tokens.clear()
        self._total = 0

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Conversations and their tokens."""
        return iter(list(self._tokens.items()))
