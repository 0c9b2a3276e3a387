"""What the next turn's prompt begins with, token for token, whatever it asks and whatever is recalled for it (L11)."""

from __future__ import annotations

from typing import Final

import msgspec

from chatsvc.conversation import Branch, Role
from chatsvc.inference.base import Engine
from chatsvc.prompt import ChatMessage, Prompt
from chatsvc.scheduler.prompts import Prompts
from chatsvc.scheduler.wanted import Wanted

_QUESTIONS: Final = ("1", "\n")
"""Stand for the next question: what prompts that ask them have in common does not hang on what is asked."""
_JOINED: Final = 3
"""Tokens before the question that a tokenizer may join with its first letters."""


def ended(branch: Branch) -> Branch:
    """The branch up to its last ended reply: what a turn that runs now was begun with is no use to it any more."""
    for place in reversed(range(len(branch))):
        if branch[place].response_id is not None and branch[place].status.ended:
            return branch[: place + 1]
    return ()


async def prefix(prompts: Prompts, engine: Engine, wanted: Wanted) -> Prompt:
    """The tokens that the next prompt begins with, whatever it asks and whatever is recalled for it.

    Raises ``MessageTooLong`` where there is no room for a question, and ``EngineUnavailable``.
    """
    # For a branch without a leaf nothing is recalled.
    wanted = msgspec.structs.replace(wanted, leaf_id=None, question=_QUESTIONS[0])
    prompt = (await prompts.prepare(wanted)).prompt
    other = await engine.render((*prompt.messages[:-1], ChatMessage(Role.USER, _QUESTIONS[1])))
    ids = _common(prompt.token_ids, other.token_ids)[:-_JOINED]
    return Prompt(messages=prompt.messages, token_ids=ids, tokens=len(ids))


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    # Compared piece by piece: token by token the event loop would stand still for a long prompt.
    same, most = 0, min(len(one), len(other))
    while same < most:
        middle = (same + most + 1) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            most = middle - 1
    return one[:same]
