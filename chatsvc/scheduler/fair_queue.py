"""L12, fair share: between any two users who both have work waiting, weighted service differs by a bounded amount.

The queue of one model: pure, no I/O, no clock. Users are served by the smallest counter, which is the weighted service
they have received plus what they are charged ahead for the replies under way. The bound, its derivation, and what each
constant is for: ``docs/scheduling.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

from chatsvc.limits import ServiceCost, TierName
from chatsvc.scheduler.fair_flow import Charge, Demand, Flight, Flow, FlowHeaps, May, Waiting
from chatsvc.scheduler.fair_rules import KEPT_IDLE, Rules
from chatsvc.scheduler.idle_users import IdleUsers
from chatsvc.scheduler.kept_room import KeptRoom
from chatsvc.scheduler.output_length import OutputEstimator
from chatsvc.scheduler.standing import Places, Standing
from chatsvc.scheduler.virtual_time import VirtualTime


class FairQueue:
    """Who is next, of one model. Every call is O(log n) in the number of waiting users, amortised."""

    def __init__(
        self,
        weights: Mapping[TierName, float],
        *,
        cost: ServiceCost | None = None,
        estimator: OutputEstimator | None = None,
        rules: Rules | None = None,
    ) -> None:
        self._weights: Final = dict(weights)
        self._cost: Final = ServiceCost() if cost is None else cost
        self._estimator: Final = OutputEstimator() if estimator is None else estimator
        self._rules: Final = Rules() if rules is None else rules
        self._time: Final = VirtualTime(weights, floor_share=self._rules.floor_share, quantum=self._rules.quantum)
        self._room: Final = KeptRoom(self._rules.most_passes)
        self._heaps: Final = FlowHeaps(weights, self._rank)
        self._flows: dict[str, Flow] = {}
        self._line_of: dict[str, Flow] = {}
        self._flights: dict[str, Flight] = {}
        self._here = 0  # flights that are this engine's own
        self._idle: Final = IdleUsers(self._tag)
        self._warm = 0  # waiting runs that have something in the prefix cache
        self._roof = 0.0  # most KV tokens that can be free, as seen when nothing ran
        self._parked: dict[str, Flow] = {}  # users whose next run is larger than that: they wait for capacity
        self._places: Final = Places(
            self._flows, self._weights, time=self._time, cost=self._cost, estimator=self._estimator, edge=self._edge
        )

    # Runs come and go ---------------------------------------------------------------------------------------------

    def put(self, demand: Demand) -> None:
        """Let a run wait, behind its user's others. One that waits or is under way already changes nothing.

        A run that is older, by its id, than all that wait of its user goes to the front: it has been there before.
        """
        if demand.run_id in self._line_of or demand.run_id in self._flights:
            return
        flow = self._flow(demand)
        is_first = not flow.waiting
        goes_first = is_first or demand.run_id < flow.head.demand.run_id
        flow.waiting[demand.run_id] = Waiting(demand, min(self._prompt(demand), self._rules.quantum) / 2)
        self._line_of[demand.run_id] = flow
        self._warm += demand.cached_tokens > 0
        self._places.changed(1)
        if goes_first:
            flow.waiting.move_to_end(demand.run_id, last=False)
            self._unpark(flow)
        if is_first:
            # Idling earns no credit and forgives no debt.
            start = self._time.start(self._least())
            if start > self._tag(flow):
                flow.received += start - self._tag(flow)
                self._time.started(start)
            self._time.wait(flow.tier, flow.received)
        if is_first or (goes_first and flow.entry):
            self._heaps.push(flow)

    def take(
        self, sequences: int, kv_tokens: int | None = None, may: May | None = None, *, replies_first: bool = False
    ) -> list[Demand]:
        """Remove and return the runs to start now, the next first.

        At most ``sequences``, and they fit into ``kv_tokens`` (None: no limit). Each is under way until ``end`` or
        ``refund``. What ``may`` not is left to others; with ``replies_first`` replies go first, within ``reach``.
        """
        free: float = math.inf if kv_tokens is None else kv_tokens
        if free > self._roof or not self._here:
            self._roof = free
            for flow in [flow for flow in self._parked.values() if flow.head.demand.kv_tokens <= free]:
                self._unpark(flow)
        taken: list[Demand] = []
        while len(taken) < sequences and (chosen := self._choose(free, may, replies_first)) is not None:
            demand = chosen.head.demand
            self._dispatch(chosen, demand, here=True)
            free -= demand.kv_tokens
            taken.append(demand)
        return taken

    def taken_elsewhere(self, demand: Demand) -> None:
        """Another engine of this model has begun this run: it is under way too, until ``end`` or ``refund``."""
        self.put(demand)
        if (flow := self._line_of.get(demand.run_id)) is not None:
            self._dispatch(flow, demand, here=False)

    def discard(self, run_id: str) -> None:
        """Forget a waiting run. Unknown ids are fine; one under way stays."""
        if (flow := self._line_of.get(run_id)) is not None:
            self._leave(flow, run_id)
            self._heaps.note_decrease(flow)
            self._note_idle(flow)

    def started(self, run_id: str, prompt_tokens: int, cached_tokens: int) -> None:
        """The engine has read the prompt, and counted it. Only the first call counts."""
        if (flight := self._flights.get(run_id)) is not None and not flight.started:
            flight.started = True
            self._deliver(flight, self._cost.of_prompt(prompt_tokens, cached_tokens))

    def delivered(self, run_id: str, output_tokens: int) -> None:
        """The engine wrote so many more tokens."""
        if (flight := self._flights.get(run_id)) is not None and output_tokens > 0:
            flight.output_tokens += output_tokens
            self._deliver(flight, self._cost.of_output(output_tokens))

    def end(self, run_id: str, *, complete: bool = False) -> Charge | None:
        """A run under way has ended, in whatever way: it costs what it got, no more and no less.

        A prompt that was not reported as read costs what was expected, for reading was under way. ``complete``: it came
        to its own end, so its length says something about lengths. None for ids that are not under way.
        """
        if (flight := self._flights.get(run_id)) is None:
            return None
        if not flight.started:
            self._receive(flight, self._prompt(flight.demand))
        if complete:
            self._places.about_to_change(flight.flow)
            self._estimator.observe(flight.demand.user_id, flight.output_tokens)
        self._land(flight)
        return flight.charge

    def refund(self, run_id: str) -> None:
        """A run under way was not started here after all, or nothing of it was shown: it costs nothing."""
        if (flight := self._flights.get(run_id)) is not None:
            self._receive(flight, -flight.received)
            self._land(flight)

    def starts_reply(self, kv_tokens: float, may: May | None = None) -> bool:
        """Whether a reply would start if so much were free. None does."""
        return any(not flow.background for flow in self._startable(kv_tokens, may, replies_first=True))

    # What others ask ----------------------------------------------------------------------------------------------

    def position(self, run_id: str) -> Standing | None:
        """Where a run stands; None when it does not wait. O(log n): out of date when many wait, see ``survey``."""
        return None if (flow := self._line_of.get(run_id)) is None else self._places.of(run_id, flow)

    def survey(self) -> Iterator[None]:
        """Find anew where all runs stand, if much has changed: in small steps, so that thousands hold up nobody."""
        return self._places.survey()

    def left(self) -> list[float]:
        """Service that each run under way is still likely to come to, least first."""
        return sorted(max(0.0, self._expected(flight.demand) - flight.received) for flight in self._flights.values())

    def waits(self) -> bool:
        """Whether any run waits."""
        return bool(self._line_of)

    def ids(self) -> set[str]:
        """The runs that wait."""
        return set(self._line_of)

    def __len__(self) -> int:
        return len(self._line_of)

    # The order ----------------------------------------------------------------------------------------------------

    def _choose(self, free: float, may: May | None, replies_first: bool) -> Flow | None:
        """The user whose next run is to start, if there is one that may and fits."""
        if not (fitting := self._startable(free, may, replies_first)):
            return None
        best = max(fitting, key=lambda flow: flow.head.demand.cached_tokens)
        for flow in fitting[: fitting.index(best)]:
            flow.head.bypassed += 1
        return best

    def _startable(self, free: float, may: May | None, replies_first: bool) -> list[Flow]:
        if (kept := self._kept(replies_first)) is not None and kept.head.demand.kv_tokens <= free:
            return [kept]
        return [] if self._room.closed else self._fitting(free, may, replies_first)

    def _fitting(self, free: float, may: May | None, replies_first: bool) -> list[Flow]:
        """The users among whom the warmest prefix decides, the next first."""
        fitting, others = list[Flow](), list[Flow]()
        behind, farthest = False, math.inf
        # However many of the background wait, the first of them says whether it is the turn of any.
        background = self._heaps.first(background=True) if replies_first else None
        offered = False if replies_first else None
        while self._looks_on(len(fitting), len(others)) and (flow := self._heaps.first(background=offered)) is not None:
            if self._tag(flow) > farthest or (fitting and self._is_apart(flow, fitting[0], self._rules.quantum)):
                break
            if not fitting and background is not None and self._is_apart(flow, background, self._rules.reach):
                behind, replies_first = True, False
                break
            if behind := not fitting and self._is_left_behind(others, flow):
                break
            demand = flow.head.demand
            if demand.kv_tokens > self._roof:
                self._heaps.discard(flow)
                self._parked[flow.user_id] = flow
                continue
            self._heaps.set_aside(flow)
            if may is not None and not may(demand):
                others.append(flow)
            elif demand.kv_tokens > free:
                farthest = min(farthest, self._passed_up_to(flow, is_next=not fitting))
            elif self._room.lets_pass(self._expected(demand)):
                fitting.append(flow)
                if not self._warm or flow.head.bypassed >= self._rules.most_bypasses:
                    break
        self._heaps.put_back()
        return self._fitting(free, None, replies_first) if behind else fitting

    def _looks_on(self, fitting: int, others: int) -> bool:
        return fitting < self._rules.candidates and self._heaps.aside - fitting - others < self._rules.most_others

    def _passed_up_to(self, flow: Flow, *, is_next: bool) -> float:
        """Up to which counter others may pass a user whose next run does not fit."""
        demand = flow.head.demand
        if demand.kv_tokens <= self._rules.large * self._roof:
            return -math.inf
        if is_next:
            self._room.keep(demand.run_id, self._expected(demand))
        return self._tag(flow) + self._expected(demand) / flow.weight

    def _is_left_behind(self, others: list[Flow], flow: Flow) -> bool:
        """Whether the first of those who are left to other engines must not see this one go first."""
        rules = self._rules
        return bool(others) and (len(others) >= rules.most_others or self._is_apart(flow, others[0], rules.reach))

    def _kept(self, replies_first: bool) -> Flow | None:
        """The user for whose next run room is kept."""
        flow = self._line_of.get(self._room.run_id or "")
        if (
            flow is None
            or flow.head.demand.run_id != self._room.run_id
            or flow.head.demand.kv_tokens > self._roof
            or (replies_first and flow.background and not self._has_turn(flow))
        ):
            flow = self._room.run_id = None
        return flow

    def _has_turn(self, background: Flow) -> bool:
        """Whether one in the background has let as many replies go first as it has to."""
        first = self._heaps.first(background=False)
        return first is not None and self._is_apart(first, background, self._rules.reach)

    def _least(self) -> float | None:
        return None if (first := self._heaps.first()) is None else self._tag(first)

    def _tag(self, flow: Flow) -> float:
        """The user's counter, as compared over all tiers."""
        return flow.counter - self._time.offset(flow.tier)

    def _rank(self, flow: Flow) -> float:
        """By what firsts of tiers are compared."""
        return self._tag(flow) + self._edge(flow.tier)

    def _edge(self, tier: TierName) -> float:
        return self._time.edge(tier, self._cost.of_output(self._rules.lookahead * self._estimator.usual))

    def _is_apart(self, one: Flow, other: Flow, service: float) -> bool:
        return self._tag(one) > self._tag(other) + service / max(one.weight, other.weight)

    def _unpark(self, flow: Flow) -> None:
        if self._parked.pop(flow.user_id, None) is not None:
            self._heaps.push(flow)

    # Accounts -----------------------------------------------------------------------------------------------------

    def _flow(self, demand: Demand) -> Flow:
        """The user's account, in the tier it has now."""
        if (flow := self._flows.get(demand.user_id)) is None:
            flow = self._flows[demand.user_id] = Flow(demand, self._weights[demand.tier])
        self._places.about_to_change(flow)
        if not flow.has_work:
            self._time.work(flow.tier, 1)
        if flow.tier is not demand.tier:
            self._change_tier(flow, demand.tier)
        return flow

    def _change_tier(self, flow: Flow, tier: TierName) -> None:
        entered = flow.entry != 0
        if entered:
            self._heaps.discard(flow)
        if flow.waiting:
            self._time.wait_no_more(flow.tier, flow.received)
        self._time.work(flow.tier, -1)
        flow.received += self._time.offset(tier) - self._time.offset(flow.tier)
        flow.tier, flow.weight = tier, self._weights[tier]
        self._time.work(tier, 1)
        if flow.waiting:
            self._time.wait(tier, flow.received)
        if entered:
            self._heaps.push(flow)

    def _dispatch(self, flow: Flow, demand: Demand, *, here: bool) -> None:
        self._time.dispatched(self._tag(flow), flow.ahead)
        self._leave(flow, demand.run_id)
        if self._time.waiting == bool(flow.waiting):
            self._time.reach(flow.received - self._time.offset(flow.tier))
        flight = self._flights[demand.run_id] = Flight(demand, flow, self._time.lift(flow.tier), here)
        flow.flights += 1
        self._here += here
        self._charge_ahead(flight)
        if here:
            self._room.note(demand.run_id, self._expected(demand))

    def _prompt(self, demand: Demand) -> float:
        return self._cost.of_prompt(demand.prompt_tokens, demand.cached_tokens)

    def _expected(self, demand: Demand) -> float:
        """Service that a run is likely to come to."""
        output = self._estimator.predict(demand.user_id, demand.max_tokens)
        return self._prompt(demand) + self._cost.of_output(output)

    def _charge_ahead(self, flight: Flight) -> None:
        """Charge a run for its prompt, until it is read, and for the tokens that it is about to be given."""
        left = flight.demand.max_tokens - flight.output_tokens
        coming = max(0.0, min(self._rules.lookahead * self._estimator.usual, left))
        unread = 0.0 if flight.started else self._prompt(flight.demand)
        self._set_ahead(flight, unread + self._cost.of_output(coming))

    def _set_ahead(self, flight: Flight, ahead: float) -> None:
        self._places.about_to_change(flight.flow)
        flight.flow.ahead += (ahead - flight.ahead) / flight.weight
        flight.ahead = ahead

    def _receive(self, flight: Flight, service: float) -> None:
        flow = flight.flow
        self._places.about_to_change(flow)
        flight.received += service
        flow.received += service / flight.weight
        if flow.waiting:
            self._time.receive(flow.tier, service / flight.weight)
        self._time.shift(flight.tier, service * flight.lift)

    def _deliver(self, flight: Flight, service: float) -> None:
        before = flight.flow.counter
        self._receive(flight, service)
        self._charge_ahead(flight)
        if flight.flow.counter < before:
            self._heaps.note_decrease(flight.flow)
        self._time.advance(service, self._least())
        self._forget_settled()

    def _land(self, flight: Flight) -> None:
        del self._flights[flight.demand.run_id]
        self._here -= flight.here
        self._set_ahead(flight, 0.0)
        flow = flight.flow
        flow.flights -= 1
        if not flow.flights:
            flow.ahead = 0.0
        self._heaps.note_decrease(flow)
        self._note_idle(flow)

    def _leave(self, flow: Flow, run_id: str) -> None:
        """Take a run out of its user's line."""
        self._places.about_to_change(flow)
        self._warm -= flow.waiting.pop(run_id).demand.cached_tokens > 0
        del self._line_of[run_id]
        self._places.changed(-1)
        self._unpark(flow)
        if not flow.waiting:
            self._time.wait_no_more(flow.tier, flow.received)
            self._heaps.discard(flow)

    def _note_idle(self, flow: Flow) -> None:
        """Keep nothing of a user who has no work and owes nothing."""
        if flow.has_work:
            return
        self._time.work(flow.tier, -1)
        if not self._line_of and not self._flights:
            self._flows.clear()
            self._idle.clear()
            self._time.reset()
        else:
            self._idle.note(flow)
            self._forget_settled()

    def _forget_settled(self) -> None:
        many = len(self._idle) > max(KEPT_IDLE, len(self._flows) - len(self._idle))
        settled = self._time.start(self._least()) if many else self._time.now
        for flow in self._idle.settled(settled):
            del self._flows[flow.user_id]
