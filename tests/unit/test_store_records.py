"""Cursors and column lists of the store: what goes out comes back, and nothing else is taken."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatsvc.errors import InvalidCursor
from chatsvc.limits import TierName, Usage
from chatsvc.run import RunStatus
from chatsvc.store.records import conversation_of, decode_cursor, encode_cursor, message_of, run_of, statement

# hypothesis wants the bounds without a zone and adds it itself.
times = st.datetimes(datetime(2000, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001
plausible_ids = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=80)


@given(times, plausible_ids)
def test_a_cursor_comes_back_as_it_went_out(at, identity):
    assert decode_cursor(encode_cursor(at, identity), (datetime, str)) == (at, identity)


@given(times, plausible_ids)
def test_a_cursor_can_stand_in_a_query_string_as_it_is(at, identity):
    cursor = encode_cursor(at, identity)
    assert set(cursor) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


@given(st.text(max_size=60))
def test_any_other_text_is_refused_as_a_cursor(text):
    try:
        parts = decode_cursor(text, (datetime, str))
    except InvalidCursor:
        return
    assert encode_cursor(*parts).rstrip("=") == text.rstrip("=")


@given(st.recursive(st.none() | st.integers() | st.text(max_size=5), st.lists, max_leaves=5))
def test_json_of_another_shape_is_refused_as_a_cursor(value):
    with pytest.raises(InvalidCursor):
        decode_cursor(encode_cursor(value), (datetime, str))


@pytest.mark.parametrize("identity", ["", "a\x00b", "x" * 81, "é", "a\nb"])
def test_a_cursor_with_what_can_be_no_id_is_refused(identity):
    with pytest.raises(InvalidCursor):
        decode_cursor(encode_cursor(datetime.now(UTC), identity), (datetime, str))


def test_column_lists_carry_their_alias_and_leave_the_rest_alone():
    sql = statement("SELECT {message:m} FROM messages m", "WHERE m.id = %(id)s")
    assert sql.startswith("SELECT m.id, m.conversation_id, m.parent_id, ")
    assert sql.endswith("FROM messages m\nWHERE m.id = %(id)s")
    assert "{" not in sql


def test_rows_become_records_with_their_types():
    now = datetime.now(UTC)
    row = {
        "id": "resp_1", "user_id": "u", "conversation_id": "c", "user_message_id": "q", "message_id": "a",
        "client_msg_id": "x", "model": "small", "tier": "pro", "status": "streaming", "attempt": 2, "created_at": now,
        "owner": "w", "max_tokens": None, "temperature": 0.5, "background": False, "stop_requested": True,
        "last_seq": 7, "finish_reason": None, "error_code": None, "error_message": None,
        "started_at": now + timedelta(seconds=1), "ended_at": None, "prompt_tokens": 3, "cached_tokens": 2,
        "output_tokens": 1, "request_hash": b"more than was asked for",
    }  # fmt: skip
    run = run_of(row)
    assert (run.status, run.tier) == (RunStatus.STREAMING, TierName.PRO)
    assert run.usage == Usage(prompt_tokens=3, cached_tokens=2, output_tokens=1)
    message = {"id": "m", "conversation_id": "c", "parent_id": None, "role": "user", "content": "", "created_at": now}
    assert message_of(message | {"status": "complete"}).status is RunStatus.COMPLETE
    conversation = {"id": "c", "user_id": "u", "title": None, "system_prompt": None, "model": None, "pinned": True}
    more = {"head_message_id": None, "temporary": False, "created_at": now, "updated_at": now}
    assert conversation_of(conversation | more).pinned is True
