"""What is certain of a prompt whose engine is in another process, so that nothing of it can be counted here. Pure.

A token of a text is a byte of it at least. So a text has no more tokens than bytes, whatever its language.
"""

from __future__ import annotations

from typing import Final

import msgspec

from chatsvc.context.assemble import assemble
from chatsvc.context.budget import reply_reserve
from chatsvc.context.material import Material
from chatsvc.conversation import Branch, BranchView, Role
from chatsvc.scheduler.news import Window
from chatsvc.scheduler.wanted import Wanted

_MEMORY_SHARE: Final = 8
"""Memory takes no more than this fraction of a window."""
_MESSAGE_TOKENS: Final = 16
"""More than chat templates add to a message."""


def surely_fits(wanted: Wanted, window: Window) -> bool:
    """Whether the message has room for certain: with all left out of the conversation that may be."""
    bare = BranchView(summary=None, pinned=(), verbatim=_last_question(wanted))
    return _most_tokens(msgspec.structs.replace(wanted, view=bare)) <= _room(wanted, window)


def surely_shown(wanted: Wanted, window: Window) -> bool:
    """Whether all of the conversation has room for certain, in what is left to it."""
    return _most_tokens(wanted) <= wanted.history_share * _room(wanted, window)


def _room(wanted: Wanted, window: Window) -> int:
    memory = window.tokens // _MEMORY_SHARE if wanted.conversation.memory else 0
    return window.tokens - reply_reserve(window.tokens, wanted.max_tokens) - memory


def _most_tokens(wanted: Wanted) -> int:
    view = wanted.view
    verbatim = view.verbatim if wanted.continued is None else (*view.verbatim, wanted.continued)
    material = Material(
        conversation=wanted.conversation,
        summary=view.summary,
        pinned=view.pinned,
        verbatim=verbatim,
        question=wanted.question,
    )
    return sum(len(message.content.encode()) + _MESSAGE_TOKENS for message in assemble(material).messages)


def _last_question(wanted: Wanted) -> Branch:
    """The stored message that is to be answered, where it is not a new one."""
    if wanted.question is not None:
        return ()
    return tuple(message for message in wanted.view.verbatim if message.role is Role.USER)[-1:]
