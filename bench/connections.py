"""Many open streams on one process of the whole service: is any lost, how late are events, what does one cost?

    python bench/connections.py [--connections 15000] [--seconds 120] [--talking 0.1] [--rate 5] [--json]

One ``python -m chatsvc`` with its embedded Postgres and Valkey and a scripted engine. A share of the readers
(``--talking``) each follows a reply of its own, at ``--rate`` events a second. The others wait: fifty at a time for one
reply whose model has not said anything yet. Readers are processes of their own, with source addresses of their own, and
are not counted. Every connection checks that the ids of its events have no gap and no repeat; at the end all talking
replies are read to their end. Latency runs from the engine's saying a token to its bytes arriving at the reader, the
batching of 50 ms included; memory is what the process's resident memory grows by per connection.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
from control import Child
from stream_service import Service, ready

HERE = Path(__file__).parent
READERS = 4
READERS_OF_ONE = 50
POSTS_AT_ONCE = 16
WARM = 40
"""Connections that are opened before memory is looked at."""
HEARTBEAT_S = 15.0
TALK_MARGIN_S = 60.0
"""Talking replies last this much longer than the hold: they begin before it."""
END_PATIENCE_S = 300.0
CONFIG = """
[models.talk]
engine = "scripted:?tokens_per_s={rate}&tokens={tokens}&slots=20000&window=1000000&text=some+words+of+a+reply+"
default = true
[models.wait]
engine = "scripted:?first_token_ms=600000&tokens=1&slots=20000"
"""


class CrowdedService(Service):
    """The service of the other benchmarks, with stamped tokens and a second model that keeps its readers waiting."""

    def __init__(self, directory: str, *, rate: float, tokens: int) -> None:
        super().__init__(directory)
        self._config = Path(directory) / "chatsvc.toml"
        self._config.write_text(CONFIG.format(rate=rate, tokens=tokens))

    def start(self) -> None:
        settings = {
            "CHATSVC_PORT": str(self.port),
            "CHATSVC_DATA_DIR": str(self.data_dir),
            "CHATSVC_CONFIG": str(self._config),
            "CHATSVC_AUTH": "proxy",
            "CHATSVC_LOG_LEVEL": "warning",
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CHATSVC_")}
        with self.log_path.open("wb") as log:
            self.process = psutil.Popen(
                [sys.executable, str(HERE / "connections_service.py")],
                env={**inherited, **settings},
                stdout=log,
                stderr=log,
            )

    def rss(self) -> int:
        assert self.process is not None
        return int(self.process.memory_info().rss)


async def post(client: httpx.AsyncClient, model: str, tokens: int) -> str:
    """A new user asks something. Returns the path of the reply's stream."""
    headers = {"x-forwarded-user": uuid.uuid4().hex}
    conversation = (await client.post("/v1/conversations", json={}, headers=headers)).json()["id"]
    body = {"content": "Tell me.", "client_msg_id": uuid.uuid4().hex, "model": model, "max_tokens": tokens}
    answer = await client.post(f"/v1/conversations/{conversation}/messages", json=body, headers=headers)
    if answer.status_code != httpx.codes.ACCEPTED:
        raise RuntimeError(f"POST answered {answer.status_code}: {answer.text}")
    path: str = answer.json()["stream_url"]
    return path


async def posts(client: httpx.AsyncClient, model: str, tokens: int, count: int) -> list[str]:
    turns = asyncio.Semaphore(POSTS_AT_ONCE)

    async def one() -> str:
        async with turns:
            return await post(client, model, tokens)

    return await asyncio.gather(*(one() for _ in range(count)))


class Crowd:
    """The reader processes."""

    def __init__(self, children: list[Child], port: int) -> None:
        self._children = children
        self._port = port

    async def connect(self, paths: list[str], *, idle: bool) -> int:
        """Open streams, a share in each process. Returns how many were answered; says why others were not."""
        answers = await asyncio.gather(
            *(
                child.do(
                    "connect", port=self._port, source=f"127.0.0.{number + 2}", paths=paths[number::READERS], idle=idle
                )
                for number, child in enumerate(self._children)
            )
        )
        for fault in {fault for answer in answers for fault in answer["faults"]}:
            print("not connected:", fault, file=sys.stderr)
        return sum(answer["open"] for answer in answers)

    async def mark(self) -> dict[str, Any]:
        """What came since the last mark, of all processes."""
        found = await asyncio.gather(*(child.do("mark") for child in self._children))
        summed: dict[str, Any] = {
            name: sum(one[name] for one in found)
            for name in ("events", "lost_events", "repeated_events", "open", "broken", "ended")
        }
        for name in ("late", "pings"):
            counted: Counter[int] = Counter()
            for one in found:
                counted.update(dict(one[name]))
            summed[name] = counted
        return summed


def share_of(counted: Counter[int], share: float) -> float:
    """The value below which a share of all counted lies."""
    left = counted.total() * share
    for value, count in sorted(counted.items()):
        left -= count
        if left < 0:
            return value
    return float("nan")


async def measure(options: argparse.Namespace, service: CrowdedService, crowd: Crowd, tokens: int) -> dict[str, Any]:
    """Open all, hold them, and read the talking ones to their end."""
    talking = round(options.connections * options.talking)
    idle = options.connections - talking
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
        await ready(client)
        waited_for = await posts(client, "wait", 1, -(-(idle + WARM) // READERS_OF_ONE))
        paths = [path for path in waited_for for _ in range(READERS_OF_ONE)]
        opened = await crowd.connect(paths[:WARM], idle=True)
        before = service.rss()
        began = time.monotonic()
        opened += await crowd.connect(paths[WARM:idle], idle=True)
        idle_rss = service.rss()
        opened += await crowd.connect(await posts(client, "talk", tokens, talking), idle=False)
        connecting_s = time.monotonic() - began
        await asyncio.sleep(2)
        await crowd.mark()
        counted = service.counted()
        cpu_before, load_before, began = counted.cpu_s(), os.getloadavg()[0], time.monotonic()
        await asyncio.sleep(options.seconds)
        held = await crowd.mark()
        wall = time.monotonic() - began
        cpu = {role: (used - cpu_before[role]) / wall for role, used in counted.cpu_s().items()}
        rss = service.rss()
        load = (load_before + os.getloadavg()[0]) / 2
        after = await to_the_end(crowd, talking)
    beats = int(options.seconds / (HEARTBEAT_S * 9 / 8))
    return {
        "connections": options.connections,
        "opened": opened,
        "lost_connections": options.connections - opened + after["broken"],
        "talking": talking,
        "rate": options.rate,
        "seconds": wall,
        "connecting_s": connecting_s,
        "open": held["open"],
        "delivered": held["events"],
        "lost_events": held["lost_events"] + after["lost_events"],
        "repeated_events": held["repeated_events"] + after["repeated_events"],
        "read_to_the_end": after["ended"],
        "p50_ms": share_of(held["late"], 0.50) / 10,
        "p99_ms": share_of(held["late"], 0.99) / 10,
        "heartbeats": sum(number * streams for number, streams in held["pings"].items()),
        "heartbeats_due": beats,
        "idle": idle,
        "idle_with_all_heartbeats": sum(streams for number, streams in held["pings"].items() if number >= beats),
        "kb_per_idle": (idle_rss - before) / 1024 / max(1, idle - WARM),
        "kb_per_connection": (rss - before) / 1024 / max(1, options.connections - WARM),
        "rss_mb": rss / 2**20,
        "cpu": cpu,
        "load": load,
    }


async def to_the_end(crowd: Crowd, talking: int) -> dict[str, Any]:
    """Wait until the talking streams have ended; what is missing then is missing for good."""
    until = time.monotonic() + END_PATIENCE_S
    found = await crowd.mark()
    while found["ended"] < talking and found["broken"] == 0 and time.monotonic() < until:
        await asyncio.sleep(1)
        more = await crowd.mark()
        for name in ("lost_events", "repeated_events"):
            more[name] += found[name]
        found = more
    return found


COLUMNS = (
    "open / lost connections",
    "events delivered / lost / repeated",
    "read to the end",
    "p50, p99 ms",
    "heartbeats; idle with all",
    "KB per idle connection, per connection",
    "RSS, MB",
    "CPU: API, Postgres, Valkey",
)


def line(row: dict[str, Any]) -> str:
    cpu = ", ".join(format(row["cpu"][role], ".2f") for role in ("api", "postgres", "valkey"))
    return (
        f"| {row['open']:,} / {row['lost_connections']:,} "
        f"| {row['delivered']:,} / {row['lost_events']:,} / {row['repeated_events']:,} "
        f"| {row['read_to_the_end']:,} of {row['talking']:,} "
        f"| {row['p50_ms']:.0f}, {row['p99_ms']:.0f} "
        f"| {row['heartbeats']:,}; {row['idle_with_all_heartbeats']:,} of {row['idle']:,} "
        f"| {row['kb_per_idle']:.1f}, {row['kb_per_connection']:.1f} | {row['rss_mb']:.0f} | {cpu} |"
    )


async def main(options: argparse.Namespace) -> None:
    margin = TALK_MARGIN_S + options.connections / 150
    tokens = max(1, round(options.rate * (options.seconds + margin)))
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as directory:
        service = CrowdedService(directory, rate=options.rate, tokens=tokens)
        service.start()
        children: list[Child] = []
        try:
            for _ in range(READERS):
                children.append(await Child.start(str(HERE / "connections_reader.py")))  # noqa: PERF401  # one by one
            row = await measure(options, service, Crowd(children, service.port), tokens)
        except BaseException:
            print(service.log_path.read_text()[-4000:], file=sys.stderr)
            raise
        finally:
            for child in children:
                await child.stop()
            await asyncio.to_thread(service.stop)
    if options.json:
        print(json.dumps({**row, "python": platform.python_version(), "cores": os.cpu_count()}))
        return
    print(
        f"{row['connections']:,} connections opened in {row['connecting_s']:.0f} s, held {row['seconds']:.0f} s, "
        f"{row['talking']:,} of them at {row['rate']:g} events/s; load {row['load']:.1f}; "
        f"{os.cpu_count()} cores, Python {platform.python_version()}\n"
    )
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    print(line(row))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=15_000)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--talking", type=float, default=0.1, help="share of the connections that stream all the time")
    parser.add_argument("--rate", type=float, default=5.0, help="events a second of each talking reply")
    parser.add_argument("--json", action="store_true")
    asyncio.run(main(parser.parse_args()))
