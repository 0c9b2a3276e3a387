"""The constants of the fair queue. What each is for, and how the bound follows from them: ``docs/scheduling.md``."""

from __future__ import annotations

from typing import Final

import msgspec

KEPT_IDLE: Final = 1000
"""Idle users of whom it is remembered exactly how far they were ahead; of more, only those who still are."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The constants of the order. None depends on the load; each is a bound that is promised, but the first."""

    lookahead: float = 0.5
    """What a reply under way is charged for before it is written, as a share of a usual reply of the model."""
    quantum: float = 1024.0
    """Service within which users count as equal, so that the warmer prefix may go first: about one reply."""
    most_bypasses: int = 4
    """How often a run that is next may see a warmer one go first."""
    large: float = 0.125
    """Share of the engine's KV tokens beyond which a run is large: room for it takes long to become free, so that
    lighter ones may pass it. For others everybody waits: the room of the few that end next is enough."""
    most_passes: int = 32
    """How many lighter runs may pass a large one that does not fit, before room is kept for it; together they may cost
    no more than it does."""
    reach: float = 4096.0
    """How far, in service, users whose prefix is on another engine of the model may be behind those whose is here."""
    most_others: int = 64
    """Users left to other engines that are looked past for one dispatch, and as many whose next run may not go yet: it
    does not fit, or costs more than may pass one that does not."""
    candidates: int = 5
    """Users among whom the warmest prefix decides: the next, and as many as may bypass it."""
    floor_share: float = 0.05
    """What the free tier gets at least while it waits, as a share of what the paying tiers get."""
