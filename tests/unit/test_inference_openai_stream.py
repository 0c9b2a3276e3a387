"""Bytes from another server become chunks, however they are cut, and an end that was not said is no end."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chatsvc.errors import EngineFailed
from chatsvc.inference.openai_stream import Completion, estimate_tokens, event_data
from chatsvc.prompt import Chunk


def read_events(pieces: Sequence[bytes]) -> list[bytes]:
    async def stream() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def read() -> list[bytes]:
        return [data async for data in event_data(stream())]

    return asyncio.run(read())


def said(text: str, reason: str | None = None) -> bytes:
    return json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]}).encode()


def used(prompt: int, output: int, cached: int | None = None) -> bytes:
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": output}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return json.dumps({"choices": [], "usage": usage}).encode()


def chunks_of(*events: bytes, stop: tuple[str, ...] = ()) -> list[Chunk]:
    completion = Completion(stop)
    chunks = [chunk for event in events for chunk in completion.feed(event)]
    return [*chunks, *completion.close()]


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n")), max_size=4),
    st.lists(st.sampled_from(["\n", "\r\n"]), min_size=1),
    st.lists(st.integers(0, 1000)),
)
@example(["a\u2028b\u2029c\x85d"], ["\n"], [9, 10, 11])
def test_events_come_out_whole_however_the_bytes_are_cut(texts: list[str], ends: list[str], places: list[int]):
    end = itertools.cycle(ends)
    wire = "".join(f": comment{next(end)}data: {text}{next(end)}{next(end)}" for text in texts).encode()
    bounds = [0, *sorted(place % (len(wire) + 1) for place in places), len(wire)]
    assert read_events([wire[a:b] for a, b in itertools.pairwise(bounds)]) == [text.encode() for text in texts]


def test_data_on_several_lines_is_one_event_and_an_unfinished_event_is_none():
    assert read_events([b"event: x\ndata: 1\ndata:2\n\ndata: cut off"]) == [b"1\n2"]


def test_the_end_waits_for_the_counts_and_carries_the_rest_of_them():
    chunks = chunks_of(said("Hel"), said("lo"), said("", "stop"), used(12, 7, 5), b"[DONE]")
    assert [chunk.text for chunk in chunks] == ["Hel", "lo", ""]
    assert [chunk.output_tokens for chunk in chunks] == [1, 1, 5]
    last = chunks[-1]
    assert (last.finish_reason, last.prompt_tokens, last.cached_tokens) == ("stop", 12, 5)


def test_a_server_that_counts_nothing_still_ends_properly():
    chunks = chunks_of(said("a"), said("b", "length"))
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "length"]
    assert sum(chunk.output_tokens for chunk in chunks) == 2


@pytest.mark.parametrize("events", [[said("a")], [said("a"), b"[DONE]"], [said("a", "content_filter")], []])
def test_an_end_without_a_reason_that_we_know_is_a_failure(events: list[bytes]):
    with pytest.raises(EngineFailed, match="early"):
        chunks_of(*events)


@pytest.mark.parametrize("event", [b"no json", b"[1]", b'{"error": {"message": "overloaded"}}'])
def test_an_event_that_is_none_is_a_failure_and_is_not_repeated(event: bytes):
    with pytest.raises(EngineFailed) as caught:
        chunks_of(said("a"), event)
    assert "overloaded" not in caught.value.detail


@given(st.text(max_size=8), st.lists(st.integers(0, 100)))
@example("🙂🙂", [1, 3])
def test_a_text_cut_between_the_halves_of_a_character_is_joined(text: str, places: list[int]):
    units = text.encode("utf-16-le", "surrogatepass")
    bounds = [0, *sorted(place % (len(units) // 2 + 1) * 2 for place in places), len(units)]
    parts = [units[a:b].decode("utf-16-le", "surrogatepass") for a, b in itertools.pairwise(bounds)]
    chunks = chunks_of(*(said(part) for part in parts), said("", "stop"))
    assert "".join(chunk.text for chunk in chunks) == text
    for chunk in chunks:
        chunk.text.encode("utf-8")


def test_a_stop_string_that_the_server_let_pass_ends_the_reply_here():
    chunks = chunks_of(said("one ST"), said("OP two"), stop=("STOP",))
    assert "".join(chunk.text for chunk in chunks) == "one "
    assert chunks[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("text", "tokens"),
    # Counted with the tokenizer of SmolLM2.
    [
        ("What is the capital of France?", 7),
        ("日本語で。", 9),
        ("नमस्ते", 6),
        ("👩\u200d💻", 8),
        ("{}[]();:,.!?", 8),
        ("", 0),
    ],
)
def test_the_estimate_is_on_the_safe_side(text: str, tokens: int):
    assert tokens <= estimate_tokens(text)
