"""One chaos run: start everything, let users live while the plan strikes, let it come to rest, and judge."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from chaos.checker import Violation, check
from chaos.clients import CALL_S, User
from chaos.crashes import late_news
from chaos.faults import plan, strike, warden
from chaos.figures import figures
from chaos.history import History, now
from chaos.servers import Servers
from chaos.settle import settle

LIMITS = httpx.Limits(max_connections=1000, max_keepalive_connections=20)
FINISH_S = 150.0
"""How long users may take to see the end of what they began."""


@dataclass(frozen=True)
class Options:
    """What a run is made of."""

    seed: int
    seconds: float
    replicas: int = 3
    users: int = 24


@dataclass
class Result:
    """What came of it."""

    options: Options
    directory: Path
    history: History
    violations: list[Violation]
    figures: dict[str, Any]


def new_directory() -> Path:
    """For the data and the logs of a run. Unix sockets need a short path, and Postgres' account passes through it."""
    directory = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
    directory.chmod(0o755)
    return directory


def clear(directory: Path, *, logs_too: bool) -> None:
    """Remove the servers' data; what they logged stays for whoever has a violation to explain."""
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    if logs_too:
        shutil.rmtree(directory)


async def run(options: Options, directory: Path) -> Result:
    """Run it with all its data below ``directory``, where the servers' logs remain."""
    draw = random.Random(options.seed)
    history = History(replicas=options.replicas)
    servers = Servers(directory, options.replicas, draw)
    async with servers.running(), httpx.AsyncClient(timeout=httpx.Timeout(CALL_S, connect=2), limits=LIMITS) as http:
        began = now()
        watching = asyncio.create_task(warden(servers, history))
        try:
            await _live(options, servers, history, http, draw)
            await settle(servers, history)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        wall_s = now() - began
        cuts = servers.cuts
    history.surprises += [f"logged as an error: {line}" for line in servers.errors().values()]
    violations = [*check(history), *late_news(history)]
    told = {
        "seed": options.seed,
        "minutes": round(options.seconds / 60, 2),
        "replicas": options.replicas,
        "users": options.users,
        "wall_s": round(wall_s, 1),
        "cuts": {"total": sum(cuts.values()), **cuts},
        **figures(history, violations),
    }
    return Result(options, directory, history, violations, told)


async def _live(
    options: Options, servers: Servers, history: History, http: httpx.AsyncClient, draw: random.Random
) -> None:
    """Users take turns for the whole time; then the faults are over, and everybody sees their last turn through."""
    closing = asyncio.Event()
    users = [User(servers, history, http, random.Random(draw.random())) for _ in range(options.users)]
    living = [asyncio.create_task(user.run(closing)) for user in users]
    try:
        began = now()
        await strike(servers, history, plan(options.seed, options.seconds))
        await asyncio.sleep(max(0.0, began + options.seconds - now()))
        closing.set()
        for replica in servers.replicas:
            replica.proxy.calm = True
        async with asyncio.timeout(FINISH_S):
            await asyncio.gather(*living)
    except TimeoutError:
        history.surprises.append(f"{sum(not task.done() for task in living)} users were not done after {FINISH_S:g} s")
    finally:
        for task in living:
            task.cancel()
        await asyncio.gather(*living, return_exceptions=True)
