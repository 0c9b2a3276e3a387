"""Opaque ids: a prefix that names the kind, then a UUIDv7 in hexadecimal (RFC 9562 §5.7).

    conv_0199c1…   msg_0199c1…   resp_<region>_0199c1…   sum_0199c1…   fold_0199c1…

UUIDv7 starts with the time in milliseconds, so ids made later sort later and B-tree inserts stay local. Nothing
but the region in a response id is ever read back out of an id.
"""

from __future__ import annotations

import os
import re
import time
from typing import Final

REGION_PATTERN: Final = re.compile(r"[a-z0-9-]{1,32}")
_RESPONSE_PATTERN: Final = re.compile(r"resp_([a-z0-9-]{1,32})_[0-9a-f]{32}")
_MAX_ID_LENGTH: Final = 80


def uuid7_hex() -> str:
    """A fresh UUIDv7 as 32 hexadecimal digits: 48 bits of Unix time in ms, version, variant, 74 random bits."""
    ms = time.time_ns() // 1_000_000
    random = int.from_bytes(os.urandom(10), "big")
    value = (ms & 0xFFFF_FFFF_FFFF) << 80
    value |= 0x7 << 76 | ((random >> 62) & 0xFFF) << 64
    value |= 0b10 << 62 | (random & 0x3FFF_FFFF_FFFF_FFFF)
    return f"{value:032x}"


def new_conversation_id() -> str:
    """``conv_`` and a UUIDv7."""
    return f"conv_{uuid7_hex()}"


def new_message_id() -> str:
    """``msg_`` and a UUIDv7."""
    return f"msg_{uuid7_hex()}"


def new_response_id(region: str) -> str:
    """``resp_``, the region that runs the reply, and a UUIDv7."""
    return f"resp_{region}_{uuid7_hex()}"


def new_summary_id() -> str:
    """``sum_`` and a UUIDv7."""
    return f"sum_{uuid7_hex()}"


def new_memory_id() -> str:
    """``mem_`` and a UUIDv7."""
    return f"mem_{uuid7_hex()}"


def new_fold_id() -> str:
    """``fold_`` and a UUIDv7: the run that writes a summary. No route takes it."""
    return f"fold_{uuid7_hex()}"


def region_of(response_id: str) -> str | None:
    """The region named in a response id, or None when the id is not of that form."""
    match = _RESPONSE_PATTERN.fullmatch(response_id)
    return match.group(1) if match else None


def is_plausible(value: str) -> bool:
    """False for what can be no id of ours (too long, control characters); such a value is not looked up at all."""
    return 0 < len(value) <= _MAX_ID_LENGTH and value.isascii() and value.isprintable()
