"""What is left, as headers with the names that clients of OpenAI's API know.

    x-ratelimit-{limit,remaining}-requests          replies that may be open at once
    x-ratelimit-{limit,remaining,reset}-tokens      the budget in units of service; only where there is one

``reset`` is the time until the oldest part of what was used is free again, like ``1h2m3s``.
"""

from __future__ import annotations

import math
from datetime import datetime
from typing import Final

from chatsvc.limits import Allowance

_UNITS: Final = (("h", 3600), ("m", 60), ("s", 1))


def ratelimit_headers(allowance: Allowance | None, now: datetime) -> dict[str, str]:
    """The headers; none where nothing is known."""
    if allowance is None:
        return {}
    headers = {
        "x-ratelimit-limit-requests": str(allowance.open_limit),
        "x-ratelimit-remaining-requests": str(max(0, allowance.open_limit - allowance.open_used)),
    }
    if allowance.budget:
        headers["x-ratelimit-limit-tokens"] = str(math.floor(allowance.budget))
        headers["x-ratelimit-remaining-tokens"] = str(max(0, math.floor(allowance.budget - allowance.used)))
        if allowance.refills_at is not None:
            headers["x-ratelimit-reset-tokens"] = _spell((allowance.refills_at - now).total_seconds())
    return headers


def _spell(seconds: float) -> str:
    left = max(0, math.ceil(seconds))
    parts: list[str] = []
    for unit, size in _UNITS:
        count, left = divmod(left, size)
        if count or parts or unit == "s":
            parts.append(f"{count}{unit}")
    return "".join(parts)
