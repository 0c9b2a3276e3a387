"""Where waiting runs stand: what an honest position and an honest waiting time are made of.

A survey finds it for all runs as of one moment, and yet in steps of some hundred, between which the event loop may go
on: whoever is about to change, and was not looked at yet, is looked at first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, islice
from typing import Final

import msgspec

from chatsvc.limits import ServiceCost, TierName
from chatsvc.scheduler.fair_flow import Flow
from chatsvc.scheduler.output_length import OutputEstimator
from chatsvc.scheduler.virtual_time import VirtualTime

_AT_ONCE: Final = 512
"""Users that are worked out in one step; fewer runs than that are not worth any."""
_OUT_OF_DATE: Final = 1 / 8
"""A survey serves until this share of those who wait has changed."""
Entry = tuple[float, str, float]
"""The counter at which a run is next, its id, and its expected service."""


class Standing(msgspec.Struct, frozen=True):
    """Where one run stands."""

    position: int
    """1: next."""
    service_ahead: float
    """Expected service of all runs that go before it. Divided by the service delivered in a second, by this user's
    replies and all others', it says how long the run waits."""


class Standings:
    """All waiting runs in the order in which they would start if nobody came and predictions were right."""

    def __init__(self) -> None:
        self._tags: list[float] = []
        self._ahead: list[float] = [0.0]
        self._index: dict[str, int] = {}

    def of(self, run_id: str) -> Standing | None:
        """Where a run stands; None when it was not waiting."""
        index = self._index.get(run_id)
        return None if index is None else Standing(index + 1, self._ahead[index])

    def at(self, tag: float) -> Standing:
        """Where a run with this counter would stand."""
        index = bisect_left(self._tags, tag)
        return Standing(index + 1, self._ahead[index])

    def put(self, entries: list[Entry]) -> Iterator[None]:
        """Take in all there are, in small steps."""
        entries.sort()  # it is quick: the parts are sorted
        yield
        for first in range(0, len(entries), 4 * _AT_ONCE):
            part = entries[first : first + 4 * _AT_ONCE]
            self._index.update((run_id, first + index) for index, (_, run_id, _) in enumerate(part))
            self._tags += [tag for tag, _, _ in part]
            self._ahead += accumulate([self._ahead.pop(), *(service for _, _, service in part)])
            yield


class _Survey:
    """All users of one moment; whoever is about to change meanwhile has its turn first."""

    def __init__(self, flows: Iterable[Flow], weigh: Callable[[Flow], list[Entry]]) -> None:
        self._left = dict.fromkeys(flows)
        self._weigh = weigh
        self.entries: list[Entry] = []

    def about_to_change(self, flow: Flow) -> None:
        if flow in self._left:
            del self._left[flow]
            self.entries += self._weigh(flow)

    def steps(self) -> Iterator[None]:
        while self._left:
            part: list[Entry] = []
            for flow in [*islice(self._left, _AT_ONCE)]:
                del self._left[flow]
                part += self._weigh(flow)
            part.sort()
            self.entries += part
            yield


class Places:
    """Where all runs of one fair queue stand, as it was when they were last surveyed."""

    def __init__(
        self,
        flows: Mapping[str, Flow],
        weights: Mapping[TierName, float],
        *,
        time: VirtualTime,
        cost: ServiceCost,
        estimator: OutputEstimator,
        edge: Callable[[TierName], float],
    ) -> None:
        self._flows = flows
        self._weights = weights
        self._time = time
        self._cost = cost
        self._estimator = estimator
        self._edge = edge
        self._waiting = 0
        self._changes = 0
        self._survey: _Survey | None = None
        self._seen = Standings()
        self._seen_at = -1

    def changed(self, count: int) -> None:
        """So many runs more wait, or fewer."""
        self._waiting += count
        self._changes += 1

    def about_to_change(self, flow: Flow) -> None:
        """A user's counter, tier, or line, or what its replies are like, will be another in a moment."""
        if self._survey is not None:
            self._survey.about_to_change(flow)

    def of(self, run_id: str, flow: Flow) -> Standing:
        """Where a waiting run of this user stands. Surveys at once if all are few, or never were surveyed."""
        if self._seen_at < 0 or self._waiting <= _AT_ONCE:
            for _ in self.survey():
                pass
        return self._seen.of(run_id) or self._seen.at(flow.key + self._edge(flow.tier) - self._time.offset(flow.tier))

    def survey(self) -> Iterator[None]:
        """Look at all, if much has changed. All is as it was at the first step; it counts once the last one is done.

        Another one that is begun meanwhile goes on instead.
        """
        changes = self._changes
        if self._seen_at >= 0 and changes - self._seen_at <= self._waiting * _OUT_OF_DATE:
            return
        self._survey = survey = _Survey(self._flows.values(), self._weigher())
        found = Standings()
        try:
            yield
            for steps in (survey.steps(), found.put(survey.entries)):
                for _ in steps:
                    yield
                    if self._survey is not survey:
                        return
            self._seen, self._seen_at = found, changes
        finally:
            if self._survey is survey:
                self._survey = None

    def _weigher(self) -> Callable[[Flow], list[Entry]]:
        """Says where a user's runs stand, by what concerns all users as it is now."""
        cost, estimator, usual = self._cost, self._estimator, self._estimator.usual
        ahead = {tier: self._edge(tier) - self._time.offset(tier) for tier in self._weights}
        boosts = {tier: self._time.boost(tier) for tier in self._weights}

        def weigh(flow: Flow) -> list[Entry]:
            entries: list[Entry] = []
            if not flow.waiting:
                return entries
            tag, rate = flow.received + flow.ahead + ahead[flow.tier], flow.weight * boosts[flow.tier]
            mean = estimator.mean(flow.user_id, usual)
            for run_id, one in flow.queued:
                demand = one.demand
                service = cost.of_prompt(demand.prompt_tokens, demand.cached_tokens)
                service += cost.of_output(min(mean, demand.max_tokens))
                entries.append((tag + one.centre / flow.weight, run_id, service))
                tag += service / rate
            return entries

        return weigh
