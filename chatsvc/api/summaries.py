"""Summaries of what is folded: read, and changed by hand."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from litestar import Controller, get, put
from litestar.params import Parameter
from msgspec import Meta

from chatsvc.api.conversations import plausible
from chatsvc.api.schemas import Body
from chatsvc.api.strict_json import StrictJson
from chatsvc.conversation import Summary
from chatsvc.limits import Principal
from chatsvc.scheduler import Scheduler
from chatsvc.store import Store


class SummaryOut(msgspec.Struct, frozen=True, kw_only=True):
    """Text that stands, in prompts, for a branch up to and including a message."""

    id: str
    through_message_id: str
    version: int
    """1 for what a model wrote; one more for each change."""
    text: str
    tokens: int
    edited: bool
    """Whether this version was written by hand."""
    created_at: datetime


class SummaryList(msgspec.Struct, frozen=True):
    """Newest fold first."""

    data: list[SummaryOut]


class EditSummary(Body, frozen=True, kw_only=True):
    """``PUT /v1/conversations/{id}/summaries/{message id}``."""

    text: Annotated[str, Meta(description="What it is to say.", examples=["Facts\nThe cat is called Minka."])]
    version: Annotated[int, Meta(ge=1, description="The version that was read: it has to be the newest still.")]


def summary_out(summary: Summary) -> SummaryOut:
    """The summary for the wire."""
    return SummaryOut(
        id=summary.id,
        through_message_id=summary.through_message_id,
        version=summary.version,
        text=summary.text,
        tokens=summary.tokens,
        edited=summary.edited,
        created_at=summary.created_at,
    )


class SummaryController(Controller):
    """``/v1/conversations/{id}/summaries``."""

    path = "/v1/conversations/{conversation_id:str}/summaries"
    dto = StrictJson
    return_dto = None
    tags = ("conversations",)

    @get(operation_id="listSummaries", summary="Read a branch's summaries")
    async def list(
        self,
        conversation_id: str,
        principal: Principal,
        store: Store,
        leaf: Annotated[str | None, Parameter(max_length=80, description="Last message; none: the head.")] = None,
    ) -> SummaryList:
        """The summaries on a branch, newest fold first, each in its newest version. The first is the one in use."""
        found = await store.summaries.on_branch(
            principal.user_id,
            plausible(conversation_id, "conversation"),
            None if leaf is None else plausible(leaf, "message"),
        )
        return SummaryList([summary_out(summary) for summary in found])

    @put("/{message_id:str}", operation_id="editSummary", summary="Change a summary")
    async def edit(
        self, conversation_id: str, message_id: str, data: EditSummary, principal: Principal, scheduler: Scheduler
    ) -> SummaryOut:
        """Store another text as the summary's next version. It counts for every branch that contains the message.

        409 `summary_changed` when there is a newer version than the one that was read.
        """
        return summary_out(
            await scheduler.folds.edit(
                principal.user_id,
                plausible(conversation_id, "conversation"),
                plausible(message_id, "message"),
                text=data.text,
                version=data.version,
            )
        )
