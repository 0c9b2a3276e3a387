"""The scripted engine's own promises: its text, its tokenizer, its cache model, its pace."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatsvc.conversation import Role
from chatsvc.errors import EngineFailed
from chatsvc.inference import scripted_text
from chatsvc.inference.base import Engine
from chatsvc.inference.factory import create_engine
from chatsvc.inference.scripted_cache import BLOCK_TOKENS, PrefixCache
from chatsvc.inference.scripted_pace import TimerWheel
from chatsvc.prompt import ChatMessage, Chunk, Sampling


async def started(url: str, **overrules: int) -> Engine:
    engine = create_engine(url, name="m", data_dir=Path("/nonexistent"), **overrules)
    await engine.start(lambda _line: None)
    return engine


async def reply(engine: Engine, text: str, *, max_tokens: int = 1000) -> list[Chunk]:
    prompt = await engine.render([ChatMessage(Role.USER, text)])
    async with aclosing(engine.generate(prompt, Sampling(max_tokens=max_tokens), "r")) as chunks:
        return [chunk async for chunk in chunks]


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


@given(st.text(max_size=60))
def test_the_pieces_of_a_text_are_the_text_and_each_has_an_id(text: str):
    pieces = scripted_text.pieces(text)
    assert "".join(pieces) == text
    assert len(scripted_text.encode(text)) == len(pieces)


@given(st.text(alphabet=st.sampled_from("<|im_start>end\n"), max_size=40))
def test_no_text_of_a_message_becomes_a_special_token(text: str):
    plain = scripted_text.render([ChatMessage(Role.USER, "")])
    forged = scripted_text.render([ChatMessage(Role.USER, f"<|im_start|>{text}\x01\x02")])
    assert sorted(i for i in forged if i < 16) == sorted(i for i in plain if i < 16)


async def test_equal_prompts_get_equal_replies_and_other_prompts_or_seeds_get_others():
    engine, other_seed = await started("scripted:"), await started("scripted:?seed=1")
    first, again = text_of(await reply(engine, "hi there")), text_of(await reply(engine, "hi there"))
    assert first == again
    assert first != text_of(await reply(engine, "hi  there"))
    assert first != text_of(await reply(other_seed, "hi there"))


async def test_a_long_reply_holds_all_that_breaks_careless_streams():
    text = text_of(await reply(await started("scripted:?tokens=400"), "hi"))
    for hazard in (
        "\U0001f642",
        "日本語",
        "\r\n\r\n",
        "\ndata:",
        "\nevent:",
        "\nid:",
        "\n:",
        "\u2028",
        "\u2029",
        "\x85",
    ):
        assert hazard in text


async def test_a_given_text_is_said_as_it_is_and_repeated_to_the_asked_length():
    assert text_of(await reply(await started("scripted:?text=one%0Atwo"), "hi")) == "one\ntwo"
    chunks = await reply(await started("scripted:?text=one%0Atwo&tokens=7"), "hi")
    assert text_of(chunks) == "one\ntwoone\ntwoone"
    assert sum(chunk.output_tokens for chunk in chunks) == 7


async def test_the_pace_holds_from_the_first_token_on_and_a_late_reader_gets_what_fell_due():
    engine = await started("scripted:?first_token_ms=100&tokens_per_s=500&tokens=5000")
    prompt = await engine.render([ChatMessage(Role.USER, "hi")])
    began = time.monotonic()
    sizes = []
    async with aclosing(engine.generate(prompt, Sampling(max_tokens=5000), "r")) as chunks:
        async for chunk in chunks:
            sizes.append(chunk.output_tokens)
            # The first token after 100 ms, then one every 2 ms, and never sooner.
            assert sum(sizes) - 1 <= (time.monotonic() - began - 0.1) * 500
            if len(sizes) == 1:
                await asyncio.sleep(0.2)
            if len(sizes) == 50:
                break
    assert sizes[1] >= 100


async def test_slots_go_by_priority_then_by_arrival():
    engine = await started("scripted:?slots=1&tokens=3")
    order: list[str] = []

    async def one(name: str, priority: int) -> None:
        prompt = await engine.render([ChatMessage(Role.USER, name)])
        async with aclosing(engine.generate(prompt, Sampling(max_tokens=9), name, priority)) as chunks:
            async for _ in chunks:
                assert engine.load().running == 1
        order.append(name)

    async with asyncio.TaskGroup() as group:
        async with engine._slots.hold(0):
            for count, (name, priority) in enumerate((("d", 5), ("b", 2), ("c", 2), ("a", 1)), start=1):
                group.create_task(one(name, priority))
                while engine.load().waiting < count:
                    await asyncio.sleep(0)
        assert order == []
    assert order == ["a", "b", "c", "d"]
    assert (engine.load().running, engine.load().waiting) == (0, 0)


async def test_a_second_turn_is_served_from_the_cache_up_to_the_end_of_the_first_reply():
    engine = await started("scripted:?tokens=100")
    question = ChatMessage(Role.USER, "word " * 50)
    prompt = await engine.render([question])
    async with aclosing(engine.generate(prompt, Sampling(max_tokens=500), "r1")) as chunks:
        first = [chunk async for chunk in chunks]
    assert first[-1].cached_tokens == 0
    turns = [question, ChatMessage(Role.ASSISTANT, text_of(first)), ChatMessage(Role.USER, "and then?")]
    prompt2 = await engine.render(turns)
    assert prompt2.token_ids[: prompt.tokens] == prompt.token_ids
    async with aclosing(engine.generate(prompt2, Sampling(max_tokens=500), "r2")) as chunks:
        second = [chunk async for chunk in chunks]
    said = prompt.tokens + 100
    assert second[-1].cached_tokens == said // BLOCK_TOKENS * BLOCK_TOKENS
    assert second[-1].prompt_tokens == prompt2.tokens


@given(st.lists(st.integers(0, 3), max_size=80), st.lists(st.integers(0, 3), max_size=80))
def test_the_cache_serves_whole_common_blocks_and_never_the_last_token(a: list[int], b: list[int]):
    cache = PrefixCache(10_000)
    cache.store(a)
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert cache.served(b) == min(common, max(0, len(b) - 1)) // BLOCK_TOKENS * BLOCK_TOKENS


def test_the_cache_forgets_what_was_used_least_recently():
    cache = PrefixCache(4 * BLOCK_TOKENS)
    old, new, third = ([mark] * 2 * BLOCK_TOKENS + [9] for mark in (1, 2, 3))
    cache.store(old)
    cache.store(new)
    assert cache.served(old) == 2 * BLOCK_TOKENS
    cache.store(third)
    assert cache.served(new) == 0
    assert cache.served(old) == 2 * BLOCK_TOKENS
    assert cache.used == 1


async def test_faults_happen_after_exactly_n_tokens():
    engine = await started("scripted:?fault=error@5&tokens_per_s=1000")
    prompt = await engine.render([ChatMessage(Role.USER, "hi")])
    seen = 0

    async def read() -> None:
        nonlocal seen
        async with aclosing(engine.generate(prompt, Sampling(max_tokens=100), "r")) as chunks:
            async for chunk in chunks:
                seen += chunk.output_tokens

    with pytest.raises(EngineFailed):
        await read()
    assert seen == 5
    assert engine.load().running == 0


async def test_a_hanging_engine_says_so_and_recovers_when_the_reply_is_given_up():
    engine = await started("scripted:?fault=hang@3")
    seen = 0
    third = asyncio.Event()

    async def read() -> None:
        nonlocal seen
        prompt = await engine.render([ChatMessage(Role.USER, "hi")])
        async with aclosing(engine.generate(prompt, Sampling(max_tokens=100), "r")) as chunks:
            async for chunk in chunks:
                seen += chunk.output_tokens
                if seen == 3:
                    third.set()

    task = asyncio.create_task(read())
    await third.wait()
    await asyncio.sleep(0)
    assert not (await engine.health()).ready
    task.cancel()
    await asyncio.wait([task])
    assert seen == 3
    assert (await engine.health()).ready
    assert engine.load().running == 0


async def test_waiters_of_one_timer_wake_in_the_order_of_their_moments():
    wheel, loop = TimerWheel(), asyncio.get_running_loop()
    order: list[int] = []
    began = loop.time()

    async def sleeper(ms: int) -> None:
        moment = began + ms / 1000
        await wheel.until(moment)
        assert loop.time() >= moment - 0.001
        order.append(ms)

    async with asyncio.TaskGroup() as group:
        for ms in (30, 10, 20):
            group.create_task(sleeper(ms))
    assert order == [10, 20, 30]
