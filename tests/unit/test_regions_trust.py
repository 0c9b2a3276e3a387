"""Who may vouch for a caller: whoever has the secret, for one request, for a minute."""

import base64
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatsvc.api.auth import VOUCHED, ProxyAuth, caller_of
from chatsvc.api.region_trust import HEADER, VALID_S, RegionRefused, RegionTrust
from chatsvc.config import AuthConfig, AuthMode
from chatsvc.errors import NotAuthenticated
from chatsvc.limits import Principal, TierName

SECRET = "s" * 32
ANN = Principal("ann", TierName.PLUS)
TARGET = "/v1/responses/resp_eu_0/stream?last_event_id=3"
users = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=255)


class At:
    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def now(self):
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.seconds)

    def monotonic(self):
        return self.seconds


def trust(seconds=0.0, secret=SECRET, region="us"):
    return RegionTrust(secret, At(seconds), region=region)


def headers(value):
    return [(b"host", b"x"), (HEADER, value.encode("latin-1"))]


@given(users, st.sampled_from(TierName))
def test_what_one_region_signs_another_reads(user, tier):
    principal = Principal(user, tier)
    hop = trust(region="eu").check("GET", TARGET, headers(trust().sign("GET", TARGET, principal)))
    assert (hop.principal, hop.region) == (principal, "us")


def test_a_region_that_knew_nobody_vouches_for_nobody():
    hop = trust().check("GET", TARGET, headers(trust().sign("GET", TARGET, None)))
    assert hop.principal is None


def test_a_request_without_the_header_comes_from_no_region():
    assert trust().check("GET", TARGET, [(b"x-forwarded-user", b"ann")]) is None


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("POST", TARGET),
        ("GET", TARGET + "0"),
        ("GET", TARGET.replace("resp_eu_0", "resp_eu_1")),
        ("GET", TARGET.partition("?")[0]),
        ("GET", ""),
        ("GET\n/", TARGET[1:]),
    ],
)
def test_a_signature_is_good_for_its_own_request_only(method, target):
    with pytest.raises(RegionRefused):
        trust().check(method, target, headers(trust().sign("GET", TARGET, ANN)))


def test_another_secret_signs_nothing():
    with pytest.raises(RegionRefused, match="secret"):
        trust().check("GET", TARGET, headers(trust(secret="t" * 32).sign("GET", TARGET, ANN)))


@pytest.mark.parametrize("late", [0, VALID_S - 1, 1 - VALID_S])
def test_clocks_may_differ_by_less_than_a_minute(late):
    assert trust(late).check("GET", TARGET, headers(trust().sign("GET", TARGET, ANN))).principal == ANN


@pytest.mark.parametrize("late", [VALID_S + 1, -VALID_S - 1, 1e6, -1e6])
def test_a_signature_from_another_time_is_refused(late):
    with pytest.raises(RegionRefused, match="expired"):
        trust(late).check("GET", TARGET, headers(trust().sign("GET", TARGET, ANN)))


@given(st.data())
def test_no_byte_of_a_signed_header_can_be_changed(data):
    value = trust().sign("GET", TARGET, ANN)
    payload, mac = (base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)) for part in value.split("."))
    whole = bytearray(payload + mac)
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    changed = ".".join(
        base64.urlsafe_b64encode(part).decode() for part in (bytes(whole[: len(payload)]), bytes(whole[len(payload) :]))
    )
    with pytest.raises(RegionRefused):
        trust().check("GET", TARGET, headers(changed))


@given(st.binary(max_size=200))
def test_whatever_the_header_holds_it_is_refused_and_nothing_breaks(value):
    with pytest.raises(RegionRefused):
        trust().check("GET", TARGET, [(HEADER, value)])


def test_the_header_may_come_once_only():
    value = headers(trust().sign("GET", TARGET, ANN))
    with pytest.raises(RegionRefused):
        trust().check("GET", TARGET, value + value[1:])


def test_whom_a_region_vouches_for_is_believed_from_any_address_and_the_headers_are_not_read():
    proxy = ProxyAuth(AuthConfig(mode=AuthMode.PROXY))
    scope = {"client": ("203.0.113.9", 1), "headers": [(b"x-forwarded-user", b"eve")]}
    with pytest.raises(NotAuthenticated):
        caller_of(proxy, scope)
    assert caller_of(proxy, {**scope, VOUCHED: ANN}) == ANN


def test_nobody_vouched_for_is_nobody_whatever_the_headers_say():
    proxy = ProxyAuth(AuthConfig(mode=AuthMode.PROXY))
    scope = {"client": ("127.0.0.1", 1), "headers": [(b"x-forwarded-user", b"eve")], VOUCHED: None}
    with pytest.raises(NotAuthenticated):
        caller_of(proxy, scope)
