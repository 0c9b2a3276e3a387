"""The whole service as a policy: its door, its degradation ladder and its queue, each the code that serves.

What differs from a server: refusals and moves are decided at the moment of arrival, never in a race; usage is kept in a
list instead of rows; a reply that moves to the smaller model is out of this engine's hands and counts as ended for the
door; who is refused does not come back.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
from sim_policies import COST, Answer, Ours
from sim_traces import CAP, Job

from chatsvc.config import Config, DegradationConfig, ModelConfig
from chatsvc.errors import TooLate
from chatsvc.limits import Tier, TierName
from chatsvc.run import WaitingRun
from chatsvc.scheduler.admission import expected_cost
from chatsvc.scheduler.pressure import HISTORY, Pressure, Terms, UsualReply
from chatsvc.scheduler.queue_delay import QueueDelays
from chatsvc.scheduler.spared import Fullness

LARGE: Final = "large"
STEP_S: Final = 300
"""Budgets count in steps of five minutes, as in ``store/allowances.py``."""
LOOK_S: Final = 1.0
USUAL: Final = UsualReply(most=CAP, reserve=None)
LEAST_PROMPT: Final = 200
"""Tokens of a prompt that are no history: the system prompt and the question."""
CONFIG: Final = Config(
    data_dir=Path(),
    # Traces cap replies at a quarter of what the service does; so does the ladder.
    degradation=DegradationConfig(max_tokens=CAP // 4),
    models={
        LARGE: ModelConfig(engine="scripted:", default=True, degrade_to="small"),
        "small": ModelConfig(engine="scripted:"),
    },
)


class _Clock:
    """The simulation's time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.seconds, UTC)

    def monotonic(self) -> float:
        return self.seconds


class Door:
    """Places, budgets and queue caps: ``Tier.shortage`` over what was used."""

    def __init__(self) -> None:
        self._open: dict[str, dict[str, float]] = defaultdict(dict)
        self._spent: dict[str, dict[int, float]] = defaultdict(dict)
        self._waiting: Counter[TierName] = Counter()

    def takes(self, job: Job, tier: Tier, charge: float, now: float) -> bool:
        """Whether one more reply may come; then it is open until ``ends``."""
        oldest = now - tier.budget_window_s - STEP_S
        spent = sum(units for step, units in self._spent[job.user].items() if step * STEP_S > oldest)
        lacks = tier.shortage(
            open_used=len(self._open[job.user]),
            used=spent + sum(self._open[job.user].values()),
            charge=charge,
            waiting=self._waiting[tier.name],
            must_wait=True,
        )
        if lacks is None:
            self._open[job.user][job.run_id] = charge
            self._waiting[tier.name] += 1
        return lacks is None

    def begins(self, job: Job) -> None:
        """It waits no more."""
        self._waiting[job.tier] -= 1

    def ends(self, job: Job, units: float, now: float) -> None:
        """What it came to, whatever the end."""
        del self._open[job.user][job.run_id]
        steps = self._spent[job.user]
        steps[int(now // STEP_S)] = steps.get(int(now // STEP_S), 0.0) + units


class Service(Ours):
    """``Ours``, behind the door and under the ladder."""

    model: Final = LARGE

    def __init__(self, tiers: Mapping[TierName, Tier] | None = None, *, smaller: bool = True) -> None:
        """``smaller``: whether there is a smaller model to move to."""
        super().__init__()
        config = CONFIG if tiers is None else msgspec.structs.replace(CONFIG, tiers=dict(tiers))
        if not smaller:
            config = msgspec.structs.replace(config, models={LARGE: ModelConfig(engine="scripted:", default=True)})
        self._tiers = config.tiers
        self._clock = _Clock()
        self._door = Door()
        self.delays = QueueDelays()
        self._since: dict[str, float] = {}
        self._pressure = Pressure(
            config=config, queues=[self], clock=self._clock, enabled=True, fullness=lambda _: self._full
        )
        self._full = Fullness()
        self._looked = -LOOK_S
        self.moved: list[Job] = []
        """What the smaller model was given to do."""
        self.steps: list[tuple[float, int]] = [(0.0, 0)]
        """The ladder: from when on, which step."""
        self.degraded: Counter[tuple[TierName, str]] = Counter()

    def waits(self) -> Iterable[tuple[WaitingRun, float]]:
        """As ``Pressure`` asks for it."""
        for run_id, since in self._since.items():
            job = self._jobs[run_id]
            run = WaitingRun(id=run_id, user_id=job.user, tier=job.tier, model=LARGE, prompt_tokens=job.prompt_tokens)
            yield run, since

    def fills(self, full: Fullness) -> None:
        self._full = full

    def look(self, now: float) -> list[Job]:
        self._clock.seconds = now
        if now - self._looked < LOOK_S:
            return []
        self._looked = now
        self._pressure.look()
        if (step := self._pressure.step(LARGE)) != self.steps[-1][1]:
            self.steps.append((now, step))
        overdue = [self._jobs.pop(run_id) for run_id in self._pressure.overdue()]
        for job in overdue:
            self.queue.discard(job.run_id)
            del self._since[job.run_id]
            self._door.begins(job)
            self._door.ends(job, 0.0, now)
        return overdue

    def put(self, job: Job, now: float) -> Answer:
        self._clock.seconds = now
        terms = self._pressure.terms(
            job.tier, LARGE, named=False, max_tokens=job.max_tokens, usual=lambda _: USUAL, is_ready=lambda _: True
        )
        job = _on(terms, job)
        charge = expected_cost(COST, prompt_tokens=job.prompt_tokens, reply_limit=job.max_tokens)
        if not self._door.takes(job, terms.tier, charge, now):
            return Answer.REFUSED
        try:
            self._pressure.refuse_late(job.tier, terms.model)
        except TooLate:
            self._door.begins(job)
            self._door.ends(job, 0.0, now)
            return Answer.REFUSED
        self._pressure.note(job.tier, terms, job.prompt_tokens)
        self.degraded.update((job.tier, what) for what in terms.degraded)
        if terms.moved:
            self._door.begins(job)
            self._door.ends(job, charge, now)
            self.moved.append(msgspec.structs.replace(job, arrival_s=now))
            return Answer.MOVED
        self._since[job.run_id] = now
        return super().put(job, now)

    def take(self, sequences: int, kv_tokens: int) -> list[Job]:
        taken = super().take(sequences, kv_tokens)
        now = self._clock.seconds
        for job in taken:
            self.delays.begins(job.tier, now - self._since.pop(job.run_id), now)
            self._door.begins(job)
        return taken

    def end(self, job: Job) -> None:
        charge = self.queue.end(job.run_id, complete=True)
        self._door.ends(job, 0.0 if charge is None else charge.service, self._clock.seconds)


def _on(terms: Terms, job: Job) -> Job:
    """The request on these terms."""
    most = job.max_tokens if terms.max_tokens is None else terms.max_tokens
    prompt = job.prompt_tokens
    if HISTORY in terms.degraded and prompt > LEAST_PROMPT:
        prompt = LEAST_PROMPT + int((prompt - LEAST_PROMPT) * terms.history_share)
    return msgspec.structs.replace(
        job, prompt_tokens=prompt, max_tokens=most, output_tokens=min(job.output_tokens, most)
    )
