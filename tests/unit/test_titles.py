"""A conversation is called by the first words of its first message until somebody names it."""

import pytest

from chatsvc.scheduler.request import TITLE_CHARS, title_from


def test_a_short_message_is_its_own_title_as_it_was_written():
    assert title_from("Why  is the\nsky blue?") == "Why is the sky blue?"
    assert title_from("Wait...") == "Wait..."


def test_a_long_message_is_cut_between_words():
    title = title_from("tell me a long story about the sea and its many many creatures, please")
    assert title == "tell me a long story about the sea and its many many…"
    assert len(title) <= TITLE_CHARS + 1


@pytest.mark.parametrize("mark", [".", ",", "!", "...", "…", " -", "。"])
def test_a_title_cut_after_a_mark_ends_in_three_dots_alone(mark):
    words = "This sentence is as long as a title may be, or nearly so"
    assert title_from(f"{words}{mark} And then it goes on and on") == words + "…"


def test_a_message_of_marks_alone_still_has_a_title():
    assert title_from("." * 200) == "." * TITLE_CHARS + "…"
