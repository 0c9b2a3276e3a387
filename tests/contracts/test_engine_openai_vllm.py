"""``openai:`` against a server that others wrote: vLLM's own."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from contracts.engines import BACKENDS, Talk, text_of, tokens_of
from server import free_port

from chatsvc.conversation import Role
from chatsvc.inference.embedded_model import unpack_embedded_model
from chatsvc.inference.factory import create_engine
from chatsvc.prompt import ChatMessage, Sampling

pytestmark = [*next(backend.marks for backend in BACKENDS if backend.name == "vllm"), pytest.mark.timeout(300)]

STORY = "Tell me a long story about a lighthouse, with many details."


@asynccontextmanager
async def vllm_server(data_dir: Path) -> AsyncIterator[str]:
    """vLLM's OpenAI server on the embedded model; yields its base URL once it serves."""
    model = await unpack_embedded_model(data_dir, lambda _line: None)
    port = free_port()
    options = "--served-model-name far --dtype bfloat16 --enforce-eager --block-size 32 --max-num-seqs 8"
    sizes = f"--kv-cache-memory-bytes {1 << 29} --max-model-len 2048 --enable-prompt-tokens-details"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *(*options.split(), *sizes.split(), "--host", "127.0.0.1", "--port", str(port)),
        env={**os.environ, "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"},
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(200), httpx.AsyncClient() as client:
            while not await _serves(client, f"http://127.0.0.1:{port}/health"):
                assert process.returncode is None
                await asyncio.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        await process.wait()


async def _serves(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == 200
    except httpx.TransportError:
        return False


async def running_there(base_url: str) -> float:
    """How many requests the server says it runs or keeps waiting."""
    async with httpx.AsyncClient() as client:
        metrics = (await client.get(base_url.removesuffix("/v1") + "/metrics")).text
    found = re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} ([0-9.]+)$", metrics, re.MULTILINE)
    assert len(found) >= 2
    return sum(map(float, found))


async def test_replies_counts_stops_and_aborts_with_vllms_own_server(request: pytest.FixtureRequest):
    async with vllm_server(request.config.cache.mkdir("engines")) as base_url:
        engine = create_engine(f"openai:{base_url}#far", name="m", data_dir=Path("/nonexistent"))
        await engine.start(lambda _line: None)
        assert engine.limits.window == 2048
        talk = Talk(engine)

        chunks = await talk.ask("What is the capital of France?", max_tokens=40)
        assert text_of(chunks) == "The capital of France is Paris."
        assert chunks[-1].finish_reason == "stop"

        whole = await talk.ask(STORY, max_tokens=30)
        assert tokens_of(whole) == 30
        assert whole[-1].finish_reason == "length"
        stop = text_of(whole)[20:26]
        stopped = await talk.ask(STORY, max_tokens=30, stop=(stop,))
        assert text_of(stopped) == text_of(whole).partition(stop)[0]
        assert stopped[-1].finish_reason == "stop"

        long_question = STORY * 10
        await talk.ask(long_question, max_tokens=2)
        again = await talk.ask(long_question, max_tokens=2)
        prompt = await engine.render([ChatMessage(Role.USER, long_question)])
        assert 64 <= again[-1].cached_tokens < again[-1].prompt_tokens <= prompt.tokens

        question = await engine.render([ChatMessage(Role.USER, STORY)])
        async with aclosing(engine.generate(question, Sampling(max_tokens=1500), talk.run_id())) as chunks:
            await anext(chunks)
            assert await running_there(base_url) == 1
        async with asyncio.timeout(30):
            while await running_there(base_url):
                # Its metrics move with its steps; a short request makes it take some.
                await talk.ask("hi", max_tokens=2)
        await engine.aclose()
