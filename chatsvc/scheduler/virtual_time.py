"""Virtual time: where users begin who begin to wait, and how far a tier may be ahead of others by right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from chatsvc.limits import TierName


class VirtualTime:
    """Sums over users that can be kept up to date in O(1). All amounts are service divided by weight.

    An engine serves many runs at once, so what was dispatched and what was delivered are far apart. Virtual time is
    therefore read from what users have *received*: who begins to wait begins at the mean of those who wait. Start tags
    of dispatched runs (SFQ) would be late by what is under way, and leave a newcomer behind by as much.
    """

    def __init__(self, weights: Mapping[TierName, float], *, floor_share: float, quantum: float) -> None:
        self._weights: Final = dict(weights)
        self._floor_share: Final = floor_share
        self._slack: Final = quantum / max(weights.values())
        self._most_edge: Final = quantum / 2
        self._working: Final = dict.fromkeys(weights, 0)
        self._waiting: Final = dict.fromkeys(weights, 0)
        self._received: Final = dict.fromkeys(weights, 0.0)
        self._offset: Final = dict.fromkeys(weights, 0.0)
        self._boost = 1.0
        """Of the free tier. It changes with those who have work only."""
        self._served = 0.0
        self._most_ahead = 0.0
        self._latest = 0.0
        self.now = 0.0
        """Nobody who begins to wait begins before this. Never goes back."""

    # Who has work -------------------------------------------------------------------------------------------------

    def work(self, tier: TierName, users: int) -> None:
        """So many users of a tier more, or fewer, have work: waiting or under way."""
        self._working[tier] += users
        self._boost = self._free_boost()

    def wait(self, tier: TierName, received: float) -> None:
        """A user who has received so much begins to wait."""
        self._waiting[tier] += 1
        self._received[tier] += received

    def receive(self, tier: TierName, amount: float) -> None:
        """A user who waits has received more."""
        self._received[tier] += amount

    def wait_no_more(self, tier: TierName, received: float) -> None:
        """A user who has received so much has nothing waiting any more."""
        self._waiting[tier] -= 1
        # Nothing of rounding is carried on.
        self._received[tier] = self._received[tier] - received if self._waiting[tier] else 0.0

    @property
    def waiting(self) -> int:
        """Users with runs waiting."""
        return sum(self._waiting.values())

    # Time ---------------------------------------------------------------------------------------------------------

    def start(self, least: float | None) -> float:
        """Where a user begins who begins to wait: at the mean of what those who wait have received.

        ``least`` is the counter of who is next: a newcomer is not put behind it, save for the time that has gone by
        since that one began to wait. Nor is it put before others who began lately, by more than is charged ahead.
        """
        if least is None:
            return self.now
        total = weight = 0.0
        for tier, users in self._waiting.items():
            total += self._weights[tier] * (self._received[tier] - users * self._offset[tier])
            weight += self._weights[tier] * users
        return max(self.now, max(self._served, self._latest) - self._most_ahead, min(total / weight, least))

    def started(self, tag: float) -> None:
        """A user began to wait with this counter."""
        self._latest = max(self._latest, tag)

    def dispatched(self, tag: float, ahead: float) -> None:
        """A user with this counter, charged ahead so much of it, was next.

        Who begins to wait now begins there (SFQ's start tag), less at most what is under way for any one user.
        """
        self._served = max(self._served, tag)
        self._most_ahead = max(self._most_ahead, ahead)

    def reach(self, received: float) -> None:
        """A user who has received so much is served while nobody else waits: it took from nobody."""
        self.now = max(self.now, received)

    def advance(self, service: float, least: float | None) -> None:
        """So much was delivered to all: time goes on as in a fluid server, divided by the weight of all who have work.

        So a crowd of newcomers, each of whom would be next, cannot keep those waiting for ever who have had a little:
        time passes even if all who are served are new. It runs ahead of who is next by at most a quantum.
        """
        weight = sum(self._weights[tier] * users * self.boost(tier) for tier, users in self._working.items() if users)
        later = self.now + service / weight
        self.now = max(self.now, later if least is None else min(later, least + self._slack))

    def edge(self, tier: TierName, service: float) -> float:
        """How far a run of the tier counts as served before it is, when tiers are compared: by so much of its reply.

        Counters say who has received less; among those who are even, who is worth more goes first. So weights are felt
        in waiting times too, not only in shares.
        """
        return min(service, self._most_edge) / (self._weights[tier] * self.boost(tier))

    def reset(self) -> None:
        """Nobody has work: all are equal again."""
        self.now = self._served = self._latest = self._most_ahead = 0.0
        for tier in self._offset:
            self._offset[tier] = 0.0

    # The floor ----------------------------------------------------------------------------------------------------

    def offset(self, tier: TierName) -> float:
        """How far counters of the tier are ahead by right.

        The floor moves all free users together, so that it changes nothing between two of them.
        """
        return self._offset[tier]

    def boost(self, tier: TierName) -> float:
        """How many times its weight the tier is worth now.

        The free tier's is raised until it gets the floor's share of what the paying tiers get; but never so far that a
        free user gets more than any paying user who has work.
        """
        return self._boost if tier is TierName.FREE else 1.0

    def _free_boost(self) -> float:
        free = self._weights.get(TierName.FREE, 0.0) * self._working.get(TierName.FREE, 0)
        paying = [
            (self._weights[name], users) for name, users in self._working.items() if users and name is not TierName.FREE
        ]
        if not free or not paying:
            return 1.0
        wanted = self._floor_share * sum(weight * users for weight, users in paying) / free
        return max(1.0, min(wanted, min(weight for weight, _ in paying) / self._weights[TierName.FREE]))

    def lift(self, tier: TierName) -> float:
        """By how much one unit of service for this tier moves its offset.

        With it, the counters of the tier go on 1 / boost as fast as seen by the others.
        """
        boost = self.boost(tier)
        return 0.0 if boost == 1.0 else (1.0 - 1.0 / boost) / (self._weights[tier] * self._working[tier])

    def shift(self, tier: TierName, amount: float) -> None:
        """Move the tier's offset."""
        self._offset[tier] += amount
