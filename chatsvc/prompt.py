"""What goes into an engine and what comes out. Records only."""

from __future__ import annotations

from datetime import datetime

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


class PromptParts(msgspec.Struct, frozen=True, kw_only=True):
    """Where a prompt's tokens go; template tokens count with the part that they belong to. The sum is the prompt."""

    system: int = 0
    memory: int = 0
    summary: int = 0
    pinned: int = 0
    verbatim: int = 0
    """Messages that are shown as they are, without the question."""
    recalled: int = 0
    question: int = 0
    """The newest user message, and the text that a continued reply begins with."""


class SummaryUsed(msgspec.Struct, frozen=True, kw_only=True):
    """The summary that stands in a prompt."""

    id: str
    version: int
    through_message_id: str
    tokens: int


class RecalledTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A folded turn that was quoted in a prompt."""

    message_ids: tuple[str, ...]
    score: float
    tokens: int
    created_at: datetime
    """When it was said."""


class ContextReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a reply's prompt was made of. Told to the user; none of it reaches the model."""

    window: int
    reply_reserve: int
    """Tokens of the window that were kept free for the reply."""
    prompt_tokens: int
    cached_tokens: int | None
    """None until the engine has said so."""
    parts: PromptParts
    left_out: int
    """Turns that neither stand in the prompt nor in its summary: there was no room, and no fold yet."""
    summary: SummaryUsed | None
    recalled: tuple[RecalledTurn, ...] = ()

    @property
    def condensed(self) -> bool:
        """Whether a summary stands for the older part."""
        return self.summary is not None
