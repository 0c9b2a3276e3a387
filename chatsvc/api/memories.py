"""What a user wants to be known in all their conversations: listed, added, reworded, deleted. Off until turned on."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from litestar import Controller, delete, get, patch, post
from msgspec import Meta

from chatsvc.api.conversations import plausible
from chatsvc.api.schemas import Body
from chatsvc.api.strict_json import StrictJson
from chatsvc.conversation import Memory
from chatsvc.ids import new_memory_id
from chatsvc.limits import Principal
from chatsvc.store import Store


class MemoryOut(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to be known."""

    id: str
    text: str
    created_at: datetime
    updated_at: datetime


class MemoryList(msgspec.Struct, frozen=True):
    """Oldest first; all of them."""

    data: list[MemoryOut]


class WriteMemory(Body, frozen=True, kw_only=True):
    """``POST /v1/me/memories`` and ``PATCH /v1/me/memories/{id}``."""

    text: Annotated[
        str,
        Meta(
            max_length=500,
            pattern=r"\S",
            description="One fact, in your words. Line breaks become spaces.",
            examples=["I live in Lisbon."],
        ),
    ]


def memory_out(memory: Memory) -> MemoryOut:
    """The memory for the wire."""
    return MemoryOut(id=memory.id, text=memory.text, created_at=memory.created_at, updated_at=memory.updated_at)


class MemoryController(Controller):
    """``/v1/me/memories``."""

    path = "/v1/me/memories"
    dto = StrictJson
    return_dto = None
    tags = ("me",)

    @get(operation_id="listMemories", summary="Read your memories")
    async def list(self, principal: Principal, store: Store) -> MemoryList:
        """All of them, oldest first, also while memory is off."""
        return MemoryList([memory_out(memory) for memory in await store.memories.list(principal.user_id)])

    @post(operation_id="addMemory", summary="Add a memory")
    async def add(self, data: WriteMemory, principal: Principal, store: Store) -> MemoryOut:
        """Counts, with memory on, for conversations that begin from now on, and for others after their next summary.

        422 `memory_full` with the numbers when there are too many.
        """
        return memory_out(await store.memories.add(principal, new_memory_id(), data.text))

    @patch("/{memory_id:str}", operation_id="changeMemory", summary="Reword a memory")
    async def change(self, memory_id: str, data: WriteMemory, principal: Principal, store: Store) -> MemoryOut:
        """The old wording is shown to the model no more; the new one counts as one that was just added."""
        return memory_out(await store.memories.change(principal, plausible(memory_id, "memory"), data.text))

    @delete("/{memory_id:str}", operation_id="deleteMemory", summary="Delete a memory")
    async def remove(self, memory_id: str, principal: Principal, store: Store) -> None:
        """It is gone, and shown to the model no more, from the next message on."""
        await store.memories.delete(principal.user_id, plausible(memory_id, "memory"))
