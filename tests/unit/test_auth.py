"""Identity from a proxy: believed from trusted peers only, read anew each time, never ambiguous (L10)."""

import pytest
import structlog

from chatsvc.api.auth import LOCAL_USER, MAX_REMEMBERED_TIERS, create_authenticator
from chatsvc.config import AuthConfig, AuthMode
from chatsvc.errors import NotAuthenticated
from chatsvc.limits import Principal, TierName

USER = b"x-forwarded-user"
TIER = b"x-forwarded-tier"


@pytest.fixture
def proxy():
    return create_authenticator(
        AuthConfig(mode=AuthMode.PROXY, trusted_proxies=("127.0.0.0/8", "10.1.0.0/16", "::1/128"))
    )


@pytest.mark.parametrize("peer", ["127.0.0.1", "10.1.2.3", "::1", "::ffff:10.1.2.3"])
def test_a_trusted_peer_names_the_user_and_the_tier(proxy, peer):
    assert proxy.authenticate(peer, [(USER, b"ada"), (TIER, b"plus")]) == Principal("ada", TierName.PLUS)


@pytest.mark.parametrize("peer", ["10.2.0.1", "192.168.0.1", "::2", "::ffff:10.2.0.1", None, "", "not-an-address"])
def test_the_headers_of_any_other_peer_are_worth_nothing(proxy, peer):
    with pytest.raises(NotAuthenticated):
        proxy.authenticate(peer, [(USER, b"ada"), (TIER, b"pro")])


def test_identity_follows_the_header_from_one_request_to_the_next(proxy):
    assert proxy.authenticate("127.0.0.1", [(USER, b"ada")]).user_id == "ada"
    assert proxy.authenticate("127.0.0.1", [(USER, b"bob")]).user_id == "bob"
    with pytest.raises(NotAuthenticated):
        proxy.authenticate("127.0.0.1", [])


@pytest.mark.parametrize("values", [[b"ada", b"bob"], [b""], [b"   "], [b"a" * 256], [b"a\x00b"], [b"a\nb"]])
def test_a_doubled_empty_overlong_or_unprintable_name_is_refused(proxy, values):
    with pytest.raises(NotAuthenticated):
        proxy.authenticate("127.0.0.1", [(USER, value) for value in values])


def test_two_tiers_are_refused(proxy):
    with pytest.raises(NotAuthenticated):
        proxy.authenticate("127.0.0.1", [(USER, b"ada"), (TIER, b"free"), (TIER, b"pro")])


@pytest.mark.parametrize(("value", "tier"), [(b"PRO", TierName.PRO), (b"gold", TierName.FREE), (b"", TierName.FREE)])
def test_an_unknown_or_missing_tier_is_free(proxy, value, tier):
    assert proxy.authenticate("127.0.0.1", [(USER, b"ada"), (TIER, value)]).tier is tier


def test_an_unknown_tier_is_logged_once_however_often_it_comes(proxy):
    with structlog.testing.capture_logs() as logged:
        for tier in (b"gold", b"gold", b"gold", b"platinum", b"gold", b"", b"free"):
            proxy.authenticate("127.0.0.1", [(USER, b"ada"), (TIER, tier)])
    assert [(line["log_level"], line["tier"]) for line in logged] == [("warning", "gold"), ("warning", "platinum")]


def test_a_proxy_that_makes_up_tiers_without_end_does_not_fill_memory_or_log(proxy):
    with structlog.testing.capture_logs() as logged:
        for number in range(10 * MAX_REMEMBERED_TIERS):
            proxy.authenticate("127.0.0.1", [(USER, b"ada"), (TIER, b"tier %d" % number)])
    assert len(logged) == MAX_REMEMBERED_TIERS


def test_other_header_names_can_be_configured():
    config = AuthConfig(mode=AuthMode.PROXY, user_header="Remote-User", tier_header="Remote-Groups")
    principal = create_authenticator(config).authenticate(
        "127.0.0.1", [(b"remote-user", "zoë".encode()), (USER, b"eve")]
    )
    assert principal == Principal("zoë", TierName.FREE)


def test_without_authentication_everybody_is_the_local_user_whatever_the_headers_say():
    assert create_authenticator(AuthConfig()).authenticate("127.0.0.1", [(USER, b"ada")]) == LOCAL_USER
