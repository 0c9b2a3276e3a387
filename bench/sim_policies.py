"""Who is next: the service's own queue, and what it is compared with."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Final, Protocol

from sim_traces import FREE, PLUS, PRO, Job

from chatsvc.limits import ServiceCost, TierName
from chatsvc.scheduler.fair_flow import Demand
from chatsvc.scheduler.fair_queue import FairQueue
from chatsvc.scheduler.fair_rules import Rules
from chatsvc.scheduler.output_length import OutputEstimator
from chatsvc.scheduler.spared import Fullness

WEIGHTS: Final[Mapping[TierName, float]] = {PRO: 16.0, PLUS: 4.0, FREE: 1.0}
COST: Final = ServiceCost(prompt=1.0, cached=0.1, output=2.0)
"""Service as the measure counts it, prompt + 2 x output, for all policies that count."""


class Answer(Enum):
    """What becomes of a request that comes."""

    WAITS = "waits"
    REFUSED = "refused"
    MOVED = "moved"
    """Another engine serves it."""


class Policy(Protocol):
    """What the engine tells and asks."""

    def put(self, job: Job, now: float) -> Answer:
        """A request comes."""
        ...

    def fills(self, full: Fullness) -> None:
        """How full the engine is now."""
        ...

    def look(self, now: float) -> list[Job]:
        """Time goes by: which of those who wait are refused now."""
        ...

    def take(self, sequences: int, kv_tokens: int) -> list[Job]:
        """Which to start, given so much room, on what terms they are served."""
        ...

    def started(self, job: Job) -> None: ...

    def delivered(self, job: Job, tokens: int) -> None: ...

    def end(self, job: Job) -> None: ...


class Ours:
    """The service's queue, through its public calls."""

    def __init__(self, rules: Rules | None = None, estimator: OutputEstimator | None = None) -> None:
        self.estimator = OutputEstimator() if estimator is None else estimator
        self.queue = FairQueue(WEIGHTS, cost=COST, estimator=self.estimator, rules=rules)
        self._jobs: dict[str, Job] = {}

    def put(self, job: Job, now: float) -> Answer:
        self._jobs[job.run_id] = job
        self.queue.put(
            Demand(
                run_id=job.run_id,
                user_id=job.user,
                tier=job.tier,
                prompt_tokens=job.prompt_tokens,
                max_tokens=job.max_tokens,
            )
        )
        return Answer.WAITS

    def fills(self, full: Fullness) -> None:
        pass

    def look(self, now: float) -> list[Job]:
        return []

    def take(self, sequences: int, kv_tokens: int) -> list[Job]:
        return [self._jobs.pop(demand.run_id) for demand in self.queue.take(sequences, kv_tokens)]

    def started(self, job: Job) -> None:
        self.queue.started(job.run_id, job.prompt_tokens, 0)

    def delivered(self, job: Job, tokens: int) -> None:
        self.queue.delivered(job.run_id, tokens)

    def end(self, job: Job) -> None:
        self.queue.end(job.run_id, complete=True)


class _Plain:
    """Policies that do not count."""

    def fills(self, full: Fullness) -> None:
        """Nothing to note."""

    def look(self, now: float) -> list[Job]:
        """Whoever waits may wait."""
        return []

    def started(self, job: Job) -> None:
        """Nothing to note."""

    def delivered(self, job: Job, tokens: int) -> None:
        """Nothing to note."""

    def end(self, job: Job) -> None:
        """Nothing to note."""


class Lines(_Plain):
    """First come, first served, in one line or in several of which an earlier one always goes first."""

    def __init__(self, line_of: Callable[[Job], int]) -> None:
        self._line_of = line_of
        self._lines: dict[int, deque[Job]] = {}

    def put(self, job: Job, now: float) -> Answer:
        self._lines.setdefault(self._line_of(job), deque()).append(job)
        return Answer.WAITS

    def take(self, sequences: int, kv_tokens: int) -> list[Job]:
        taken: list[Job] = []
        while len(taken) < sequences:
            line = next((self._lines[name] for name in sorted(self._lines) if self._lines[name]), None)
            if line is None or line[0].prompt_tokens + line[0].max_tokens > kv_tokens:
                break
            taken.append(line.popleft())
            kv_tokens -= taken[-1].prompt_tokens + taken[-1].max_tokens
        return taken


class RequestsPerMinute(Lines):
    """So many requests of a user in each minute, first come, first served; the rest is refused."""

    def __init__(self, limit: int) -> None:
        super().__init__(lambda _: 0)
        self._limit = limit
        self._counts: dict[tuple[str, int], int] = {}

    def put(self, job: Job, now: float) -> Answer:
        key = (job.user, int(job.arrival_s // 60))
        self._counts[key] = self._counts.get(key, 0) + 1
        return super().put(job, now) if self._counts[key] <= self._limit else Answer.REFUSED


class PlainVtc(_Plain):
    """Virtual Token Counter as published (Sheng et al., OSDI 2024).

    Prompts are charged at dispatch, output as it is written; a user who begins to wait is lifted to the smallest
    counter among those who wait.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[Job]] = OrderedDict()
        self._counters: dict[str, float] = {}
        self._last_left = 0.0

    def put(self, job: Job, now: float) -> Answer:
        user = job.user
        if user not in self._lines:
            least = min((self._counters[other] for other in self._lines), default=self._last_left)
            self._counters[user] = max(self._counters.get(user, 0.0), least)
        self._lines.setdefault(user, deque()).append(job)
        return Answer.WAITS

    def take(self, sequences: int, kv_tokens: int) -> list[Job]:
        taken: list[Job] = []
        while len(taken) < sequences and self._lines:
            user = min(self._lines, key=self._counters.__getitem__)
            job = self._lines[user][0]
            if job.prompt_tokens + job.max_tokens > kv_tokens:
                break
            taken.append(self._lines[user].popleft())
            kv_tokens -= job.prompt_tokens + job.max_tokens
            self._counters[user] += COST.of_prompt(job.prompt_tokens, 0) / WEIGHTS[job.tier]
            if not self._lines[user]:
                del self._lines[user]
                self._last_left = self._counters[user]
        return taken

    def started(self, job: Job) -> None:
        """The prompt was charged at dispatch."""

    def delivered(self, job: Job, tokens: int) -> None:
        self._counters[job.user] += COST.of_output(tokens) / WEIGHTS[job.tier]

    def end(self, job: Job) -> None:
        """All is charged already."""


class KnowingVtc(PlainVtc):
    """VTC that knows how long each reply will be, and charges all of it at dispatch."""

    def take(self, sequences: int, kv_tokens: int) -> list[Job]:
        taken: list[Job] = []
        while len(taken) < sequences and (one := super().take(1, kv_tokens)):
            (job,) = one
            super().delivered(job, job.output_tokens)
            kv_tokens -= job.prompt_tokens + job.max_tokens
            taken.append(job)
        return taken

    def delivered(self, job: Job, tokens: int) -> None:
        """It was charged at dispatch."""


RANK: Final = {PRO: 0, PLUS: 1, FREE: 2}
POLICIES: Final[dict[str, Callable[[], Policy]]] = {
    "ours": Ours,
    "vtc": PlainVtc,
    "vtc_known": KnowingVtc,
    "fcfs": lambda: Lines(lambda _: 0),
    "tier_priority": lambda: Lines(lambda job: RANK[job.tier]),
    "rpm": lambda: RequestsPerMinute(5),
}
