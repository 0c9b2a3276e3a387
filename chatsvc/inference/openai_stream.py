"""A stream of chat completions, read: bytes → events → chunks. Pure but for the iterator of bytes.

The wire's lines are split as the standard says and no finer: clients that also split at U+2028 tear JSON apart.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncGenerator, AsyncIterable, Iterator
from typing import Any, Final

from chatsvc.errors import EngineFailed
from chatsvc.inference.text import StopStrings
from chatsvc.prompt import Chunk

_DONE: Final = b"[DONE]"
_LETTERS_PER_TOKEN: Final = 3
"""English text has 4 to 5 of them in a token, names and code about 3."""
_WORDS: Final = re.compile(r"[A-Za-z ]+")


def estimate_tokens(text: str) -> int:
    """An upper guess: letters and spaces make words; of everything else each byte may be a token of its own."""
    rest = _WORDS.sub("", text)
    letters = len(text) - len(rest)
    return math.ceil(letters / _LETTERS_PER_TOKEN) + len(rest.encode("utf-8", "surrogatepass"))


async def event_data(stream: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """The data of each event of an SSE stream. Lines end with LF or CR LF."""
    buffer = b""
    data: list[bytes] = []
    async for piece in stream:
        *lines, buffer = (buffer + piece).split(b"\n")
        for line in lines:
            field, _, value = line.rstrip(b"\r").partition(b":")
            if field == b"data":
                data.append(value.removeprefix(b" "))
            elif not field and not value and data:
                yield b"\n".join(data)
                data = []


class Completion:
    """Makes chunks of one completion's events. The end is held back until the server has said what it counted."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stops = StopStrings(stop)
        self._half = ""
        self._reason: str | None = None
        self._prompt_tokens: int | None = None
        self._cached_tokens: int | None = None
        self._counted: int | None = None
        self._ended = False
        self.output_tokens = 0
        """Tokens of the chunks made so far; an event with text counts as one until the server has counted."""

    def feed(self, data: bytes) -> Iterator[Chunk]:
        """The chunks of one event. Raises ``EngineFailed`` when the event is an error, or no event of this protocol."""
        if data == _DONE:
            yield from self.close()
            return
        event = self._parse(data)
        self._note_usage(event.get("usage"))
        for choice in event.get("choices") or ():
            self._reason = choice.get("finish_reason") or self._reason
            text = self._whole((choice.get("delta") or {}).get("content") or "")
            if text:
                yield self._chunk(self._stops.feed(text), 1)
            if self._stops.stopped:
                # The server let the stop string pass; the reply ends here all the same.
                self._reason = "stop"
                yield from self.close()
                return

    def close(self) -> Iterator[Chunk]:
        """The last chunk. Raises ``EngineFailed`` when the server has not said how the reply ended."""
        if self._ended:
            return
        if self._reason not in {"stop", "length"}:
            raise EngineFailed(f"The server ended the reply early ({self._reason or 'no reason given'}).")
        self._ended = True
        rest = max(0, (self._counted or 0) - self.output_tokens)
        yield self._chunk(self._stops.flush(), rest, self._reason)

    def _chunk(self, text: str, tokens: int, reason: str | None = None) -> Chunk:
        self.output_tokens += tokens
        return Chunk(
            text=text,
            output_tokens=tokens,
            finish_reason=reason,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
        )

    def _parse(self, data: bytes) -> dict[str, Any]:
        try:
            event = json.loads(data)
        except ValueError as error:
            raise EngineFailed("The server sent an event that is no JSON.") from error
        if not isinstance(event, dict) or "error" in event:
            raise EngineFailed("The server reports an error in the middle of the reply.")
        return event

    def _note_usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        self._prompt_tokens = usage.get("prompt_tokens")
        self._counted = usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details") or {}
        self._cached_tokens = details.get("cached_tokens") or 0

    def _whole(self, text: str) -> str:
        """Hold back the first half of a surrogate pair: servers written in JavaScript cut texts there (E1)."""
        text = self._half + text
        if self._half:
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        self._half = text[-1:] if "\ud800" <= text[-1:] <= "\udbff" else ""
        return text[: len(text) - len(self._half)]
