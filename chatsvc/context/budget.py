"""The token budget of one prompt. Pure: counts in, counts out.

    window = system + history + reply
    history = summary + pinned + verbatim + recalled + question

    reply      what the request asks for, or min(4,096, window / 4)
    summary    at most a quarter of the history that there is beside a usual reply, and half of what there is
    pinned     at most a quarter of the history
    recalled   at most an eighth, and no more than is configured
    question   whatever it needs, and a sixteenth is kept for it: what is larger than all of the history is refused
    verbatim   the rest

What does not fit verbatim is left out from its old end, in whole turns and in large steps: the places of the steps
depend on the turns before them only, so from turn to turn a prompt begins as the one before, but for the few turns at
which a step is taken (L11).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from chatsvc.errors import MessageTooLong, SystemPromptTooLong

DEFAULT_REPLY_TOKENS: Final = 4096
"""Reply length when the request names none, and the model nothing shorter."""
RESERVE_SHARE: Final = 4
"""A quarter of a small window is kept for the reply, so that the last turn that still fits can be answered usefully."""
PART_SHARE: Final = 4
"""Neither the summary nor what is pinned takes more than this fraction of the history."""
RECALL_SHARE: Final = 8
"""Recalled turns are computed anew in every turn: in a small window they would crowd out what is not."""
QUESTION_SHARE: Final = 16
"""Of the history: room that is kept for a question, however short it is. So what is left out for most questions is
known before they are asked, and can be read ahead."""
QUESTION_TOKENS: Final = 512
"""No more than this is kept for it: some two pages of a letter."""
STEP_SHARE: Final = 3
"""Of the window: turns that are left out, or folded, in one step take no more."""
MOST_HALVINGS: Final = 3
"""Of a step, where there is less room than one has."""
SYSTEM_SHARE: Final = 2
"""Of the window: a system prompt takes no more."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens each part of a prompt may have; template tokens count."""

    window: int
    reply: int
    system: int
    """Tokens that the system message has."""
    history: int
    """For all but the system message and the reply."""
    allowed: int
    """Most tokens of the whole prompt: less than the window leaves when history is to be kept short."""
    summary: int
    pinned: int
    recalled: int
    question: int
    """Kept for the question where it needs less."""
    step: int
    """Verbatim turns are left out in steps of so many tokens."""

    def verbatim(self, *, summary: int = 0, pinned: int = 0, recalled: int = 0, question: int = 0) -> int:
        """What is left for verbatim turns beside parts of these sizes; 0 when nothing is."""
        return max(0, self.allowed - self.system - summary - pinned - recalled - question)


def reply_reserve(window: int, requested: int | None) -> int:
    """Tokens of the window that the prompt must leave free."""
    return requested if requested is not None else min(DEFAULT_REPLY_TOKENS, window // RESERVE_SHARE)


def split(
    *,
    window: int,
    system_tokens: int,
    requested: int | None,
    recall_tokens: int,
    step_tokens: int,
    history_share: float = 1.0,
) -> Budget:
    """The budget of a prompt. ``requested`` is the reply's length where the request names one.

    ``history_share``, 0-1, is how much of the history's part may be used. The question alone may need more.
    """
    reply = max(1, reply_reserve(window, requested))
    history = max(0, window - system_tokens - reply)
    usable = int(history * history_share)
    # Neither what this request asks for nor how busy the service is moves the places of the steps, or the end of a long
    # summary, which stands in front of everything: not until there is less than half of the usual room.
    usual = max(0, window - system_tokens - reply_reserve(window, None))
    return Budget(
        window=window,
        reply=reply,
        system=system_tokens,
        history=history,
        allowed=system_tokens + usable,
        summary=min(usual // PART_SHARE, usable // 2),
        pinned=usable // PART_SHARE,
        recalled=min(recall_tokens, usable // RECALL_SHARE),
        question=min(QUESTION_TOKENS, usable // QUESTION_SHARE),
        step=max(1, min(step_tokens, window // STEP_SHARE, usual // 2)),
    )


def check_system(system_tokens: int, window: int) -> None:
    """Raises ``SystemPromptTooLong`` with the numbers when a system prompt leaves too little of a window."""
    limit = window // SYSTEM_SHARE
    if system_tokens > limit:
        raise SystemPromptTooLong(
            f"The system prompt has {system_tokens} tokens; at most {limit} are taken, half of the {window} tokens of"
            " this model's context window. Shorten it, or choose a model with a larger window.",
            field="system_prompt",
            tokens=system_tokens,
            window=window,
            limit=limit,
        )


def check_question(budget: Budget, question_tokens: int) -> None:
    """Raises ``MessageTooLong`` with the numbers when one message is more than all of the history may be."""
    if question_tokens <= budget.history:
        return
    beside = f" and a system prompt of {budget.system}" if budget.system else ""
    advice = "Shorten the message, or ask for fewer max_tokens."
    if budget.system > budget.window // SYSTEM_SHARE:
        # It was set for a model with a larger window.
        advice = "Shorten the system prompt or the message, or choose a model with a larger window."
    raise MessageTooLong(
        f"The message has {question_tokens} tokens; at most {budget.history} fit beside a reply of {budget.reply}"
        f"{beside} into the {budget.window} tokens of this model's context window. {advice}",
        field="content",
        message_tokens=question_tokens,
        prompt_tokens=budget.system + question_tokens,
        reply_tokens=budget.reply,
        window=budget.window,
        limit=budget.history,
    )


def halvings(step: int, room: int) -> int:
    """How often a step is halved for a prompt that has so much room for verbatim turns: till it is no more than that.

    Else the step behind which a turn begins anew would leave out all but the newest.
    """
    return next((number for number in range(MOST_HALVINGS) if step >> number <= room), MOST_HALVINGS)


def cuts(sizes: Sequence[int], step: int, halved: int = 0) -> list[int]:
    """Where history may begin, as numbers of turns left out: 0 first, rising, all of them last.

    ``sizes`` are the turns' tokens, oldest first. A step takes at least one turn, and no more than ``step`` tokens
    unless that one has more. Behind the last full step every turn is a place. Turns that are added change nothing about
    the steps before them. ``halved``: each step is divided so often, and the places between steps stay where they are.
    """
    places, _ = _steps(sizes, step, halved)
    return [*places, *range(places[-1] + 1, len(sizes) + 1)]


def holds_for(sizes: Sequence[int], step: int, cut: int, halved: int = 0) -> int | None:
    """How many tokens a turn that is added may have so that ``cut`` is one of the ``cuts`` still; None: any number."""
    places, left = _steps(sizes, step, halved)
    return None if cut <= places[-1] or cut == len(sizes) else max(0, left)


def _steps(sizes: Sequence[int], step: int, halved: int) -> tuple[list[int], int]:
    """The places at which a full step ends, or a part of one, 0 first; and how many tokens more make the next one."""
    limits = [max(1, step >> number) for number in range(halved + 1)]
    taken = [0] * len(limits)
    places = [0]
    for number, size in enumerate(sizes):
        full = next((n for n, limit in enumerate(limits) if number and taken[n] + size > limit), None)
        if full is not None:
            places.append(number)
            taken[full:] = [0] * (len(limits) - full)
        taken = [tokens + size for tokens in taken]
    return places, min(limit - tokens for limit, tokens in zip(limits, taken, strict=True))


def first_fit(sizes: Sequence[int], places: Sequence[int], room: int) -> int:
    """The index of the first of ``places`` at which what follows has at most ``room`` tokens; the last one fits."""
    left = sum(sizes)
    number = 0
    for index, place in enumerate(places):
        left -= sum(sizes[number:place])
        number = place
        if left <= room:
            return index
    return len(places) - 1


def clipped(text: str, tokens: int, most: int) -> str:
    """A text of ``tokens`` tokens, shortened at a line's end so that it has about ``most`` of them or fewer.

    Its beginning is kept. Whoever needs to be sure counts again; the same arguments give the same text.
    """
    if tokens <= most:
        return text
    kept = text[: len(text) * max(0, most) // tokens]
    whole, line_end, _ = kept.rpartition("\n")
    return whole if line_end and len(whole) > len(kept) // 2 else kept


def reply_limit(*, prompt_tokens: int, window: int, requested: int | None, default: int = DEFAULT_REPLY_TOKENS) -> int:
    """Most tokens the reply may have.

    Raises ``MessageTooLong`` with the numbers when the prompt leaves less than the reserve. Without a request the reply
    may use more than the reserve, up to ``default``, where the prompt is short.
    """
    reserve = reply_reserve(window, requested)
    room = window - prompt_tokens
    if room < max(reserve, 1):
        raise MessageTooLong(
            f"The prompt takes {prompt_tokens} tokens and the reply needs {reserve}, together more than the "
            f"{window} tokens of this model's context window. Shorten the message, ask for fewer max_tokens, or start "
            "a new conversation.",
            field="content",
            prompt_tokens=prompt_tokens,
            reply_tokens=reserve,
            window=window,
            limit=window - reserve,
        )
    return requested if requested is not None else min(default, room)
