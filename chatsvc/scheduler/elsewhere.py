"""What is certain of a prompt whose engine is in another process, so that nothing of it can be counted here. Pure.

A token of a text is a byte of it at least. So a text has no more tokens than bytes, whatever its language.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from chatsvc.context.assemble import assemble
from chatsvc.context.budget import reply_reserve, split
from chatsvc.context.material import Assembled
from chatsvc.conversation import Branch, BranchView, Role
from chatsvc.prompt import ChatMessage
from chatsvc.scheduler.news import Window
from chatsvc.scheduler.wanted import Wanted, material

_MEMORY_SHARE: Final = 8
"""Memory takes no more than this fraction of a window."""
_MESSAGE_TOKENS: Final = 16
"""More than chat templates add to a message."""


def surely_fits(wanted: Wanted, window: Window) -> bool:
    """Whether the message has room for certain: with all left out of the conversation that may be."""
    bare = BranchView(summary=None, pinned=(), verbatim=_last_question(wanted))
    return _most_tokens(_assembled(msgspec.structs.replace(wanted, view=bare)).messages) <= _room(wanted, window)


def surely_shown(wanted: Wanted, window: Window) -> bool:
    """Whether all of the conversation has room for certain, in what is left to it, and each of its parts in its own."""
    all_of_it = _assembled(wanted)
    system = _most_tokens(all_of_it.system) + _memory(wanted, window)
    budget = split(
        window=window.tokens,
        system_tokens=system,
        requested=wanted.max_tokens,
        recall_tokens=window.tokens,
        step_tokens=window.tokens,
        history_share=wanted.history_share,
    )
    summary = wanted.view.summary.text if wanted.view.summary else ""
    # Room for a question and for what may be recalled is kept, whatever is asked.
    taken = _most_tokens(all_of_it.messages) + budget.question + budget.recalled
    return (
        taken + _memory(wanted, window) <= budget.allowed
        and _bytes(summary) <= budget.summary
        and sum(_bytes(message.content) + 2 * _MESSAGE_TOKENS for message in wanted.view.pinned) <= budget.pinned
    )


def _room(wanted: Wanted, window: Window) -> int:
    return window.tokens - reply_reserve(window.tokens, wanted.max_tokens) - _memory(wanted, window)


def _memory(wanted: Wanted, window: Window) -> int:
    return window.tokens // _MEMORY_SHARE if wanted.conversation.memory else 0


def _assembled(wanted: Wanted) -> Assembled:
    view = wanted.view
    return assemble(material(wanted, view.verbatim if wanted.continued is None else (*view.verbatim, wanted.continued)))


def _most_tokens(messages: Iterable[ChatMessage]) -> int:
    return sum(_bytes(message.content) + _MESSAGE_TOKENS for message in messages)


def _bytes(text: str) -> int:
    return len(text.encode())


def _last_question(wanted: Wanted) -> Branch:
    """The stored message that is to be answered, where it is not a new one."""
    if wanted.question is not None:
        return ()
    return tuple(message for message in wanted.view.verbatim if message.role is Role.USER)[-1:]
