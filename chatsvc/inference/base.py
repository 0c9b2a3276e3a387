"""The contract of an engine. ``tests/contracts/test_engine.py`` is its suite, run over every backend.

What an implementer owes:

- **E1 deltas.** The concatenation of all chunk texts is the reply. No chunk ends inside a character; U+FFFD appears
  only where the model's bytes are truly no UTF-8.
- **E2 one end.** A generation that is read to its end yields exactly one chunk with a ``finish_reason``, the last.
- **E3 stop strings** end the text before themselves, also when split over tokens; nothing of them is ever yielded.
- **E4 max_tokens** is obeyed exactly; ``length`` is reported.
- **E5 abort.** Closing the iterator, or cancelling the task that reads it, at any stage (queued, prefilling, decoding),
  frees the sequence; afterwards ``load().running + load().waiting`` returns to what it was within one step. Nothing
  else aborts.
- **E6 counts.** ``prompt_tokens`` equals ``Prompt.tokens`` where the engine owns its tokenizer; ``cached_tokens`` is
  what the prefix cache served; the sum of ``output_tokens`` is the number of sampled tokens.
- **E7 side by side.** Any number of generations may run at once; ``run_id`` is unique per attempt and never reused.
- **E8 death is said.** When the engine dies or is not started, ``generate`` raises ``EngineUnavailable`` before its
  first chunk or ``EngineFailed`` after it; never a silent end. ``health`` tells within its timeout.
- **E9 no blocking.** No call blocks the event loop for more than a few milliseconds once ``start`` has returned.
- **E10 user text has no powers.** ``render`` never turns text of a message into special tokens of the template.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from chatsvc.errors import EngineUnavailable, MessageTooLong
from chatsvc.prompt import ChatMessage, Chunk, Prompt, Sampling

Progress = Callable[[str], None]
"""Told what a slow start is doing, one short line at a time, for a person to read."""


class ServerAway(EngineUnavailable):
    """The server that an engine speaks to is not there now, and may come by itself: nothing needs to be set right."""


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can take. Known once started."""

    model: str
    """The name the model is served under."""
    window: int
    """Most tokens of prompt and output together."""
    slots: int
    """Sequences that run at the same time."""
    kv_tokens: int | None = None
    """Tokens that the KV cache holds, where known: whole blocks."""
    kv_block: int = 1
    """Tokens of the KV cache that are given out together: a sequence takes whole blocks."""
    keeps_prefixes: bool = False
    """Whether what was computed of a prompt is kept for those that begin alike."""
    temperature: float = 0.7
    """What suits the model when a request names none."""
    reply_tokens: int = 4096
    """Most tokens of a reply when a request names none: about 3,000 English words, more than chat models write in one
    go."""

    @property
    def most(self) -> int:
        """Most tokens of prompt and output of one sequence: the window, or the KV cache where that holds less."""
        return self.window if self.kv_tokens is None else min(self.window, self.kv_tokens)


def room(prompt: Prompt, sampling: Sampling, limits: EngineLimits) -> int:
    """How many tokens may be generated: ``max_tokens``, or what the window leaves. At least 1.

    Raises ``MessageTooLong`` with the numbers when the prompt leaves no room in the window or in the KV cache: such a
    prompt could wait in the engine for ever.
    """
    most = limits.most
    if prompt.tokens >= most:
        raise MessageTooLong(
            f"The prompt has {prompt.tokens} tokens; the model takes at most {most} together with its reply.",
            prompt_tokens=prompt.tokens,
            window=most,
        )
    return max(1, min(sampling.max_tokens, most - prompt.tokens))


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is doing now."""

    running: int
    waiting: int
    kv_used: float | None = None
    """Share of the KV cache in use, 0–1, where known."""


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """``ready`` when new work would be answered. ``reason`` says what is wrong otherwise."""

    ready: bool
    reason: str | None = None


class Engine(abc.ABC):
    """See the module's docstring for what each method owes (E1–E10)."""

    @abc.abstractmethod
    async def start(self, progress: Progress) -> None:
        """Load everything; returns when ready. Raises ``EngineUnavailable`` with what to do when it cannot.

        ``ServerAway`` where it is enough to try again later, with a new engine.
        """

    @property
    @abc.abstractmethod
    def limits(self) -> EngineLimits:
        """Valid after ``start``; after ``ServerAway`` what is known without the server."""

    @abc.abstractmethod
    async def render(self, messages: Sequence[ChatMessage]) -> Prompt:
        """Apply the model's chat template, with the opening of the assistant's turn at the end, and tokenize.

        When the last message is the assistant's, its turn is left open behind its text: the reply goes on from there.
        """

    @abc.abstractmethod
    async def encode(self, text: str) -> Sequence[int]:
        """Plain text as token ids, no special tokens added. Without a tokenizer an estimate: only the length counts."""

    @abc.abstractmethod
    def generate(
        self, prompt: Prompt, sampling: Sampling, run_id: str, priority: int = 0
    ) -> AsyncGenerator[Chunk, None]:
        """Generate one reply. An async generator; use it in ``contextlib.aclosing``. Lower ``priority`` first."""

    @abc.abstractmethod
    def load(self) -> EngineLoad:
        """Cheap; callable at any time after ``start``."""

    @abc.abstractmethod
    async def health(self) -> EngineHealth:
        """Answers within two seconds, also when the engine hangs."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Stop everything that was started. Idempotent; running generations end with ``EngineFailed``."""
