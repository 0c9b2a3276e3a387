"""From tokens to text that can be shown: no chunk ends inside a character (E1), nothing of a stop string leaks (E3).

Pure: both machines are fed piece by piece and answer with what may go out now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

_REPLACEMENT: Final = "\ufffd"


class Detokenizer:
    """Turns a growing list of token ids into text, never ending inside a character.

    ``decode`` must be the tokenizer's own decoding of a list of ids, with U+FFFD for bytes that are no UTF-8. A UTF-8
    decoder answers the unfinished bytes at the end of its input with one U+FFFD, so the last character of a decoding
    is held back while it is U+FFFD, and everything before it is final. What is still held when the reply ends was half
    a character and is dropped.

    Decoders may treat the first token of a list differently (a leading space is dropped). So new tokens are decoded
    behind those of the last whole piece, whose text is cut off again; the cost does not grow with the reply.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        """Tokens of the last piece that ended with a whole character."""
        self._pending: list[int] = []
        """Tokens since then."""
        self._told = 0
        """Characters of the pending tokens' text that were given out."""

    def feed(self, ids: Sequence[int]) -> str:
        """The text that these further tokens make certain."""
        self._pending.extend(ids)
        if not self._pending:
            return ""
        before = len(self._decode(self._context)) if self._context else 0
        text = self._decode(self._context + self._pending)[before:]
        whole = not text.endswith(_REPLACEMENT)
        certain = text if whole else text[:-1]
        fresh = certain[self._told :]
        self._told = len(certain)
        if whole:
            # Tokens without text (special ones) must not push out the context that keeps the next leading space.
            if text or not self._context:
                self._context = self._pending
            self._pending = []
            self._told = 0
        return fresh


class StopStrings:
    """Ends a text before the first stop string, however the text is cut into pieces.

    The first is the one that is complete first; of those complete at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False

    def feed(self, piece: str) -> str:
        """The text that may go out; sets ``stopped`` when a stop string was found. Nothing goes out after that."""
        if self.stopped:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped = True
            self._held = ""
            return text[: min(ends)[1]]
        kept = max(self._overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def flush(self) -> str:
        """What was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of ``text`` with which ``stop`` begins."""
        for length in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0
