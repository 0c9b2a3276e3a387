"""How much this process has to give up, by how long runs wait in it, and what that means for one request.

The policy is ``degrade``'s; here it gets its measurements and is applied. Each process judges for itself, by the queues
as it knows them. What is given up for a run is settled when it is taken in and stored with it, so that
a repeated request is answered alike, and nothing is taken from a reply that runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Final, NamedTuple, Protocol

import msgspec
import structlog

from chatsvc.clock import Clock
from chatsvc.config import Config
from chatsvc.errors import NothingLeft, QueueFull, TooLate
from chatsvc.limits import Tier, TierName
from chatsvc.run import RunKind, WaitingRun
from chatsvc.scheduler.degrade import Ladder, SmallModel, measures
from chatsvc.scheduler.queue_delay import RATE_WINDOW_S, QueueDelays
from chatsvc.scheduler.spared import Fullness, Need, Spared
from chatsvc.scheduler.wanted import Wanted

_log = structlog.get_logger(__name__)

MODEL: Final = "model"
MAX_TOKENS: Final = "max_tokens"
HISTORY: Final = "history"
"""What may be given up for a reply."""
MOST_LOOK_S: Final = 1.0
LOOKS_IN_AN_INTERVAL: Final = 5
OVERDUE_AT_ONCE: Final = 200
LEAST_RETRY_S: Final = 5
RETRY_SPREAD: Final = 0.2
LEAST_SPREAD_S: Final = 5
"""So much later some are told to come again than others: all that are refused at once would come back at once."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """On what terms a run is taken in."""

    model: str
    """The one that answers."""
    asked_model: str
    max_tokens: int | None
    history_share: float = 1.0
    """What is left of the budget for the conversation's history."""
    tier: Tier
    """The user's limits, with as many places in the queue as are left."""
    degraded: tuple[str, ...] = ()
    """What was given up: ``model``, ``max_tokens``, ``history``."""
    reply_tokens: int = 0
    """The longest that the reply may be, as far as is known here."""
    reply_tokens_below: int | None = None
    """The same a step lower; None: there another model answers too."""

    @property
    def moved(self) -> bool:
        """Whether another model answers than was asked for."""
        return self.model != self.asked_model

    def of(self, wanted: Wanted) -> Wanted:
        """What was wanted, on these terms."""
        return msgspec.structs.replace(
            wanted, model=self.model, max_tokens=self.max_tokens, history_share=self.history_share
        )

    def with_all_history(self) -> Terms:
        """The terms of a prompt that has all of the history that it would have otherwise."""
        return msgspec.structs.replace(self, degraded=tuple(what for what in self.degraded if what != HISTORY))


class UsualReply(NamedTuple):
    """A model's replies when nothing is asked for, in tokens; None: not known here."""

    most: int | None
    """The longest."""
    reserve: int | None
    """What of the window is kept free for one."""


class Queue(Protocol):
    """What has to be known of a model's queue."""

    @property
    def model(self) -> str:
        """Whose queue it is."""
        ...

    @property
    def delays(self) -> QueueDelays:
        """How long its runs wait."""
        ...

    def waits(self) -> Iterable[tuple[WaitingRun, float]]:
        """Every run that waits, and since when, by the monotonic clock."""
        ...


class Pressure:
    """The ladders of all models here. ``run`` is to be kept running; without it nothing is ever given up."""

    def __init__(
        self,
        *,
        config: Config,
        queues: Iterable[Queue],
        clock: Clock,
        enabled: bool,
        fullness: Callable[[str], Fullness] = lambda _: Fullness(),
    ) -> None:
        """``queues``: those that are known in this process, one a model; ``fullness``: of what serves a model."""
        targets = {name: tier.queue_target_s for name, tier in config.tiers.items()}
        self._rules = config.degradation
        self._tiers = config.tiers
        self._smaller = {name: model.degrade_to for name, model in config.models.items() if model.degrade_to}
        self._clock = clock
        self._queues = {queue.model: queue for queue in queues}
        self._ladders = {name: Ladder(config.degradation, targets) for name in self._queues} if enabled else {}
        self._targets = targets
        self.fullness = fullness
        self._spared = {name: Spared(config.degradation.recover_s) for name in self._queues}
        self.loads_below: dict[str, float] = {}
        """The share of what there is that would be taken a step lower, by model; 0.0: not known."""
        self.delays: dict[str, dict[TierName, float]] = {name: {} for name in self._queues}
        """How long runs waited when last looked at, by model and tier."""
        self.degraded: Counter[tuple[str, TierName, str]] = Counter()
        """Runs for which something was given up, by model asked for, tier, and what it was."""
        self.refused: Counter[tuple[TierName, str]] = Counter()
        """Requests refused because there was too little, or nothing left for the user, by tier and code."""

    # What others ask it -------------------------------------------------------------------------------------------

    def step(self, model: str) -> int:
        """On which step of the ladder a model stands here."""
        return self._ladders[model].step if model in self._ladders else 0

    def steps(self) -> Mapping[str, int]:
        """On which step each model stands, of those whose queues are known here."""
        return {model: self.step(model) for model in self._queues}

    def allows_background(self, model: str) -> bool:
        """Whether work that nobody waits for may be done by this model now: titles, folds, embeddings."""
        return all(measures(self.step(model), tier).background for tier in TierName)

    def terms(
        self,
        tier: TierName,
        asked: str,
        *,
        named: bool,
        max_tokens: int | None,
        usual: Callable[[str], UsualReply],
        is_ready: Callable[[str], bool],
    ) -> Terms:
        """On what terms a run is taken in that asks for this model; ``named``: not for want of another wish.

        ``max_tokens`` is what was asked for, ``usual`` what a model's reply is when nothing was.
        """
        step = self.step(asked)
        terms, below = (
            self._terms_on(at, tier, asked, named=named, max_tokens=max_tokens, usual=usual, is_ready=is_ready)
            for at in (step, max(step - 1, 0))
        )
        return msgspec.structs.replace(terms, reply_tokens_below=None if below.moved else below.reply_tokens)

    def _terms_on(
        self,
        step: int,
        tier: TierName,
        asked: str,
        *,
        named: bool,
        max_tokens: int | None,
        usual: Callable[[str], UsualReply],
        is_ready: Callable[[str], bool],
    ) -> Terms:
        model = asked
        moves = measures(step, tier).small_model
        smaller = self._smaller.get(asked)
        if smaller and (moves is SmallModel.ALWAYS or (moves is SmallModel.UNLESS_NAMED and not named)):
            # Not from the rain into the downpour.
            model = smaller if is_ready(smaller) and self.step(smaller) <= step else asked
        held = measures(step, tier)
        degraded = [MODEL] if model != asked else []
        if held.cap_tokens:
            most, reserve = (max_tokens, None) if max_tokens is not None else usual(model)
            # What is asked for is kept free in the window: nobody is to get less of it for not having asked.
            cap = min(self._rules.max_tokens, self._rules.max_tokens if reserve is None else reserve)
            if most is None or most > cap:
                max_tokens = cap
                degraded.append(MAX_TOKENS)
        share = self._rules.history_share if held.less_history else 1.0
        if share < 1:
            degraded.append(HISTORY)
        limits = self._tiers[tier]
        if held.short_queue:
            places = max(1, math.floor(limits.max_queued * self._rules.queue_share))
            limits = msgspec.structs.replace(limits, max_queued=places)
        return Terms(
            model=model,
            asked_model=asked,
            max_tokens=max_tokens,
            history_share=share,
            tier=limits,
            degraded=tuple(degraded),
            reply_tokens=(usual(model).most or 0) if max_tokens is None else max_tokens,
        )

    def in_force(self, tier: TierName, model: str) -> tuple[str, ...]:
        """What is given up now for the tier's replies by this model, where it applies."""
        held = measures(self.step(model), tier)
        moves = held.small_model is not SmallModel.NEVER and model in self._smaller
        return tuple(
            what
            for what, holds in ((MODEL, moves), (MAX_TOKENS, held.cap_tokens), (HISTORY, held.less_history))
            if holds
        )

    def refuse_late(self, tier: TierName, model: str) -> None:
        """Raises ``TooLate`` when a run that came now would begin after its deadline, and that matters now."""
        if model not in self._queues or not measures(self.step(model), tier).refuse_late:
            return
        deadline_s = self._tiers[tier].deadline_s
        expected_s = self._queues[model].delays.expected_s(tier, self._clock.monotonic(), deadline_s)
        if expected_s > deadline_s:
            retry_s = _spread(self._retry_s(model, tier), random.random())  # noqa: S311  # spreads load, hides nothing
            raise TooLate(
                f"So many are waiting that this would begin in about {expected_s:.0f} s, and more than {deadline_s:g} s"
                f" is too late. Try again in {retry_s} s.",
                retry_after=retry_s,
                expected_s=round(expected_s),
            )

    @contextlib.contextmanager
    def counting(self, tier: TierName) -> Iterator[None]:
        """Count a request that is refused within the block for want of something."""
        try:
            yield
        except (NothingLeft, QueueFull, TooLate) as error:
            self.refused[tier, error.code] += 1
            raise

    def note(self, tier: TierName, terms: Terms, prompt_tokens: int) -> None:
        """A run was taken in on these terms, with a prompt of about so many tokens."""
        now = self._clock.monotonic()
        need = Need(1, prompt_tokens + terms.reply_tokens)
        if terms.asked_model in self._ladders:
            below = terms.reply_tokens_below
            without = Need() if below is None else Need(1, prompt_tokens + below)
            self._spared[terms.asked_model].take_in(now, Need() if terms.moved else need, without)
        if terms.moved and terms.model in self._ladders:
            self._spared[terms.model].take_in(now, need, need)
        for what in terms.degraded:
            self.degraded[terms.asked_model, tier, what] += 1

    # What it does -------------------------------------------------------------------------------------------------

    async def run(self, refuse: Callable[[dict[str, int]], object]) -> None:
        """Look at the queues until cancelled.

        ``refuse`` is given the runs that have waited too long, and after how many seconds each may be tried again.
        """
        every_s = min(MOST_LOOK_S, self._rules.interval_s / LOOKS_IN_AN_INTERVAL)
        while True:
            self.look()
            if overdue := self.overdue():
                refuse(overdue)
            await asyncio.sleep(every_s)

    def look(self) -> None:
        """Measure, and take or give back a step where it is time."""
        now = self._clock.monotonic()
        for model, queue in self._queues.items():
            replies = ((run.tier, since) for run, since in queue.waits() if run.kind is RunKind.REPLY)
            delays = queue.delays.look(now, replies)
            self.delays[model] = delays
            if (ladder := self._ladders.get(model)) is None:
                continue
            before, spared = ladder.step, self._spared[model]
            in_time = all(delay_s <= self._targets[tier] for tier, delay_s in delays.items())
            load_below = self.loads_below[model] = spared.look(now, self.fullness(model), in_time=in_time)
            if ladder.observe(now, delays, queue.delays.waiting, load_below=load_below) != before:
                spared.restart(now)
                shown = {tier.value: round(delay_s, 1) for tier, delay_s in delays.items()}
                _log.warning("degradation", model=model, step=ladder.step, before=before, queue_delay_s=shown)

    def overdue(self) -> dict[str, int]:
        """Runs that wait, whose deadline has passed, of models and tiers where that matters now.

        With each, after how many seconds it may be tried again.
        """
        now = self._clock.monotonic()
        found: dict[str, int] = {}
        for model, queue in self._queues.items():
            step = self.step(model)
            tiers = {tier: self._retry_s(model, tier) for tier in TierName if measures(step, tier).refuse_late}
            if tiers:
                late = (
                    run
                    for run, since in queue.waits()
                    if run.tier in tiers
                    and run.kind is RunKind.REPLY
                    and now - since > self._tiers[run.tier].deadline_s
                )
                for run in islice(late, OVERDUE_AT_ONCE):
                    found[run.id] = _spread(tiers[run.tier], _share(run.id))
        return found

    def _retry_s(self, model: str, tier: TierName) -> float:
        """In so many seconds the tier's queue will be short enough for one more, if nobody came.

        While none begins, as long again as that was looked at.
        """
        deadline_s = self._tiers[tier].deadline_s
        paced_s = self._queues[model].delays.paced_s(tier, self._clock.monotonic(), deadline_s)
        return RATE_WINDOW_S if paced_s is None else max(LEAST_RETRY_S, paced_s - deadline_s)


def _spread(retry_s: float, share: float) -> int:
    """What is told for ``retry_s``: never less, and by ``share`` (0 to 1) more."""
    return math.ceil(retry_s + share * max(LEAST_SPREAD_S, RETRY_SPREAD * retry_s))


def _share(run_id: str) -> float:
    """A number from 0 to 1 that is the run's, in every process: whoever refuses it says the same."""
    return zlib.crc32(run_id.encode()) / 2**32
