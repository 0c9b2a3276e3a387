"""A conversation is a tree of messages with an owner and a head; a branch is the path from the root to a leaf.

A message is an immutable node once its run has ended; only ``parent_id`` links it (children lists are never stored,
so they cannot fall out of step). An edit or a regeneration adds a sibling.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

import msgspec

from chatsvc.run import RunStatus


class Role(StrEnum):
    """Who speaks in a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One node of the tree. ``tokens`` is None until counted; ``response_id`` is set on assistant messages."""

    id: str
    conversation_id: str
    parent_id: str | None
    role: Role
    content: str
    status: RunStatus
    created_at: datetime
    model: str | None = None
    response_id: str | None = None
    finish_reason: str | None = None
    tokens: int | None = None
    error_code: str | None = None
    pinned: bool = False
    """The user wants the model to keep seeing it as it is, also when it is folded."""
    degraded: tuple[str, ...] = ()
    """What was given up for the reply, as its run has it; only where it is read for people."""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """An owner's tree of messages. ``head_message_id`` is the leaf of the branch that was last in use."""

    id: str
    user_id: str
    title: str | None
    system_prompt: str | None
    model: str | None
    head_message_id: str | None
    pinned: bool
    temporary: bool
    created_at: datetime
    updated_at: datetime
    memory: tuple[str, ...] = ()
    """What its owner wants to be known in it; only where it is read for a prompt."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a user wants to be known in all their conversations; ``text`` is one line."""

    id: str
    text: str
    created_at: datetime
    updated_at: datetime


Branch = tuple[Message, ...]
"""Messages from the root to a leaf, or a part of that path, in that order."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Text that stands for a branch up to and including ``through_message_id``.

    Bound to that message: every branch that contains it may use it. Never changed; another text is another version.
    """

    id: str
    conversation_id: str
    through_message_id: str
    """The last message of a whole turn."""
    version: int
    """1 for what a fold wrote; one more for each change of it. The newest counts."""
    previous_id: str | None
    """The summary that this one was made from: an earlier fold's, or the version before."""
    text: str
    tokens: int
    """Of ``text``, by the tokenizer of ``model``."""
    edited: bool
    """Written by the user."""
    model: str | None
    created_at: datetime


class BranchView(msgspec.Struct, frozen=True, kw_only=True):
    """A branch as a prompt needs it: the summary of what is folded, and the rest message by message."""

    summary: Summary | None
    """None: nothing is folded."""
    pinned: Branch
    """Folded messages that are pinned, oldest first."""
    verbatim: Branch
    """What is not folded, oldest first."""
