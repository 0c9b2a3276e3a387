"""The whole service under load: replies by POST, a scripted engine, Postgres, Valkey, SSE. One server process."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import httpx
import psutil
from control import Child
from measure import Counted, free_port, percentile

HERE = Path(__file__).parent
TOKENS_PER_S = 20
TEXT = "a+reply+goes+on+and+on+while+many+people+read+"
ENGINE = f"scripted:?tokens_per_s={TOKENS_PER_S}&tokens=12000&window=100000&slots=4000&text={TEXT}"
START_PATIENCE_S = 120.0
POSTS_AT_ONCE = 16


class Service:
    """``python -m chatsvc`` with its embedded parts, in a directory of its own."""

    def __init__(self, directory: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.data_dir = Path(directory) / "data"
        self.log_path = Path(directory) / "log"
        self.process: psutil.Popen | None = None

    def start(self) -> None:
        settings = {
            "CHATSVC_PORT": str(self.port),
            "CHATSVC_DATA_DIR": str(self.data_dir),
            "CHATSVC_ENGINE": ENGINE,
            "CHATSVC_AUTH": "proxy",
            "CHATSVC_LOG_LEVEL": "warning",
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CHATSVC_")}
        with self.log_path.open("wb") as log:
            self.process = psutil.Popen(
                [sys.executable, "-m", "chatsvc"], env={**inherited, **settings}, stdout=log, stderr=log
            )

    def stop(self) -> None:
        """A second signal cuts the grace time short."""
        if self.process is not None and self.process.is_running():
            self.process.terminate()
            try:
                self.process.wait(2)
            except psutil.TimeoutExpired:
                self.process.terminate()
                self.process.wait(30)

    def counted(self) -> Counted:
        """The server itself, and its Postgres and Valkey with all their processes."""
        assert self.process is not None
        roles: dict[str, list[int]] = {"api": [self.process.pid], "postgres": [], "valkey": []}
        for process in psutil.process_iter(["cmdline", "cwd"]):
            line = " ".join(process.info["cmdline"] or ())
            if str(self.data_dir) not in f"{line} {process.info['cwd']}" or process.pid == self.process.pid:
                continue
            roles["valkey" if "valkey" in line else "postgres"].append(process.pid)
        return Counted(**roles)


async def ready(client: httpx.AsyncClient) -> None:
    until = time.monotonic() + START_PATIENCE_S
    while True:
        try:
            if (await client.get("/readyz")).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > until:
            raise RuntimeError("the service did not become ready")
        await asyncio.sleep(0.2)


class Posts:
    """Replies begun, in order: where their streams are, and when they were asked for."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._turns = asyncio.Semaphore(POSTS_AT_ONCE)
        self.paths: list[str] = []
        self.asked: list[float] = []
        self.latencies_ms: list[float] = []

    async def one(self) -> None:
        """A new user asks something in a new conversation."""
        async with self._turns:
            headers = {"x-forwarded-user": uuid.uuid4().hex}
            conversation = (await self._client.post("/v1/conversations", json={}, headers=headers)).json()["id"]
            body = {"content": "Tell me a story.", "client_msg_id": uuid.uuid4().hex, "max_tokens": 12_000}
            asked = time.monotonic()
            answer = await self._client.post(f"/v1/conversations/{conversation}/messages", json=body, headers=headers)
            self.latencies_ms.append((time.monotonic() - asked) * 1000)
            if answer.status_code != httpx.codes.ACCEPTED:
                raise RuntimeError(f"POST answered {answer.status_code}: {answer.text}")
            self.asked.append(asked)
            self.paths.append(answer.json()["stream_url"])


async def measure_service(replies: int, seconds: float) -> dict[str, Any]:
    """One row: so many replies at once, one reader each."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as directory:
        service = Service(directory)
        service.start()
        reader = await Child.start(str(HERE / "stream_reader.py"))
        try:
            async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
                await ready(client)
                posts = Posts(client)
                for first in range(0, replies, POSTS_AT_ONCE):
                    count = min(POSTS_AT_ONCE, replies - first)
                    await asyncio.gather(*(posts.one() for _ in range(count)))
                    # Readers come right behind their POST, as clients do.
                    await reader.do("connect", port=service.port, paths=posts.paths[first:])
            await asyncio.sleep(2)
            counted = service.counted()
            await reader.do("mark")
            cpu_before, began = counted.cpu_s(), time.monotonic()
            await asyncio.sleep(seconds)
            seen = await reader.do("mark")
            cpu, wall = counted.cpu_s(), time.monotonic() - began
            firsts = await reader.do("firsts")
            rss = counted.rss()
        finally:
            await reader.stop()
            await asyncio.to_thread(service.stop)
    used = {role: cpu[role] - cpu_before[role] for role in cpu}
    waits = [(at - posts.asked[int(number)]) * 1000 for number, at in firsts.items()]
    return {
        "replies": replies,
        "open": seen["open"],
        "tokens_offered_per_s": replies * TOKENS_PER_S,
        "delivered_per_s": seen["events"] / wall,
        "events_per_cpu_s": seen["events"] / sum(used.values()),
        "cpu": {role: round(spent / wall, 3) for role, spent in used.items()},
        "rss_mb": rss / 2**20,
        "post_p50_ms": percentile(posts.latencies_ms, 0.50),
        "post_p99_ms": percentile(posts.latencies_ms, 0.99),
        "first_delta_p50_ms": percentile(waits, 0.50),
        "first_delta_p99_ms": percentile(waits, 0.99),
    }


SERVICE_COLUMNS = (
    "replies",
    "tokens/s",
    "events/s",
    "events per CPU-second",
    "CPU: API, Postgres, Valkey",
    "POST p50, p99 ms",
    "first delta p50, p99 ms",
    "RSS, all, MB",
)


def service_line(row: dict[str, Any]) -> str:
    cpu = ", ".join(format(row["cpu"][role], ".2f") for role in ("api", "postgres", "valkey"))
    return (
        f"| {row['open']:,} | {row['tokens_offered_per_s']:,} | {row['delivered_per_s']:,.0f} "
        f"| {row['events_per_cpu_s']:,.0f} | {cpu} "
        f"| {row['post_p50_ms']:.0f}, {row['post_p99_ms']:.0f} "
        f"| {row['first_delta_p50_ms']:.0f}, {row['first_delta_p99_ms']:.0f} | {row['rss_mb']:.0f} |"
    )
