"""The token in a ``stream_url``: good for reading one response, for a short time, by whoever holds it.

For clients that can send neither cookie nor header (a native ``EventSource`` behind some proxies, ``curl``). It is
``base64url(expiry ‖ HMAC-SHA256(key, response id ‖ expiry)[:16])``; the key is shared by all replicas through Postgres.
Tokens never appear in logs.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Final

from chatsvc.clock import Clock

_EXPIRY_BYTES: Final = 5  # Unix seconds
_MAC_BYTES: Final = 16  # 128 bits, as RFC 2104 §5 allows


class StreamTokens:
    """Makes and checks tokens."""

    def __init__(self, key: bytes, clock: Clock, *, ttl_s: float, base_path: str) -> None:
        self._key = key
        self._clock = clock
        self._ttl_s = ttl_s
        self._base_path = base_path

    def url(self, response_id: str) -> str:
        """The path of a response's stream with a fresh token, base path included."""
        return f"{self._base_path}v1/responses/{response_id}/stream?token={self.token(response_id)}"

    def token(self, response_id: str) -> str:
        """A token that is good from now on for the configured time."""
        expiry = int(self._clock.now().timestamp() + self._ttl_s).to_bytes(_EXPIRY_BYTES, "big")
        return base64.urlsafe_b64encode(expiry + self._mac(response_id, expiry)).decode().rstrip("=")

    def is_good(self, response_id: str, token: str) -> bool:
        """Whether the token was made here for this response and has not expired."""
        try:
            raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        except (ValueError, binascii.Error):
            return False
        expiry, mac = raw[:_EXPIRY_BYTES], raw[_EXPIRY_BYTES:]
        if not hmac.compare_digest(mac, self._mac(response_id, expiry)):
            return False
        return int.from_bytes(expiry, "big") >= self._clock.now().timestamp()

    def _mac(self, response_id: str, expiry: bytes) -> bytes:
        return hmac.new(self._key, response_id.encode() + b"\x00" + expiry, hashlib.sha256).digest()[:_MAC_BYTES]
