"""A model's own tokenizer and chat template, used so that user text stays text (E10) and prompts stay stable (L11).

Two rules beyond "render the template, tokenize the result":

- Where a message spells out one of the vocabulary's added tokens (``<|im_end|>``), that spelling is tokenized letter by
  letter. It reads the same, and is no command.
- The text is tokenized in sections that end where the assistant's turn opens. So the prompt of one turn is, token for
  token, the beginning of the next one's, whatever characters the reply begins with. And a section that was tokenized
  once is only looked up from then on: a turn tokenizes what is new in it, however long the conversation is.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog

from chatsvc.conversation import Role
from chatsvc.errors import EngineUnavailable
from chatsvc.inference.text import Detokenizer
from chatsvc.inference.token_cache import TokenCache
from chatsvc.prompt import ChatMessage, Prompt

_log = structlog.get_logger(__name__)

_OFFLOAD_CHARS: Final = 10_000
"""Longer texts are rendered and tokenized in a thread, so that the loop stays free (E9)."""
_MARK: Final = "\ue000{}\ue001"
"""Stands for a spelled-out token while the template runs. Private-use characters, in no template."""
_PROBE: Final = "\ue002"
_MARKS: Final = re.compile("\ue000([0-9]+)\ue001")


class ChatTokenizer:
    """Wraps a tokenizer of transformers (``PreTrainedTokenizerBase``). Safe to use from several threads.

    Raises ``EngineUnavailable`` when the model has no chat template, or one that takes no chat. Where it takes no
    system message, what that says is put in front of the first user message.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise EngineUnavailable(
                f"The model {tokenizer.name_or_path} has no chat template; it cannot hold a chat. Use an"
                " instruction-tuned model, or put a chat_template.jinja beside its tokenizer."
            )
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._decode: Callable[[Sequence[int]], str]
        if backend is not None:
            # Its methods hold no state of their own, unlike those of the wrapper. Of its ways to encode, only the one
            # for batches leaves the interpreter free for other threads.
            self._encode = TokenCache(lambda text: backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
            self._decode = lambda ids: backend.decode(ids, skip_special_tokens=True)
        else:
            self._encode = TokenCache(lambda text: tokenizer.encode(text, add_special_tokens=False))
            self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
        spellings = sorted((text for text in tokenizer.get_added_vocab() if text), key=len, reverse=True)
        # What looks like a mark of ours is marked too, so that every mark found later is ours.
        self._spelled = re.compile("|".join([*map(re.escape, spellings), _MARKS.pattern]))
        try:
            self._opening = self._find_opening()
        except Exception as error:
            # A template is code of the model's makers and may raise what it likes: all of it means that it is no use.
            raise EngineUnavailable(
                f"The chat template of {tokenizer.name_or_path} cannot be used ({type(error).__name__}: {error}). Put"
                " one that takes user and assistant messages into chat_template.jinja beside its tokenizer."
            ) from error
        self._takes_system = self._tries([{"role": "system", "content": "x"}, {"role": "user", "content": "x"}])

    @property
    def tokenized(self) -> int:
        """Characters that were tokenized so far, and not only looked up."""
        return self._encode.misses

    def detokenizer(self) -> Detokenizer:
        """A fresh machine that turns this model's tokens into text."""
        return Detokenizer(self._decode)

    async def render(self, messages: Sequence[ChatMessage]) -> Prompt:
        """See ``Engine.render``."""
        kept = tuple(messages)
        ids = await self._off_loop(sum(len(message.content) for message in kept), self._render, kept)
        return Prompt(messages=kept, token_ids=tuple(ids), tokens=len(ids))

    async def encode(self, text: str) -> Sequence[int]:
        """See ``Engine.encode``."""
        return await self._off_loop(len(text), self._encode_plain, text)

    @staticmethod
    async def _off_loop(size: int, function: Callable[[Any], list[int]], argument: Any) -> list[int]:
        if size > _OFFLOAD_CHARS:
            return await asyncio.to_thread(function, argument)
        return function(argument)

    def _render(self, messages: Sequence[ChatMessage]) -> list[int]:
        if messages and messages[-1].role is Role.ASSISTANT:
            # The turn stays open behind its text. What was a prompt before it is the beginning of this one.
            return [*self._render_turns(messages[:-1]), *self._encode_plain(messages[-1].content)]
        return self._render_turns(messages)

    def _render_turns(self, messages: Sequence[ChatMessage]) -> list[int]:
        spelled: list[str] = []

        def mark(match: re.Match[str]) -> str:
            spelled.append(match.group())
            return _MARK.format(len(spelled) - 1)

        turns = [
            {"role": message.role.value, "content": self._spelled.sub(mark, message.content)} for message in messages
        ]
        if not self._takes_system and turns and turns[0]["role"] == Role.SYSTEM:
            system, *turns = turns
            if turns and turns[0]["role"] == Role.USER:
                turns[0]["content"] = f"{system['content']}\n\n{turns[0]['content']}"
            else:
                turns.insert(0, {"role": Role.USER.value, "content": system["content"]})
        text = self._apply(turns, opening=True)
        if not spelled:
            return self._encode_sections(text)
        ids: list[int] = []
        for index, part in enumerate(_MARKS.split(text)):
            if index % 2 == 0:
                ids += self._encode_sections(part)
            else:
                ids += self._encode_letters(spelled[int(part)])
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        ids: list[int] = []
        end = 0
        for match in self._spelled.finditer(text):
            ids += self._encode(text[end : match.start()])
            ids += self._encode_letters(match.group())
            end = match.end()
        return [*ids, *self._encode(text[end:])]

    def _encode_letters(self, spelling: str) -> list[int]:
        return [number for letter in spelling for number in self._encode(letter)]

    def _encode_sections(self, text: str) -> list[int]:
        if not self._opening:
            return list(self._encode(text))
        ids: list[int] = []
        head, *tail = text.split(self._opening)
        for section in tail:
            ids += self._encode(head + self._opening)
            head = section
        return [*ids, *self._encode(head)] if head else ids

    def _find_opening(self) -> str:
        """What the template adds for the assistant's turn to follow, or else what it ends a user's turn with."""
        turns = [{"role": "user", "content": _PROBE}]
        closed, opened = self._apply(turns, opening=False), self._apply(turns, opening=True)
        self._apply([*turns, {"role": "assistant", "content": _PROBE}, *turns], opening=True)
        if opened != closed:
            return opened.removeprefix(closed) if opened.startswith(closed) else ""
        return closed.rpartition(_PROBE)[2]

    def _tries(self, turns: list[dict[str, str]]) -> bool:
        """Whether the template takes such a conversation."""
        try:
            self._apply(turns, opening=True)
        except Exception as error:  # noqa: BLE001  # as above
            _log.info("the chat template takes no system message", error_type=type(error).__name__)
            return False
        return True

    def _apply(self, turns: list[dict[str, str]], *, opening: bool) -> str:
        return str(self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=opening))
