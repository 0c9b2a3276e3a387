"""What ``CHATSVC_REDIS_URL`` may say: one server, a master that Sentinel knows, or a Cluster.

    redis://[user:password@]host[:port][/db]      rediss:// with TLS      unix://[user:password@]/path[?db=]
    redis+sentinel://[user:password@]host[:port][,host[:port]…]/master[/db][?sentinel_username=&sentinel_password=]
    redis+cluster://[user:password@]host[:port][,host[:port]…]
    rediss+sentinel://, rediss+cluster://         the same with TLS, to Sentinels and nodes as well

Options behind ``?`` are redis-py's (``ssl_ca_certs`` and so on) and hold for every connection.
"""

from __future__ import annotations

from enum import Enum
from typing import Final
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import msgspec

from chatsvc.logs import mask_secrets

_PORT: Final = 6379
_SENTINEL_PORT: Final = 26379
_SENTINEL_OPTIONS: Final = ("sentinel_username", "sentinel_password")


class RedisKind(Enum):
    """Who says where the keys are."""

    SERVER = "server"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


_SCHEMES: Final = {
    "redis": RedisKind.SERVER,
    "rediss": RedisKind.SERVER,
    "unix": RedisKind.SERVER,
    "redis+sentinel": RedisKind.SENTINEL,
    "rediss+sentinel": RedisKind.SENTINEL,
    "redis+cluster": RedisKind.CLUSTER,
    "rediss+cluster": RedisKind.CLUSTER,
}


class RedisUrl(msgspec.Struct, frozen=True, kw_only=True):
    """A URL taken apart into plain URLs of single servers."""

    kind: RedisKind
    servers: tuple[str, ...]
    """The server; the nodes to ask first; or, of a master, a URL whose host and port are still to be put in."""
    sentinels: tuple[str, ...] = ()
    master: str = ""
    """The name that Sentinels know the master by."""

    @classmethod
    def parse(cls, url: str) -> RedisUrl:
        """Raises ``ValueError`` that says what a URL must be like instead; it shows no password."""
        scheme, separator, rest = url.partition("://")
        kind = _SCHEMES.get(scheme)
        if not separator or kind is None or not rest:
            *most, last = (f"{known}://" for known in _SCHEMES)
            shown = mask_secrets(url).partition("@")[0]
            raise ValueError(f'must start with {", ".join(most)} or {last}, not "{shown}"')
        if kind is RedisKind.SERVER:
            _check_port(url)
            return cls(kind=kind, servers=(url,))
        body, _, query = rest.partition("?")
        authority, _, path = body.partition("/")
        credentials, at, hosts = authority.rpartition("@")
        plain = scheme.partition("+")[0]
        if "#" in url or "@" in path:
            raise ValueError('must have no "#"; in a password write "/", "#" and "@" as %2F, %23 and %40')
        if kind is RedisKind.SENTINEL:
            return _sentinel(plain, credentials + at, hosts, path, query)
        return _cluster(plain, credentials + at, hosts, path, query)


def _sentinel(scheme: str, credentials: str, hosts: str, path: str, query: str) -> RedisUrl:
    places = _places(hosts, _SENTINEL_PORT, "redis+sentinel://host:26379,host:26379/master")
    master, _, db = path.partition("/")
    if not master:
        raise ValueError("must end with the master's name, as in redis+sentinel://host:26379,host:26379/mymaster")
    if db and not db.isdecimal():
        raise ValueError(f'must have the number of a database behind the master\'s name, not "{db}"')
    options = dict(parse_qsl(query))
    user, password = (options.pop(name, "") for name in _SENTINEL_OPTIONS)
    known = f"{quote(user, safe='')}:{quote(password, safe='')}@" if user or password else ""
    common = _query(options)
    return RedisUrl(
        kind=RedisKind.SENTINEL,
        servers=(f"{scheme}://{credentials}{places[0]}/{db}{common}",),
        sentinels=tuple(f"{scheme}://{known}{place}/{common}" for place in places),
        master=unquote(master),
    )


def _cluster(scheme: str, credentials: str, hosts: str, path: str, query: str) -> RedisUrl:
    places = _places(hosts, _PORT, "redis+cluster://host:6379,host:6379")
    options = dict(parse_qsl(query))
    if path not in ("", "0") or options.pop("db", "0") != "0":
        raise ValueError("must name no database: a Cluster has only the one with number 0")
    servers = tuple(f"{scheme}://{credentials}{place}/{_query(options)}" for place in places)
    return RedisUrl(kind=RedisKind.CLUSTER, servers=servers)


def _places(hosts: str, port: int, example: str) -> list[str]:
    """``host:port`` of each, the port filled in."""
    places = []
    for item in hosts.split(","):
        known = _check_port(f"redis://{item}")
        host = urlsplit(f"redis://{item}").hostname
        if not host or item.strip() != item:
            raise ValueError(f'must name one or more hosts between commas, as in {example}, not "{hosts}"')
        places.append(f"{f'[{host}]' if ':' in host else host}:{known or port}")
    return places


def _query(options: dict[str, str]) -> str:
    return f"?{urlencode(options)}" if options else ""


def _check_port(url: str) -> int | None:
    try:
        return urlsplit(url).port
    except ValueError:
        raise ValueError(
            "must have a number from 0 to 65535 as the port, after the last colon of a host; a password has"
            ' "/", "?", "#" and "@" as %2F, %3F, %23 and %40'
        ) from None
