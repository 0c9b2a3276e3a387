"""What goes into the store and comes out of it, and how rows become records.

A column has the name of the record's field, so that one list serves both; ``statement`` puts those lists into SQL.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from chatsvc.conversation import BranchView, Conversation, Memory, Message, Summary
from chatsvc.errors import InvalidCursor
from chatsvc.ids import is_plausible
from chatsvc.limits import Allowance, Principal, Tier, TierName, Usage
from chatsvc.prompt import ContextReport
from chatsvc.run import Run, RunStatus, WaitingRun

T = TypeVar("T")


class NewConversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation to be made, still empty."""

    id: str
    title: str | None = None
    system_prompt: str | None = None
    model: str | None = None
    temporary: bool = False


class ConversationPatch(msgspec.Struct, frozen=True, kw_only=True):
    """What to change; UNSET leaves a field as it is, None empties it."""

    title: str | UnsetType | None = UNSET
    head_message_id: str | UnsetType = UNSET
    system_prompt: str | UnsetType | None = UNSET
    pinned: bool | UnsetType = UNSET
    model: str | UnsetType | None = UNSET


class NewReply(msgspec.Struct, frozen=True, kw_only=True):
    """A reply to be queued, whatever it answers; all its rows are written in one transaction."""

    principal: Principal
    client_msg_id: str
    request_hash: bytes
    """Tells whether a ``client_msg_id`` came again with the same request."""
    model: str
    tier: Tier
    """What the user may have."""
    charge: float
    """Units of service that the run is expected to cost."""
    prompt_tokens: int
    """Tokens of the prompt, or a guess."""
    user_message_id: str
    """The message that it answers."""
    message_id: str
    response_id: str
    max_tokens: int | None = None
    temperature: float | None = None
    background: bool = False
    owner: str | None = None
    """The worker that has a place for the run: it is claimed as it is written."""
    context: ContextReport | None = None
    """What its prompt is made of, where that is known."""
    asked_model: str | None = None
    """The model that was asked for, where it is not ``model``."""
    degraded: tuple[str, ...] = ()
    """What is given up for the reply."""
    hurried: bool = False
    """Others see the run before it is on the disk. Whoever asked for it is told after ``Runs.keep`` only."""


class Submission(NewReply, frozen=True, kw_only=True):
    """A message and its reply: three rows. ``parent_id`` None makes a new root."""

    conversation_id: str
    parent_id: str | None
    content: str
    user_tokens: int | None = None
    """Tokens of ``content``."""
    title: str | None = None
    """The conversation's title from now on, should it have none."""
    at_head: bool = False
    """The parent was chosen because it was the head: it has to be so still."""


class Regeneration(NewReply, frozen=True, kw_only=True):
    """A user message to be answered once more, by a sibling of the answers it has."""

    continues_message_id: str | None = None
    """A sibling whose text the new answer begins with."""


class NewFold(msgspec.Struct, frozen=True, kw_only=True):
    """A fold to be queued: the summary of the branch through ``through_message_id``, going on from ``base_id``."""

    id: str
    user_id: str
    conversation_id: str
    through_message_id: str
    base_id: str | None
    model: str
    tier: TierName
    prompt_tokens: int
    """What the summariser is to read, about."""
    max_tokens: int
    asked_model: str | None = None
    degraded: tuple[str, ...] = ()
    """As in ``NewReply``, the last three."""


class Submitted(msgspec.Struct, frozen=True):
    """The run that answers a submission; ``created`` is False when an earlier one with the same id had made it (L8)."""

    run: Run
    created: bool
    allowance: Allowance | None = None
    """The user's, with this run in it; None when the run came before."""
    hurried: bool = False
    """It was written so just now."""

    @property
    def may_be_lost(self) -> bool:
        """Whether the run may not be on the disk yet: it was hurried, or another request's may have been.

        What has been claimed is: the claim waited for the disk, after the run.
        """
        return self.hurried or (not self.created and self.run.status is RunStatus.QUEUED)


class View(msgspec.Struct, frozen=True):
    """A branch, and the message that it ends in: that one may be folded already."""

    leaf: Message
    branch: BranchView


class Ground(msgspec.Struct, frozen=True, kw_only=True):
    """What a new message stands on."""

    known: Submitted | None
    """What an earlier request with the same id made; then the rest is of no interest."""
    conversation: Conversation | None
    """None: the user has no such conversation."""
    view: View | None
    """The branch that ends in the parent. None for a parent that is not in the conversation, or none at all."""


class SettledReply(msgspec.Struct, frozen=True, kw_only=True):
    """What the store knows of a reply: its run, its text so far, and the sequence number up to which the text goes."""

    run: Run
    text: str
    text_seq: int


class Page(msgspec.Struct, Generic[T], frozen=True):
    """Part of a list; ``next_cursor`` is None at its end."""

    items: tuple[T, ...]
    next_cursor: str | None


class Deleted(msgspec.Struct, frozen=True):
    """The runs that were deleted with a conversation: all of them, and those among them that had not ended."""

    response_ids: tuple[str, ...]
    running: tuple[str, ...]


class Beat(msgspec.Struct, frozen=True):
    """What a worker learns by its heartbeat: which of its runs are to stop, and the (run, attempt) that it holds."""

    stop_requested: tuple[str, ...]
    held: tuple[tuple[str, int], ...]
    gap_s: float | None
    """Seconds since the heartbeat before, by the database's clock; None for the first."""


class Signal(msgspec.Struct, frozen=True):
    """News from another process: ``stop`` was asked for, a run is ``queued``, or one is ``gone`` (deleted).

    Or what the prompts of a conversation begin with was changed (``prefix``).
    """

    kind: str
    response_id: str = ""
    model: str | None = None
    waiting: WaitingRun | None = None
    """With ``queued``."""
    user_id: str = ""
    conversation_id: str = ""
    """With ``prefix``."""


_BAD_CURSOR: Final = "The cursor is not one that this list gave out."
_USAGE: Final = ("prompt_tokens", "cached_tokens", "output_tokens")
_COLUMNS: Final = {
    "conversation": tuple(name for name in Conversation.__struct_fields__ if name != "memory"),
    "message": tuple(name for name in Message.__struct_fields__ if name != "degraded"),
    "summary": Summary.__struct_fields__,
    "memory": Memory.__struct_fields__,
    "run": (*(name for name in Run.__struct_fields__ if name != "usage"), *_USAGE),
}


def statement(*parts: str) -> str:
    """The parts as one SQL text, with ``{run:r}`` and the like replaced by that record's columns under that alias."""

    def columns(match: re.Match[str]) -> str:
        return ", ".join(f"{match[2]}.{name}" for name in _COLUMNS[match[1]])

    return re.sub(r"\{(\w+):(\w+)\}", columns, "\n".join(parts))


def conversation_of(row: dict[str, Any]) -> Conversation:
    """A row with the columns ``{conversation:…}``."""
    return msgspec.convert(row, Conversation)


def message_of(row: dict[str, Any]) -> Message:
    """A row with the columns ``{message:…}``."""
    return msgspec.convert(row, Message)


def summary_of(row: dict[str, Any]) -> Summary:
    """A row with the columns ``{summary:…}``."""
    return msgspec.convert(row, Summary)


def memory_of(row: dict[str, Any]) -> Memory:
    """A row with the columns ``{memory:…}``."""
    return msgspec.convert(row, Memory)


def run_of(row: dict[str, Any]) -> Run:
    """A row with the columns ``{run:…}``."""
    usage = Usage(**{name: row[name] for name in _USAGE})
    texts = {name: row[name] or "" for name in ("user_message_id", "message_id", "client_msg_id")}
    return msgspec.convert(row | texts | {"usage": usage}, Run)


def json_of(record: msgspec.Struct | None) -> str | None:
    """The record as the text of a ``jsonb`` column."""
    return None if record is None else msgspec.json.encode(record).decode()


def encode_cursor(*parts: str | datetime) -> str:
    """A place in a list, opaque to clients."""
    return base64.urlsafe_b64encode(msgspec.json.encode(parts)).decode().rstrip("=")


def decode_cursor(cursor: str, types: Sequence[type]) -> tuple[Any, ...]:
    """The parts of a cursor made by ``encode_cursor``. Raises ``InvalidCursor``."""
    try:
        raw = base64.b64decode(cursor.encode("ascii") + b"=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        parts: tuple[Any, ...] = msgspec.json.decode(raw, type=tuple[tuple(types)])  # type: ignore[misc]
    except (ValueError, msgspec.DecodeError) as error:
        raise InvalidCursor(_BAD_CURSOR) from error
    if not all(is_plausible(part) for part in parts if isinstance(part, str)):
        raise InvalidCursor(_BAD_CURSOR)
    return parts
