"""How regions vouch to each other for a caller: one signed header a request, good for this request and a minute.

    X-Chatsvc-Region: base64url(payload) "." base64url(HMAC-SHA256(secret, label ‖ method ‖ target ‖ payload))
    payload = {"region", "user", "tier", "expires"}    target = path below the base path, and query

``user`` and ``tier`` are null when the sender could not tell who calls and passes on a stream token for the home region
to judge. Every signed request is idempotent, so one that is sent again within its minute does nothing new. Whoever
sends this header without the secret is refused; what other headers say of a caller is not looked at then.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable
from typing import Final

import msgspec

from chatsvc.clock import Clock
from chatsvc.errors import NotAuthenticated
from chatsvc.limits import Principal, TierName

HEADER: Final = b"x-chatsvc-region"
VALID_S: Final = 60
"""How long a signature is good, and by how much the clocks of two regions may differ."""
_LABEL: Final = b"chatsvc region 1"
_MAX_HEADER_BYTES: Final = 4096


class RegionRefused(NotAuthenticated):
    """The header that regions vouch by is not what a region of ours would send."""

    code = "region_refused"
    title = "This request does not come from a region of this service"


class Hop(msgspec.Struct, frozen=True):
    """What one region says to another about a request that it passes on."""

    region: str
    """Where the request came in."""
    user: str | None
    tier: TierName | None
    expires: int
    """Unix seconds."""

    @property
    def principal(self) -> Principal | None:
        """The caller, when the sender knew them."""
        return Principal(self.user, self.tier) if self.user and self.tier else None


class RegionTrust:
    """Signs and checks."""

    def __init__(self, secret: str, clock: Clock, *, region: str) -> None:
        self._key = secret.encode()
        self._clock = clock
        self._region = region

    def sign(self, method: str, target: str, principal: Principal | None) -> str:
        """The header's value for one request to another region."""
        user, tier = (principal.user_id, principal.tier) if principal else (None, None)
        payload = msgspec.json.encode(Hop(self._region, user, tier, int(self._now()) + VALID_S))
        return f"{_to_text(payload)}.{_to_text(self._mac(method, target, payload))}"

    def check(self, method: str, target: str, headers: Iterable[tuple[bytes, bytes]]) -> Hop | None:
        """What a region vouches for; None when the request comes from none. Raises ``RegionRefused``."""
        values = [value for name, value in headers if name == HEADER]
        if not values:
            return None
        if len(values) > 1 or len(values[0]) > _MAX_HEADER_BYTES:
            raise RegionRefused("The region header came more than once, or is too long.")
        payload, _, mac = (_from_text(part) for part in values[0].partition(b"."))
        if not hmac.compare_digest(mac, self._mac(method, target, payload)):
            raise RegionRefused("The region header's signature does not fit. Do all regions have the same secret?")
        hop = _decoded(payload)
        # The second bound: a sender whose clock is far ahead would hand out what is good for long.
        if not 0 <= hop.expires - self._now() <= 2 * VALID_S:
            raise RegionRefused(f"The region header has expired. Do the clocks differ by more than {VALID_S} s?")
        return hop

    def _now(self) -> float:
        return self._clock.now().timestamp()

    def _mac(self, method: str, target: str, payload: bytes) -> bytes:
        # No part but the last can hold a newline, so two requests never have the same bytes.
        signed = b"\n".join((_LABEL, method.encode("latin-1"), target.encode(), payload))
        return hmac.new(self._key, signed, hashlib.sha256).digest()


def _decoded(payload: bytes) -> Hop:
    try:
        return msgspec.json.decode(payload, type=Hop)
    except msgspec.DecodeError as error:
        raise RegionRefused("The region header cannot be read. Do all regions run the same version?") from error


def _to_text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _from_text(text: bytes) -> bytes:
    try:
        return base64.urlsafe_b64decode(text + b"=" * (-len(text) % 4))
    except (ValueError, binascii.Error):
        return b""
