"""Who is calling and what they may use. Records only."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

import msgspec


class TierName(StrEnum):
    """The classes of users, from the one served first under pressure to the one degraded first."""

    PRO = "pro"
    PLUS = "plus"
    FREE = "free"


class ServiceCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[service]``: what a token costs, in units that shares and budgets are counted in. See docs/scheduling.md.

    Reading a prompt is limited by arithmetic and done many tokens at a time; writing is limited by memory bandwidth,
    one token of a sequence a step (Sheng et al., OSDI 2024, weigh output twice; 3 counts its read of the KV cache). A
    cached prompt token is not computed again, but takes room, and is read at every step.
    """

    prompt: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0
    """A token of a prompt that has to be computed. Ratios decide who is next; budgets count the units."""
    cached: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 0.1
    """A token of a prompt that is served from the prefix cache. At most ``prompt``."""
    output: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 3.0
    """A token of a reply. ``bench/calibrate.py`` measures what it is on your engine."""

    def of_prompt(self, prompt_tokens: int, cached_tokens: int) -> float:
        """Service of reading a prompt of which ``cached_tokens`` are served from the prefix cache."""
        cached = min(max(cached_tokens, 0), prompt_tokens)
        return self.prompt * (prompt_tokens - cached) + self.cached * cached

    def of_output(self, output_tokens: float) -> float:
        """Service of writing so many tokens."""
        return self.output * output_tokens


class Shortage(StrEnum):
    """What there is too little of for one more reply."""

    PLACES = "places"
    BUDGET = "budget"
    QUEUE = "queue"


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """Weight and limits of a class of users."""

    name: TierName
    weight: Annotated[float, msgspec.Meta(gt=0, le=1_000_000)]
    """Share of service relative to a user of weight 1."""
    max_open_replies: Annotated[int, msgspec.Meta(ge=1, le=100_000)]
    """Replies of one user that may be queued or streaming at the same time."""
    abandon_after_s: Annotated[float, msgspec.Meta(ge=0, le=2_678_400)] = 0
    """A reply that nobody has read for so many seconds is stopped; 0: never. ``background: true`` exempts a message."""
    budget: Annotated[float, msgspec.Meta(ge=0, le=1_000_000_000_000)] = 0
    """Service that one user may use within ``budget_window_s``; 0: any amount. What a token costs: ``[service]``."""
    budget_window_s: Annotated[float, msgspec.Meta(ge=300, le=2_678_400)] = 10_800
    """What was used counts for so many seconds, in steps of five minutes; then it is free again."""
    max_queued: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 1000
    """Replies of this tier that may wait at the same time, those of all users together; more are refused."""
    queue_target_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 5
    """When replies of this tier wait longer than so many seconds, and go on doing so, ``[degradation]`` begins."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 60
    """On the steps of ``[degradation]`` that refuse what is late: a reply that would begin later than so many seconds
    after its message, or has not begun by then."""

    def shortage(self, *, open_used: int, used: float, charge: float, waiting: int, must_wait: bool) -> Shortage | None:
        """What a user lacks for one more reply that is expected to cost ``charge``; None: it may come.

        ``store.allowances.MAY`` says the same in SQL, where the rows are. The first request on an untouched budget may
        cost more than all of it, or some could never be made.
        """
        if open_used >= self.max_open_replies:
            return Shortage.PLACES
        if self.budget and used and used + charge > self.budget:
            return Shortage.BUDGET
        if must_wait and waiting >= self.max_queued:
            return Shortage.QUEUE
        return None


class Principal(msgspec.Struct, frozen=True):
    """The caller of one request, as vouched for by the authenticator. Re-read on every request."""

    user_id: str
    tier: TierName


class Allowance(msgspec.Struct, frozen=True, kw_only=True):
    """What a user may have at once and in time, and how much of it is taken."""

    open_limit: int
    open_used: int
    """Replies that are queued or streaming."""
    budget: float
    """Units of service; 0: no limit."""
    used: float = 0
    """Within the window, what open replies are expected to cost included."""
    refills_at: datetime | None = None
    """When the oldest part of it is free again; None when nothing of it is due yet."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that one run used, by the model's own tokenizer."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """The part of ``prompt_tokens`` that the engine served from its prefix cache."""
    output_tokens: int = 0
