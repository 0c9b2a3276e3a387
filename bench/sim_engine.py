"""A batching engine as discrete events: every step reads some prompt tokens and writes one token of each sequence.

A step takes ``a + b · prompt tokens read + c · sequences + d · KV tokens read``. Room for prompt and ``max_tokens`` is
held from dispatch to end, so nothing is ever preempted.
"""

from __future__ import annotations

import random
from collections import deque

import msgspec
from sim_policies import Answer, Policy
from sim_traces import Job, Trace

from chatsvc.scheduler.spared import Fullness


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's size and speed. The defaults: a 7 B model on a 24 GB card, as in the published measurements.

    a: the weights are read once a step (13.5 GB at 600 GB/s) and the rest of a step is started. b: a prompt token costs
    2 x 7e9 operations, at 60 TFLOP/s. c: sampling, and attention's fixed cost, per sequence. d: half a megabyte of keys
    and values per token, at 600 GB/s. What remains to be chosen is how many replies run at once: ``kv_tokens`` is set
    such that first come, first served delivers what was measured there, about 780 tokens a second.
    """

    a: float = 0.027
    b: float = 0.00024
    c: float = 0.0004
    d: float = 0.0000009
    sequences: int = 64
    kv_tokens: int = 32_000
    prefill_tokens: int = 2048
    """Most prompt tokens read in one step."""
    admit_every: int = 10
    """Steps from one look at the queue to the next while replies are under way, as in the published measurements. So a
    few places are given away at once, as they are where each dispatch takes a round trip to a database."""


class Served(msgspec.Struct, kw_only=True):
    """What became of a request."""

    job: Job
    dispatched_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    refused: bool = False
    moved: bool = False
    """Another engine served it."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run."""

    trace: Trace
    served: list[Served]
    ended_s: float
    idle_s: float
    """Seconds in which nothing ran while someone waited."""


class _Sequence:
    __slots__ = ("leaves", "left", "record", "to_read", "written")

    def __init__(self, record: Served) -> None:
        self.record = record
        self.to_read = record.job.prompt_tokens
        self.left = record.job.output_tokens
        self.written = 0
        self.leaves = False
        """Whether it ends where capacity was taken away: that part takes nothing new."""


def simulate(trace: Trace, policy: Policy, engine: Engine, seed: int = 0) -> Result:
    """Serve the whole trace under one policy. ``seed`` decides which steps take a little longer than others."""
    return _Simulation(trace, policy, engine, random.Random(seed)).run()


class _Simulation:
    def __init__(self, trace: Trace, policy: Policy, engine: Engine, noise: random.Random) -> None:
        self._noise = noise
        self._trace = trace
        self._policy = policy
        self._engine = engine
        self._records = {job.run_id: Served(job=job) for job in trace.jobs}
        self._coming = deque(trace.jobs)
        self._capacity = deque(trace.capacity)
        self._running: list[_Sequence] = []
        self._now = self._idle_s = 0.0
        self._share = 1.0
        self._held = 0
        self._waiting = 0

    def run(self) -> Result:
        """Until all is served."""
        steps = 0
        while self._coming or self._waiting or self._running:
            self._arrive()
            self._policy.fills(self._fullness())
            for job in self._policy.look(self._now):
                self._waiting -= 1
                self._records[job.run_id].refused = True
            if not self._running or steps % self._engine.admit_every == 0:
                self._start()
            if self._running:
                self._now += _step(self._running, self._engine) * self._noise.uniform(0.9, 1.1)
                self._end(_written(self._running, self._policy, self._now))
                steps += 1
            else:
                self._sleep()
        served = list(self._records.values())
        return Result(trace=self._trace, served=served, ended_s=self._now, idle_s=self._idle_s)

    def _arrive(self) -> None:
        while self._capacity and self._capacity[0][0] <= self._now:
            self._resize(self._capacity.popleft()[1])
        while self._coming and self._coming[0].arrival_s <= self._now:
            job = self._coming.popleft()
            # What can never fit is refused at the door, under every policy.
            fits = _room(job) <= self._engine.kv_tokens
            answer = self._policy.put(job, self._now) if fits else Answer.REFUSED
            self._waiting += answer is Answer.WAITS
            self._records[job.run_id].refused = answer is Answer.REFUSED
            self._records[job.run_id].moved = answer is Answer.MOVED

    def _resize(self, share: float) -> None:
        """Capacity goes as whole replicas do: what runs there ends there, and nothing is cut."""
        lost = int(len(self._here) * (1 - share / self._share)) if share < self._share else 0
        for index in range(lost):
            sequence = self._here[index * len(self._here) // lost]
            sequence.leaves = True
            self._held -= _room(sequence.record.job)
        self._share = share

    @property
    def _here(self) -> list[_Sequence]:
        return [sequence for sequence in self._running if not sequence.leaves]

    def _fullness(self) -> Fullness:
        places = int(self._engine.sequences * self._share)
        kv_tokens = int(self._engine.kv_tokens * self._share)
        return Fullness(places, len(self._here) / max(places, 1), self._held / max(kv_tokens, 1))

    def _start(self) -> None:
        slots = max(int(self._engine.sequences * self._share) - len(self._here), 0)
        room = max(int(self._engine.kv_tokens * self._share) - self._held, 0)
        for job in self._policy.take(slots, room):
            self._waiting -= 1
            self._held += _room(job)
            record = self._records[job.run_id]
            record.job = job
            record.dispatched_s = self._now
            self._running.append(_Sequence(record))

    def _end(self, done: list[_Sequence]) -> None:
        for sequence in done:
            self._held -= 0 if sequence.leaves else _room(sequence.record.job)
            self._running.remove(sequence)

    def _sleep(self) -> None:
        """Nothing runs: until somebody comes, or capacity changes."""
        events = [self._coming[0].arrival_s] if self._coming else []
        if self._waiting and self._capacity:
            events.append(self._capacity[0][0])
        if self._waiting and not events:
            raise RuntimeError(f"{self._waiting} requests wait and nothing runs")
        then = min(events, default=self._now)
        if self._waiting:
            self._idle_s += then - self._now
        self._now = then


def _room(job: Job) -> int:
    return job.prompt_tokens + job.max_tokens


def _step(running: list[_Sequence], engine: Engine) -> float:
    """Read prompts, oldest first; returns how long the step takes."""
    budget = engine.prefill_tokens
    kv = 0
    for sequence in running:
        if sequence.to_read:
            part = min(sequence.to_read, budget)
            sequence.to_read -= part
            budget -= part
        kv += sequence.record.job.prompt_tokens - sequence.to_read + sequence.written
    read = engine.prefill_tokens - budget
    return engine.a + engine.b * read + engine.c * len(running) + engine.d * kv


def _written(running: list[_Sequence], policy: Policy, now: float) -> list[_Sequence]:
    """One token for each sequence whose prompt is read; returns those that are done."""
    done = []
    for sequence in running:
        if sequence.to_read:
            continue
        record = sequence.record
        if record.first_token_s is None:
            record.first_token_s = now
            policy.started(record.job)
        sequence.written += 1
        sequence.left -= 1
        policy.delivered(record.job, 1)
        if sequence.left <= 0:
            record.ended_s = now
            policy.end(record.job)
            done.append(sequence)
    return done
