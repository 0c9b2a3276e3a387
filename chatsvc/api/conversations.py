"""Conversations: make, list, read, change, delete; and the messages in them."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, Response, delete, get, patch, post
from litestar.params import Parameter
from msgspec import UNSET

from chatsvc.api.ratelimit import ratelimit_headers
from chatsvc.api.schemas import (
    Accepted,
    ConversationOut,
    ConversationTree,
    CreateConversation,
    MessageOut,
    Page,
    PatchConversation,
    PatchMessage,
    PostMessage,
    PostResponse,
    accepted,
    conversation_out,
    message_out,
    tree_out,
)
from chatsvc.api.stream_token import StreamTokens
from chatsvc.api.strict_json import StrictJson
from chatsvc.clock import Clock
from chatsvc.conversation import Message, Role
from chatsvc.errors import CannotContinue, NotFound, StoreUnavailable
from chatsvc.ids import is_plausible, new_conversation_id
from chatsvc.limits import Principal
from chatsvc.scheduler import NewAnswer, NewMessage, Scheduler
from chatsvc.store import ConversationPatch, NewConversation, Store, Submitted

Limit = Annotated[int, Parameter(ge=1, le=100, description="Most entries in the answer.")]
Cursor = Annotated[str | None, Parameter(max_length=500, description="``next_cursor`` of the page before.")]


def plausible(value: str, what: str) -> str:
    """The id, if it can be one of ours. Raises ``NotFound`` alike for ids that never were and that are another's."""
    if not is_plausible(value):
        raise NotFound(f"There is no such {what}.")
    return value


class ConversationController(Controller):
    """``/v1/conversations``."""

    path = "/v1/conversations"
    dto = StrictJson
    return_dto = None
    tags = ("conversations",)

    @post(operation_id="createConversation", summary="Make a conversation")
    async def create(
        self, data: CreateConversation, principal: Principal, store: Store, scheduler: Scheduler
    ) -> ConversationOut:
        """An empty conversation. It gets its title from the first message unless one is given."""
        await scheduler.check_system_prompt(data.model, data.system_prompt)
        new = NewConversation(
            id=new_conversation_id(),
            title=data.title,
            system_prompt=data.system_prompt,
            model=data.model,
            temporary=data.temporary,
        )
        return conversation_out(await store.conversations.create(principal, new))

    @get(operation_id="listConversations", summary="List conversations")
    async def list(
        self, principal: Principal, store: Store, limit: Limit = 30, cursor: Cursor = None
    ) -> Page[ConversationOut]:
        """The caller's conversations, newest activity first, without temporary ones."""
        page = await store.conversations.list(principal.user_id, cursor=cursor, limit=limit)
        return Page([conversation_out(conversation) for conversation in page.items], page.next_cursor)

    @get("/{conversation_id:str}", operation_id="getConversation", summary="Read a conversation")
    async def read(
        self, conversation_id: str, principal: Principal, store: Store, tokens: StreamTokens
    ) -> ConversationTree:
        """The conversation and the whole tree of its messages; a running reply comes with its stream's address."""
        conversation, messages = await store.conversations.tree(
            principal.user_id, plausible(conversation_id, "conversation")
        )
        return tree_out(conversation, messages, tokens.url)

    @get("/{conversation_id:str}/messages", operation_id="listBranch", summary="Read one branch")
    async def branch(
        self,
        conversation_id: str,
        principal: Principal,
        store: Store,
        tokens: StreamTokens,
        leaf: Annotated[str | None, Parameter(max_length=80, description="Last message; none: the head.")] = None,
        limit: Limit = 30,
        cursor: Cursor = None,
    ) -> Page[MessageOut]:
        """The messages from a leaf back to the root, newest first."""
        page = await store.conversations.branch_page(
            principal.user_id, plausible(conversation_id, "conversation"), leaf=leaf, cursor=cursor, limit=limit
        )
        return Page([message_out(message, tokens.url) for message in page.items], page.next_cursor)

    @patch("/{conversation_id:str}", operation_id="updateConversation", summary="Change a conversation")
    async def change(
        self, conversation_id: str, data: PatchConversation, principal: Principal, store: Store, scheduler: Scheduler
    ) -> ConversationOut:
        """Change the title, the head, the system prompt, the model or the pin; what is absent stays."""
        conversation_id = plausible(conversation_id, "conversation")
        if data.model is not UNSET or data.system_prompt is not UNSET:
            before = await store.conversations.get(principal.user_id, conversation_id)
            await scheduler.check_system_prompt(
                before.model if data.model is UNSET else data.model,
                before.system_prompt if data.system_prompt is UNSET else data.system_prompt,
            )
        changes = ConversationPatch(
            title=data.title,
            head_message_id=data.head_message_id,
            system_prompt=data.system_prompt,
            pinned=data.pinned,
            model=data.model,
        )
        return conversation_out(await store.conversations.update(principal.user_id, conversation_id, changes))

    @delete("/{conversation_id:str}", operation_id="deleteConversation", summary="Delete a conversation")
    async def remove(self, conversation_id: str, principal: Principal, scheduler: Scheduler) -> None:
        """Delete it with all its messages, replies and logs. What is still being written is cut off."""
        await scheduler.delete_conversation(principal.user_id, plausible(conversation_id, "conversation"))

    @post("/{conversation_id:str}/messages", status_code=202, operation_id="sendMessage", summary="Send a message")
    async def send(
        self,
        conversation_id: str,
        data: PostMessage,
        principal: Principal,
        scheduler: Scheduler,
        tokens: StreamTokens,
        clock: Clock,
    ) -> Response[Accepted]:
        """Store a user message and start its reply.

        An edit is a message with the same ``parent_id`` as the one it replaces.
        """
        new = NewMessage(
            content=data.content,
            client_msg_id=data.client_msg_id,
            parent_id=data.parent_id,
            model=data.model,
            max_tokens=data.max_tokens,
            temperature=data.temperature,
            background=data.background,
        )
        conversation_id = plausible(conversation_id, "conversation")
        return await _answer(await scheduler.submit(principal, conversation_id, new), scheduler, tokens, clock)


class MessageController(Controller):
    """``/v1/messages``."""

    path = "/v1/messages"
    dto = StrictJson
    return_dto = None
    tags = ("messages",)

    @patch("/{message_id:str}", operation_id="pinMessage", summary="Pin a message")
    async def change(
        self, message_id: str, data: PatchMessage, principal: Principal, store: Store, tokens: StreamTokens
    ) -> MessageOut:
        """Pin a message, or let it go: a pinned one is shown to the model as it is, also when it is folded."""
        message_id = plausible(message_id, "message")
        message = await store.conversations.pin(principal.user_id, message_id, pinned=data.pinned)
        return message_out(message, tokens.url)

    @post("/{message_id:str}/responses", status_code=202, operation_id="answerAgain", summary="Answer a message again")
    async def answer_again(
        self,
        message_id: str,
        data: PostResponse,
        principal: Principal,
        store: Store,
        scheduler: Scheduler,
        tokens: StreamTokens,
        clock: Clock,
    ) -> Response[Accepted]:
        """Write another reply beside the ones there are.

        Given a reply's id, the message it answers is answered again; with ``continue`` the new reply begins with the
        text of the given one, and only the rest is generated.
        """
        message = await store.conversations.owner_of_message(principal.user_id, plausible(message_id, "message"))
        target = message.parent_id if message.role is Role.ASSISTANT and message.parent_id else message.id
        new = NewAnswer(
            client_msg_id=data.client_msg_id,
            model=data.model,
            max_tokens=data.max_tokens,
            temperature=data.temperature,
            background=data.background,
            continues=_to_continue(message) if data.continue_ else None,
        )
        return await _answer(await scheduler.answer_again(principal, target, new), scheduler, tokens, clock)


def _to_continue(message: Message) -> Message:
    if message.role is not Role.ASSISTANT:
        raise CannotContinue("Name the reply to go on with, not the message it answers.", field="continue")
    return message


async def _answer(submitted: Submitted, scheduler: Scheduler, tokens: StreamTokens, clock: Clock) -> Response[Accepted]:
    try:
        position = await scheduler.position(submitted.run)
    except StoreUnavailable:
        position = None  # the run is committed; where it stands is told by its stream
    return Response(
        accepted(submitted.run, position, tokens.url), headers=ratelimit_headers(submitted.allowance, clock.now())
    )
