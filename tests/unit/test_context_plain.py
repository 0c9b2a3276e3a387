"""The plain context: the branch verbatim, a stable prefix (L11), and refusal with the numbers."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatsvc.context.assemble import assemble
from chatsvc.context.budget import DEFAULT_REPLY_TOKENS, reply_limit, reply_reserve
from chatsvc.conversation import Message, Role
from chatsvc.errors import MessageTooLong
from chatsvc.run import RunStatus


def message(role, content, number):
    return Message(
        id=f"msg_{number}",
        conversation_id="conv_1",
        parent_id=f"msg_{number - 1}" if number else None,
        role=role,
        content=content,
        status=RunStatus.COMPLETE,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


turns = st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=8)


def branch_of(pairs):
    contents = [text for pair in pairs for text in pair]
    return [
        message(Role.USER if number % 2 == 0 else Role.ASSISTANT, text, number) for number, text in enumerate(contents)
    ]


@given(turns, st.text(), st.none() | st.text(min_size=1))
def test_the_next_turn_begins_with_all_of_this_turn_L11(pairs, question, system):
    branch = branch_of(pairs)
    for turn in range(1, len(pairs)):
        before = assemble(system, branch[: 2 * turn], question)
        after = assemble(system, [*branch[: 2 * turn], message(Role.USER, question, 99)], None)
        assert after == before
        later = assemble(system, branch[: 2 * turn + 1])
        assert later[: len(before) - 1] == before[:-1]


@given(turns, st.text(), st.none() | st.text(min_size=1))
def test_every_turn_is_shown_verbatim_and_in_order_with_the_system_prompt_first_and_once(pairs, question, system):
    shown = assemble(system, branch_of(pairs), question)
    expected = ([system] if system else []) + [text for pair in pairs for text in pair] + [question]
    assert [turn.content for turn in shown] == expected
    assert [turn.role for turn in shown].count(Role.SYSTEM) == bool(system)
    assert shown[-1].role is Role.USER


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
