"""The scripted model's language: its tokenizer, its chat template and what it says.

Tokens are short runs of word characters, line breaks or single characters. A character beyond the basic plane takes two
tokens, the first of which has no text yet, as with byte-level vocabularies. Ids are checksums, the same everywhere and
for ever; special tokens lie below ``_FIRST_ORDINARY``, where no text can reach (E10).
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from chatsvc.conversation import Role
from chatsvc.prompt import ChatMessage, Prompt

_TURN_START: Final = 1
_TURN_END: Final = 2
_FIRST_ORDINARY: Final = 16
_PIECE: Final = re.compile(r" ?\w{1,8}|[\r\n]{1,4}|.", re.DOTALL)
_ASTRAL: Final = 0x10000

_WORDS: Final = (
    *("a", "reply", "goes", "on", "while", "nobody", "looks", "and", "the", "next", "reader", "finds", "it", "whole"),
    *("from", "first", "word", "to", "last", "just", "as", "was", "said"),
)
_HAZARDS: Final = (
    "\U0001f642",
    "\U0001f469\u200d\U0001f4bb",
    "e\u0301",
    "日本語",
    "中文字符",
    "नमस्ते",
    "\n",
    "\r",
    "\r\n\r\n",
    "\ndata: not an event\n",
    "\nevent: done\n\n",
    "\nid: 99999\n",
    "\n: not a comment\n",
    "\u2028",
    "\u2029",
    "\x85",
    "**bold** `code`",
    "<b>&amp;</b>",
)
"""What breaks careless streams: characters of several bytes, line breaks, and text that looks like the wire format."""


def pieces(text: str) -> list[str]:
    """The text of each token, in order; their concatenation is the text."""
    result: list[str] = []
    for match in _PIECE.finditer(text):
        piece = match.group()
        if len(piece) == 1 and ord(piece) >= _ASTRAL:
            result.append("")
        result.append(piece)
    return result


def encode(text: str) -> list[int]:
    """Token ids of plain text, one for each of ``pieces``."""
    ids: list[int] = []
    for match in _PIECE.finditer(text):
        piece = match.group()
        number = _FIRST_ORDINARY + zlib.crc32(piece.encode("utf-8", "surrogatepass"))
        if len(piece) == 1 and ord(piece) >= _ASTRAL:
            ids.append(number + 1)
        ids.append(number)
    return ids


def render(messages: Sequence[ChatMessage], encoded: Callable[[str], Sequence[int]] | None = None) -> list[int]:
    """The chat template: each turn between special tokens, then the opening of the assistant's turn.

    When the last message is the assistant's, it is what stands in that open turn already. ``encoded`` is ``encode``, or
    knows its answers.
    """
    encoded = encoded or encode
    ids: list[int] = []
    open_turn = ""
    if messages and messages[-1].role is Role.ASSISTANT:
        *messages, last = messages
        open_turn = last.content
    for message in messages:
        ids += (_TURN_START, *encoded(f"{message.role.value}\n"), *encoded(message.content), _TURN_END)
    ids += (_TURN_START, *encoded(f"{Role.ASSISTANT.value}\n"), *encoded(open_turn))
    return ids


def derive(prompt: Prompt, tokens: int, seed: int) -> list[str]:
    """The reply to a prompt as the text of each of its ``tokens`` tokens: the same for the same prompt and seed."""
    result: list[str] = []
    for fragment in _fragments(prompt, seed):
        result.extend(pieces(fragment))
        if len(result) >= tokens:
            break
    return result[:tokens]


def repeat(text: str, tokens: int | None) -> list[str]:
    """A fixed text as the text of each of its tokens; with ``tokens``, repeated or cut to that length."""
    once = pieces(text)
    if tokens is None or not once:
        return once or [""]
    return (once * (tokens // len(once) + 1))[:tokens]


def rest_of(reply: Sequence[str], kept: str) -> list[str]:
    """The tokens of a reply behind the text ``kept``; the whole reply where it does not begin with that text."""
    text = ""
    for place, piece in enumerate(reply):
        if text == kept:
            return list(reply[place:])
        text += piece
    return [""] if text == kept else list(reply)


def _fragments(prompt: Prompt, seed: int) -> Iterator[str]:
    question = next((m.content for m in reversed(prompt.messages) if m.role is Role.USER), "")
    words = question.split()[:8]
    if words:
        yield "You said: " + " ".join(words)[:80] + "."
    packed = b"".join(number.to_bytes(8, "little") for number in prompt.token_ids)
    # Not a secret: only the same draw for the same prompt.
    draw = random.Random(zlib.crc32(packed, seed & 0xFFFF_FFFF))  # noqa: S311
    deck: list[str] = []
    while True:
        for _ in range(draw.randrange(1, 4)):
            yield " " + draw.choice(_WORDS)
        if not deck:
            deck = list(_HAZARDS)
            draw.shuffle(deck)
        yield " " + deck.pop()
