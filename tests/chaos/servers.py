"""The parts under fault: one Postgres, one Valkey, and replicas of the real server behind cutting proxies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
from log_server import LogServer
from server import ServerFailed, ServerProcess

from chaos.proxy import Proxy
from chatsvc.embedded import embedded_postgres

# A killed process must lose nothing that was committed; a power cut is not among the faults.
POSTGRES = {"fsync": "off", "full_page_writes": "off"}

MODELS = {
    "quick": {"first_token_ms": 30, "tokens_per_s": 120, "tokens": 24, "slots": 12},
    "plain": {"first_token_ms": 80, "tokens_per_s": 40, "tokens": 70, "slots": 16},
    "steady": {"first_token_ms": 150, "tokens_per_s": 16, "tokens": 80, "slots": 12},
    "slow": {"first_token_ms": 300, "tokens_per_s": 10, "tokens": 150, "slots": 12},
    "pensive": {"first_token_ms": 2500, "tokens_per_s": 60, "tokens": 40, "slots": 6},
}
"""Replies of 0.2 to 15 s; ``pensive`` ones wait long for their first token."""
HEARTBEAT_S = 2.0
"""Clients here take a stream for dead that was silent for three of these."""
GRACE_S = 8.0


def engine_url(model: str) -> str:
    """The engine of one of ``MODELS``."""
    return "scripted:?" + "&".join(f"{name}={value}" for name, value in MODELS[model].items())


def config_text() -> str:
    """The configuration that all replicas share."""
    tables = [
        f'[models.{name}]\nengine = "{engine_url(name)}"\ndefault = {str(name == "plain").lower()}' for name in MODELS
    ]
    # Logs outlive the run, so that all of them can be read at its end.
    stream = f"[stream]\nheartbeat_s = {HEARTBEAT_S}\nlog_ttl_s = 7200.0"
    return "\n\n".join([*tables, stream, f"[server]\ngrace_s = {GRACE_S}", '[auth]\nmode = "proxy"'])


class Database:
    """A Postgres that can be stopped by any signal and started again on the same data."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = contextlib.AsyncExitStack()
        self.url = ""

    async def start(self) -> None:
        """Return when it answers."""
        self.url = await self._stack.enter_async_context(
            embedded_postgres(self._directory, lambda line: None, settings=POSTGRES)
        )

    async def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """SIGQUIT is Postgres' immediate shutdown: no goodbye, and recovery at the next start."""
        pid_file = self._directory / "postgres" / "postmaster.pid"
        if pid_file.exists():
            os.kill(int(pid_file.read_text().split("\n", 1)[0]), number)
        await self._stack.aclose()


class Log:
    """A Valkey that keeps what it has taken in when it is killed, unless told to forget."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.server = LogServer(directory, "--save", "", "--appendonly", "yes", "--appendfsync", "everysec")

    def forget(self) -> None:
        """To be called while it is down: the next start is empty."""
        shutil.rmtree(self._directory / "appendonlydir", ignore_errors=True)


class Replica:
    """One server process and the proxy that its clients come through. Whoever does something to it holds ``busy``."""

    def __init__(self, number: int, server: ServerProcess, draw: random.Random) -> None:
        self.number = number
        self.server = server
        self.proxy = Proxy(server.port, draw)
        self.busy = asyncio.Lock()
        self.worker_id = ""
        self.up = False
        """It was ready, and nobody has done anything to it since."""

    async def start(self) -> None:
        """Start until it is ready: one that finds no Postgres ends, and is started again as a supervisor would."""
        told = len(self.server.log())
        while not self.up:
            try:
                await asyncio.to_thread(self.server.start, 120)
                self.up = True
            except ServerFailed:
                await asyncio.sleep(0.5)
        # It answers a moment before it says under which name it works.
        while not (ready := [line for line in self.server.log()[told:].splitlines() if '"message": "ready"' in line]):
            await asyncio.sleep(0.05)
        self.worker_id = json.loads(ready[-1])["worker"]

    async def kill(self) -> None:
        """SIGKILL."""
        self.up = False
        await asyncio.to_thread(self.server.kill)

    async def terminate(self) -> None:
        """SIGTERM, and wait for the end. Raises ``ServerFailed`` when it takes far longer than the grace time."""
        self.up = False
        await asyncio.to_thread(self.server.stop, GRACE_S + 30)


class Servers:
    """All parts. ``running`` starts and stops them."""

    def __init__(self, directory: Path, count: int, draw: random.Random) -> None:
        self.directory = directory
        self.database = Database(directory)
        self.log = Log(directory)
        self._count = count
        self._draw = draw
        self.replicas: list[Replica] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Servers]:
        """Everything is ready inside the block."""
        (self.directory / "chatsvc.toml").write_text(config_text())
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self.database.stop)
            await self.database.start()
            stack.enter_context(self.log.server)
            for number in range(self._count):
                server = ServerProcess(
                    self.directory / f"replica{number}",
                    {"CHATSVC_CONFIG": str(self.directory / "chatsvc.toml")},
                    engine="",
                    database_url=self.database.url,
                    redis_url=self.log.server.url,
                )
                replica = Replica(number, server, random.Random(self._draw.random()))
                stack.callback(server.kill_if_running)
                await replica.start()
                await stack.enter_async_context(replica.proxy.running())
                self.replicas.append(replica)
            yield self

    async def held_by(self, worker_id: str) -> list[str] | None:
        """The runs that this worker holds, by the word of Postgres; None when it cannot be asked."""
        query = "SELECT id FROM runs WHERE owner = %s AND status = 'streaming'"

        def ask() -> list[str]:
            with psycopg.connect(self.database.url, connect_timeout=2) as connection:
                return [row[0] for row in connection.execute(query, [worker_id]).fetchall()]

        try:
            return await asyncio.to_thread(ask)
        except psycopg.Error:
            return None

    def errors(self) -> dict[str, str]:
        """What the replicas logged as errors: the first line of each kind. A cut or an outage is none."""
        found: dict[str, str] = {}
        for replica in self.replicas:
            for line in replica.server.log().splitlines():
                if '"level": "error"' in line:
                    found.setdefault(json.loads(line)["message"], f"replica {replica.number}: {line[:2000]}")
                elif line and not line.startswith("{"):
                    found.setdefault("not JSON", f"replica {replica.number}: {line[:2000]}")
        return found

    @property
    def cuts(self) -> dict[str, int]:
        """Client connections broken by the proxies, by kind."""
        total: dict[str, int] = {}
        for replica in self.replicas:
            for kind, count in replica.proxy.cuts.items():
                total[kind] = total.get(kind, 0) + count
        return total
