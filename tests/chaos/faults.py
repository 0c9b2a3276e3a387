"""What goes wrong, as a table, and when: a plan drawn from the seed before anything starts.

Each track deals its faults like a shuffled deck, so that a short run too meets every kind.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from server import ServerFailed

from chaos.history import History, Trouble, now
from chaos.servers import Replica, Servers

LEASE_S = 6.0


@dataclass(frozen=True)
class Strike:
    """One fault to come. ``draw`` holds its particulars."""

    at: float
    name: str
    seed: int


Act = Callable[[Servers, History, random.Random], Awaitable[None]]
"""A fault: does it, and undoes it."""


async def _kill(servers: Servers, history: History, draw: random.Random) -> None:
    async with _free_replica(servers, draw) as replica:
        at = now()
        await replica.kill()
        trouble = Trouble("kill", at, at, f"replica {replica.number}", await servers.held_by(replica.worker_id))
        history.troubles.append(trouble)
        await asyncio.sleep(draw.uniform(0.2, 3))
        await replica.start()
        trouble.until = now()


async def _freeze(servers: Servers, history: History, draw: random.Random) -> None:
    async with _free_replica(servers, draw) as replica:
        at = now()
        replica.server.signal(signal.SIGSTOP)
        trouble = Trouble("freeze", at, at + 60, f"replica {replica.number}", await servers.held_by(replica.worker_id))
        history.troubles.append(trouble)
        try:
            await asyncio.sleep(LEASE_S + draw.uniform(2.5, 6))
        finally:
            replica.server.signal(signal.SIGCONT)
            trouble.until = now()


async def _roll(servers: Servers, history: History, draw: random.Random) -> None:
    """A deployment: one replica after the other."""
    for replica in list(servers.replicas):
        async with replica.busy:
            trouble = Trouble("roll", now(), now() + 60, f"replica {replica.number}")
            history.troubles.append(trouble)
            try:
                await replica.terminate()
            except ServerFailed as error:
                history.surprises.append(f"SIGTERM did not end replica {replica.number}: {error}")
            await replica.start()
            trouble.until = now()


async def _redis_empty(servers: Servers, history: History, draw: random.Random) -> None:
    await _redis_down(servers, history, "redis empty", away_s=draw.uniform(0, 1), forget=True)


async def _redis_kept(servers: Servers, history: History, draw: random.Random) -> None:
    await _redis_down(servers, history, "redis kept", away_s=draw.uniform(0, 2), forget=False)


async def _redis_away(servers: Servers, history: History, draw: random.Random) -> None:
    await _redis_down(servers, history, "redis away", away_s=draw.uniform(5, 15), forget=draw.random() < 0.5)


async def _redis_down(servers: Servers, history: History, name: str, *, away_s: float, forget: bool) -> None:
    trouble = Trouble(name, now(), now() + 60, "empty" if forget else "kept")
    history.troubles.append(trouble)
    await asyncio.to_thread(servers.log.server.kill)
    if forget:
        servers.log.forget()
    await asyncio.sleep(away_s)
    await asyncio.to_thread(servers.log.server.start)
    trouble.until = now()


async def _redis_paused(servers: Servers, history: History, draw: random.Random) -> None:
    trouble = Trouble("redis paused", now(), now() + 60)
    history.troubles.append(trouble)
    servers.log.server.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(draw.uniform(0.5, 9))
    finally:
        servers.log.server.signal(signal.SIGCONT)
        trouble.until = now()


async def _postgres_restart(servers: Servers, history: History, draw: random.Random) -> None:
    await _postgres_down(servers, history, "postgres restart", away_s=0, number=signal.SIGQUIT)


async def _postgres_away(servers: Servers, history: History, draw: random.Random) -> None:
    number = draw.choice((signal.SIGINT, signal.SIGQUIT))
    await _postgres_down(servers, history, "postgres away", away_s=draw.uniform(3, 20), number=number)


async def _postgres_down(
    servers: Servers, history: History, name: str, *, away_s: float, number: signal.Signals
) -> None:
    trouble = Trouble(name, now(), now() + 60, number.name)
    history.troubles.append(trouble)
    await servers.database.stop(number)
    await asyncio.sleep(away_s)
    await servers.database.start()
    trouble.until = now()


class _free_replica:  # noqa: N801 - used like a function
    """A replica that is up and that nobody else does anything to, for the length of a block; waits for one."""

    def __init__(self, servers: Servers, draw: random.Random) -> None:
        self._servers = servers
        self._draw = draw
        self._replica: Replica | None = None

    async def __aenter__(self) -> Replica:
        while True:
            free = [replica for replica in self._servers.replicas if replica.up and not replica.busy.locked()]
            if free:
                self._replica = self._draw.choice(free)
                await self._replica.busy.acquire()
                return self._replica
            await asyncio.sleep(0.1)

    async def __aexit__(self, *_: object) -> None:
        assert self._replica is not None
        self._replica.busy.release()


@dataclass(frozen=True)
class Track:
    """Faults of one kind: the first after ``first_s``, then one every ``every_s``. They never overlap one another."""

    first_s: float
    every_s: float
    faults: dict[str, Act]


TRACKS = (
    Track(8, 20, {"kill": _kill}),
    Track(16, 41, {"freeze": _freeze, "roll": _roll}),
    Track(13, 27, {
        "redis empty": _redis_empty, "redis kept": _redis_kept,
        "redis away": _redis_away, "redis paused": _redis_paused,
    }),
    Track(36, 59, {"postgres restart": _postgres_restart, "postgres away": _postgres_away}),
)  # fmt: skip


def plan(seed: int, seconds: float) -> list[list[Strike]]:
    """What strikes when, for each track. The same for the same seed."""
    draw = random.Random(seed)
    plans = []
    for track in TRACKS:
        strikes, deck, at = [], [], track.first_s
        while at < seconds - 5:
            if not deck:
                deck = list(track.faults)
                draw.shuffle(deck)
            strikes.append(Strike(at + draw.uniform(-2, 2), deck.pop(), draw.randrange(2**32)))
            at += track.every_s
        plans.append(strikes)
    return plans


async def strike(servers: Servers, history: History, plans: list[list[Strike]]) -> None:
    """Carry the plan out. Returns once the last fault is undone."""
    began = now()

    async def follow(track: Track, strikes: list[Strike]) -> None:
        for one in strikes:
            await asyncio.sleep(max(0.0, began + one.at - now()))
            await track.faults[one.name](servers, history, random.Random(one.seed))

    async with asyncio.TaskGroup() as tracks:
        for track, strikes in zip(TRACKS, plans, strict=True):
            tracks.create_task(follow(track, strikes))


async def warden(servers: Servers, history: History) -> None:
    """Start again what ended by itself, as a supervisor would; nothing here may. Until cancelled."""
    while True:
        for replica in servers.replicas:
            if replica.up and not replica.busy.locked() and replica.server.exit_status is not None:
                history.surprises.append(f"replica {replica.number} ended by itself with {replica.server.exit_status}")
                replica.up = False
                async with replica.busy:
                    await replica.start()
        await asyncio.sleep(0.5)
