"""An engine without a model, for tests, benchmarks and demonstrations: it passes the same contract as the real ones.

    scripted:?first_token_ms=200&tokens_per_s=20&tokens=64&slots=8

The reply is a function of the prompt. It is said at the given pace whether or not anyone keeps up; a reader who was
away finds the tokens that fell due meanwhile in one chunk. All generations share one timer.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Final

import msgspec

from chatsvc.conversation import Role
from chatsvc.errors import EngineFailed, EngineUnavailable
from chatsvc.inference import scripted_text
from chatsvc.inference.base import Engine, EngineHealth, EngineLimits, EngineLoad, Progress, room
from chatsvc.inference.scripted_cache import PrefixCache
from chatsvc.inference.scripted_pace import TimerWheel
from chatsvc.inference.slots import Slots
from chatsvc.inference.text import StopStrings
from chatsvc.inference.token_cache import TokenCache
from chatsvc.prompt import ChatMessage, Chunk, Prompt, Sampling

_OFFLOAD_CHARS: Final = 20_000
"""Longer texts are tokenized in a thread, so that the loop stays free (E9)."""
_EXIT_STATUS: Final = 70
_DEFAULT_TOKENS: Final = 64

_Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=600_000)]
_PerSecond = Annotated[float, msgspec.Meta(ge=0, le=100_000)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
_Fault = Annotated[str, msgspec.Meta(pattern=r"^(error|hang|exit)@[0-9]{1,9}$")]


class ScriptedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The query of a ``scripted:`` URL."""

    first_token_ms: _Milliseconds = 0.0
    """Time from getting a slot to the first token."""
    tokens_per_s: _PerSecond = 0.0
    """Pace of each reply; 0: as fast as it is read."""
    tokens: _Count | None = None
    """Length of a reply. Default: 64, or the length of ``text``."""
    slots: _Count = 64
    """Replies that run at the same time; others wait, by priority, then in order."""
    window: _Count = 8192
    """Context window in tokens."""
    text: str | None = None
    """The reply; with ``tokens``, repeated or cut to that length. Default: derived from the prompt."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] = 0
    """Other seeds give other derived texts."""
    fault: _Fault | None = None
    """Every reply breaks after N tokens: ``error@N`` raises, ``hang@N`` goes silent, ``exit@N`` ends the process."""
    fault_on: str | None = None
    """Only replies to prompts whose last message has this in it break."""
    cache_tokens: Annotated[int, msgspec.Meta(ge=0, le=100_000_000)] = 262_144
    """Size of the modelled prefix cache."""


class ScriptedEngine(Engine):
    """See the module's docstring. ``model`` is the name it is served under."""

    def __init__(self, options: ScriptedOptions, *, model: str) -> None:
        self._options = options
        self._limits = EngineLimits(
            model=model,
            window=options.window,
            slots=options.slots,
            keeps_prefixes=options.cache_tokens > 0,
        )
        kind, _, after = (options.fault or "").partition("@")
        self._fault = kind
        self._fault_after = int(after) if after else None
        self._tokens = TokenCache(scripted_text.encode)
        self._cache = PrefixCache(options.cache_tokens)
        self._wheel = TimerWheel()
        self._slots = Slots(options.slots)
        self._hung: set[asyncio.Future[None]] = set()
        self._open = False

    async def start(self, progress: Progress) -> None:
        progress(f"{self._limits.model}: scripted replies, no model")
        self._open = True

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    async def render(self, messages: Sequence[ChatMessage]) -> Prompt:
        kept = tuple(messages)
        if sum(len(message.content) for message in kept) > _OFFLOAD_CHARS:
            ids = await asyncio.to_thread(scripted_text.render, kept, self._tokens)
        else:
            ids = scripted_text.render(kept, self._tokens)
        return Prompt(messages=kept, token_ids=tuple(ids), tokens=len(ids))

    async def encode(self, text: str) -> Sequence[int]:
        if len(text) > _OFFLOAD_CHARS:
            return await asyncio.to_thread(self._tokens, text)
        return self._tokens(text)

    async def generate(
        self,
        prompt: Prompt,
        sampling: Sampling,
        run_id: str,
        priority: int = 0,
    ) -> AsyncGenerator[Chunk, None]:
        self._check_open(EngineUnavailable)
        budget = room(prompt, sampling, self._limits)
        reply = self._reply(prompt)
        length = min(len(reply), budget)
        end = "stop" if len(reply) <= budget else "length"
        stops = StopStrings(sampling.stop)
        fault_after = self._fault_after if self._breaks_on(prompt) else None
        sent = 0
        async with self._slots.hold(priority):
            cached = self._cache.served(prompt.token_ids)
            first = await self._first_token()
            try:
                while True:
                    self._check_open(EngineFailed if sent else EngineUnavailable)
                    if sent == fault_after:
                        await self._break(sent)
                    due = min(length, await self._due(sent, first, fault_after))
                    text = stops.feed("".join(reply[sent:due]))
                    fresh, sent = due - sent, due
                    reason = "stop" if stops.stopped else end if sent == length else None
                    yield Chunk(
                        text=text + stops.flush() if reason else text,
                        output_tokens=fresh,
                        finish_reason=reason,
                        prompt_tokens=prompt.tokens,
                        cached_tokens=cached,
                    )
                    if reason:
                        return
            finally:
                self._cache.store((*prompt.token_ids, *scripted_text.encode("".join(reply[:sent]))))

    async def _first_token(self) -> float:
        """Wait as long as the prefill takes; returns the moment (``loop.time()``) of the first token."""
        moment = asyncio.get_running_loop().time() + self._options.first_token_ms / 1000
        if self._options.first_token_ms:
            await self._wheel.until(moment)
        return moment

    async def _due(self, sent: int, first: float, fault_after: int | None) -> int:
        """Wait until more than ``sent`` tokens are due, and say how many are; a fault's place is not passed."""
        pace = self._options.tokens_per_s
        if pace:
            if sent:
                await self._wheel.until(first + sent / pace)
            due = max(sent, int((asyncio.get_running_loop().time() - first) * pace)) + 1
        else:
            await asyncio.sleep(0)
            due = sent + 1
        if fault_after is not None and fault_after > sent:
            return min(due, fault_after)
        return due

    def load(self) -> EngineLoad:
        return EngineLoad(running=self._slots.held, waiting=self._slots.waiting, kv_used=self._cache.used)

    async def health(self) -> EngineHealth:
        if not self._open:
            return EngineHealth(ready=False, reason="the engine is not running")
        if self._hung:
            return EngineHealth(ready=False, reason="the engine has stopped answering")
        return EngineHealth(ready=True)

    async def aclose(self) -> None:
        self._open = False
        self._wheel.wake_all()
        for future in self._hung:
            if not future.done():
                future.set_result(None)
        self._slots.close(f"The engine of {self._limits.model} was closed.")

    def _reply(self, prompt: Prompt) -> list[str]:
        """The text of each token. A reply that is gone on with ends as it would have without the break."""
        *before, last = prompt.messages or (None,)
        if last is None or last.role is not Role.ASSISTANT:
            return self._whole_reply(prompt)
        ids = scripted_text.render(before)
        whole = self._whole_reply(Prompt(messages=tuple(before), token_ids=tuple(ids), tokens=len(ids)))
        return scripted_text.rest_of(whole, last.content)

    def _whole_reply(self, prompt: Prompt) -> list[str]:
        options = self._options
        if options.text is not None:
            return scripted_text.repeat(options.text, options.tokens)
        return scripted_text.derive(prompt, options.tokens or _DEFAULT_TOKENS, options.seed)

    def _check_open(self, error: type[EngineFailed | EngineUnavailable]) -> None:
        if not self._open:
            raise error(f"The engine of {self._limits.model} is not running.")

    def _breaks_on(self, prompt: Prompt) -> bool:
        """Whether ``fault`` is for the reply to this prompt."""
        only = self._options.fault_on
        return only is None or (bool(prompt.messages) and only in prompt.messages[-1].content)

    async def _break(self, sent: int) -> None:
        """Do what ``fault`` asks for; returns only when the engine is closed."""
        if self._fault == "exit":
            os._exit(_EXIT_STATUS)
        if self._fault == "error":
            raise EngineFailed(f"Scripted failure after {sent} tokens.")
        with self._hanging() as future:
            await future
        self._check_open(EngineFailed if sent else EngineUnavailable)

    @contextmanager
    def _hanging(self) -> Iterator[asyncio.Future[None]]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._hung.add(future)
        try:
            yield future
        finally:
            self._hung.discard(future)
