"""The degradation ladder: what is given up, for whom and in which order, when there is too little. Pure; no clock.

``STEPS`` is the whole policy: each step adds one thing to those before it. ``Ladder`` says on which step a model
stands, from how long runs wait. Nothing here ever touches a reply that is streaming.

Up: the next step is taken when a tier that may call for it has waited longer than its target *without a break* for an
interval, so a burst that drains by itself calls for nothing (CoDel: Nichols and Jacobson, 2012). It is not taken while
ever fewer wait: then those before it are enough. What a step does to replies shows only when those begin that came
after it; the one after such a step takes at least as long as these wait. Down: when all these tiers are well below
their targets for the whole of a longer time, and what came in it would have fitted without the step. A step that had to
be taken again soon after it was given back is given back more slowly the next time: so under a load that stays, changes
become ever rarer.
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
FEWER: Final = 0.95
"""Fewer wait when they are no more than this share of those an interval ago."""
FITS: Final = 1.0
"""A step is needed while, without it, more than this share of what there is would be taken."""
MOST_PATIENCE: Final = 16
"""``recover_s`` is stretched at most so many times. After that long a calm a step is tried without, whatever was
expected of it."""


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
    at_once: bool = False
    """Whether it shows at once in how many wait: it keeps runs away, or gives places back."""


_ALL_AT_ONCE: Final[Mapping[str, object]] = {
    "small_model": SmallModel.UNLESS_NAMED,
    "cap_tokens": True,
    "less_history": True,
    "short_queue": True,
    "refuse_late": True,
}
STEPS: Final[tuple[Step, ...]] = (
    Step(tiers=_ALL, adds={"background": False}, called_by=_ALL, at_once=True),
    Step(tiers=_FREE, adds={"small_model": SmallModel.ALWAYS}, called_by=_ALL, at_once=True),
    # How long replies are shows only when they end.
    Step(tiers=_FREE, adds={"cap_tokens": True}, called_by=_ALL),
    Step(tiers=_FREE, adds={"less_history": True}, called_by=_ALL),
    Step(tiers=_FREE, adds={"short_queue": True}, called_by=_ALL, at_once=True),
    Step(tiers=_FREE, adds={"refuse_late": True}, called_by=_ALL, at_once=True),
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
        self._waited_then: dict[TierName, int] | None = None
        """How many waited of each tier when the last step was taken, if that was upwards, or an interval ago."""
        self._counted_at = 0.0
        self._over_since: float | None = None
        self._calm_since: float | None = None
        self._needed_at: float | None = None
        """When the step was last seen to keep away more than would fit."""
        self._lowered_at: float | None = None

    def observe(
        self,
        now: float,
        delays: Mapping[TierName, float],
        waiting: Mapping[TierName, int],
        *,
        load_below: float = 0.0,
    ) -> int:
        """Note how long the tiers' runs wait, and how many do; the step from now on.

        A tier without runs is left out of ``delays``. ``load_below``: the share of what there is that would be taken on
        the step below; 0.0: not known. ``now`` is in seconds and never goes back.
        """
        over = self._over(delays)
        self._over_since = None if over is None else now if self._over_since is None else self._over_since
        self._calm_since = None if not self._calm(delays) else now if self._calm_since is None else self._calm_since
        if load_below > FITS:
            self._needed_at = now
        if over is not None and self._over_since is not None and now - self._over_since >= self._patience(over):
            self._raise_unless_fewer(now, waiting)
        elif self._calm_since is not None and self._is_over(now, self._calm_since):
            self._lower(now)
        elif over is None and self._waited_then is not None and now - self._counted_at >= self._interval_s:
            self._count(now, waiting)
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

    def _is_over(self, now: float, calm_since: float) -> bool:
        """Whether what the last step was taken for is over."""
        if now - calm_since >= MOST_PATIENCE * self._first_recover_s:
            return True
        needed_at = calm_since if self._needed_at is None else max(calm_since, self._needed_at)
        return now - needed_at >= self._recover_s

    def _patience(self, delay_s: float) -> float:
        """Seconds for which a wait must have been too long before the next step is taken."""
        if self._waited_then is None or STEPS[self.step - 1].at_once:
            return self._interval_s
        return max(self._interval_s, min(delay_s, MOST_INTERVALS * self._interval_s))

    def _count(self, now: float, waiting: Mapping[TierName, int]) -> None:
        self._waited_then, self._counted_at = dict(waiting), now

    def _raise_unless_fewer(self, now: float, waiting: Mapping[TierName, int]) -> None:
        # Those who may call for this step, then and now; the last one may have been called for by others.
        called_by = STEPS[self.step].called_by
        before = None if self._waited_then is None else sum(self._waited_then.get(tier, 0) for tier in called_by)
        self._count(now, waiting)
        if before is not None and sum(waiting.get(tier, 0) for tier in called_by) <= FEWER * before:
            self._over_since = now
            return
        # Soon after it was given back: giving it back was too early.
        if self._lowered_at is not None and now - self._lowered_at < 2 * self._recover_s:
            self._recover_s = min(2 * self._recover_s, MOST_PATIENCE * self._first_recover_s)
        else:
            self._recover_s = self._first_recover_s
        self._lowered_at = None
        self._change(self.step + 1)

    def _lower(self, now: float) -> None:
        self._lowered_at = now
        self._waited_then = None
        self._change(self.step - 1)

    def _change(self, step: int) -> None:
        self.step = step
        self._over_since = self._calm_since = self._needed_at = None
