"""Whether a message needs anything old: by its words, by what was said lately, and by meaning where it is known."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatsvc.context import need as need_module
from chatsvc.context.need import LATELY_CHARS, Need, closeness, lately, need
from chatsvc.context.passages import Passage, Words, pack, question_keys
from chatsvc.conversation import Message, Role
from chatsvc.run import RunStatus

LONG_AGO = datetime(2023, 5, 8, tzinfo=UTC)
VOCABULARY = ["heron", "dentist", "lisbon", "train", "paint", "quarrel", "seven", "garden"]
sentences = st.lists(st.sampled_from(VOCABULARY), min_size=0, max_size=6).map(" ".join)
talks = st.lists(sentences, min_size=1, max_size=20)
SMALL_TALK = [
    *("I looked at the weather this morning.", "People talk about the weather all the time.", "So we had some rain."),
    *("I read about a football match.", "It was a long match in the evening.", "We talked for an hour about a film."),
]


def needed(talk, question, said="", cosines=None, unrelated=None):
    """What a message needs of a talk."""
    packed = pack([Passage(f"m{n}", 0, len(text), text, LONG_AGO) for n, text in enumerate(talk)])
    words, wanted = Words(packed.words), question_keys(question)
    meaning = None if cosines is None else np.array(cosines, np.float32)
    just_said = np.isin(wanted, question_keys(said))
    return need(words.lengths, dict(words.find(wanted)), just_said, meaning, unrelated=unrelated)


def turn(number, question, answer):
    return [
        Message(
            id=f"m{number}_{role.value}",
            conversation_id="c",
            parent_id=None,
            role=role,
            content=text,
            status=RunStatus.COMPLETE,
            created_at=LONG_AGO,
            pinned=False,
        )
        for role, text in ((Role.USER, question), (Role.ASSISTANT, answer))
    ]


@given(talks, sentences, sentences, st.data())
def test_what_tells_lies_between_nought_and_one(talk, question, said, data):
    numbers = st.floats(-1, 1, width=32)
    meaning = data.draw(st.none() | st.lists(numbers, min_size=len(talk), max_size=len(talk)))
    found = needed(talk, question, said, meaning, data.draw(st.none() | st.floats(0, 1)))
    assert 0 <= found.share <= 1 + 1e-9
    assert 0 <= found.lately <= 1 + 1e-9
    assert (found.closeness is None) == (meaning is None)
    assert found.closeness is None or 0 <= found.closeness <= 1 + 1e-6


@given(talks, sentences, sentences, sentences)
def test_what_was_said_lately_never_makes_anything_old_more_needed(talk, question, said, more):
    for cosines in (None, [0.5] * len(talk)):
        less = needed(talk, question, f"{said} {more}", cosines)
        assert less.share == needed(talk, question, said, cosines).share
        assert less.lately >= needed(talk, question, said, cosines).lately
        assert not less.met or needed(talk, question, said, cosines).met


@given(st.floats(0, 1), st.floats(0, 1), st.none() | st.floats(0, 1), st.floats(0, 2), st.floats(0, 2))
def test_a_higher_bar_never_recalls_more(share, said, close, one, other):
    found = Need(share, said, close)
    seen = []
    for bar in sorted((one, other)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(need_module, "NEEDED", bar)
            patch.setattr(need_module, "NEEDED_BY_WORDS", bar)
            seen.append((found.met, found.enough))
    (low_met, low_enough), (high_met, high_enough) = seen
    assert low_met or not high_met
    assert 0 < low_enough <= high_enough < 1


@given(st.floats(0, 1), st.floats(0, 1), st.none() | st.floats(0, 1), st.integers(0, 2000), st.integers(0, 2000))
def test_less_room_never_recalls_more(share, said, close, one, other):
    least, most = (Need(share, said, close, room) for room in sorted((one, other)))
    assert most.met or not least.met
    assert most.enough <= least.enough


@given(st.floats(0, 1), st.floats(0, 1), st.none() | st.floats(0, 1), st.integers(0, 2000))
def test_what_words_alone_leave_closed_no_closeness_makes_needed(share, said, close, room):
    found = Need(share, said, close, room)
    told = Need(share, said, None, room)
    assert told.is_open or not found.met
    assert found.is_open or not found.met


def test_meaning_alone_may_be_enough_where_there_is_room_and_more_of_it_counts_no_more():
    assert Need(0, 0, 0.55).met
    assert not Need(0, 0, 0.54).met
    assert not Need(0, 0, 1.0, 500).met
    assert not Need(0, 0.1, 1.0).met
    assert [Need(0, said, None).is_open for said in (0, 0.01)] == [True, False]
    assert [Need(share, 0, None, 500).is_open for share in (0.09, 0.11)] == [False, True]


def test_in_half_the_room_more_has_to_be_needed_and_beyond_the_usual_room_no_less():
    assert [Need(0.3, 0, 0.3, room).met for room in (4000, 1000, 800, 500)] == [True, True, True, False]
    assert [Need(0.1, 0, None, room).met for room in (4000, 1000, 900, 500)] == [True, True, True, False]
    assert not Need(0.2, 0, 0.3, 4000).met
    assert not Need(0.05, 0, None, 4000).met


def test_what_is_plainly_needed_is_recalled_further_from_the_best_than_what_hardly_is():
    assert [round(Need(share, 0, 0.3).enough, 3) for share in (0.25, 0.35, 0.45, 1)] == [0.8, 0.65, 0.5, 0.5]
    assert [round(Need(share, 0, None).enough, 3) for share in (0.08, 0.18, 1)] == [0.8, 0.55, 0.3]


@given(st.integers(0, 300), st.sampled_from([None, 0.0, 0.2, -0.5, math.nan]), st.sampled_from([None, 0.35]))
def test_a_word_that_one_old_passage_has_is_always_enough(others, cosine, unrelated):
    talk = [*(SMALL_TALK * (others // 6 + 1))[:others], "Our parrot is called Bismuth.", "That is a fine name."]
    cosines = None if cosine is None else [cosine] * len(talk)
    assert needed(talk, "And the parrot?", "The weather is fine.", cosines, unrelated).met


@given(talks, st.lists(st.sampled_from(["xylophone", "marzipan", "fjord"]), max_size=4).map(" ".join))
def test_by_words_nothing_is_needed_whose_words_no_passage_has(talk, question):
    assert not needed(talk, question).met


@pytest.mark.parametrize("said", ["Go on, please!", "Thanks, great", "continue"])
def test_a_passage_that_says_only_what_the_message_says_is_no_reason(said):
    talk = [*SMALL_TALK * 20, said]
    same = [*[0.1] * (len(talk) - 1), 1.0]
    assert not needed(talk, said, cosines=same).met
    assert not needed(talk, said).met
    assert needed([*talk[:-1], f"{said} with the story of the parrot"], said, cosines=same).met


def test_a_remark_of_the_same_kind_is_little_more_than_half_the_reason_that_it_is_with_a_story_behind_it():
    question = "Wow, that bowl looks gorgeous! Where did you find it?"
    remark = "Wow, that looks gorgeous! Where did you find the vase?"
    alone, told = (
        needed([*SMALL_TALK * 10, text], question).share for text in (remark, f"{remark} {' '.join(VOCABULARY * 5)}")
    )
    assert 0.5 * told < alone < 0.6 * told


@given(talks, sentences, st.lists(st.sampled_from(["xylophone", "marzipan", "fjord"]), max_size=60).map(" ".join))
def test_more_that_an_old_passage_tells_never_makes_it_less_needed(talk, question, told):
    assert needed([f"{talk[0]} {told}", *talk[1:]], question).share >= needed(talk, question).share - 1e-6


def test_words_that_are_everywhere_are_no_reason():
    talk = [f"I think that the {word} is fine, and what do you think?" for word in VOCABULARY * 10]
    assert not needed(talk, "What do you think?").met
    assert needed([*talk, "I think the parrot is ill."], "What do you think of the parrot?").met


def test_a_message_that_goes_on_from_the_last_subject_needs_nothing_and_one_that_leaves_it_does():
    talk = [*SMALL_TALK * 20, "The paint on the garden fence is peeling again."]
    said = "You could sand the fence first, then two coats of paint. The garden side needs more."
    assert not needed(talk, "Are two coats of paint enough for the fence?", said).met
    assert needed(talk, "Are two coats of paint enough for the fence?", "The train was late.").met


@pytest.mark.parametrize(
    ("told", "question"),
    [
        ("我的牙医叫李华，她在里斯本工作。", "我的牙医叫什么名字？"),
        ("Мой зубной врач живёт в Лиссабоне.", "Где живёт мой зубной врач?"),
        ("मेरे तोते का नाम बिस्मथ है।", "मेरे तोते का नाम क्या है?"),
        ("طبيب أسناني يعيش في لشبونة", "أين يعيش طبيب أسناني؟"),
    ],
)
def test_it_works_by_words_in_any_language(told, question):
    talk = [*SMALL_TALK * 10, told]
    assert needed(talk, question).met
    at_length = f"{told} {' '.join(VOCABULARY * 5)}"
    assert needed(talk, question, told).lately == pytest.approx(needed([*talk[:-1], at_length], question).share)
    assert not needed(SMALL_TALK * 10, question).met


def test_close_is_what_is_closer_than_usual():
    every = np.ones(100, np.bool_)
    alike = np.full(100, 0.6, np.float32)
    assert closeness(alike, every, unrelated=None) < 0.2
    alike[7] = 0.95
    assert closeness(alike, every, unrelated=None) > 0.8
    assert closeness(alike, np.arange(100) != 7, unrelated=None) < 0.2
    assert closeness(np.full(2, 0.8, np.float32), every[:2], unrelated=None) > 0.7  # two tell nothing of what is usual
    assert closeness(np.full(2, 0.8, np.float32), every[:2], unrelated=0.81) == 0
    alike[3] = math.nan
    assert closeness(alike, every, unrelated=None) is None
    assert closeness(np.zeros(0, np.float32), every[:0], unrelated=None) is None


# What was said lately ---------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.text(max_size=900), st.text(max_size=900)), max_size=6), st.text(max_size=40))
def test_what_was_said_last_is_the_end_of_what_is_shown(said, question):
    shown = [turn(n, *texts) for n, texts in enumerate(said)]
    found = lately(reversed(shown), question)
    assert len(found) <= 2 * LATELY_CHARS + 12  # the ends of lines between them
    whole = "\n".join(message.content for part in shown for message in part)
    if not question_keys(question).size:
        assert len(found) >= min(len(whole), LATELY_CHARS)
        assert len(whole) > LATELY_CHARS or found == whole


def test_a_long_reply_leaves_room_for_what_the_user_wrote_before_it():
    found = lately([turn(1, "And the garden?", "word " * 999), turn(0, "The train to Lisbon.", "Yes.")], "Go on.")
    assert found.startswith("The train to Lisbon.\nAnd the garden?\n")
    assert len(found) < LATELY_CHARS + 40


def test_who_asks_again_has_not_found_it_in_what_was_said_lately():
    old = turn(0, "What is on today?", "The train to Lisbon.")
    asked = turn(1, "What is my dentist called?", "I do not know your dentist.")
    assert (
        lately([asked, old], "The name of my dentist, how is she called?") == "What is on today?\nThe train to Lisbon."
    )
    assert "dentist" in lately([asked, old], "Then find me the address of her practice.")
    assert "dentist" in lately([asked, old], "")
    assert "dentist" in lately([turn(1, f"{'Some words of another kind. ' * 9}My dentist!", "Well.")], "My dentist?")
    long = " ".join(f"word{number}" for number in range(LATELY_CHARS))
    assert lately([turn(1, long, "Too much for me."), old], long) == "What is on today?\nThe train to Lisbon."
