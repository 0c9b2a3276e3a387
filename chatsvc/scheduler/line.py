"""The line of one model: all runs that wait for it, here or for another replica, and those under way (L12).

Each replica keeps such a line of all that wait and takes from it what is at home here. What is at home elsewhere is
left to its home, unless that is gone, or waiting there takes longer than reading the prompt anew. What nobody waits for
(folds) lets the replies of its engine go first, within the queue's ``reach``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from chatsvc.clock import Clock
from chatsvc.inference.base import Engine, EngineLimits
from chatsvc.limits import ServiceCost
from chatsvc.run import RunKind, WaitingRun
from chatsvc.scheduler.fair_flow import Demand
from chatsvc.scheduler.fair_queue import FairQueue
from chatsvc.scheduler.flights import Flights
from chatsvc.scheduler.loads import Loads
from chatsvc.scheduler.news import End, Held
from chatsvc.scheduler.pace import Pace
from chatsvc.scheduler.queue_delay import QueueDelays
from chatsvc.scheduler.routing import may_take
from chatsvc.scheduler.spared import Fullness
from chatsvc.scheduler.standing import Standing
from chatsvc.scheduler.warmth import Warmth

_BACKGROUND: Final = "\n"
"""Behind a user's name: the line of what is done for that user in the background. No name has a line break, and what
nobody waits for must neither go before the user's next message nor put it behind others' by what it cost."""
_REPLY_TOKENS: Final = 4096
"""Where the model is not served: what a reply may have at most, for all that is known."""
_FIRST_TOKEN_S: Final = 0.0005
_FADE: Final = 0.95


class Spare(NamedTuple):
    """What of an engine nobody uses or waits for."""

    places: int
    kv_tokens: float


class Neighbours(Protocol):
    """The other replicas, as far as they are known to live."""

    @property
    def me(self) -> str:
        """This one's name."""
        ...

    def others(self, model: str) -> bool:
        """Whether another one serves the model."""
        ...

    def lives(self, replica_id: str) -> bool:
        """Whether this one is heard of, whatever it serves."""
        ...

    def serves(self, replica_id: str, model: str) -> bool:
        """Whether this one serves it."""
        ...

    def speed(self, model: str) -> float:
        """Service that the others deliver in a second while they are full."""
        ...


class Alone:
    """No neighbours."""

    me = ""

    def others(self, model: str) -> bool:
        return False

    def lives(self, replica_id: str) -> bool:
        return False

    def serves(self, replica_id: str, model: str) -> bool:
        return False

    def speed(self, model: str) -> float:
        return 0.0


class _Waits:
    """A run in the line."""

    __slots__ = ("cached_tokens", "home", "run", "since")

    def __init__(self, run: WaitingRun, home: str, cached_tokens: int, since: float) -> None:
        self.run = run
        self.home = home
        self.cached_tokens = cached_tokens
        self.since = since


class Line:
    """See the module's docstring. ``engine`` is None where the model is not served."""

    def __init__(
        self,
        model: str,
        engine: Engine | None,
        slots: int,
        *,
        queue: FairQueue,
        clock: Clock,
        cost: ServiceCost,
        neighbours: Neighbours,
    ) -> None:
        self.model = model
        self.slots = slots
        self._engine = engine
        self._clock = clock
        self._cost = cost
        self._neighbours = neighbours
        self.queue = queue
        self.flights = Flights(queue)
        self.warmth = Warmth(engine.limits.kv_tokens if engine else 0)
        self.pace = Pace(clock)
        self.delays = QueueDelays()
        self._waiting: dict[str, _Waits] = {}
        self.waiting_at: Loads[str] = Loads()
        """How many wait for each replica."""
        self._replies_at: Loads[str] = Loads()
        """How many of them are replies."""
        self._by_turn: set[str] = set()
        self._room: dict[str, int] = {}
        """KV tokens kept for each of our runs under way."""
        self._begun: dict[str, tuple[float, str, float]] = {}
        """When they were taken, how they came here, and when they were posted."""
        self.came: Counter[str] = Counter()
        """How many runs were begun here that were at ``home`` here, ``stolen`` from another home, or ``left`` by one
        that is gone; while there are other replicas."""
        self._read_s, self._read_tokens = _FIRST_TOKEN_S, 1.0

    @property
    def limits(self) -> EngineLimits | None:
        """Those of the engine here."""
        return None if self._engine is None else self._engine.limits

    # Who waits ----------------------------------------------------------------------------------------------------

    def put(self, run: WaitingRun, home: str = "", cached_tokens: int = 0) -> None:
        """Let a run wait, for that home; one that waits already may get another home, nothing else changes."""
        known = self._waiting.get(run.id)
        if known is None:
            holder = self.flights.holder(run.id)
            if holder is not None and not self._lives(holder):
                self.flights.lost(run.id)  # what its worker had begun was put back when that had died
            if not self.queue.waits() and len(self._room) < self.slots:
                self.pace.idle()  # up to now there was a free place
            before = len(self.queue)
            self.queue.put(self.demand(run))
            if len(self.queue) == before:
                return  # it is under way
            self._waiting[run.id] = waits = _Waits(run, home, cached_tokens, self._clock.monotonic() - run.age_s)
            self._count(waits)
        elif home:
            self._count_no_more(known)
            known.home, known.cached_tokens = home, cached_tokens
            self._count(known)

    def discard(self, run_id: str) -> None:
        """Forget a waiting run; unknown ids are fine."""
        self.queue.discard(run_id)
        self._leave(run_id)

    def waits(self) -> Iterator[tuple[WaitingRun, float]]:
        """Every run that waits, here or for another replica, and since when it was posted."""
        for waits in self._waiting.values():
            yield waits.run, waits.since

    def demand(self, run: WaitingRun) -> Demand:
        """What the queue has to know."""
        prompt, block = run.prompt_tokens, 1
        if self._engine is None:
            wanted = _REPLY_TOKENS if run.max_tokens is None else run.max_tokens
        else:
            # Never more than the engine has: what is too long is shortened, or refused, when the run begins. One that
            # never began would wait for ever, and all of its user behind it.
            limits = self._engine.limits
            prompt, block = min(prompt, limits.most - 1), limits.kv_block
            wanted = min(limits.reply_tokens if run.max_tokens is None else run.max_tokens, limits.most - prompt)
        return Demand(
            run_id=run.id,
            user_id=run.user_id if run.kind is RunKind.REPLY else f"{run.user_id}{_BACKGROUND}",
            tier=run.tier,
            prompt_tokens=prompt,
            max_tokens=wanted,
            cached_tokens=min(self.warmth.cached(run.conversation_id), prompt),
            block=block,
            background=run.kind is not RunKind.REPLY,
        )

    def knows(self, run_id: str) -> bool:
        """Whether a run waits here, or is under way here or with another replica that lives."""
        return run_id in self._waiting or run_id in self.flights.own or self._lives(self.flights.holder(run_id))

    def _lives(self, replica_id: str | None) -> bool:
        # One that is leaving, or whose engine is not ready, still writes what it has.
        return replica_id is not None and self._neighbours.lives(replica_id)

    def load(self, replica_id: str) -> int:
        """Runs that a replica has: under way, and waiting for it."""
        under_way = len(self.flights.own) if replica_id == self._neighbours.me else self.flights.load[replica_id]
        return under_way + self.waiting_at[replica_id]

    def survey(self) -> Iterator[None]:
        """Bring up to date what ``standing`` tells when many wait, in small steps."""
        return self.queue.survey()

    def standing(self, run_id: str, left: Sequence[float]) -> tuple[Standing, float | None] | None:
        """Where a run stands among all that wait, and in how many seconds it will start; None when it does not wait.

        ``left``: what ``queue.left()`` said, which is the same for all that are looked at in one go.
        """
        standing = self.queue.position(run_id)
        if standing is None:
            return None
        elsewhere = self._neighbours.speed(self.model)
        wait_s = self.pace.wait_s(
            standing.position, standing.service_ahead, left, elsewhere=elsewhere, here=self.slots > 0
        )
        return standing, wait_s

    # Who is next --------------------------------------------------------------------------------------------------

    def take(self) -> list[str]:
        """The runs to start here now, the next first. Each is under way from now on."""
        sequences = self.slots - len(self._room)
        if sequences <= 0 or self._engine is None:
            return []
        free = self._free_kv()
        shared = self._neighbours.others(self.model)
        taken = self.queue.take(sequences, free, self._may if shared else None, replies_first=self.held_up > 0)
        for demand in taken:
            self._begin(demand, shared=shared)
        if self.held_up:
            self._by_turn.update(demand.run_id for demand in taken if not self._is_reply(demand.run_id))
        if shared and free is None and len(taken) < sequences:
            self.pace.idle()  # who waits, waits elsewhere
        return [demand.run_id for demand in taken]

    def spare(self) -> Spare:
        """What is left for what no line knows of; nothing while anybody waits, wherever."""
        if self._engine is None or self.queue.waits():
            return Spare(0, 0)
        free = self._free_kv()
        return Spare(self.slots - len(self._room), math.inf if free is None else free)

    def _free_kv(self, without: Collection[str] = ()) -> int | None:
        """KV tokens that no run of ours has, or would have ``without`` these; None: no limit."""
        if self._engine is None or self._engine.limits.kv_tokens is None:
            return None
        taken = sum(kv_tokens for run_id, kv_tokens in self._room.items() if run_id not in without)
        return self._engine.limits.kv_tokens - taken

    def fullness(self) -> Fullness:
        """How much of the engine here replies have; what is done in the background is not counted."""
        if self._engine is None or not self.slots:
            return Fullness()
        kept = [kv_tokens for run_id, kv_tokens in self._room.items() if self._is_reply(run_id)]
        return Fullness(self.slots, len(kept) / self.slots, sum(kept) / (self._engine.limits.kv_tokens or math.inf))

    def take_at_once(self, run: WaitingRun) -> bool:
        """Take this run if there is room and nobody waits; else nothing has changed."""
        if self.queue.waits():
            return False
        self.put(run, self._neighbours.me)
        if self.take():
            return True
        self.discard(run.id)
        return False

    @property
    def held_up(self) -> int:
        """Replies that wait, and for no other replica. When nothing more can be taken: for a place here."""
        return sum(
            count
            for home, count in self._replies_at.items()
            if home == self._neighbours.me or not self._neighbours.serves(home, self.model)
        )

    def helps(self, run_ids: Collection[str]) -> bool:
        """Whether a reply would begin here if these runs of ours, one at least, had ended."""
        may = self._may if self._neighbours.others(self.model) else None
        free = self._free_kv(run_ids)
        return self.queue.starts_reply(math.inf if free is None else free, may)

    def began_by_turn(self, run_id: str) -> bool:
        """Whether a run in the background was begun though replies waited: it had let as many pass as it had to."""
        return run_id in self._by_turn

    def _is_reply(self, run_id: str) -> bool:
        return self.flights.own[run_id].run.kind is RunKind.REPLY

    def _may(self, demand: Demand) -> bool:
        """Whether a run may start here: it is at home here, its home is gone, or it has waited there long enough."""
        waits = self._waiting[demand.run_id]
        if not self._neighbours.serves(waits.home, self.model) or waits.home == self._neighbours.me:
            return True
        return may_take(
            waited_s=self._clock.monotonic() - waits.since,
            lost_tokens=waits.cached_tokens - demand.cached_tokens,
            token_s=self._read_s / self._read_tokens,
        )

    def _begin(self, demand: Demand, *, shared: bool) -> None:
        waits = self._waiting[demand.run_id]
        self._leave(demand.run_id)
        came = ""
        if waits.home == self._neighbours.me:
            came = "home" if shared else ""
        elif waits.home:
            came = "stolen" if self._neighbours.serves(waits.home, self.model) else "left"
        self._room[demand.run_id] = demand.kv_tokens
        self._begun[demand.run_id] = self._clock.monotonic(), came, waits.since
        self.flights.begin(waits.run)

    def _leave(self, run_id: str) -> _Waits | None:
        waits = self._waiting.pop(run_id, None)
        if waits is not None:
            self._count_no_more(waits)
        return waits

    def _count(self, waits: _Waits) -> None:
        self.waiting_at[waits.home] += 1
        if waits.run.kind is RunKind.REPLY:
            self._replies_at[waits.home] += 1

    def _count_no_more(self, waits: _Waits) -> None:
        self.waiting_at.less(waits.home)
        if waits.run.kind is RunKind.REPLY:
            self._replies_at.less(waits.home)

    def _note_wait(self, run: WaitingRun, waited_s: float) -> None:
        """A run has begun, here or elsewhere."""
        if run.kind is RunKind.REPLY:
            self.delays.begins(run.tier, waited_s, self._clock.monotonic())

    # What they receive --------------------------------------------------------------------------------------------

    def claimed(self, run_id: str) -> None:
        """A run that was taken is ours, by the word of Postgres."""
        self.flights.claimed(run_id)
        if run_id in self._begun:
            at, came, since = self._begun[run_id]
            self._note_wait(self.flights.own[run_id].run, at - since)
            if came:
                self.came[came] += 1

    def started(self, run_id: str, prompt_tokens: int, cached_tokens: int) -> None:
        """The engine has read the prompt."""
        self.flights.started(run_id, prompt_tokens, cached_tokens)
        self.pace.delivered(self._cost.of_prompt(prompt_tokens, cached_tokens))
        if run_id in self._begun:
            self._read_s = _FADE * self._read_s + self._clock.monotonic() - self._begun[run_id][0]
            self._read_tokens = _FADE * self._read_tokens + max(1, prompt_tokens - cached_tokens)

    def age_s(self, run_id: str) -> float:
        """Seconds since a run of ours was posted."""
        begun = self._begun.get(run_id)
        return 0.0 if begun is None else self._clock.monotonic() - begun[2]

    def delivered(self, run_id: str, output_tokens: int) -> None:
        """The engine has written more."""
        self.flights.delivered(run_id, output_tokens)
        self.pace.delivered(self._cost.of_output(output_tokens))

    def end(self, run_id: str, how: End, *, lost: bool = False) -> None:
        """A run of ours has ended, or others have it."""
        held = self.flights.end(run_id, how, lost=lost)
        if held is not None and held.read and held.run.kind is RunKind.REPLY:
            self.warmth.served(held.run.conversation_id, held.prompt_tokens + held.output_tokens)
        self._room.pop(run_id, None)
        self._begun.pop(run_id, None)
        self._by_turn.discard(run_id)
        if not self.queue.waits():
            self.pace.idle()

    def hear(self, replica_id: str, held: Held) -> None:
        """Another replica tells of a run of its own."""
        if self.flights.hear(replica_id, held, self.demand(held.run)) and (waits := self._leave(held.run.id)):
            self._note_wait(waits.run, self._clock.monotonic() - waits.since)
