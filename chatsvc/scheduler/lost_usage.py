"""What a reply had used whose worker died: charged is what was delivered, also then.

Its log tells: the prompt's tokens stand in the ``context`` event, the reply's are those of the text that was shown. The
last checkpoint, up to ten seconds older, is the least.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import msgspec

from chatsvc.errors import EngineUnavailable
from chatsvc.events import Context, Entry
from chatsvc.limits import Usage
from chatsvc.run import Run

BYTES_PER_TOKEN: Final = 4
"""Where no tokenizer is at hand: about right for English, and for scripts whose characters have more bytes."""
CountTokens = Callable[[str, str], Awaitable[int | None]]
"""From a model and a text to its tokens; None where the model is not in this process."""


async def usage_of_lost(run: Run, entries: Iterable[Entry], generated: str, count: CountTokens) -> Usage:
    """By its log's ``entries`` and the text that it had ``generated``."""
    prompt_tokens, cached_tokens = run.usage.prompt_tokens, run.usage.cached_tokens
    for entry in entries:
        if entry.event == Context.name and isinstance(context := entry.decode(), Context):
            prompt_tokens, cached_tokens = context.prompt_tokens, context.cached_tokens or 0
    try:
        counted = await count(run.model, generated)
    except EngineUnavailable:
        counted = None
    if counted is None:
        counted = len(generated.encode()) // BYTES_PER_TOKEN
    return msgspec.structs.replace(
        run.usage,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        output_tokens=max(run.usage.output_tokens, counted),
    )
