"""A model of a prefix cache: which part of a prompt an engine would not compute again.

Prompts are cut into blocks of 16 tokens; a block's hash covers all tokens before it too. A prompt is served up to its
first missing block, and never wholly: the last token is always computed, since its output is wanted. The blocks used
least recently go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

BLOCK_TOKENS: Final = 16


class PrefixCache:
    """Blocks of tokens by hash, at most ``capacity_tokens`` worth of them; 0 turns the cache off."""

    def __init__(self, capacity_tokens: int, block_tokens: int = BLOCK_TOKENS) -> None:
        self._block = block_tokens
        self._capacity = capacity_tokens // block_tokens
        self._blocks: OrderedDict[int, None] = OrderedDict()

    @property
    def used(self) -> float:
        """Share of the capacity that is filled, 0-1."""
        return len(self._blocks) / self._capacity if self._capacity else 0.0

    def served(self, tokens: Sequence[int]) -> int:
        """How many leading tokens of a prompt the cache holds; they count as used now."""
        blocks = 0
        for block in self._hashes(tokens[: max(0, len(tokens) - 1)]):
            if block not in self._blocks:
                break
            self._blocks.move_to_end(block)
            blocks += 1
        return blocks * self._block

    def store(self, tokens: Sequence[int]) -> None:
        """Remember the full blocks of a sequence, pushing out the oldest."""
        # A prefix is worth more than what follows it, so it is made the most recent.
        for block in reversed(list(self._hashes(tokens))):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def _hashes(self, tokens: Sequence[int]) -> Iterator[int]:
        chain = 0
        for start in range(0, len(tokens) - self._block + 1, self._block):
            chain = hash((chain, tuple(tokens[start : start + self._block])))
            yield chain
