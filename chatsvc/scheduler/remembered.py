"""How much of what a user wants to be known goes into a prompt: the first lines that have room together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from chatsvc.inference.base import Engine

_SHARE: Final = 8
"""Of the window: memory takes no more than this fraction."""
_LINE_TOKENS: Final = 3
"""For the mark before a quoted line, and its end."""


async def fitting(engine: Engine, lines: Sequence[str], most_tokens: int) -> str | None:
    """The lines, or as many of the first as fit; it depends on nothing else, so it is the same in every turn."""
    room = min(most_tokens, engine.limits.most // _SHARE)
    kept: list[str] = []
    for line in lines:
        room -= len(await engine.encode(line)) + _LINE_TOKENS
        if room < 0:
            break
        kept.append(line)
    return "\n".join(kept) or None
