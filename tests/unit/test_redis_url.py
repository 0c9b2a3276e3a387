"""Which forms of ``CHATSVC_REDIS_URL`` there are, and what is said of one that is none of them."""

import pytest

from chatsvc.redis_url import RedisKind, RedisUrl
from chatsvc.streamlog.redis_wire import Address, pack


def test_a_plain_url_is_left_as_it_is():
    for url in ("redis://h", "rediss://u:p@h:1/2?ssl_ca_certs=/ca", "unix:///run/redis.sock?db=1"):
        assert RedisUrl.parse(url) == RedisUrl(kind=RedisKind.SERVER, servers=(url,))


def test_sentinels_have_credentials_of_their_own_and_the_servers_have_the_rest():
    parsed = RedisUrl.parse(
        "rediss+sentinel://chat:p%40ss@a,b:1,[::1]:2/main/3?sentinel_username=s&sentinel_password=x%20y&ssl_cert_reqs=none"
    )
    assert (parsed.kind, parsed.master) == (RedisKind.SENTINEL, "main")
    sentinels = [Address.from_url(url) for url in parsed.sentinels]
    assert [(one.host, one.port) for one in sentinels] == [("a", 26379), ("b", 1), ("::1", 2)]
    assert {one.greeting for one in sentinels} == {(pack(b"AUTH", b"s", b"x y"),)}
    (server,) = (Address.from_url(url) for url in parsed.servers)
    assert server.greeting == (pack(b"AUTH", b"chat", b"p@ss"), pack(b"SELECT", b"3"))
    assert all(one.tls is not None and not one.tls.check_hostname for one in (server, *sentinels))


def test_sentinels_are_not_shown_the_password_of_the_servers():
    parsed = RedisUrl.parse("redis+sentinel://:secret@a/main")
    assert Address.from_url(parsed.sentinels[0]).greeting == ()
    assert "secret" not in parsed.sentinels[0]


def test_a_cluster_is_some_of_its_nodes():
    parsed = RedisUrl.parse("redis+cluster://u:p@a:7000,b")
    assert parsed.kind is RedisKind.CLUSTER
    nodes = [Address.from_url(url) for url in parsed.servers]
    assert [(node.host, node.port) for node in nodes] == [("a", 7000), ("b", 6379)]
    assert {node.greeting for node in nodes} == {(pack(b"AUTH", b"u", b"p"),)}


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("http://:secret@h", "must start with redis://"),
        ("redis+cluster://", "must start with redis://"),
        ("redis://h:secret", "a number from 0 to 65535"),
        ("redis+sentinel://a,b", "must end with the master's name"),
        ("redis+sentinel://a:26379,b:26379/", "must end with the master's name"),
        ("redis+sentinel:///main", "must name one or more hosts"),
        ("redis+sentinel://a, b/main", "must name one or more hosts"),
        ("redis+sentinel://a:secret/main", "a number from 0 to 65535"),
        ("redis+sentinel://a/main/secrets", "the number of a database"),
        ("redis+sentinel://:sec/ret@a/main", 'write "/", "#" and "@" as %2F, %23 and %40'),
        ("redis+cluster://a,,b", "must name one or more hosts"),
        ("redis+cluster://a/1", "has only the one with number 0"),
        ("redis+cluster://a?db=1", "has only the one with number 0"),
        ("redis+cluster://:sec#ret@a", 'write "/", "#" and "@" as %2F, %23 and %40'),
    ],
)
def test_what_is_no_such_url_is_refused_with_what_would_be_and_without_a_password(url, part):
    with pytest.raises(ValueError, match="must") as refused:
        RedisUrl.parse(url)
    assert part in str(refused.value)
    if "main/secrets" not in url:
        assert "sec" not in str(refused.value)
