"""What a reply's prompt was made of, for the wire."""

from __future__ import annotations

import msgspec

from chatsvc.prompt import ContextReport, PromptParts, RecalledTurn, SummaryUsed


class ContextOut(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/responses/{id}/context``. All counts are tokens, but for ``left_out``."""

    window: int
    """The model's context window."""
    reply_reserve: int
    """Kept free for the reply."""
    prompt_tokens: int
    cached_tokens: int | None
    """Of the prompt, those that the engine had not to compute again; null until it has said so."""
    parts: PromptParts
    """Where the prompt's tokens go."""
    condensed: bool
    """Whether a summary stands for the older part of the branch."""
    left_out: int
    """Turns that the model was not shown, not even in a summary: there was no room, and no fold yet."""
    summary: SummaryUsed | None
    recalled: tuple[RecalledTurn, ...]
    """Old turns that were quoted for this question."""


def context_out(report: ContextReport) -> ContextOut:
    """The report for the wire."""
    return ContextOut(
        window=report.window,
        reply_reserve=report.reply_reserve,
        prompt_tokens=report.prompt_tokens,
        cached_tokens=report.cached_tokens,
        parts=report.parts,
        condensed=report.condensed,
        left_out=report.left_out,
        summary=report.summary,
        recalled=report.recalled,
    )
