"""Who is calling. One interface, one class a mode; identity is read anew on every request (L10).

``none``   everybody is the one local user.
``proxy``  an authenticating reverse proxy names the user in a header. Only TCP peers in ``trusted_proxies`` are
           believed; from anybody else the headers are worth nothing.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

import structlog

from chatsvc.config import AuthConfig, AuthMode
from chatsvc.errors import NotAuthenticated
from chatsvc.limits import Principal, TierName

_log = structlog.get_logger(__name__)

LOCAL_USER: Final = Principal("local", TierName.PRO)
MAX_USER_ID_CHARS: Final = 255
MAX_REMEMBERED_TIERS: Final = 100
"""Unknown tier names that were logged once; the number is bounded since a proxy's mistake may make up many."""
Headers = Iterable[tuple[bytes, bytes]]


class Authenticator(Protocol):
    """Turns one request into its caller."""

    def authenticate(self, peer: str | None, headers: Headers) -> Principal:
        """The caller. ``peer`` is the address of the TCP peer, None when unknown. Raises ``NotAuthenticated``."""
        ...


class NoAuth:
    """One local user, nobody to ask."""

    def authenticate(self, peer: str | None, headers: Headers) -> Principal:
        return LOCAL_USER


class ProxyAuth:
    """Believes the headers of trusted peers."""

    def __init__(self, config: AuthConfig) -> None:
        self._user_header = config.user_header.lower().encode("latin-1")
        self._tier_header = config.tier_header.lower().encode("latin-1")
        self._names = (config.user_header, config.tier_header)
        self._trusted = [ipaddress.ip_network(network) for network in config.trusted_proxies]
        self._unknown_tiers: set[str] = set()

    def authenticate(self, peer: str | None, headers: Headers) -> Principal:
        if not self._is_trusted(peer):
            raise NotAuthenticated(
                f"This server takes identity from its auth proxy only, and {peer or 'the peer'} is not one of its "
                "trusted_proxies. Go through the proxy, or add its address to auth.trusted_proxies."
            )
        users = [value for name, value in headers if name == self._user_header]
        tiers = [value for name, value in headers if name == self._tier_header]
        if len(users) > 1 or len(tiers) > 1:
            # A proxy that appends instead of replacing lets the client choose the first value.
            raise NotAuthenticated("An identity header came more than once. The proxy must replace it, not add to it.")
        user = _text(users[0]) if users else ""
        if not user:
            raise NotAuthenticated(f"The header {self._names[0]} is missing. Sign in through the proxy.")
        if len(user) > MAX_USER_ID_CHARS or not user.isprintable():
            raise NotAuthenticated(
                f"The header {self._names[0]} must hold at most {MAX_USER_ID_CHARS} printable characters."
            )
        return Principal(user, self._tier(_text(tiers[0]) if tiers else ""))

    def _is_trusted(self, peer: str | None) -> bool:
        if peer is None:
            return False
        try:
            address = ipaddress.ip_address(peer)
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        address = mapped or address
        return any(address in network for network in self._trusted if network.version == address.version)

    def _tier(self, name: str) -> TierName:
        try:
            return TierName(name.lower())
        except ValueError:
            if name and name not in self._unknown_tiers and len(self._unknown_tiers) < MAX_REMEMBERED_TIERS:
                self._unknown_tiers.add(name)
                _log.warning("unknown tier from the proxy is served as free", tier=name[:40])
            return TierName.FREE


VOUCHED: Final = "chatsvc.vouched"
"""Key in a request's scope under which the door puts whom another region vouches for; None: the region knew nobody."""


def caller_of(authenticator: Authenticator, scope: Mapping[str, Any]) -> Principal:
    """The caller of a request: whom another region vouches for, else whom the authenticator finds.

    Raises ``NotAuthenticated``.
    """
    if VOUCHED not in scope:
        client = scope.get("client")
        return authenticator.authenticate(client[0] if client else None, scope["headers"])
    vouched: Principal | None = scope[VOUCHED]
    if vouched is None:
        raise NotAuthenticated("The region that passed this on does not know who is calling. Sign in there.")
    return vouched


def _text(value: bytes) -> str:
    """Header bytes as text: UTF-8 where it is that, else the protocol's own Latin-1."""
    try:
        return value.decode("utf-8").strip()
    except UnicodeDecodeError:
        return value.decode("latin-1").strip()


def create_authenticator(config: AuthConfig) -> Authenticator:
    """The authenticator of the configured mode."""
    return NoAuth() if config.mode is AuthMode.NONE else ProxyAuth(config)
