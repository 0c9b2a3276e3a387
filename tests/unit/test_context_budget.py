"""The split of the window, and what is left out: nothing overflows, and cuts stay where they are."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chatsvc.context.budget import (
    DEFAULT_REPLY_TOKENS,
    MOST_HALVINGS,
    check_question,
    clipped,
    cuts,
    first_fit,
    halvings,
    holds_for,
    reply_limit,
    reply_reserve,
    split,
)
from chatsvc.errors import MessageTooLong

windows = st.integers(16, 200_000)


def budget(window=8192, system_tokens=0, requested=None, recall_tokens=1000, step_tokens=20_000, history_share=1.0):
    return split(
        window=window,
        system_tokens=system_tokens,
        requested=requested,
        recall_tokens=recall_tokens,
        step_tokens=step_tokens,
        history_share=history_share,
    )


@given(windows, st.integers(0, 300_000), st.none() | st.integers(1, 300_000), st.floats(0, 1))
def test_the_parts_and_the_reply_never_exceed_the_window(window, system, requested, share):
    whole = budget(window, system, requested, history_share=share)
    assert whole.history == max(0, window - system - whole.reply)
    assert whole.allowed <= system + whole.history
    assert whole.summary + whole.pinned + whole.recalled <= whole.history
    room = whole.verbatim(summary=whole.summary, pinned=whole.pinned, recalled=whole.recalled)
    assert system + whole.summary + whole.pinned + whole.recalled + room <= max(whole.allowed, system)
    assert whole.step >= 1


@given(windows, st.integers(0, 100_000), st.integers(1, 300_000), st.floats(0, 1))
def test_the_places_of_the_steps_do_not_move_with_the_request(window, system, requested, share):
    assert budget(window, system, requested, history_share=share).step == budget(window, system).step


@given(windows, st.integers(0, 100_000), st.integers(1, 300_000), st.floats(0, 1))
def test_a_long_summary_ends_where_it_did_until_there_is_less_than_half_of_the_usual_room_L11(
    window, system, requested, share
):
    usual, this = budget(window, system), budget(window, system, requested, history_share=share)
    if this.allowed - this.system >= usual.history / 2:
        assert this.summary == usual.summary
    assert this.summary <= usual.summary
    assert this.summary + this.pinned + this.recalled <= max(0, this.allowed - this.system)


@given(windows, st.integers(0, 100_000), st.integers(0, 300_000))
def test_a_question_is_refused_with_its_tokens_and_the_limit_when_all_of_the_history_is_not_enough(
    window, system, question
):
    whole = budget(window, system)
    try:
        check_question(whole, question)
    except MessageTooLong as error:
        assert question > whole.history
        assert error.extra["message_tokens"] == question
        assert error.extra["limit"] == whole.history
        assert str(question) in error.detail
        assert str(whole.history) in error.detail
    else:
        assert system + question + whole.reply <= window or question == 0


@pytest.mark.parametrize(("system", "advice"), [(400, "Shorten the message"), (900, "Shorten the system prompt")])
def test_who_went_on_to_a_smaller_window_is_not_told_to_shorten_a_short_message(system, advice):
    with pytest.raises(MessageTooLong, match=advice):
        check_question(budget(1024, system), 1000 - system)


sizes = st.lists(st.integers(0, 500), max_size=40)
halved = st.integers(0, MOST_HALVINGS)


@given(sizes, st.integers(1, 2000))
def test_places_rise_from_nothing_to_everything(turns, step):
    places = cuts(turns, step)
    assert places[0] == 0
    assert places[-1] == len(turns)
    assert places == sorted(set(places))


@given(sizes, sizes, st.integers(1, 2000), halved)
def test_full_steps_stay_where_they_are_when_turns_are_added(turns, more, step, halved):
    before, after = cuts(turns, step, halved), cuts([*turns, *more], step, halved)
    full = [place for place in before if sum(turns[place:]) > step]
    assert [place for place in after if place in full] == full
    for start, end in pairwise(after):
        assert sum([*turns, *more][start:end]) <= max(1, step >> halved) or end == start + 1


@given(sizes, st.integers(1, 2000), halved)
def test_a_request_that_leaves_little_room_moves_no_place_between_steps(turns, step, halved):
    """It has more of them."""
    full = [place for place in cuts(turns, step) if sum(turns[place:]) > step]
    assert set(full) <= set(cuts(turns, step, halved))


@given(windows, st.integers(0, 100_000), st.none() | st.integers(1, 300_000), st.floats(0, 1))
def test_steps_are_halved_only_where_there_is_less_room_than_one_has(window, system, requested, share):
    this = budget(window, system, requested, history_share=share)
    room = this.verbatim(summary=this.summary, recalled=this.recalled, question=this.question)
    halved = halvings(this.step, room)
    assert halved <= MOST_HALVINGS
    if halved:
        assert this.step >> (halved - 1) > room
    if halved < MOST_HALVINGS:
        assert this.step >> halved <= room


@given(windows, st.integers(0, 100_000))
@example(256, 191)  # one token for all of the history
@example(256, 192)  # and none
def test_for_a_usual_request_no_step_is_halved_as_long_as_there_is_room_for_any_history(window, system):
    this = budget(window, system)
    room = this.verbatim(summary=this.summary, recalled=this.recalled, question=this.question)
    assert (halvings(this.step, room) > 0) == (this.history == 0)


def test_the_step_behind_which_a_turn_begins_anew_leaves_more_than_the_newest_in_a_narrow_room():
    turns, room, step = [100] * 60, 900, 1000
    halved = halvings(step, room)
    shown = []
    for count in range(20, 60):
        some = turns[:count]
        places = cuts(some, step, halved)
        shown.append(sum(some[places[first_fit(some, places, room)] :]))
    assert min(shown) >= room - (step >> halved)
    moves = sum(now <= before for before, now in pairwise(shown))
    assert moves <= 60 * 100 / (step >> halved)


@given(sizes, st.integers(1, 2000), st.integers(0, 2500), halved)
def test_how_long_the_next_turn_may_be_for_a_place_to_stay_is_known(turns, step, new, halved):
    after = cuts([*turns, new], step, halved)
    for place in cuts(turns, step, halved):
        most = holds_for(turns, step, place, halved)
        assert (place in after) == (most is None or new <= most)


@given(sizes, st.integers(1, 2000), st.integers(0, 20_000))
def test_what_is_left_out_is_the_least_that_makes_the_rest_fit(turns, step, room):
    places = cuts(turns, step)
    index = first_fit(turns, places, room)
    assert sum(turns[places[index] :]) <= room
    assert index == 0 or sum(turns[places[index - 1] :]) > room


@given(sizes, st.integers(1, 2000), st.integers(0, 20_000), st.integers(0, 500), halved)
def test_as_a_branch_grows_the_beginning_only_ever_moves_forward(turns, step, room, new, halved):
    before = cuts(turns, step, halved)[first_fit(turns, cuts(turns, step, halved), room)]
    longer = [*turns, new]
    after = cuts(longer, step, halved)[first_fit(longer, cuts(longer, step, halved), room)]
    assert after >= before


def test_the_beginning_of_a_full_prompt_moves_once_in_many_turns():
    turns, beginnings = [], []
    for _ in range(300):
        turns.append(100)
        places = cuts(turns, 1000)
        beginnings.append(places[first_fit(turns, places, 3000)])
    moves = sum(now != before for before, now in pairwise(beginnings))
    assert moves == 27  # (300 - 30) / 10, and not 270


@given(st.text(max_size=200), st.integers(1, 100), st.integers(0, 100))
def test_a_text_that_is_clipped_is_a_beginning_of_itself(text, tokens, most):
    kept = clipped(text, tokens, most)
    assert text.startswith(kept)
    assert kept == text if tokens <= most else len(kept) * tokens <= len(text) * most


@given(st.integers(1, 200_000), st.integers(0, 300_000), st.none() | st.integers(1, 300_000))
def test_prompt_and_reply_never_exceed_the_window(window, prompt_tokens, requested):
    try:
        limit = reply_limit(prompt_tokens=prompt_tokens, window=window, requested=requested)
    except MessageTooLong as error:
        assert prompt_tokens + max(reply_reserve(window, requested), 1) > window
        assert error.extra["prompt_tokens"] == prompt_tokens
        assert error.extra["window"] == window
        assert str(prompt_tokens) in error.detail
        assert str(window) in error.detail
    else:
        assert prompt_tokens + limit <= window
        assert limit >= 1
        assert limit == requested or (requested is None and limit <= DEFAULT_REPLY_TOKENS)


def test_a_quarter_of_a_small_window_is_kept_for_the_reply():
    assert reply_limit(prompt_tokens=6144, window=8192, requested=None) == 2048
    with pytest.raises(MessageTooLong):
        reply_limit(prompt_tokens=6145, window=8192, requested=None)
