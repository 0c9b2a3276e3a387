"""The lines before this process's engines: a fair queue for each model, and the room that each engine has left (L12).

An engine's own queue is kept nearly empty: a run is taken out of its line only when a sequence is free, and room in the
KV cache for its prompt and all that it may write. So the order is decided here, and nothing is preempted there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from chatsvc.clock import Clock
from chatsvc.inference.base import Engine
from chatsvc.limits import ServiceCost, TierName
from chatsvc.run import RunKind, WaitingRun
from chatsvc.scheduler.fair_flow import Demand
from chatsvc.scheduler.fair_queue import FairQueue
from chatsvc.scheduler.pace import Pace
from chatsvc.scheduler.standing import Standing

_REPORT_TOKENS: Final = 16
"""Tokens of a reply are accounted for in steps of so many: as often as they are written to the log at most."""

_BACKGROUND: Final = "\n"
"""Behind a user's name: the line of what is done for that user in the background. No name has a line break, and what
nobody waits for must neither go before the user's next message nor put it behind others' by what it cost."""


class Meter:
    """What one run receives, told to its line. ``end`` or ``refund`` it, once."""

    __slots__ = ("_line", "_pending", "_run_id")

    def __init__(self, line: _Line, run_id: str) -> None:
        self._line = line
        self._run_id = run_id
        self._pending = 0

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
        self._line.end(self._run_id, complete=complete)

    def refund(self) -> None:
        """Nothing of the run was shown: it costs nothing, and is answered elsewhere or later."""
        self._line.refund(self._run_id)

    def _report(self) -> None:
        pending, self._pending = self._pending, 0
        self._line.delivered(self._run_id, pending)


class _Line:
    """One model: who waits, and what runs."""

    def __init__(
        self, engine: Engine, slots: int, weights: Mapping[TierName, float], clock: Clock, cost: ServiceCost
    ) -> None:
        self._engine = engine
        self._slots = slots
        self._cost = cost
        self.queue = FairQueue(weights, cost=self._cost)
        self.pace = Pace(clock)
        self._room: dict[str, int] = {}
        """KV tokens kept for each run under way."""

    def demand(self, run: WaitingRun) -> Demand:
        window = self._engine.limits.window
        room = max(1, window - run.prompt_tokens)
        return Demand(
            run_id=run.id,
            user_id=run.user_id if run.kind is RunKind.REPLY else f"{run.user_id}{_BACKGROUND}",
            tier=run.tier,
            prompt_tokens=run.prompt_tokens,
            max_tokens=min(room, self._engine.limits.reply_tokens if run.max_tokens is None else run.max_tokens),
        )

    def take(self) -> list[Demand]:
        sequences = self._slots - len(self._room)
        if sequences <= 0:
            return []
        capacity = self._engine.limits.kv_tokens
        free = None if capacity is None else capacity - sum(self._room.values())
        taken = self.queue.take(sequences, free)
        for demand in taken:
            self._room[demand.run_id] = demand.kv_tokens
        return taken

    def started(self, run_id: str, prompt_tokens: int, cached_tokens: int) -> None:
        self.queue.started(run_id, prompt_tokens, cached_tokens)
        self.pace.delivered(self._cost.of_prompt(prompt_tokens, cached_tokens))

    def delivered(self, run_id: str, output_tokens: int) -> None:
        self.queue.delivered(run_id, output_tokens)
        self.pace.delivered(self._cost.of_output(output_tokens))

    def end(self, run_id: str, *, complete: bool) -> None:
        self.queue.end(run_id, complete=complete)
        self._leave(run_id)

    def refund(self, run_id: str) -> None:
        self.queue.refund(run_id)
        self._leave(run_id)

    def _leave(self, run_id: str) -> None:
        self._room.pop(run_id, None)
        if not self.queue.waits():
            self.pace.idle()


class Lines:
    """All of them. Pure but for asking engines for their limits."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        slots: Mapping[str, int],
        weights: Mapping[TierName, float],
        clock: Clock,
        cost: ServiceCost,
    ) -> None:
        self._lines = {model: _Line(engine, slots[model], weights, clock, cost) for model, engine in engines.items()}
        self._unready: set[str] = set()

    def put(self, run: WaitingRun) -> bool:
        """Let a run wait; False when its model is not served here. One that waits or is under way changes nothing."""
        line = self._lines.get(run.model)
        if line is None:
            return False
        line.queue.put(line.demand(run))
        return True

    def take(self) -> list[tuple[str, str]]:
        """Model and id of the runs to start now, the next first. Each is under way from now on."""
        return [
            (model, demand.run_id)
            for model, line in self._lines.items()
            if model not in self._unready
            for demand in line.take()
        ]

    def take_at_once(self, run: WaitingRun) -> bool:
        """Take this run if there is room and nobody waits; else nothing has changed."""
        line = self._lines.get(run.model)
        if line is None or run.model in self._unready or line.queue.waits():
            return False
        line.queue.put(line.demand(run))
        if line.take():
            return True
        line.queue.discard(run.id)
        return False

    def meter(self, model: str, run_id: str) -> Meter:
        """The account of a run that was taken."""
        return Meter(self._lines[model], run_id)

    def discard(self, run_id: str) -> None:
        """Forget a waiting run; unknown ids are fine."""
        for line in self._lines.values():
            line.queue.discard(run_id)

    def set_ready(self, model: str, ready: bool) -> None:
        """Nothing is taken for an engine that is not ready."""
        (self._unready.discard if ready else self._unready.add)(model)

    def standing(self, model: str, run_id: str) -> tuple[Standing, float | None] | None:
        """Where a run stands and in how many seconds it will start; None when it does not wait here."""
        line = self._lines.get(model)
        standing = None if line is None else line.queue.position(run_id)
        if line is None or standing is None:
            return None
        return standing, line.pace.wait_s(standing.position, standing.service_ahead, line.queue.left())

    def ids(self) -> set[str]:
        """The runs that wait."""
        return set().union(*(line.queue.ids() for line in self._lines.values()))

    def __contains__(self, model: str) -> bool:
        return model in self._lines

    def __len__(self) -> int:
        return sum(len(line.queue) for line in self._lines.values())
