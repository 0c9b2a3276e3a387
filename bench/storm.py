"""What happens when a process that holds thousands of streams is killed, or shut down?

    python bench/storm.py [--deploy] [--streams 2000] [--readers 1] [--rate 1] [--seconds 5] [--json]

Three processes on one Postgres and one Valkey: one generates the replies, two serve readers. All clients read through
one of the two, which is killed (SIGKILL), or shut down (SIGTERM) with ``--deploy``; they come back as an EventSource
does, to the other one. Every client checks that no event is missing and none comes twice. ``--readers``: clients of one
reply. ``--rate``: events a second and reply. ``--seconds``: so long they go on reading after the last one is back.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
import redis.asyncio
from control import Child
from measure import free_port, percentile
from stream_service import TEXT, Posts, ready

from chatsvc.embedded import embedded_postgres, embedded_redis

HERE = Path(__file__).parent
SAMPLE_S = 0.1
RETURN_PATIENCE_S = 60.0
POSTS_IN_A_ROW = 64
BATCH_S = 0.1


class Replica:
    """``python -m chatsvc`` on databases that others share."""

    def __init__(self, name: str, directory: Path, database_url: str, redis_url: str, **settings: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        own = {
            "CHATSVC_PORT": str(self.port),
            "CHATSVC_DATA_DIR": str(directory / name),
            "CHATSVC_DATABASE_URL": database_url,
            "CHATSVC_REDIS_URL": redis_url,
            "CHATSVC_AUTH": "proxy",
            "CHATSVC_LOG_LEVEL": "warning",
            **settings,
        }
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("CHATSVC_")}
        self.log_path = directory / f"{name}.log"
        with self.log_path.open("wb") as log:
            self.process = psutil.Popen(
                [sys.executable, "-m", "chatsvc"], env={**inherited, **own}, stdout=log, stderr=log
            )

    def kill(self) -> None:
        """SIGKILL: no end is written to any stream."""
        if self.process.is_running():
            self.process.kill()
            self.process.wait(10)

    def rss_mb(self) -> float:
        """Resident memory."""
        return float(self.process.memory_info().rss / 2**20)


class Gauges:
    """Connections to the databases and the survivor's memory, looked at ten times a second."""

    def __init__(self, database_url: str, redis_url: str, survivor: Replica) -> None:
        self._database_url = database_url
        self._redis_url = redis_url
        self._survivor = survivor
        self.samples: list[dict[str, float]] = []

    async def run(self) -> None:
        """Look until cancelled. Its own two connections are left out."""
        count = (
            "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        async with (
            redis.asyncio.from_url(self._redis_url, single_connection_client=True) as valkey,
            await psycopg.AsyncConnection.connect(self._database_url, autocommit=True) as postgres,
        ):
            while True:
                clients = (await valkey.info("clients"))["connected_clients"] - 1
                row = await (await postgres.execute(count)).fetchone()
                self.samples.append(
                    {"redis": clients, "postgres": row[0] if row else 0, "rss": self._survivor.rss_mb()}
                )
                await asyncio.sleep(SAMPLE_S)

    def before_peak_after(self, key: str, killed_at: int) -> list[float]:
        """The value just before the kill, the highest after it, and the last."""
        values = [sample[key] for sample in self.samples]
        return [values[killed_at - 1], max(values[killed_at:]), values[-1]]


@contextlib.asynccontextmanager
async def deployment(rate: float) -> AsyncIterator[tuple[Replica, Replica, Replica, Gauges]]:
    """The process that generates, the one that will be killed, the survivor, and the gauges."""
    engine = f"scripted:?tokens_per_s={rate:g}&tokens=12000&window=100000&slots=4000&text={TEXT}"
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="storm-", dir="/tmp")))
        databases = await stack.enter_async_context(embedded_postgres(directory / "pg", lambda _: None))
        valkey = await stack.enter_async_context(embedded_redis(directory / "vk", lambda _: None))

        async def replica(name: str, roles: str) -> Replica:
            started = Replica(name, directory, databases, valkey, CHATSVC_ROLES=roles, CHATSVC_ENGINE=engine)
            stack.callback(started.kill)
            async with httpx.AsyncClient(base_url=started.url) as client:
                await ready(client)
            return started

        worker = await replica("worker", "api,worker")
        doomed, survivor = await replica("doomed", "api"), await replica("survivor", "api")
        gauges = Gauges(databases, valkey, survivor)
        watching = asyncio.create_task(gauges.run())
        try:
            yield worker, doomed, survivor, gauges
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def storm(streams: int, readers: int, rate: float, seconds: float, *, deploy: bool) -> dict[str, Any]:
    """One row: so many streams at once."""
    crowd = await Child.start(str(HERE / "storm_reader.py"))
    try:
        async with deployment(rate) as (worker, doomed, survivor, gauges):
            await crowd.do("doors", ports=[doomed.port])
            async with httpx.AsyncClient(base_url=worker.url, timeout=60) as client:
                posts = Posts(client)
                served = 0
                for first in range(0, streams // readers, POSTS_IN_A_ROW):
                    count = min(POSTS_IN_A_ROW, streams // readers - first)
                    await asyncio.gather(*(posts.one() for _ in range(count)))
                    served += (await crowd.do("connect", paths=posts.paths[first:] * readers))["served"]
            await asyncio.sleep(2)
            await crowd.do("doors", ports=[survivor.port])
            killed_at, moment = len(gauges.samples), time.monotonic()
            if deploy:
                doomed.process.terminate()
            else:
                doomed.kill()
            returned = (await crowd.do("returned", patience_s=RETURN_PATIENCE_S))["returned"]
            before = await crowd.do("seen")
            await asyncio.sleep(seconds)
            seen = await crowd.do("seen")
            status = doomed.process.poll()
            found = {key: gauges.before_peak_after(key, killed_at) for key in ("redis", "postgres", "rss")}
            log = survivor.log_path.read_text(errors="replace").strip()
    finally:
        await crowd.stop()
    if log:
        print(log[:2000], file=sys.stderr)
    slots = Counter(int((at - moment) / BATCH_S) for at in seen["arrivals"])
    return {
        "streams": served,
        "replies": streams // readers,
        "returned": returned,
        "exit_status": status,
        "again_s": {
            name: percentile(seen["again"], share) for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
        },
        "answered_s": {
            name: percentile([at - moment for at in seen["arrivals"]], share)
            for name, share in (("first", 0.0), ("p50", 0.5), ("p99", 0.99), ("max", 1.0))
        },
        "fullest_share": max(slots.values(), default=0) / max(1, served),
        "live_events_per_s": (seen["events"] - before["events"]) / seconds,
        "offered_events_per_s": streams * rate,
        **{key: seen[key] for key in ("events", "lost", "repeated", "snapshots", "refused", "ended", "bad_answers")},
        **found,
    }


COLUMNS = (
    "streams",
    "back",
    "from the cut to the next event: p50, p99, max s",
    "last one back after s",
    "fullest 0.1 s",
    "events lost, repeated",
    "Redis connections: before, peak, after",
    "Postgres",
    "survivor's memory, MB",
)


def line(row: dict[str, Any]) -> str:
    again = ", ".join(f"{row['again_s'][name]:.1f}" for name in ("p50", "p99", "max"))
    redis_, postgres, rss = (", ".join(f"{value:.0f}" for value in row[key]) for key in ("redis", "postgres", "rss"))
    back = f"{row['returned']:,} | {again} | {row['answered_s']['max']:.1f} | {row['fullest_share']:.0%}"
    return f"| {row['streams']:,} | {back} | {row['lost']}, {row['repeated']} | {redis_} | {postgres} | {rss} |"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deploy", action="store_true", help="SIGTERM instead of SIGKILL")
    parser.add_argument("--streams", type=int, default=2000, help="open streams (default: %(default)s)")
    parser.add_argument("--readers", type=int, default=1, help="clients of one reply (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1, help="events a second and reply (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5, help="reading on after the return (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    return parser.parse_args()


async def main() -> None:
    chosen = options()
    row = await storm(chosen.streams, chosen.readers, chosen.rate, chosen.seconds, deploy=chosen.deploy)
    if chosen.json:
        print(json.dumps({"load": psutil.getloadavg(), **row}, indent=2))
    else:
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n{line(row)}")


if __name__ == "__main__":
    asyncio.run(main())
