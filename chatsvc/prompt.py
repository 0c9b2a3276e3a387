"""What goes into an engine and what comes out. Records only."""

from __future__ import annotations

import msgspec

from chatsvc.conversation import Role


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn as the chat template sees it."""

    role: Role
    content: str


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A rendered prompt.

    ``token_ids`` is what an engine with its own tokenizer reads, template included. ``messages`` is kept beside it for
    engines that render on the far side (``openai:``), where ``token_ids`` is empty and ``tokens`` an estimate.
    """

    messages: tuple[ChatMessage, ...]
    token_ids: tuple[int, ...]
    tokens: int


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to draw tokens. ``max_tokens`` is always explicit: engines have surprising defaults."""

    max_tokens: int
    temperature: float = 0.7
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    """Generation ends before the first of these; the stop string itself is not part of the text."""
    seed: int | None = None


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of output.

    ``text`` never ends inside a character (a combining mark may still follow) and may be empty. ``output_tokens`` is
    how many tokens this chunk adds. The last chunk of a generation, and only it, has a ``finish_reason``: ``stop`` or
    ``length``. ``prompt_tokens`` and ``cached_tokens`` are totals, set once known and repeated from then on.
    """

    text: str
    output_tokens: int
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
