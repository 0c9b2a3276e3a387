"""What somebody asks to have answered, checked as far as that needs no database."""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from chatsvc.conversation import Message
from chatsvc.errors import CannotContinue, InvalidInput
from chatsvc.run import RunStatus

TITLE_CHARS: Final = 60
CUT_MARKS: Final = " .,;:!?…-–—。、，；：！？"
"""Not kept before the "…" of a title that was cut: "like this.…" reads as a slip."""
MAX_CLIENT_MSG_ID_CHARS: Final = 200


class NewMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A user message to be answered. ``parent_id`` UNSET = the conversation's head, None = a new root."""

    content: str
    client_msg_id: str
    parent_id: str | msgspec.UnsetType | None = msgspec.UNSET
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    background: bool = False


class NewAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A wish to have a user message answered again."""

    client_msg_id: str
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    background: bool = False
    continues: Message | None = None
    """The reply to go on with: a stopped, failed or cut-off answer to that message."""


def checked_id(client_msg_id: str) -> str:
    """The id, if it can be one. Raises ``InvalidInput``."""
    if not 0 < len(client_msg_id) <= MAX_CLIENT_MSG_ID_CHARS or not client_msg_id.isprintable():
        raise InvalidInput(
            f"client_msg_id must be 1 to {MAX_CLIENT_MSG_ID_CHARS} printable characters, new for each message.",
            field="client_msg_id",
        )
    return client_msg_id


def title_from(content: str) -> str:
    """The first words of a message, as a conversation's title until somebody names it."""
    words = " ".join(content.split())
    if len(words) <= TITLE_CHARS:
        return words
    cut = words[:TITLE_CHARS]
    whole = cut[: cut.rfind(" ")] if " " in cut[TITLE_CHARS // 2 :] else cut
    return (whole.rstrip(CUT_MARKS) or whole) + "…"


def continuable(reply: Message) -> Message:
    """The reply, if there is more to say. Raises ``CannotContinue``."""
    if reply.status in {RunStatus.STOPPED, RunStatus.FAILED} or reply.finish_reason == "length":
        return reply
    raise CannotContinue(
        "Only a reply that was stopped, failed, or reached its limit of tokens can be continued. "
        "To have the message answered once more, leave out 'continue'.",
        field="continue",
    )


def digest(kind: str, target: str, new: NewMessage | NewAnswer) -> bytes:
    """A digest of all that makes the request what it is:

    the same id with another digest is a different request (L8).
    """
    if isinstance(new, NewAnswer) and new.continues is not None:
        # What it says may have grown by a late checkpoint; which one it is, is the request.
        kind, target, new = "continue", new.continues.id, msgspec.structs.replace(new, continues=None)
    body = msgspec.json.encode([kind, target, msgspec.to_builtins(new)], order="deterministic")
    return hashlib.sha256(body).digest()
