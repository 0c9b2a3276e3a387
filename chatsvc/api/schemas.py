"""What goes over the wire: request bodies, answers, and how records become answers.

Unknown fields are refused everywhere: a misspelt field that is silently ignored costs its sender an afternoon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from chatsvc.conversation import Conversation, Message
from chatsvc.errors import kind_of
from chatsvc.events import Queued
from chatsvc.limits import Allowance, Usage
from chatsvc.run import Run, RunStatus

T = TypeVar("T")
StreamUrl = Callable[[str], str]
"""From a response id to the address of its stream, token included."""

Title = Annotated[str, Meta(min_length=1, max_length=300, description="Shown in lists.", examples=["Sourdough"])]
SystemPrompt = Annotated[
    str, Meta(max_length=100_000, description="Shown to the model before the first turn.", examples=["Be brief."])
]
ModelName = Annotated[str, Meta(min_length=1, max_length=200, examples=["SmolLM2-135M-Instruct"])]
ClientMsgId = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=200,
        description="Made by the client, new for each message: a repeated POST with it starts nothing twice.",
        examples=["7d9f3c1e-6c1b-4a55-9a55-1f7f4f3f2b10"],
    ),
]
MaxTokens = Annotated[int, Meta(ge=1, le=10_000_000, description="Longest reply, in tokens.", examples=[512])]
Temperature = Annotated[float, Meta(ge=0, le=2, description="0 always picks the likeliest token.", examples=[0.7])]
Degraded = Annotated[
    str,
    Meta(
        description="`model`: a smaller one answers; `max_tokens`: the reply is kept short; `history`: less of the"
        " conversation is shown to the model.",
        examples=["max_tokens"],
    ),
]
MessageId = Annotated[str, Meta(min_length=1, max_length=80, examples=["msg_0199c1a2b3c4d5e6f708192a3b4c5d6e"])]


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all request bodies."""


class CreateConversation(Body, frozen=True, kw_only=True):
    """``POST /v1/conversations``."""

    title: Title | None = None
    system_prompt: SystemPrompt | None = None
    model: ModelName | None = None
    temporary: bool = False


class PatchConversation(Body, frozen=True, kw_only=True):
    """``PATCH /v1/conversations/{id}``: what is absent stays."""

    title: Title | UnsetType | None = UNSET
    head_message_id: MessageId | UnsetType = UNSET
    system_prompt: SystemPrompt | UnsetType | None = UNSET
    model: ModelName | UnsetType | None = UNSET
    pinned: bool | UnsetType = UNSET


class PostMessage(Body, frozen=True, kw_only=True):
    """``POST /v1/conversations/{id}/messages``. No ``parent_id``: the head; null: a new first message."""

    content: Annotated[str, Meta(description="The message.", examples=["What is the capital of France?"])]
    client_msg_id: ClientMsgId
    parent_id: MessageId | UnsetType | None = UNSET
    model: ModelName | None = None
    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    background: bool = False


class PatchMessage(Body, frozen=True, kw_only=True):
    """``PATCH /v1/messages/{id}``."""

    pinned: Annotated[bool, Meta(description="Whether the model is to keep seeing it as it is, also when folded.")]


class PostResponse(Body, frozen=True, kw_only=True):
    """``POST /v1/messages/{id}/responses``."""

    continue_: Annotated[
        bool, Meta(description="Go on with this stopped, failed or cut-off reply: its text is kept, the rest written.")
    ] = msgspec.field(default=False, name="continue")
    client_msg_id: ClientMsgId
    model: ModelName | None = None
    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    background: bool = False


class Page(msgspec.Struct, Generic[T], frozen=True):
    """A part of a list. ``next_cursor`` is null on the last page."""

    data: list[T]
    next_cursor: str | None


class MessageOut(msgspec.Struct, frozen=True, kw_only=True):
    """A message. ``response_id`` and ``stream_url`` lead to the reply while it is being written.

    ``model`` is the one that answers, ``degraded`` what was given up for the reply because there was too little.
    """

    id: str
    parent_id: str | None
    role: str
    content: str
    status: RunStatus
    model: str | None
    response_id: str | None
    finish_reason: str | None
    error_code: str | None
    tokens: int | None
    pinned: bool
    degraded: list[Degraded]
    created_at: datetime
    stream_url: str | None = None


class ConversationOut(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation without its messages."""

    id: str
    title: str | None
    system_prompt: str | None
    model: str | None
    head_message_id: str | None
    pinned: bool
    temporary: bool
    created_at: datetime
    updated_at: datetime


class ConversationTree(ConversationOut, frozen=True, kw_only=True):
    """A conversation with the whole tree of its messages, oldest first."""

    messages: list[MessageOut]


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """A reply is queued or running.

    ``message_id`` is the message being written, ``user_message_id`` the one answered.
    """

    message_id: str
    user_message_id: str
    response_id: str
    stream_url: str
    status: RunStatus
    queue_position: int | None
    served_model: str
    """The model that answers: the one asked for, unless there is too little of it."""
    degraded: list[Degraded]
    """What was given up because there is too little; empty: nothing."""


class ErrorOut(msgspec.Struct, frozen=True):
    """Why a reply failed, or was stopped by the service itself."""

    code: str
    message: str
    retryable: bool


class ResponseOut(msgspec.Struct, frozen=True, kw_only=True):
    """A reply's state."""

    id: str
    conversation_id: str
    user_message_id: str
    message_id: str
    model: str
    """The model that was asked for."""
    served_model: str
    """The one that answers."""
    degraded: list[Degraded]
    """What was given up because there was too little when the message came; empty: nothing."""
    tier: str
    status: RunStatus
    queue_position: int | None
    eta_s: float | None
    finish_reason: str | None
    error: ErrorOut | None
    usage: Usage
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    stream_url: str


class StopOut(msgspec.Struct, frozen=True):
    """The reply's status when the stop was taken; ``streaming`` turns into ``stopped`` within moments."""

    status: RunStatus


class UserOut(msgspec.Struct, frozen=True):
    """The caller."""

    id: str


class WaitingReply(msgspec.Struct, frozen=True):
    """Where a reply stands that waits for its turn: 1 is next. ``eta_s``: expected seconds; null: not known yet."""

    response_id: str
    queue_position: int
    eta_s: float | None


class OpenReplies(msgspec.Struct, frozen=True):
    """How many replies may be open at once, which are, and where those stand that wait."""

    limit: int
    used: int
    left: int
    response_ids: list[str]
    waiting: list[WaitingReply]


class BudgetOut(msgspec.Struct, frozen=True):
    """Units of service within the window of the caller's tier; open replies count with their expected cost."""

    limit: float
    used: float
    left: float


class QuotaOut(msgspec.Struct, frozen=True):
    """What is left. A place is free again when one of the open replies ends; the budget bit by bit."""

    open_replies: OpenReplies
    budget: BudgetOut | None
    """None: no limit."""
    refills_at: datetime | None
    """When the oldest part of the budget's use is free again."""


class UsageOut(msgspec.Struct, frozen=True):
    """Tokens used since ``since``."""

    since: datetime
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class PatchMe(Body, frozen=True, kw_only=True):
    """``PATCH /v1/me``."""

    memory: Annotated[bool, Meta(description="Whether your memories are shown to the model.", examples=[True])]


class MeOut(msgspec.Struct, frozen=True):
    """``GET /v1/me``."""

    user: UserOut
    tier: str
    usage: UsageOut
    quota: QuotaOut
    memory: bool
    """Whether the user's memories are shown to the model."""


def budget_out(allowance: Allowance) -> BudgetOut | None:
    """The budget for the wire, in whole units."""
    if not allowance.budget:
        return None
    return BudgetOut(allowance.budget, math.ceil(allowance.used), max(0, math.floor(allowance.budget - allowance.used)))


def message_out(message: Message, stream_url: StreamUrl) -> MessageOut:
    """A message for the wire; one whose reply is still open comes with the address of its stream."""
    open_reply = message.response_id is not None and not message.status.ended
    return MessageOut(
        id=message.id,
        parent_id=message.parent_id,
        role=message.role.value,
        content=message.content,
        status=message.status,
        model=message.model,
        response_id=message.response_id,
        finish_reason=message.finish_reason,
        error_code=message.error_code,
        tokens=message.tokens,
        pinned=message.pinned,
        degraded=list(message.degraded),
        created_at=message.created_at,
        stream_url=stream_url(message.response_id) if open_reply and message.response_id else None,
    )


def conversation_out(conversation: Conversation) -> ConversationOut:
    """A conversation for lists."""
    return ConversationOut(
        id=conversation.id,
        title=conversation.title,
        system_prompt=conversation.system_prompt,
        model=conversation.model,
        head_message_id=conversation.head_message_id,
        pinned=conversation.pinned,
        temporary=conversation.temporary,
        created_at=conversation.created_at,
        updated_at=conversation.updated_at,
    )


def tree_out(conversation: Conversation, messages: Iterable[Message], stream_url: StreamUrl) -> ConversationTree:
    """A conversation with its tree."""
    return ConversationTree(
        **msgspec.structs.asdict(conversation_out(conversation)),
        messages=[message_out(message, stream_url) for message in messages],
    )


def accepted(run: Run, position: Queued | None, stream_url: StreamUrl) -> Accepted:
    """The answer to a POST that starts a reply, the first time and every time it is repeated."""
    return Accepted(
        message_id=run.message_id,
        user_message_id=run.user_message_id,
        response_id=run.id,
        stream_url=stream_url(run.id),
        status=run.status,
        queue_position=position.position if position else None,
        served_model=run.model,
        degraded=list(run.degraded),
    )


def response_out(run: Run, position: Queued | None, stream_url: StreamUrl) -> ResponseOut:
    """A reply's state for the wire."""
    error = None
    if run.error_code is not None:
        kind = kind_of(run.error_code)
        error = ErrorOut(run.error_code, run.error_message or kind.title, kind.retryable)
    return ResponseOut(
        id=run.id,
        conversation_id=run.conversation_id,
        user_message_id=run.user_message_id,
        message_id=run.message_id,
        model=run.asked_model or run.model,
        served_model=run.model,
        degraded=list(run.degraded),
        tier=run.tier.value,
        status=run.status,
        queue_position=position.position if position else None,
        eta_s=position.eta_s if position else None,
        finish_reason=run.finish_reason,
        error=error,
        usage=run.usage,
        created_at=run.created_at,
        started_at=run.started_at,
        ended_at=run.ended_at,
        stream_url=stream_url(run.id),
    )
