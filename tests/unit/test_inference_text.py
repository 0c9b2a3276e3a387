"""Detokenising and stop strings, piece by piece (E1, E3)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from chatsvc.inference.text import Detokenizer, StopStrings

TEXTS = st.text(
    alphabet=st.one_of(
        st.characters(exclude_categories=("Cs",), exclude_characters="\ufffd"),
        st.sampled_from("é👩\u200d💻日本語\u0301\r\n नमस्ते\u2028"),
    ),
    max_size=40,
)


def decode_bytes(ids: Sequence[int]) -> str:
    """A byte-level vocabulary in its plainest form: one token a byte."""
    return bytes(ids).decode("utf-8", "replace")


def decode_words(ids: Sequence[int]) -> str:
    """A decoder that drops the space before the first word, as sentencepiece does; 0 is special and says nothing."""
    return "".join(f" w{i}" for i in ids if i).removeprefix(" ")


def cut(data: Sequence[int], places: Sequence[int]) -> list[Sequence[int]]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(bounds)]


@given(TEXTS, st.lists(st.integers(0, 1000)))
@example("👩\u200d💻", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
@example("é日🙂", [1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_text_cut_at_any_bytes_comes_out_whole_and_no_piece_holds_half_a_character(text: str, places: list[int]):
    detokenizer = Detokenizer(decode_bytes)
    pieces = [detokenizer.feed(part) for part in cut(text.encode(), places)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.binary(max_size=30))
def test_bytes_that_are_no_utf8_become_replacement_characters_and_block_nothing(junk: bytes):
    detokenizer = Detokenizer(decode_bytes)
    out = "".join(detokenizer.feed([byte]) for byte in junk + b"end")
    assert out == (junk + b"end").decode("utf-8", "replace")


def test_half_a_character_at_the_end_is_never_said():
    detokenizer = Detokenizer(decode_bytes)
    assert "".join(detokenizer.feed([byte]) for byte in "a🙂".encode()[:-1]) == "a"


@given(st.lists(st.integers(0, 9), max_size=20), st.lists(st.integers(0, 100)))
def test_spaces_between_words_survive_a_decoder_that_drops_the_first(ids: list[int], places: list[int]):
    detokenizer = Detokenizer(decode_words)
    assert "".join(detokenizer.feed(part) for part in cut(ids, places)) == decode_words(ids)


def run_stops(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, bool]:
    machine = StopStrings(stops)
    out = "".join([machine.feed(piece) for piece in pieces]) + machine.flush()
    return out, machine.stopped


def expected_stop(stops: Sequence[str], text: str) -> tuple[str, bool]:
    """The law, read off character by character."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(
    st.lists(st.text(alphabet="abc\n🙂", min_size=1, max_size=4), max_size=3),
    st.text(alphabet="abc\n🙂", max_size=30),
    st.lists(st.integers(0, 100)),
)
def test_the_text_ends_before_the_first_stop_string_however_it_is_cut(stops: list[str], text: str, places: list[int]):
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    assert run_stops(stops, pieces) == expected_stop(stops, text)


def test_what_begins_like_a_stop_string_waits_and_then_goes_out():
    machine = StopStrings(["</end>"])
    assert machine.feed("hello </e") == "hello "
    assert machine.feed("m>") == "</em>"
    assert machine.feed(" </end> more") == " "
    assert machine.stopped
    assert machine.feed("again") == ""


def test_without_stop_strings_nothing_waits():
    machine = StopStrings([""])
    assert machine.feed("x") == "x"
