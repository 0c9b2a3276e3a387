"""What is asked of the simulated engine: traces from a file, and made-up ones of users who behave or do not."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from chatsvc.limits import TierName

FREE, PLUS, PRO = TierName.FREE, TierName.PLUS, TierName.PRO
CAP: Final = 1024
"""``max_tokens`` of every request that says nothing else; it tells a scheduler nothing about the reply's length."""


class Job(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One request: what is known when it comes, and what only shows (``output_tokens``)."""

    arrival_s: float
    number: int
    user: str
    prompt_tokens: int
    output_tokens: int
    tier: TierName = FREE
    max_tokens: int = CAP
    conversation: str = ""
    cacheable: int = 0
    """Tokens of the prompt that this conversation's last turn has left in the cache, if it still holds them."""

    @property
    def run_id(self) -> str:
        return f"{self.number:08d}"


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Requests by arrival, and the share of the engine that is there as time goes by."""

    name: str
    jobs: list[Job]
    capacity: tuple[tuple[float, float], ...] = ((0.0, 1.0),)
    """From when on, and which share of the engine: 1 is all of it."""
    until_s: float = 600.0
    """When the last request may come. Service is sampled up to here."""


def read(path: Path) -> Trace:
    """A CSV of ``arrival_s, user, prompt_tokens, output_tokens``, with ``tier`` where there is such a column.

    Raises ``ValueError`` naming the line that cannot be read.
    """
    jobs = []
    with path.open(newline="") as file:
        for line, row in enumerate(csv.DictReader(file), 2):
            try:
                output = int(row["output_tokens"])
                job = Job(
                    arrival_s=float(row["arrival_s"]),
                    number=line,
                    user=row["user"],
                    prompt_tokens=int(row["prompt_tokens"]),
                    output_tokens=output,
                    tier=TierName(row.get("tier") or FREE),
                    max_tokens=max(CAP, output),
                )
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {line}: {error!r}") from error
            jobs.append(job)
    jobs.sort()
    last = jobs[-1].arrival_s if jobs else 0.0
    return Trace(name=path.stem, jobs=jobs, until_s=math.ceil(last / 60) * 60)


class _Maker:
    """Collects the requests of a made-up trace."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._jobs: list[Job] = []

    def poisson(
        self,
        user: str,
        rate: float,
        size: Callable[[], tuple[int, int]],
        *,
        tier: TierName = FREE,
        on: Iterable[tuple[float, float]] = ((0.0, 600.0),),
    ) -> None:
        """Requests of one user, ``rate`` a second on average while it is on."""
        for begin, end in on:
            at = begin + self.random.expovariate(rate)
            while at < end:
                self.add(user, at, size(), tier)
                at += self.random.expovariate(rate)

    def add(self, user: str, at: float, size: tuple[int, int], tier: TierName = FREE) -> None:
        prompt, output = size
        self._jobs.append(
            Job(
                arrival_s=at,
                number=len(self._jobs),
                user=user,
                prompt_tokens=prompt,
                output_tokens=output,
                tier=tier,
                max_tokens=max(CAP, output),
            )
        )

    def chat(self) -> tuple[int, int]:
        """Sizes as people's: most prompts short, a few long; replies of any length up to a page."""
        prompt = min(1000, max(1, int(self.random.lognormvariate(3.8, 1.5))))
        output = min(1000, max(1, int(self.random.gammavariate(1.2, 210))))
        return prompt, output

    def trace(self, name: str, **also: object) -> Trace:
        return Trace(name=name, jobs=sorted(self._jobs), **also)  # type: ignore[arg-type]


def people(seed: int = 0) -> Trace:
    """27 users over ten minutes: a few send most of it, as on a public chat server; more than the engine can do."""
    maker = _Maker(seed)
    for number in range(27):
        rate = 0.55 / (1 + number) ** 0.85
        begin = 0.0 if number < 12 else maker.random.uniform(0, 450)
        maker.poisson(f"u{number:02d}", rate, maker.chat, on=[(begin, 600.0 if number < 20 else begin + 150)])
    return maker.trace("people")


def overload(seed: int = 0) -> Trace:
    """Eight users, each of whom alone asks for more than an eighth of the engine; sizes vary."""
    maker = _Maker(seed)
    for number in range(8):
        maker.poisson(f"u{number}", 0.55 if number < 3 else 0.8, maker.chat)
    return maker.trace("overload")


def on_off(seed: int = 0) -> Trace:
    """Users who flood for a minute and rest for a minute, against users who ask all the time."""
    maker = _Maker(seed)
    for number in range(4):
        maker.poisson(f"steady{number}", 0.5, maker.chat)
    for number in range(4):
        begin = 60.0 * (number % 2)
        maker.poisson(f"burst{number}", 1.6, maker.chat, on=[(at, at + 60) for at in _every(120, begin)])
    return maker.trace("on-off")


def shifting(seed: int = 0) -> Trace:
    """Four users whose rates change every two minutes: little, much, their fair share, and again otherwise."""
    maker = _Maker(seed)
    rates = [(0.1, 1.2, 0.5, 0.9, 0.3), (1.2, 0.1, 0.9, 0.4, 1.0), (0.5, 0.5, 0.5, 1.5, 0.1), (0.8, 1.4, 0.2, 0.6, 1.2)]
    for number, steps in enumerate(rates):
        for step, rate in enumerate(steps):
            maker.poisson(f"u{number}", rate, maker.chat, on=[(120.0 * step, 120.0 * step + 120)])
    return maker.trace("shifting")


def many_accounts(seed: int = 0) -> Trace:
    """One person behind a hundred accounts, each used twenty times, against ten users who have one each."""
    maker = _Maker(seed)
    for number in range(10):
        maker.poisson(f"honest{number}", 0.15, maker.chat)
    for number in range(100):
        for _ in range(20):
            maker.add(f"fake{number}", maker.random.uniform(60, 540), maker.chat())
    return maker.trace("many-accounts")


def long_outputs(seed: int = 0) -> Trace:
    """Two users whose replies are always as long as can be, with prompts of a word, against eight who chat."""
    maker = _Maker(seed)
    for number in range(8):
        maker.poisson(f"chat{number}", 0.35, maker.chat)
    for number in range(2):
        maker.poisson(f"long{number}", 0.8, lambda: (5, 1000))
    return maker.trace("long-outputs")


def capacity_drop(seed: int = 0) -> Trace:
    """All tiers at what the engine can do in a busy hour; it shrinks to a half, to 30 %, and comes back."""
    maker = _Maker(seed)
    for tier, users in ((FREE, 12), (PLUS, 4), (PRO, 2)):
        for number in range(users):
            maker.poisson(f"{tier}{number}", 0.14, maker.chat, tier=tier, on=[(0.0, 1500.0)])
    capacity = ((0.0, 1.0), (300.0, 0.5), (600.0, 0.3), (900.0, 1.0))
    return maker.trace("capacity-drop", capacity=capacity, until_s=1500.0)


def busy_hour(seed: int = 0) -> Trace:
    """The requests of ``capacity-drop``, and all of the engine all the time: what is usual, at the same times."""
    trace = capacity_drop(seed)
    whole = tuple((begin, 1.0) for begin, _ in trace.capacity)
    return msgspec.structs.replace(trace, name="busy-hour", capacity=whole)


def long_prompts(seed: int = 0) -> Trace:
    """One user with prompts of 30,000 tokens against a hundred with one line each, again and again."""
    maker = _Maker(seed)
    for number in range(100):
        maker.poisson(f"line{number:02d}", 0.05, lambda: (20, maker.random.randint(20, 120)))
    maker.poisson("book", 0.05, lambda: (30_000, 300))
    return maker.trace("long-prompts")


def tiers(seed: int = 0) -> Trace:
    """Users of every tier who all ask for more than they can get: served 1 : 4 : 16."""
    maker = _Maker(seed)
    for tier, rate in ((FREE, 0.3), (PLUS, 0.8), (PRO, 2.6)):
        for number in range(2):
            maker.poisson(f"{tier}{number}", rate, maker.chat, tier=tier, on=[(0.0, 1200.0)])
    return maker.trace("tiers", until_s=1200.0)


def crowd(seed: int = 0) -> Trace:
    """Forty pro users who ask for all there is, and six free ones: the floor keeps these alive."""
    maker = _Maker(seed)
    for number in range(40):
        maker.poisson(f"pro{number}", 0.12, maker.chat, tier=PRO)
    for number in range(6):
        maker.poisson(f"free{number}", 0.2, maker.chat)
    return maker.trace("crowd")


def _every(period: float, begin: float, end: float = 600.0) -> list[float]:
    return [begin + period * step for step in range(int((end - begin) / period + 0.999))]


MADE: Final[dict[str, Callable[[int], Trace]]] = {
    "people": people,
    "overload": overload,
    "on-off": on_off,
    "shifting": shifting,
    "many-accounts": many_accounts,
    "long-outputs": long_outputs,
    "capacity-drop": capacity_drop,
    "busy-hour": busy_hour,
    "long-prompts": long_prompts,
    "tiers": tiers,
    "crowd": crowd,
}
