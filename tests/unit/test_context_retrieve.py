"""Ranking: what the words and the meaning of passages come to, whatever they are."""

from __future__ import annotations

import math
import string
import unicodedata
from collections import Counter
from datetime import UTC, datetime
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatsvc.context.passages import (
    LONGEST,
    PASSAGES_IN_CHUNK,
    Passage,
    Spoken,
    Words,
    chunked,
    cosines,
    pack,
    pack_vectors,
    passages_of,
    question_keys,
)
from chatsvc.context.retrieve import (
    AROUND,
    K1,
    B,
    best,
    fused,
    joined,
    stretched,
    words_scores,
)
from chatsvc.context.words import key, terms, terms_of_day

LONG_AGO = datetime(2023, 5, 8, tzinfo=UTC)
VOCABULARY = ["heron", "dentist", "lisbon", "train", "paint", "quarrel", "seven", "garden"]
sentences = st.lists(st.sampled_from(VOCABULARY), min_size=0, max_size=6).map(" ".join)
talks = st.lists(sentences, min_size=1, max_size=20)


def passage(number, text, said_at=LONG_AGO):
    return Passage(f"m{number:03}", 0, len(text), text, said_at)


def scores(talk, question, sizes=(1000,)):
    """The words of a talk, packed into chunks of the given sizes, over and over."""
    parts, lengths, found, start = [], [], {}, 0
    while start < len(talk):
        size = sizes[len(parts) % len(sizes)]
        chunk = [passage(start + n, text) for n, text in enumerate(talk[start : start + size])]
        parts.append(Words(pack(chunk).words))
        lengths.append(parts[-1].lengths)
        for number, postings in parts[-1].find(question_keys(question)):
            found.setdefault(number, []).append((start, postings))
        start += len(chunk)
    return words_scores(np.concatenate(lengths), [joined(postings) for postings in found.values()])


def bm25_by_the_book(documents, question):
    """The formula, word by word."""
    mean = sum(map(len, documents)) / len(documents)
    result = []
    for document in documents:
        total = 0.0
        for word in set(terms(question)):
            having = sum(word in other for other in documents)
            weight = math.log(1 + (len(documents) - having + 0.5) / (having + 0.5))
            count = document.count(word)
            norm = K1 * (1 - B + B * len(document) / mean) if mean else K1
            total += weight * count * (K1 + 1) / (count + norm)
        result.append(total)
    return result


@given(talks, sentences)
def test_passages_and_windows_are_scored_as_the_formula_says(talk, question):
    dated = [[*terms(text), *terms_of_day(LONG_AGO)] for text in talk]
    windows = [list(chain(*dated[max(0, n - AROUND) : n + AROUND + 1])) for n in range(len(talk))]
    found = scores(talk, question)
    assert found.alone == pytest.approx(bm25_by_the_book(dated, question), abs=1e-4)
    assert found.window == pytest.approx(bm25_by_the_book(windows, question), abs=1e-4)


@given(talks, sentences, st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_how_passages_are_packed_changes_nothing(talk, question, sizes):
    whole, cut = scores(talk, question), scores(talk, question, sizes)
    assert cut.alone == pytest.approx(whole.alone)
    assert cut.window == pytest.approx(whole.window)


@given(talks, sentences, st.data())
def test_scores_lie_between_nought_and_one(talk, question, data):
    numbers = st.floats(-1, 1, width=32) | st.just(math.nan)
    meaning = data.draw(st.lists(numbers, min_size=len(talk), max_size=len(talk)))
    words = scores(talk, question)
    for one in (fused(words, np.array(meaning, np.float32)), fused(words, None)):
        assert len(one) == len(talk)
        assert np.isfinite(one).all()
        assert 0 <= one.min() <= one.max() <= 1 + 1e-6


@given(talks, sentences)
def test_without_any_vector_words_alone_decide(talk, question):
    words = scores(talk, question)
    unknown = np.full(len(talk), np.nan, np.float32)
    assert fused(words, unknown) == pytest.approx(fused(words, None))


def test_a_passage_without_a_vector_counts_as_the_least_fitting():
    words = scores(["heron"] * 12, "lisbon")
    meaning = np.array([0.9, *[0.1] * 10, math.nan], np.float32)
    scored = fused(words, meaning)
    assert best(scored, 1) == [0]
    assert scored[11] == scored[10] == scored.min()


def test_a_rare_word_outweighs_a_common_one():
    talk = [*["garden heron"] * 5, "garden", *["garden train"] * 5, "garden quarrel", *["garden"] * 6]
    assert best(fused(scores(talk, "garden quarrel"), None), 1) == [11]


def test_an_answer_is_found_by_the_words_of_its_question():
    talk = ["hello", "train", "train", "what is your dentist called", "quillfeather", "seven", "garden", "train"]
    found = best(fused(scores(talk, "dentist"), None), 5)
    assert found[0] == 3
    assert 4 in found
    assert 0 not in found


@given(st.lists(st.floats(0, 1, width=32), max_size=30), st.integers(0, 40))
def test_the_best_are_in_order_and_none_that_does_not_fit_at_all(values, count):
    scored = np.array(values, np.float32)
    found = best(scored, count)
    assert len(found) == min(count, int((scored > 0).sum()))
    assert [values[n] for n in found] == sorted((v for v in values if v > 0), reverse=True)[:count]


@given(st.lists(st.floats(0, 1, width=32), max_size=30), st.integers(0, 40), st.floats(0, 1), st.floats(0, 1))
def test_a_greater_share_of_the_best_score_is_never_more_and_the_best_is_always_there(values, count, one, other):
    scored = np.array(values, np.float32)
    less, more = (best(scored, count, enough=enough) for enough in sorted((one, other), reverse=True))
    assert more[: len(less)] == less
    assert less[:1] == best(scored, count)[:1]
    assert all(scored[n] >= max(one, other) * scored.max() for n in less)


def test_of_equals_the_newest_comes_first():
    assert best(np.array([0.5, 1, 1, 0.5], np.float32), 4) == [2, 1, 3, 0]


@given(st.lists(st.floats(-100, 100, width=32), max_size=20))
def test_stretching_keeps_the_order(values):
    scored = stretched(np.array(values, np.float32))
    assert all(scored[a] <= scored[b] for a in range(len(values)) for b in range(len(values)) if values[a] <= values[b])


# Passages ---------------------------------------------------------------------------------------------------------


@given(st.text(max_size=4000))
def test_the_passages_of_a_message_are_its_text(text):
    parts = list(passages_of(Spoken("m", text, LONG_AGO)))
    assert all(text[part.start : part.end] == part.text for part in parts)
    covered = "".join(part.text for part in parts)
    assert "".join(covered.split()) == "".join(text.split())  # a passage without text is left out
    assert all(len(part.text) <= LONGEST for part in parts)


def test_long_messages_are_cut_where_something_ends():
    sentence = "This is a sentence of some length about herons and their habits. "
    parts = list(passages_of(Spoken("m", sentence * 100, LONG_AGO)))
    assert len(parts) > 5
    assert all(part.text.endswith(". ") for part in parts)


def test_the_passages_of_an_endless_message_can_be_numbered():
    parts = list(passages_of(Spoken("m", "word. " * 3_000_000, LONG_AGO)))
    assert len(parts) < 65_536
    assert parts[-1].end == 18_000_000


@given(st.lists(st.integers(0, 3000), max_size=40))
def test_chunks_hold_every_message_once_and_none_in_two(sizes):
    messages = [Spoken(f"m{n:03}", "word " * (size // 5), LONG_AGO) for n, size in enumerate(sizes)]
    chunks = list(chunked(messages))
    assert [last for last, _ in chunks][-1:] == [message.id for message in messages][-1:]
    ids = [part.message_id for _, parts in chunks for part in parts]
    assert ids == sorted(ids)
    assert all(not parts or parts[-1].message_id <= last for last, parts in chunks)
    assert all(len(parts) >= PASSAGES_IN_CHUNK for _, parts in chunks[:-1])
    for (last, _), (_, parts) in pairwise(chunks):
        assert all(part.message_id > last for part in parts)


@given(st.lists(st.lists(st.floats(-1, 1, width=32), min_size=8, max_size=8), min_size=1, max_size=12))
def test_vectors_come_back_a_hundredth_off_at_most(rows):
    vectors = np.array(rows, np.float32)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = vectors / np.where(lengths > 0, lengths, 1)
    packed = pack_vectors(vectors)
    for question in vectors:
        assert cosines(packed, len(rows), question) == pytest.approx(vectors @ question, abs=0.012)


def test_vectors_of_another_length_are_not_compared():
    packed = pack_vectors(np.eye(3, 8, dtype=np.float32))
    assert np.isnan(cosines(packed, 3, np.ones(16, np.float32))).all()
    assert np.isnan(cosines(None, 3, np.ones(8, np.float32))).all()


@pytest.mark.parametrize("talk", [[], [""], ["the of and"]])
def test_a_chunk_without_words_can_be_asked(talk):
    packed = pack([passage(n, text) for n, text in enumerate(talk)])
    assert list(Words(packed.words).find(question_keys("heron"))) == []
    assert len(Words(packed.words).lengths) == len(talk)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("May", [1, 2]),
        ("On May 8, what did I say?", [1]),
        ("on the 8th of may", [1]),
        ("08 May 2022", [1, 2]),
        ("May 1", [2]),
        ("March 4th", [0]),
    ],
)
def test_the_day_on_which_something_was_said_is_a_key(asked, found):
    days = datetime(2023, 3, 4, tzinfo=UTC), LONG_AGO, datetime(2022, 5, 1, tzinfo=UTC)
    words = Words(pack([passage(n, "I bought a boat", day) for n, day in enumerate(days)]).words)
    hits = Counter(int(place) for _, postings in words.find(question_keys(asked)) for place in postings.positions)
    assert [place for place, count in sorted(hits.items()) if count == max(hits.values())] == found


@pytest.mark.parametrize("asked", ["Question 8", "8", "the 8th one", "what were the 8 of them"])
def test_a_number_alone_is_not_the_day_on_which_something_was_said(asked):
    words = Words(pack([passage(0, "I bought a boat", LONG_AGO)]).words)
    assert list(words.find(question_keys(asked))) == []


# Words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        ("I painted the fence", "Who was painting fences?"),
        ("two stories", "a story"),
        ("CAFÉ", "cafe\u0301"),
        ("ｆｕｌｌ　ｗｉｄｔｈ", "full width"),
        ("Ὀδυσσεύς", "ΟΔΥΣΣΕΥΣ"),
        ("我的猫很可爱", "猫"),
        ("我想去北京旅游", "北京"),
        ("東京タワーに行きました", "東京タワー"),
        ("나는 서울에 살아요", "서울"),
        ("मुझे दिल्ली पसंद है", "दिल्ली"),
        ("ฉันชอบกรุงเทพ", "กรุงเทพ"),
        ("Straße", "STRASSE"),
        ("the file is named report_2023.final", "report 2023"),
    ],
)
def test_what_is_meant_the_same_is_compared_as_the_same(said, asked):
    assert set(terms(said)) & set(terms(asked))


def test_words_that_say_nothing_are_left_out():
    assert terms("Who was it that did this to you and why?") == []


@given(st.text())
def test_any_text_has_terms_that_fit_the_index(text):
    for term in terms(text):
        assert 0 < len(term) <= 64
        assert 0 <= key(term) < 2**32


@given(st.text(max_size=200))
def test_terms_do_not_depend_on_the_form_of_the_text(text):
    assert terms(unicodedata.normalize("NFD", text)) == terms(unicodedata.normalize("NFC", text))


@given(st.text(alphabet=string.printable, max_size=200))
def test_terms_do_not_depend_on_case(text):
    assert terms(text.upper()) == terms(text.lower())
