"""One user's line and counter in the fair queue, and the heap that finds the smallest counter."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterable
from itertools import count
from typing import Final

import msgspec

from chatsvc.limits import TierName


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What a waiting run asks of the engine."""

    run_id: str
    user_id: str
    tier: TierName
    prompt_tokens: int
    max_tokens: int
    cached_tokens: int = 0
    """The part of the prompt that is likely to be served from the prefix cache: how warm the run is."""
    block: int = 1
    """Tokens of the KV cache that are given out together."""
    background: bool = False
    """Nobody waits for it: whoever takes the next run lets others go first."""

    @property
    def kv_tokens(self) -> int:
        """Room that must be free in the KV cache, so that the run can neither be preempted nor preempt."""
        return -(-(self.prompt_tokens + self.max_tokens) // self.block) * self.block


May = Callable[[Demand], bool]


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to, once ended."""

    user_id: str
    tier: TierName
    service: float
    output_tokens: int


class Waiting:
    """A demand in its user's line."""

    __slots__ = ("bypassed", "centre", "demand")

    def __init__(self, demand: Demand, centre: float) -> None:
        self.demand = demand
        self.centre = centre
        """Service of half its prompt, within bounds: at once is how it will be received."""
        self.bypassed = 0
        """How often a warmer run was preferred while this one was next."""


_NONE_QUEUED: Final[ItemsView[str, Waiting]] = OrderedDict[str, Waiting]().items()


class Flow:
    """A user: the line of its waiting runs, and what it has received.

    ``counter``, by which users are served, is what was *received* plus what the replies under way are *ahead*, that is
    charged for and not delivered yet. Both are service divided by the user's weight.
    """

    __slots__ = ("ahead", "background", "entry", "flights", "noted", "received", "tier", "user_id", "waiting", "weight")

    def __init__(self, first: Demand, weight: float) -> None:
        """The user of this run; all its runs are in the background, or none is."""
        self.user_id = first.user_id
        self.background = first.background
        self.tier = first.tier
        self.weight = weight
        self.waiting: OrderedDict[str, Waiting] = OrderedDict()
        self.flights = 0
        self.received = 0.0
        self.ahead = 0.0
        self.entry = 0
        """Number of the flow's live entry in a heap; 0: none."""
        self.noted = False
        """Whether it is on the list of idle users."""

    @property
    def counter(self) -> float:
        """Weighted service charged so far."""
        return self.received + self.ahead

    @property
    def queued(self) -> ItemsView[str, Waiting]:
        """The runs that have a place in the queue, by id: all that wait, unless nobody waits for them."""
        return _NONE_QUEUED if self.background else self.waiting.items()

    @property
    def key(self) -> float:
        """What users of a tier are served by: the counter as it will be when half of the next prompt is read."""
        return self.counter + self.head.centre / self.weight if self.waiting else self.counter

    @property
    def head(self) -> Waiting:
        """The run that is next among the user's own."""
        return next(iter(self.waiting.values()))

    @property
    def has_work(self) -> bool:
        """Whether a run waits or is under way."""
        return bool(self.waiting) or self.flights > 0


class FlowHeap:
    """Flows by key. An entry may be older than its flow's key, never larger: O(log n), amortised.

    A key that grew is noticed when its entry comes to the top. One that shrank is pushed anew, which makes the old
    entry void.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Flow]] = []
        self._numbers = count(1)
        self._live = 0

    def push(self, flow: Flow) -> None:
        """Add a flow, or note that its key shrank."""
        if not flow.entry:
            self._live += 1
        flow.entry = next(self._numbers)
        heapq.heappush(self._entries, (flow.key, flow.entry, flow))
        if len(self._entries) > 2 * self._live + 64:
            self._entries = [entry for entry in self._entries if entry[1] == entry[2].entry]
            heapq.heapify(self._entries)

    def discard(self, flow: Flow) -> None:
        """Remove a flow that is in this heap."""
        flow.entry = 0
        self._live -= 1

    def first(self) -> Flow | None:
        """The flow with the smallest key; among equals the one that came first."""
        entries = self._entries
        while entries:
            noted, number, flow = entries[0]
            if number != flow.entry:
                heapq.heappop(entries)
            elif (key := flow.key) > noted:
                heapq.heapreplace(entries, (key, number, flow))
            else:
                return flow
        return None

    def pop(self) -> tuple[float, int, Flow]:
        """Take out the entry of ``first``, which must be there; ``restore`` puts it back."""
        return heapq.heappop(self._entries)

    def restore(self, entry: tuple[float, int, Flow]) -> None:
        """Put back what ``pop`` took out."""
        heapq.heappush(self._entries, entry)

    def __len__(self) -> int:
        """How many flows are in it."""
        return self._live


class FlowHeaps:
    """A heap for each tier, and one for what each has in the background. Their firsts are compared by ``rank``."""

    def __init__(self, tiers: Iterable[TierName], rank: Callable[[Flow], float]) -> None:
        self._heaps = {(tier, background): FlowHeap() for background in (False, True) for tier in tiers}
        self._rank = rank
        self._aside: list[tuple[FlowHeap, tuple[float, int, Flow]]] = []

    def push(self, flow: Flow) -> None:
        """Add a flow, or note that its key shrank."""
        self._heaps[flow.tier, flow.background].push(flow)

    def note_decrease(self, flow: Flow) -> None:
        """The key of a flow shrank; it may be in no heap."""
        if flow.entry:
            self.push(flow)

    def discard(self, flow: Flow) -> None:
        """Remove a flow that is in its tier's heap."""
        self._heaps[flow.tier, flow.background].discard(flow)

    def first(self, *, background: bool | None = None) -> Flow | None:
        """The flow that is next, over all tiers; ``background``: of those for which somebody, or nobody, waits."""
        firsts = [
            flow
            for (_, is_background), heap in self._heaps.items()
            if len(heap) and background in (None, is_background) and (flow := heap.first()) is not None
        ]
        return firsts[0] if len(firsts) == 1 else min(firsts, key=self._rank, default=None)

    def set_aside(self, flow: Flow) -> None:
        """Look past the flow that ``first`` returned, until ``put_back``."""
        heap = self._heaps[flow.tier, flow.background]
        self._aside.append((heap, heap.pop()))

    @property
    def aside(self) -> int:
        """How many were set aside."""
        return len(self._aside)

    def put_back(self) -> None:
        """All that were set aside are there again."""
        for heap, entry in self._aside:
            heap.restore(entry)
        self._aside.clear()


class Flight:
    """A run under way: what it has received, and what it was charged ahead of that."""

    __slots__ = ("ahead", "demand", "flow", "here", "lift", "output_tokens", "received", "started", "tier", "weight")

    def __init__(self, demand: Demand, flow: Flow, lift: float, here: bool) -> None:
        self.demand = demand
        self.here = here
        """False: another engine of the model has it."""
        self.flow = flow
        self.started = False
        self.output_tokens = 0
        self.received = 0.0
        self.ahead = 0.0
        # What is given back is given back as it was taken, also when tiers and shares have changed meanwhile.
        self.tier = flow.tier
        self.weight = flow.weight
        self.lift = lift

    @property
    def charge(self) -> Charge:
        """What it has come to."""
        user_id, tier = self.demand.user_id, self.demand.tier
        return Charge(user_id=user_id, tier=tier, service=self.received, output_tokens=self.output_tokens)
