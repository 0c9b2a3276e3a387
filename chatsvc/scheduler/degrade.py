"""The degradation ladder: what is given up, for whom and in which order, when there is too little. Pure; no clock.

``STEPS`` is the whole policy: each step adds one thing to those before it. ``Ladder`` says on which step a model
stands, from how long runs wait. Nothing here ever touches a reply that is streaming.

Up: the next step is taken when a tier that may call for it has waited longer than its target *without a break* for an
interval, so a burst that drains by itself calls for nothing (CoDel: Nichols and Jacobson, 2012). What a step does
shows only in runs that came after it; so the one after it takes at least as long as these wait, and is not taken while
waits get shorter. Down: when all these tiers are well below their targets for the whole of a longer time. A step that
had to be taken again soon after it was given back is given back more slowly the next time: so under a load that stays,
changes become ever rarer.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

import msgspec

from chatsvc.config import DegradationConfig
from chatsvc.limits import TierName

_FREE: Final = frozenset({TierName.FREE})
_PLUS: Final = frozenset({TierName.PLUS})
_PRO: Final = frozenset({TierName.PRO})
_PAYING: Final = _PLUS | _PRO
_ALL: Final = _FREE | _PAYING

CALM: Final = 0.5
"""Well below the target: no more than this share of it."""
MOST_INTERVALS: Final = 6
"""The effect of a step is waited for at most so many intervals."""
SHORTER: Final = 0.95
"""Waits get shorter when they come to no more than this share of what they were."""
MOST_PATIENCE: Final = 16
"""``recover_s`` is stretched at most so many times."""


class SmallModel(Enum):
    """Whether replies move to the model that ``degrade_to`` names."""

    NEVER = 0
    UNLESS_NAMED = 1
    """Only those whose conversation and message name no model."""
    ALWAYS = 2


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for a tier on a step."""

    background: bool = True
    """Whether work that nobody waits for goes on: titles, folds, embeddings."""
    small_model: SmallModel = SmallModel.NEVER
    cap_tokens: bool = False
    """Replies are no longer than ``[degradation] max_tokens``."""
    less_history: bool = False
    """Prompts get only ``[degradation] history_share`` of their history's budget."""
    short_queue: bool = False
    """Only ``[degradation] queue_share`` of the tier's ``max_queued`` may wait."""
    refuse_late: bool = False
    """What would begin later than the tier's ``deadline_s`` after it came is refused."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the ladder: for whom, what it adds, and which tiers' waiting may call for it."""

    tiers: frozenset[TierName]
    adds: Mapping[str, object]
    called_by: frozenset[TierName]


_ALL_AT_ONCE: Final[Mapping[str, object]] = {
    "small_model": SmallModel.UNLESS_NAMED,
    "cap_tokens": True,
    "less_history": True,
    "short_queue": True,
    "refuse_late": True,
}
STEPS: Final[tuple[Step, ...]] = (
    Step(tiers=_ALL, adds={"background": False}, called_by=_ALL),
    Step(tiers=_FREE, adds={"small_model": SmallModel.ALWAYS}, called_by=_ALL),
    Step(tiers=_FREE, adds={"cap_tokens": True}, called_by=_ALL),
    Step(tiers=_FREE, adds={"less_history": True}, called_by=_ALL),
    Step(tiers=_FREE, adds={"short_queue": True}, called_by=_ALL),
    Step(tiers=_FREE, adds={"refuse_late": True}, called_by=_ALL),
    # A tier gives up something only for itself or those above it, never because one below it waits.
    Step(tiers=_PLUS, adds=_ALL_AT_ONCE, called_by=_PAYING),
    Step(tiers=_PRO, adds=_ALL_AT_ONCE, called_by=_PRO),
)
TOP: Final = len(STEPS)


def _table() -> dict[tuple[int, TierName], Measures]:
    table = {}
    for tier in TierName:
        held = Measures()
        table[0, tier] = held
        for number, step in enumerate(STEPS, start=1):
            if tier in step.tiers:
                held = msgspec.structs.replace(held, **step.adds)
            table[number, tier] = held
    return table


_MEASURES: Final = _table()


def measures(step: int, tier: TierName) -> Measures:
    """What holds for a tier on a step: 0, nothing is given up, to ``TOP``."""
    return _MEASURES[step, tier]


class Ladder:
    """On which step one model stands. Call ``observe`` a few times an interval."""

    def __init__(self, config: DegradationConfig, targets: Mapping[TierName, float]) -> None:
        """``targets``: for each tier, how many seconds its runs may wait before it counts as too long."""
        self.step: int = 0
        self._interval_s: Final = config.interval_s
        self._first_recover_s: Final = config.recover_s
        self._recover_s = config.recover_s
        self._targets: Final = dict(targets)
        self._climbed_at: float | None = None
        """How long the wait was that called for the last step, if that was upwards: its effect is waited for."""
        self._over_since: float | None = None
        self._calm_since: float | None = None
        self._lowered_at: float | None = None

    def observe(self, now: float, delays: Mapping[TierName, float]) -> int:
        """Note how long the tiers' runs wait; the step from now on. A tier without runs is left out of ``delays``.

        ``now`` is in seconds and never goes back.
        """
        over = self._over(delays)
        self._over_since = None if over is None else now if self._over_since is None else self._over_since
        self._calm_since = None if not self._calm(delays) else now if self._calm_since is None else self._calm_since
        if over is not None and self._over_since is not None and now - self._over_since >= self._patience(over):
            self._raise_unless_shorter(now, over)
        elif self._calm_since is not None and now - self._calm_since >= self._recover_s:
            self._lower(now)
        return self.step

    def _over(self, delays: Mapping[TierName, float]) -> float | None:
        """The shortest wait that calls for the next step; None: none does."""
        if self.step == TOP:
            return None
        called_by = STEPS[self.step].called_by
        return min((s for tier, s in delays.items() if tier in called_by and s > self._targets[tier]), default=None)

    def _calm(self, delays: Mapping[TierName, float]) -> bool:
        if self.step == 0:
            return False
        called_by = STEPS[self.step - 1].called_by
        return all(s <= CALM * self._targets[tier] for tier, s in delays.items() if tier in called_by)

    def _patience(self, delay_s: float) -> float:
        """Seconds for which a wait must have been too long before the next step is taken."""
        if self._climbed_at is None:
            return self._interval_s
        return max(self._interval_s, min(delay_s, MOST_INTERVALS * self._interval_s))

    def _raise_unless_shorter(self, now: float, delay_s: float) -> None:
        if self._climbed_at is not None and delay_s <= SHORTER * self._climbed_at:
            self._climbed_at = delay_s
            self._over_since = now
            return
        # Soon after it was given back: giving it back was too early.
        if self._lowered_at is not None and now - self._lowered_at < 2 * self._recover_s:
            self._recover_s = min(2 * self._recover_s, MOST_PATIENCE * self._first_recover_s)
        else:
            self._recover_s = self._first_recover_s
        self._lowered_at = None
        self._climbed_at = delay_s
        self._change(self.step + 1)

    def _lower(self, now: float) -> None:
        self._lowered_at = now
        self._climbed_at = None
        self._change(self.step - 1)

    def _change(self, step: int) -> None:
        self.step = step
        self._over_since = self._calm_since = None
