"""Where a prompt's tokens go, part by part."""

from __future__ import annotations

from chatsvc.context.material import Assembled
from chatsvc.prompt import PromptParts
from chatsvc.scheduler.sizes import Sizes


async def parts_of(assembled: Assembled, total: int, sizes: Sizes) -> PromptParts:
    """Where the ``total`` tokens of a prompt go: the verbatim turns have what nothing else does."""
    system, summary, pinned, question = [
        await sizes.of(part) for part in (assembled.system, assembled.summary, assembled.pinned, assembled.question)
    ]
    memory = await sizes.of_text(assembled.memory) if assembled.memory else 0
    recalled = await sizes.of_text(assembled.recalled) if assembled.recalled else 0
    rest = total - system - summary - pinned - question
    return PromptParts(
        system=system - memory,
        memory=memory,
        summary=summary,
        pinned=pinned,
        verbatim=rest if assembled.verbatim else 0,
        recalled=recalled,
        question=question - recalled + (0 if assembled.verbatim else rest),
    )
