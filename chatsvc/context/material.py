"""What a prompt is made from, and what comes of it. Records only."""

from __future__ import annotations

from datetime import datetime

import msgspec

from chatsvc.conversation import Branch, Conversation, Summary
from chatsvc.prompt import ChatMessage


class Recalled(msgspec.Struct, frozen=True, kw_only=True):
    """An old turn, or a message of one, that is to be quoted for the new question."""

    message_ids: tuple[str, ...]
    text: str
    """As it is to be quoted, speakers included; bounded in length by whoever retrieves it."""
    said_at: datetime
    score: float
    tokens: int
    """Of ``text``."""


class Material(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to say to the model. ``assemble`` puts it in order."""

    conversation: Conversation
    summary: Summary | None = None
    pinned: Branch = ()
    """Messages that are no longer shown in their place and are to be seen all the same, oldest first."""
    verbatim: Branch = ()
    """The messages shown as they are, oldest first. The last one is the user's that is to be answered, unless
    ``question`` is that; or the reply that is gone on with."""
    question: str | None = None
    """A user message that is not stored yet."""
    recalled: tuple[Recalled, ...] = ()
    memory: str | None = None
    """What the user wants every conversation to know."""
    left_out: int = 0
    """Turns that stand nowhere in this."""


class Assembled(msgspec.Struct, frozen=True, kw_only=True):
    """The messages for the chat template, part by part in their order."""

    system: tuple[ChatMessage, ...]
    summary: tuple[ChatMessage, ...]
    pinned: tuple[ChatMessage, ...]
    verbatim: tuple[ChatMessage, ...]
    question: tuple[ChatMessage, ...]
    """The newest user message with what was recalled for it, and the reply that is gone on with, if any."""
    memory: str
    """The part of the system message that is memory, and of the question that was recalled; empty for none."""
    recalled: str

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """All of them."""
        return (*self.system, *self.summary, *self.pinned, *self.verbatim, *self.question)
