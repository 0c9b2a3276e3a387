"""The lines before this process's engines: a fair queue for each model, and the room that each engine has left (L12).

An engine's own queue is kept nearly empty: a run is taken out of its line only when a sequence is free, and room in the
KV cache for its prompt and all that it may write. So the order is decided here, and nothing is preempted there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from chatsvc.clock import Clock
from chatsvc.inference.base import Engine
from chatsvc.limits import ServiceCost, TierName
from chatsvc.run import WaitingRun
from chatsvc.scheduler.fair_queue import FairQueue
from chatsvc.scheduler.line import Alone, Line, Neighbours, Spare
from chatsvc.scheduler.news import End, Held
from chatsvc.scheduler.spared import Fullness
from chatsvc.scheduler.standing import Standing

_REPORT_TOKENS: Final = 16
"""Tokens of a reply are accounted for in steps of so many: as often as they are written to the log at most."""


class Meter:
    """What one run receives, told to its line. ``end`` it, ``refund`` it, or say that it is ``lost``; once."""

    __slots__ = ("_line", "_pending", "_run_id")

    def __init__(self, line: Line, run_id: str) -> None:
        self._line = line
        self._run_id = run_id
        self._pending = 0

    def claimed(self) -> None:
        """The run is ours by the word of Postgres: the other replicas may be told."""
        self._line.claimed(self._run_id)

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        """The engine has read the prompt."""
        self._line.started(self._run_id, prompt_tokens, cached_tokens)

    def delivered(self, output_tokens: int) -> None:
        """The engine has written more."""
        self._pending += output_tokens
        if self._pending >= _REPORT_TOKENS:
            self._report()

    def end(self, *, complete: bool) -> None:
        """The run has ended here; ``complete``: by itself, so that its length says something."""
        self._report()
        self._line.end(self._run_id, End.COMPLETE if complete else End.CUT)

    def lost(self) -> None:
        """Others have taken the run over: what it got was delivered here all the same."""
        self._report()
        self._line.end(self._run_id, End.CUT, lost=True)

    @property
    def age_s(self) -> float:
        """Seconds since the run was posted; until it ends."""
        return self._line.age_s(self._run_id)

    def refund(self) -> None:
        """Nothing of the run was shown: it costs nothing, and is answered elsewhere or later."""
        self._line.end(self._run_id, End.REFUND)

    def _report(self) -> None:
        pending, self._pending = self._pending, 0
        self._line.delivered(self._run_id, pending)


class Lines:
    """All of them. Pure but for reading the time and asking engines for their limits.

    ``models`` without an engine here have a line too: nothing is taken from it, but it tells where its runs stand.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        slots: Mapping[str, int],
        weights: Mapping[TierName, float],
        clock: Clock,
        cost: ServiceCost,
        *,
        models: Collection[str] = (),
        neighbours: Neighbours | None = None,
    ) -> None:
        self._neighbours = Alone() if neighbours is None else neighbours
        self._lines = {
            model: Line(
                model,
                engines.get(model),
                slots.get(model, 0),
                queue=FairQueue(weights, cost=cost),
                clock=clock,
                cost=cost,
                neighbours=self._neighbours,
            )
            for model in {**dict.fromkeys(engines), **dict.fromkeys(models)}
        }
        self._unready: set[str] = set()

    def put(self, run: WaitingRun, home: str = "", cached_tokens: int = 0) -> bool:
        """Let a run wait; False when its model is not known here. One that waits or is under way changes nothing, but

        one that waits may get another ``home``: the replica that it is to be served by, where so many tokens of its
        prompt are cached.
        """
        line = self._lines.get(run.model)
        if line is None:
            return False
        line.put(run, home, cached_tokens)
        return True

    def take(self) -> list[tuple[str, str]]:
        """Model and id of the runs to start now, the next first. Each is under way from now on."""
        return [
            (model, run_id)
            for model, line in self._lines.items()
            if model not in self._unready
            for run_id in line.take()
        ]

    def take_at_once(self, run: WaitingRun) -> bool:
        """Take this run if there is room and nobody waits; else nothing has changed."""
        line = self._lines.get(run.model)
        return line is not None and run.model not in self._unready and line.take_at_once(run)

    def meter(self, model: str, run_id: str) -> Meter:
        """The account of a run that was taken."""
        return Meter(self._lines[model], run_id)

    def discard(self, run_id: str) -> None:
        """Forget a waiting run; unknown ids are fine."""
        for line in self._lines.values():
            line.discard(run_id)

    def set_ready(self, model: str, ready: bool) -> None:
        """Nothing is taken for an engine that is not ready. One that is again has nothing cached."""
        if model in self._unready and ready:
            self._lines[model].warmth.cold()
        (self._unready.discard if ready else self._unready.add)(model)

    def slots(self, model: str) -> int:
        """Replies that can be written here at the same time; none while the engine is not ready."""
        line = self._lines.get(model)
        return 0 if line is None or model in self._unready else line.slots

    def spare(self, model: str) -> Spare:
        """What of an engine nobody uses or waits for; nothing while it is not ready."""
        line = self._lines.get(model)
        return Spare(0, 0) if line is None or model in self._unready else line.spare()

    def fullness(self, model: str) -> Fullness:
        """How much of the engine here replies have; nothing is known of one that is not ready."""
        line = self._lines.get(model)
        return Fullness() if line is None or model in self._unready else line.fullness()

    def line(self, model: str) -> Line | None:
        """The line of one model."""
        return self._lines.get(model)

    def survey(self) -> Iterator[None]:
        """Bring up to date what ``standing`` tells where many wait, in small steps."""
        for line in self._lines.values():
            yield from line.survey()

    def left(self, model: str) -> list[float]:
        """Service that each run under way of this model is likely to come to yet, least first: for ``standing``."""
        line = self._lines.get(model)
        return [] if line is None else line.queue.left()

    def standing(
        self, model: str, run_id: str, left: Sequence[float] | None = None
    ) -> tuple[Standing, float | None] | None:
        """Where a run stands and in how many seconds it will start; None when it does not wait here.

        Who asks for many gives what is ``left`` of those under way: it takes longer to find than all else.
        """
        line = self._lines.get(model)
        return None if line is None else line.standing(run_id, self.left(model) if left is None else left)

    def hear(self, replica_id: str, held: Iterable[Held]) -> None:
        """Another replica tells of runs that it has."""
        for one in held:
            if (line := self._lines.get(one.run.model)) is not None:
                line.hear(replica_id, one)

    def forget(self, replica_id: str, but: Collection[str] = ()) -> None:
        """Another replica has nothing under way ``but`` these."""
        for line in self._lines.values():
            line.flights.forget(replica_id, but)

    def __iter__(self) -> Iterator[Line]:
        return iter(self._lines.values())

    def ids(self) -> set[str]:
        """The runs that wait."""
        return set().union(*(line.queue.ids() for line in self._lines.values()))

    def __contains__(self, model: str) -> bool:
        return model in self._lines

    def __len__(self) -> int:
        return sum(len(line.queue) for line in self._lines.values())
