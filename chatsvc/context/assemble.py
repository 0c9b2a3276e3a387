"""From a conversation's branch to the messages the model is shown. Pure; L11 is the law.

    [system prompt] user, assistant, user, assistant, … user

Every turn is shown verbatim and nothing that changes with time is added, so turn n+1's prompt begins with turn n's.
Summaries and recalled turns get their places here: between the system prompt and the first verbatim turn, and in front
of the newest user message.
"""

from __future__ import annotations

from collections.abc import Iterable

from chatsvc.conversation import Message, Role
from chatsvc.prompt import ChatMessage


def assemble(
    system_prompt: str | None, branch: Iterable[Message], new_content: str | None = None
) -> tuple[ChatMessage, ...]:
    """The chat messages for a branch that ends in the user message to be answered, or in a reply to be gone on with.

    ``new_content`` is a user message that is not stored yet. Replies that were stopped or failed are shown with the
    text they had, as the user saw them; empty ones keep their place, since templates want the roles to alternate.
    """
    messages: list[ChatMessage] = []
    if system_prompt:
        messages.append(ChatMessage(Role.SYSTEM, system_prompt))
    messages.extend(ChatMessage(message.role, message.content) for message in branch)
    if new_content is not None:
        messages.append(ChatMessage(Role.USER, new_content))
    return tuple(messages)
