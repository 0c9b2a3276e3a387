"""Rules that no single key can state: what a value must look like inside, and which values exclude each other.

A rule is a function from a ``Config`` to the faults it sees, each with the key to blame. ``RULES`` is the whole list,
with the keys that each rule reads beside the one it blames.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection, Iterator
from typing import Final
from urllib.parse import urlsplit

from chatsvc.config import UNNAMED_MODEL, AuthMode, Config
from chatsvc.ids import REGION_PATTERN
from chatsvc.logs import mask_secrets
from chatsvc.redis_url import RedisUrl

Faults = Iterator[tuple[str, str]]
"""Pairs of the key to blame, written ``[table] name``, and what is wrong with it."""

ROLES: Final = ("api", "worker")
_HEADER: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # a token of RFC 9110 §5.6.2
_BASE_PATH: Final = re.compile(r"/(?:[A-Za-z0-9._~-]+/)*")
_MODEL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@ -]{0,79}")
_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
_ENGINES: Final = ("auto", "vllm", "transformers", "openai", "scripted")
_EMBEDDERS: Final = ("auto", "none", "minilm", "transformers", "vllm")
_LEAST_SECRET_CHARS: Final = 32
_HOW_TO_MAKE_ONE: Final = "`openssl rand -hex 32` makes one, to be given to every region"
_LEASE_BEATS: Final = 2
"""A lease must outlive one lost sign of life."""


def broken_rules(config: Config, doubtful: Collection[str] = ()) -> Faults:
    """Every fault of every rule, but for rules that read a ``doubtful`` key: one that is not what was asked for."""
    for rule, reads in RULES:
        if not set(reads).intersection(doubtful):
            yield from rule(config)


def is_loopback(host: str) -> bool:
    """True when only programs on this machine can reach a socket bound to ``host``."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _region(config: Config) -> Faults:
    if not REGION_PATTERN.fullmatch(config.region):
        yield "region", f'must be 1–32 of a–z, 0–9 and "-", not "{config.region}"'


def _roles(config: Config) -> Faults:
    unknown = sorted(config.roles.difference(ROLES))
    if unknown or not config.roles:
        yield "roles", f'must be "api", "worker" or both{f", not {_quoted(unknown)}" if unknown else ""}'


def _host(config: Config) -> Faults:
    host = config.server.host
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not _HOST.fullmatch(host) or not re.search("[A-Za-z]", host):
            yield "[server] host", f'must be an IP address or a host name, not "{host}"'


def _base_path(config: Config) -> Faults:
    path = config.server.base_path
    if not _BASE_PATH.fullmatch(path) or {".", ".."}.intersection(path.split("/")):
        better = f"/{path.strip('/')}/"
        hint = f': write "{better}"' if _BASE_PATH.fullmatch(better) and ".." not in better else ""
        yield "[server] base_path", f'must be a path that starts and ends with a slash, not "{path}"{hint}'


def _public_without_auth(config: Config) -> Faults:
    auth = config.auth
    if auth.mode is AuthMode.NONE and not is_loopback(config.server.host) and not auth.allow_public_without_auth:
        yield (
            "[server] host",
            (
                f'"{config.server.host}" can be reached from other machines, and with auth mode "none" everybody there'
                " would be the same user. Keep 127.0.0.1, or put a signing-in proxy in front and set CHATSVC_AUTH=proxy"
                ", or accept it by CHATSVC_AUTH_ALLOW_PUBLIC_WITHOUT_AUTH=true"
            ),
        )


def _headers(config: Config) -> Faults:
    for name in ("user_header", "tier_header"):
        header = getattr(config.auth, name)
        if not _HEADER.fullmatch(header):
            yield f"[auth] {name}", f'must be the name of a header, not "{header}"'
    if config.auth.user_header.lower() == config.auth.tier_header.lower():
        yield "[auth] tier_header", "must not be the same header as user_header"


def _trusted_proxies(config: Config) -> Faults:
    if config.auth.mode is AuthMode.PROXY and not config.auth.trusted_proxies:
        yield "[auth] trusted_proxies", 'must name the proxy\'s network when mode is "proxy"; nobody could sign in'
    for text in config.auth.trusted_proxies:
        try:
            network = ipaddress.ip_network(text)
        except ValueError as error:
            yield "[auth] trusted_proxies", f'"{text}" is no network such as "10.1.0.0/16": {error}'
            continue
        if network.prefixlen == 0:
            yield "[auth] trusted_proxies", f'"{text}" is everybody: anyone could then sign in as anyone'


def _urls(config: Config) -> Faults:
    url, redis_url = config.database.url, config.database.redis_url
    if url and (fault := _url_fault(url, ("postgresql", "postgres"))):
        yield "[database] url", fault
    try:
        if redis_url:
            RedisUrl.parse(redis_url)
    except ValueError as error:
        yield "[database] redis_url", str(error)


def _url_fault(url: str, schemes: tuple[str, ...]) -> str | None:
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in schemes or not rest:
        starts = " or ".join(f"{scheme}://" for scheme in schemes)
        return f'must start with {starts}, not "{mask_secrets(url).partition("@")[0]}"'
    try:
        _ = urlsplit(url).port
    except ValueError:
        # Python's own words quote what stands at the port's place, which may be a piece of the password.
        return (
            "is no valid URL: a port is a number from 0 to 65535, an IPv6 address stands in brackets, a password has"
            ' "/", "?", "#" and "@" as %2F, %3F, %23 and %40'
        )
    return None


def _lease(config: Config) -> Faults:
    lease = config.lease
    if lease.ttl_s < _LEASE_BEATS * lease.renew_s:
        yield (
            "[lease] ttl_s",
            (
                f"must be at least twice renew_s ({lease.renew_s:g} s), not {lease.ttl_s:g} s: one late sign of life"
                " would cost a healthy worker its replies"
            ),
        )


def _service(config: Config) -> Faults:
    cost = config.service
    if cost.cached > cost.prompt:
        yield "[service] cached", f"must be at most prompt ({cost.prompt:g}), not {cost.cached:g}: it saves work"


def _models(config: Config) -> Faults:
    from_file = list(config.models) != [UNNAMED_MODEL]
    if from_file and UNNAMED_MODEL in config.models:
        yield f"[models.{UNNAMED_MODEL}]", "this name is taken; say `default = true` in the table of another name"
    for name, model in config.models.items():
        label = f"[models.{name}]" if from_file else "CHATSVC_ENGINE"
        if not _MODEL_NAME.fullmatch(name):
            yield label, "the name must start with a letter or digit and have at most 80 of a–z, 0–9, space and ._/:@-"
        if fault := _engine_fault(model.engine):
            yield (f"{label} engine" if from_file else label), fault
        if model.degrade_to and model.degrade_to == name:
            yield f"{label} degrade_to", "must name another model, not this one"
        elif model.degrade_to and model.degrade_to not in config.models:
            served = _quoted(sorted(other for other in config.models if other != name)) or "no other"
            yield f"{label} degrade_to", f'"{model.degrade_to}" is none of the models here: {served}'
    defaults = sorted(name for name, model in config.models.items() if model.default)
    if len(defaults) > 1:
        yield "models", f"only one may say `default = true`, not {_quoted(defaults)}"
    elif config.models and not defaults:
        yield "models", "one of them must say `default = true`"


def _deadlines(config: Config) -> Faults:
    for name, tier in config.tiers.items():
        if tier.deadline_s <= tier.queue_target_s:
            yield (
                f"[tiers.{name}] deadline_s",
                f"must be longer than queue_target_s ({tier.queue_target_s:g} s), not {tier.deadline_s:g} s",
            )


def _engine_fault(url: str) -> str | None:
    scheme, _, rest = url.partition(":")
    if scheme not in _ENGINES:
        return (
            "must be auto, vllm:<model>, transformers:<model>, openai:<base url>#<model> or scripted:?<options>, not"
            f' "{mask_secrets(url)}"'
        )
    if scheme == "openai":
        base, _, model = rest.partition("#")
        if not re.match(r"https?://[^/]", base) or not model:
            return "must be openai:<base url>#<model>, such as openai:http://127.0.0.1:8000/v1#my-model"
    return None


def _embedder(config: Config) -> Faults:
    setting = config.context.embedder
    if setting.strip().partition(":")[0].lower() not in _EMBEDDERS:
        yield (
            "[context] embedder",
            f'must be auto, none, minilm, transformers:<model> or vllm:<model>, not "{mask_secrets(setting)}"',
        )


def _regions(config: Config) -> Faults:
    secret = config.regions.secret
    if config.peers and not secret:
        yield "[regions] secret", f"must be set where other regions are: {_HOW_TO_MAKE_ONE}"
    elif secret and len(secret) < _LEAST_SECRET_CHARS:
        yield "[regions] secret", f"must have at least {_LEAST_SECRET_CHARS} characters: {_HOW_TO_MAKE_ONE}"
    for name, peer in config.peers.items():
        label = f"[regions.{name}]"
        if not REGION_PATTERN.fullmatch(name):
            yield label, 'a region\'s name must be 1–32 of a–z, 0–9 and "-"'
        if name == config.region:
            yield label, "this is the region that this server is in (CHATSVC_REGION); name the others only"
        if bool(peer.url) == bool(peer.urls):
            yield label, "must have one of the keys `url` and `urls`"
        for url in peer.replicas:
            if fault := _url_fault(url, ("http", "https")) or _peer_fault(url):
                yield f"{label} {'urls' if peer.urls else 'url'}", fault


def _peer_fault(url: str) -> str | None:
    parts = urlsplit(url)
    if not parts.hostname or parts.username is not None or "?" in url or "#" in url or not url.isascii():
        return "must be an address such as https://chat-us.example/, without user, query or fragment"
    return None if _BASE_PATH.fullmatch(f"{parts.path.rstrip('/')}/") else "must end with the base path of that region"


def _quoted(names: list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


RULES: Final[tuple[tuple[Callable[[Config], Faults], tuple[str, ...]], ...]] = (
    (_region, ()),
    (_roles, ()),
    (_host, ()),
    (_base_path, ()),
    (_public_without_auth, ("[auth] mode", "[auth] allow_public_without_auth")),
    (_headers, ()),
    (_trusted_proxies, ("[auth] mode",)),
    (_urls, ()),
    (_lease, ("[lease] ttl_s", "[lease] renew_s")),
    (_service, ("[service] prompt", "[service] cached")),
    (_models, ()),
    (_embedder, ()),
    (
        _deadlines,
        tuple(f"[tiers.{name}] {key}" for name in ("free", "plus", "pro") for key in ("deadline_s", "queue_target_s")),
    ),
    (_regions, ("region", "[regions] secret")),
)
