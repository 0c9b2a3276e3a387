"""Who is calling and what they may use. Records only."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec


class TierName(StrEnum):
    """The classes of users, from the one served first under pressure to the one degraded first."""

    PRO = "pro"
    PLUS = "plus"
    FREE = "free"


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """Weight and limits of a class of users."""

    name: TierName
    weight: Annotated[float, msgspec.Meta(gt=0)]
    """Share of service relative to a user of weight 1."""
    max_open_replies: Annotated[int, msgspec.Meta(ge=1)]
    """Replies of one user that may be queued or streaming at the same time."""
    abandon_after_s: Annotated[float, msgspec.Meta(ge=0)] = 0
    """A reply that nobody has read for so many seconds is stopped; 0: never. ``background: true`` exempts a message."""


class Principal(msgspec.Struct, frozen=True):
    """The caller of one request, as vouched for by the authenticator. Re-read on every request."""

    user_id: str
    tier: TierName


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that one run used, by the model's own tokenizer."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """The part of ``prompt_tokens`` that the engine served from its prefix cache."""
    output_tokens: int = 0
