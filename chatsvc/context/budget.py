"""The token budget of one prompt: how much of the window is the reply's, and whether the prompt leaves it free.

window = prompt + reply
reply reserve = what the request asks for, or min(4,096, window / 4)
"""

from __future__ import annotations

from typing import Final

from chatsvc.errors import MessageTooLong

DEFAULT_REPLY_TOKENS: Final = 4096
"""Reply length when the request names none, and the model nothing shorter."""
RESERVE_SHARE: Final = 4
"""A quarter of a small window is kept for the reply, so that the last turn that still fits can be answered usefully."""


def reply_reserve(window: int, requested: int | None) -> int:
    """Tokens of the window that the prompt must leave free."""
    return requested if requested is not None else min(DEFAULT_REPLY_TOKENS, window // RESERVE_SHARE)


def reply_limit(*, prompt_tokens: int, window: int, requested: int | None, default: int = DEFAULT_REPLY_TOKENS) -> int:
    """Most tokens the reply may have.

    Raises ``MessageTooLong`` with the numbers when the prompt leaves less than the reserve. Without a request the reply
    may use more than the reserve, up to ``default``, where the prompt is short.
    """
    reserve = reply_reserve(window, requested)
    room = window - prompt_tokens
    if room < max(reserve, 1):
        raise MessageTooLong(
            f"The conversation takes {prompt_tokens} tokens and the reply needs {reserve}, together more than the "
            f"{window} tokens of this model's context window. Shorten the message, ask for fewer max_tokens, or start "
            "a new conversation.",
            field="content",
            prompt_tokens=prompt_tokens,
            reply_tokens=reserve,
            window=window,
            limit=window - reserve,
        )
    return requested if requested is not None else min(default, room)
