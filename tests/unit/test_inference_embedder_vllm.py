"""What becomes of the core of a ``vllm:`` embedder when calls fail, with a stand-in for the core."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from chatsvc.errors import EngineUnavailable
from chatsvc.inference import embedder_vllm
from chatsvc.inference.embedder import VllmEmbedderOptions
from chatsvc.inference.embedder_vllm import VllmEmbedder


class CoreDied(Exception):
    """As vLLM's: of no kind that the language knows."""


class Core:
    """Answers, refuses a text, dies or hangs, as the text says."""

    def __init__(self):
        self.errored = False
        self.shut_down_in = []

    async def answer(self, text):
        if text == "hang":
            await asyncio.Event().wait()
        if text == "refuse":
            raise ValueError("what a text")
        if text == "die" or self.errored:
            self.errored = True
            raise CoreDied("dead")
        return np.ones(3, np.float32)

    def shutdown(self, timeout):
        self.shut_down_in.append(threading.get_ident())


@pytest.fixture
def cores(monkeypatch):
    started = []

    def start(self):
        started.append(Core())
        return started[-1]

    async def one(self, core, text):
        return await core.answer(text)

    monkeypatch.setattr(VllmEmbedder, "_start", start)
    monkeypatch.setattr(VllmEmbedder, "_one", one)
    return started


@pytest.fixture
def embedder():
    return VllmEmbedder("mine", VllmEmbedderOptions())


@pytest.mark.parametrize("what", ["die", "hang"])
async def test_a_core_that_is_of_no_use_any_more_is_ended_off_the_loop_and_the_next_call_starts_another(
    cores, embedder, monkeypatch, what
):
    with monkeypatch.context() as patch:
        patch.setattr(embedder_vllm, "_ANSWER_S", 0.05)
        with pytest.raises(EngineUnavailable, match="mine"):
            await embedder.embed([what])
    assert len(cores[0].shut_down_in) == 1
    assert cores[0].shut_down_in != [threading.get_ident()]
    assert (await embedder.embed(["a", "b"])).shape == (2, 3)
    assert len(cores) == 2
    await embedder.aclose()


async def test_a_text_that_is_refused_harms_no_other(cores, embedder):
    with pytest.raises(EngineUnavailable):
        await embedder.embed(["a", "refuse"])
    assert (await embedder.embed(["a"])).shape == (1, 3)
    assert len(cores) == 1
    assert not cores[0].shut_down_in
    await embedder.aclose()


async def test_of_calls_that_fail_together_none_ends_the_core_that_was_started_since(cores, embedder):
    await embedder.embed(["a"])
    failed = await asyncio.gather(*(embedder.embed(["die"]) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(error, EngineUnavailable) for error in failed)
    await embedder.embed(["a"])
    await embedder._give_up(cores[0])  # one that failed then and is only told now
    assert (await embedder.embed(["a"])).shape == (1, 3)
    assert [len(core.shut_down_in) for core in cores] == [1, 0]
    await embedder.aclose()
    assert len(cores[1].shut_down_in) == 1


async def test_what_a_library_raises_while_it_loads_is_said(monkeypatch, embedder):
    def start(self):
        raise CoreDied("no such weights")

    monkeypatch.setattr(VllmEmbedder, "_start", start)
    with pytest.raises(EngineUnavailable, match="cannot be loaded: no such weights"):
        await embedder.embed(["a"])
