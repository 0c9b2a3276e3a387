"""Folding: what is folded when, what the summariser is shown, and which drafts are taken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatsvc.context.fold import (
    STOPS,
    Counted,
    Draft,
    Said,
    SummaryRefused,
    accept,
    plans,
    request,
    shortened,
    summary_cap,
)
from chatsvc.conversation import Role

WINDOW = 4096
sizes = st.integers(0, 600)
# A question, whatever tools were used, and an answer.
turn = st.tuples(sizes, st.lists(st.tuples(sizes, sizes), max_size=3), sizes).map(
    lambda parts: [
        (Role.USER, parts[0]),
        *((role, size) for call in parts[1] for role, size in zip((Role.ASSISTANT, Role.TOOL), call, strict=True)),
        (Role.ASSISTANT, parts[2]),
    ]
)
turns = st.lists(turn, min_size=1, max_size=40)


def history_of(turns):
    flat = [message for turn in turns for message in turn]
    return [Counted(f"msg_{number}", role, size) for number, (role, size) in enumerate(flat)]


def planned(history, *, window=WINDOW, room=None, fold_at=0.6, step_tokens=20_000):
    """The whole step; None where nothing is to be folded."""
    return next(iter(all_planned(history, window=window, room=room, fold_at=fold_at, step_tokens=step_tokens)), None)


def all_planned(history, *, window=WINDOW, room=None, fold_at=0.6, step_tokens=20_000):
    return plans(history, window=window, room=room, fold_at=fold_at, step_tokens=step_tokens)


def own_lines(message):
    return [line for line in message.content.splitlines() if not line.startswith("> ")]


def tokens(messages):
    return sum(message.tokens for message in messages)


@given(turns)
def test_what_is_folded_and_what_is_kept_are_all_of_it_and_whole_turns(turns):
    history = history_of(turns)
    fold = planned(history)
    if fold is None:
        return
    folded, kept = history[: fold.messages], history[fold.messages :]
    assert folded[-1].id == fold.through_message_id
    assert fold.tokens == tokens(folded)
    # A turn begins with the user's message, so a tool's result is on the side of its call.
    assert folded[0].role is Role.USER
    assert kept[0].role is Role.USER
    assert sum(1 for message in kept if message.role is Role.USER) >= 1


@given(turns, st.integers(64, 8192), st.floats(0.1, 0.9), st.integers(1, 20_000))
def test_a_fold_is_one_large_step_and_no_larger_than_it_may_be(turns, window, fold_at, most):
    history = history_of(turns)
    fold = planned(history, window=window, fold_at=fold_at, step_tokens=most)
    if tokens(history) <= fold_at * window:
        assert fold is None
        return
    starts = [place for place, message in enumerate(history) if message.role is Role.USER]
    if len(starts) == 1:
        assert fold is None
        return
    step = min(most, window // 3, int(fold_at * window * 0.75))
    first = tokens(history[: starts[1]])
    assert fold.tokens <= max(step, first)
    after = next(place for place in [*starts, len(history)] if place > fold.messages)
    if fold.messages < starts[-1]:
        assert fold.tokens + tokens(history[fold.messages : after]) > int(step)


@given(turns, st.integers(64, 8192))
def test_what_is_folded_instead_is_ever_less_and_whole_turns_too(turns, window):
    history = history_of(turns)
    found = all_planned(history, window=window)
    assert len(found) <= 3
    counts = [fold.messages for fold in found]
    assert counts == sorted(set(counts), reverse=True)
    step = min(window // 3, int(0.6 * window * 0.75))
    first = next((place for place, message in enumerate(history) if place and message.role is Role.USER), 0)
    for fold in found:
        assert fold.tokens == tokens(history[: fold.messages])
        assert history[fold.messages].role is Role.USER
    assert all(fold.messages <= first or fold.tokens <= step // 2 for fold in found[1:])
    assert all(fold.messages <= first or fold.tokens <= step // 4 for fold in found[2:])


def test_a_third_of_the_window_is_folded_when_sixty_percent_of_it_are_passed():
    history = history_of([[(Role.USER, 10), (Role.ASSISTANT, 90)]] * 25)
    assert planned(history[:48]) is None
    fold = planned(history)
    assert 1265 < fold.tokens <= WINDOW // 3


def test_no_more_than_the_largest_step_is_folded_of_a_large_window():
    history = history_of([[(Role.USER, 100), (Role.ASSISTANT, 900)]] * 90)
    assert planned(history, window=131_072).tokens == 20_000


def test_history_is_folded_earlier_where_a_long_system_prompt_leaves_it_less_room():
    history = history_of([[(Role.USER, 10), (Role.ASSISTANT, 90)]] * 13)
    assert planned(history) is None
    assert planned(history, room=1500).tokens <= 1500 * 0.8 * 3 / 4


def test_a_narrow_room_is_folded_in_steps_of_several_turns():
    """With room for four turns: one by one would throw the cached prefix away in every turn."""
    history = history_of([[(Role.USER, 150), (Role.ASSISTANT, 450)]] * 5)
    assert planned(history, window=8192, room=3040).messages == 2 * 3


def test_a_turn_larger_than_the_step_is_folded_by_itself():
    history = history_of([[(Role.USER, 10), (Role.ASSISTANT, 2500)], [(Role.USER, 10), (Role.ASSISTANT, 10)]])
    assert planned(history).messages == 2


def test_the_newest_turn_is_never_folded_however_large():
    assert planned(history_of([[(Role.USER, 10), (Role.ASSISTANT, 4000)]])) is None


@given(st.text(), st.lists(st.builds(Said, st.sampled_from([Role.USER, Role.ASSISTANT, Role.TOOL]), st.text())))
def test_no_text_begins_a_line_of_its_own_in_the_summarisers_prompt(previous, said):
    texts = [previous] * bool(previous) + [each.text for each in said]
    user = request(previous, said, cap_tokens=100)[1]
    plain = request("x" * bool(previous), [Said(each.role, "x") for each in said], cap_tokens=100)[1]
    assert own_lines(user) == own_lines(plain)
    assert all(f"> {line}" in user.content for text in texts for line in text.splitlines())


def test_notes_end_where_the_messages_are_gone_on_with_and_not_at_a_line_about_the_user():
    shown = request(None, [Said(Role.USER, "hi"), Said(Role.ASSISTANT, "ho")], cap_tokens=400)[1].content
    for role in ("user", "assistant"):
        gone_on = f"Facts\n- A cat.{shown[shown.index(f'{chr(10)}{role}:') :]}"
        assert min(gone_on.find(stop) for stop in STOPS if stop in gone_on) == len("Facts\n- A cat.")
    honest = "Names and numbers\nUser: Anna\nuser: Anna\nAssistant: none\nDog: Rex\n-> done"
    assert not any(stop in honest for stop in STOPS)


def test_a_second_try_is_told_what_was_wrong_with_the_first():
    first, _, begun = request(None, [Said(Role.USER, "hi")], cap_tokens=400)
    second, _, led_on = request(None, [Said(Role.USER, "hi")], cap_tokens=400, refused="it was not finished")
    assert "at most 200 words" in first.content
    assert "at most 100 words" in second.content
    assert "it was not finished" in second.content
    assert led_on.content.startswith(begun.content)
    assert led_on.content > begun.content


def test_who_cannot_go_on_with_an_answer_is_asked_for_one_at_the_end():
    _, shown, _ = request(None, [Said(Role.USER, "hi")], cap_tokens=400)
    _, asked = request(None, [Said(Role.USER, "hi")], cap_tokens=400, begun=False)
    assert asked.content.startswith(shown.content)
    assert "notes" in asked.content.removeprefix(shown.content)


@given(st.lists(st.builds(Said, st.just(Role.USER), st.text(max_size=300)), max_size=8), st.integers(80, 1500))
def test_only_the_longest_messages_lose_their_middle_when_there_is_too_much(said, most):
    short = shortened(said, most)
    assert [each.role for each in short] == [each.role for each in said]
    if sum(len(each.text) for each in said) <= most:
        assert list(short) == said
    else:
        assert sum(len(each.text) for each in short) <= max(most, len("\n[…]\n") * len(said))
    cut = [len(before.text) for before, after in zip(said, short, strict=True) if before != after]
    whole = [len(before.text) for before, after in zip(said, short, strict=True) if before == after]
    assert not cut or not whole or min(cut) > max(whole)


GOOD = Draft(text=" Facts\nA cat. \n", tokens=20, finish_reason="stop")
SAME = "- A cat.\n" * 5
COUNTING = "".join(f"- {number}.\n" for number in range(9))


def test_a_draft_with_the_form_of_a_summary_is_taken_without_the_space_around_it():
    assert accept(GOOD, source_tokens=300, cap_tokens=100) == "Facts\nA cat."


def test_a_draft_that_goes_on_with_the_opening_is_taken_with_it_and_one_that_begins_anew_without():
    opening = request(None, [Said(Role.USER, "hi")], cap_tokens=400)[2]
    assert opening.role is Role.ASSISTANT
    draft = Draft(opening=opening.content, text="A cat.\n- A mat.\n", tokens=20, finish_reason="stop")
    assert accept(draft, source_tokens=300, cap_tokens=100) == f"{opening.content}A cat.\n- A mat."
    anew = Draft(opening=opening.content, text="Facts\n- A cat.\n", tokens=20, finish_reason="stop")
    assert accept(anew, source_tokens=300, cap_tokens=100) == "Facts\n- A cat."


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("Facts\n- A mat.\n- A cat.\n" + SAME, "Facts\n- A mat.\n- A cat."),
        ("Facts\n- A mat.\n" + "- A cat.\n\n- A dog.\n" * 5, "Facts\n- A mat.\n- A cat.\n\n- A dog."),
        ("Facts\n- A mat.\n- It is 1 m long.\n" + COUNTING, "Facts\n- A mat.\n- It is 1 m long.\n- 0."),
        ("Facts\n- A mat.\n- A cat.\n" + "".join(f"{n}. It sat.\n" for n in range(5)), None),
    ],
    ids=["one line", "two in turn", "only counts", "the same under other numbers"],
)
def test_of_a_draft_that_goes_round_in_circles_what_it_said_before_is_taken(text, taken):
    draft = Draft(text=text, tokens=90, finish_reason=None)
    expected = "Facts\n- A mat.\n- A cat.\n0. It sat." if taken is None else taken
    assert accept(draft, source_tokens=300, cap_tokens=100) == expected


def test_lines_that_begin_with_a_number_and_say_different_things_are_no_circle():
    text = "Names and numbers\n" + "".join(f"- {2010 + n}: {city}\n" for n, city in enumerate("ABCDEFGH"))
    assert accept(Draft(text=text, tokens=90, finish_reason="stop"), source_tokens=300, cap_tokens=100) == text.strip()


@pytest.mark.parametrize(
    "draft",
    [
        Draft(text="", tokens=0, finish_reason="stop"),
        Draft(text=" \n-- \n", tokens=3, finish_reason="stop"),
        Draft(text="Facts\nA c", tokens=20, finish_reason="length"),
        Draft(text="Facts\nA c", tokens=20, finish_reason=None),
        Draft(text="Facts\nA cat.", tokens=101, finish_reason="stop"),
        Draft(text=SAME, tokens=20, finish_reason="stop"),
        Draft(text="Facts\n" + COUNTING, tokens=20, finish_reason="stop"),
        Draft(text="Facts\n- A mat.\n" + SAME + "- A dog.\n", tokens=20, finish_reason="stop"),
        Draft(text="1. User:", tokens=20, finish_reason="stop"),
    ],
    ids=[
        *("empty", "marks only", "cut by its limit", "without an end", "over the cap", "the same again and again"),
        *("only counts", "goes on after equal lines", "next to nothing"),
    ],
)
def test_an_empty_unfinished_or_too_long_draft_is_refused(draft):
    with pytest.raises(SummaryRefused):
        accept(draft, source_tokens=300, cap_tokens=100)


def test_a_draft_no_shorter_than_its_source_is_refused():
    with pytest.raises(SummaryRefused):
        accept(GOOD, source_tokens=20, cap_tokens=100)


def test_a_summary_takes_an_eighth_of_a_small_window_at_most():
    assert summary_cap(4096, 1500) == 512
    assert summary_cap(32_768, 1500) == 1500
