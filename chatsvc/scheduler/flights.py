"""The runs of one model under way: our own, to be told to the other replicas, and theirs, as they tell of them.

All are in the fair queue's accounts, so a user's counter knows what was received anywhere (L12). What is told of a run
are totals, never differences: news that is lost or comes twice does no harm.
"""

from __future__ import annotations

from collections.abc import Collection

from chatsvc.run import WaitingRun
from chatsvc.scheduler.fair_flow import Demand
from chatsvc.scheduler.fair_queue import FairQueue
from chatsvc.scheduler.loads import Loads
from chatsvc.scheduler.news import End, Held


class _Theirs:
    """A run that another replica has, and what of it is in the accounts."""

    __slots__ = ("output_tokens", "replica_id")

    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id
        self.output_tokens = 0


class Flights:
    """See the module's docstring."""

    def __init__(self, queue: FairQueue) -> None:
        self._queue = queue
        self.own: dict[str, Held] = {}
        self._claimed: set[str] = set()
        """Those of them that are ours by the word of Postgres: only these are told."""
        self._theirs: dict[str, _Theirs] = {}
        self.load: Loads[str] = Loads()
        """How many runs each other replica has."""
        self._moved: dict[str, Held] = {}
        self._grown: dict[str, Held] = {}

    def holder(self, run_id: str) -> str | None:
        """Which other replica has a run under way, as far as is known."""
        theirs = self._theirs.get(run_id)
        return None if theirs is None else theirs.replica_id

    # Our own ------------------------------------------------------------------------------------------------------

    def begin(self, run: WaitingRun) -> None:
        """A run was taken out of the queue to be claimed."""
        self.own[run.id] = Held(run=run)

    def claimed(self, run_id: str) -> None:
        """It is ours."""
        if run_id in self.own:
            self._claimed.add(run_id)
            self._moved[run_id] = self.own[run_id]

    def started(self, run_id: str, prompt_tokens: int, cached_tokens: int) -> None:
        """Its prompt was read."""
        if (held := self.own.get(run_id)) is not None:
            held.read, held.prompt_tokens, held.cached_tokens = True, prompt_tokens, cached_tokens
            self._grown[run_id] = held
            self._queue.started(run_id, prompt_tokens, cached_tokens)

    def delivered(self, run_id: str, output_tokens: int) -> None:
        """It wrote so much more."""
        if (held := self.own.get(run_id)) is not None:
            held.output_tokens += output_tokens
            self._grown[run_id] = held
            self._queue.delivered(run_id, output_tokens)

    def end(self, run_id: str, how: End, *, lost: bool = False) -> Held | None:
        """It has ended here; None when it was not under way here. ``lost``: others had taken it over before."""
        held = self.own.pop(run_id, None)
        self._settle(run_id, how)
        self._grown.pop(run_id, None)
        if held is not None and run_id in self._claimed:
            self._claimed.discard(run_id)
            held.end, held.lost = how, lost
            self._moved[run_id] = held
        return held

    def moved(self) -> list[Held]:
        """Ours that began or ended since the last call."""
        moved, self._moved = self._moved, {}
        return list(moved.values())

    def grown(self) -> list[Held]:
        """Ours of which more is known than at the last call."""
        grown, self._grown = self._grown, {}
        return [held for run_id, held in grown.items() if run_id in self._claimed]

    def whole(self) -> list[Held]:
        """All of ours."""
        return [held for run_id, held in self.own.items() if run_id in self._claimed]

    # Theirs -------------------------------------------------------------------------------------------------------

    def hear(self, replica_id: str, held: Held, demand: Demand) -> bool:
        """Another replica tells of a run that it has, or had. False: that is old news, or one of us is mistaken."""
        run_id = held.run.id
        theirs = self._theirs.get(run_id)
        if run_id in self.own:
            return False  # one of us will be told by Postgres that it is not so
        if theirs is not None and theirs.replica_id != replica_id:
            if held.end is not None:
                return False  # the end of an attempt before the one that is known
            self._drop(run_id, End.REFUND)
            theirs = None
        if theirs is None:
            if held.end is End.REFUND or held.lost:
                return False  # it may wait again by now
            self._queue.taken_elsewhere(demand)
            theirs = self._theirs[run_id] = _Theirs(replica_id)
            self.load[replica_id] += 1
        if held.read:
            self._queue.started(run_id, held.prompt_tokens, held.cached_tokens)
        self._queue.delivered(run_id, held.output_tokens - theirs.output_tokens)
        theirs.output_tokens = max(theirs.output_tokens, held.output_tokens)
        if held.end is not None:
            self._drop(run_id, held.end)
        return True

    def lost(self, run_id: str) -> None:
        """A run of theirs is under way no more, and waits again."""
        self._drop(run_id, End.REFUND)

    def forget(self, replica_id: str, but: Collection[str] = ()) -> None:
        """A replica has nothing under way any more, ``but`` these; what the others got was received all the same."""
        gone = [run_id for run_id, theirs in self._theirs.items() if theirs.replica_id == replica_id]
        for run_id in gone:
            if run_id not in but:
                self._drop(run_id, End.CUT)

    def _drop(self, run_id: str, how: End) -> None:
        theirs = self._theirs.pop(run_id)
        self.load.less(theirs.replica_id)
        self._settle(run_id, how)

    def _settle(self, run_id: str, how: End) -> None:
        if how is End.REFUND:
            self._queue.refund(run_id)
        else:
            self._queue.end(run_id, complete=how is End.COMPLETE)
