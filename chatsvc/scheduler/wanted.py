"""What a prompt is wanted for, and what there is to make it of."""

from __future__ import annotations

import msgspec

from chatsvc.context.material import Material
from chatsvc.conversation import Branch, BranchView, Conversation, Message, Role


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be answered, and how."""

    model: str
    conversation: Conversation
    view: BranchView
    leaf_id: str | None
    """The last stored message of the branch; None for a conversation's first message."""
    question: str | None = None
    """The user message, where it is not stored yet."""
    continued: Message | None = None
    """The reply to go on with, behind the branch's last message."""
    max_tokens: int | None = None
    """The longest reply, if the request names it."""
    history_share: float = 1.0
    """How much of the history's budget may be used, 0-1."""
    memory: str | None = None
    """As much of the conversation's memory as fits; chosen here."""


def material(wanted: Wanted, verbatim: Branch, *, bare: bool = False) -> Material:
    """All that there is, or without anything that may be left out."""
    view = wanted.view
    return Material(
        conversation=wanted.conversation,
        summary=None if bare else view.summary,
        pinned=() if bare else view.pinned,
        verbatim=verbatim,
        question=wanted.question,
        memory=wanted.memory,
    )


def question_apart(wanted: Wanted) -> tuple[Branch, Branch]:
    """The branch's turns that may be left out, and what stands at the end whatever happens."""
    branch = wanted.view.verbatim
    if wanted.continued is not None:
        branch = (*branch, wanted.continued)
    if wanted.question is not None:
        return branch, ()
    place = next((n for n in reversed(range(len(branch))) if branch[n].role is Role.USER), len(branch))
    return branch[:place], branch[place:]
