"""A stream token opens one response, for a short time, and nothing else."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from chatsvc.api.stream_token import StreamTokens


class SetClock:
    def __init__(self):
        self.time = datetime(2026, 1, 1, tzinfo=UTC)

    def now(self):
        return self.time

    def monotonic(self):
        return self.time.timestamp()


def tokens(clock, key=b"k" * 32):
    return StreamTokens(key, clock, ttl_s=60, base_path="/chat/")


def test_a_token_is_good_for_its_response_only_and_until_it_expires():
    clock = SetClock()
    made = tokens(clock).token("resp_local_1")
    assert tokens(clock).is_good("resp_local_1", made)
    assert not tokens(clock).is_good("resp_local_2", made)
    assert not tokens(clock, key=b"x" * 32).is_good("resp_local_1", made)
    clock.time += timedelta(seconds=59)
    assert tokens(clock).is_good("resp_local_1", made)
    clock.time += timedelta(seconds=2)
    assert not tokens(clock).is_good("resp_local_1", made)


@given(st.text() | st.from_regex(r"[A-Za-z0-9_-]{0,40}", fullmatch=True))
def test_what_was_not_made_here_is_never_good(text):
    clock = SetClock()
    if text != tokens(clock).token("resp_local_1"):
        assert not tokens(clock).is_good("resp_local_1", text)


def test_a_changed_expiry_breaks_the_token():
    clock = SetClock()
    made = tokens(clock).token("resp_local_1")
    changed = [
        made[:place] + ("A" if made[place] != "A" else "B") + made[place + 1 :] for place in range(len(made) - 1)
    ]
    assert not any(tokens(clock).is_good("resp_local_1", text) for text in changed)


def test_the_address_holds_the_base_path():
    assert tokens(SetClock()).url("resp_local_1").startswith("/chat/v1/responses/resp_local_1/stream?token=")
