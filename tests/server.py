"""A real server for tests: ``python -m chatsvc`` in a process of its own, on a free port, with its log in a file."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

READY_TIMEOUT_S = 60.0


class ServerFailed(Exception):
    """The server did not become ready, or did not go away. Carries the end of its log."""


# Below what the kernel gives to outgoing connections (from 32768): one of those might sit on the port of a server that
# was killed and is to come back. Sessions at the same time begin at different places, and no port is given out twice.
_PORTS = range(12_000, 32_000)
_places = itertools.count(os.getpid() * 977)


def free_port() -> int:
    """A TCP port on the loopback that nobody listens on now, and that no other caller gets."""
    while True:
        port = _PORTS[next(_places) % len(_PORTS)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class ServerProcess:
    """One server. ``start`` returns when ``/readyz`` says yes; use as a context manager or call ``stop`` yourself.

    ``env`` holds ``CHATSVC_*`` variables, which win over the defaults here; none are inherited from the test's own
    environment. Without ``database_url`` and ``redis_url`` the server runs its embedded parts in ``data_dir``.
    A server that was stopped or killed can be started again: same port, same data.
    """

    def __init__(
        self,
        data_dir: Path,
        env: Mapping[str, str] | None = None,
        *,
        engine: str = "scripted:?tokens_per_s=20",
        database_url: str = "",
        redis_url: str = "",
        port: int | None = None,
    ) -> None:
        self.port = port if port is not None else free_port()
        self.data_dir = data_dir
        self.database_url = database_url
        self.log_path = data_dir.parent / f"{data_dir.name}.log"
        own = {
            "CHATSVC_HOST": "127.0.0.1",
            "CHATSVC_PORT": str(self.port),
            "CHATSVC_DATA_DIR": str(data_dir),
            "CHATSVC_ENGINE": engine,
            "CHATSVC_DATABASE_URL": database_url,
            "CHATSVC_REDIS_URL": redis_url,
            "CHATSVC_LOG_FORMAT": "json",
            # Load balancers and readers need not be waited for when a test is over.
            "CHATSVC_SERVER_LEAVE_S": "0.4",
            "HF_HUB_OFFLINE": "1",
            # Loading one takes seconds of processor time, and says nothing about the service.
            "CHATSVC_CONTEXT_EMBEDDER": "none",
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CHATSVC_")}
        self.environment = {**inherited, **own, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def base_url(self) -> str:
        """Where the service answers, with its base path and without a slash at the end."""
        base_path = self.environment.get("CHATSVC_BASE_PATH", "/").rstrip("/")
        return f"http://127.0.0.1:{self.port}{base_path}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        return self._running().pid

    def log(self) -> str:
        """Everything the server has written so far, of all its starts."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def launch(self) -> None:
        """Start the process and return at once."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "chatsvc"],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start(self, timeout_s: float = READY_TIMEOUT_S) -> Self:
        """Start the process and wait until it is ready. Raises ``ServerFailed``."""
        self.launch()
        self.wait_ready(timeout_s)
        return self

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return when ``/readyz`` answers 200. Raises ``ServerFailed`` when the process ends or the time is up."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            code = self._running().poll()
            if code is not None:
                raise ServerFailed(f"the server ended with {code}\n{self.log()[-4000:]}")
            if self._is_ready():
                return
            time.sleep(0.05)
        self.kill()
        raise ServerFailed(f"the server was not ready after {timeout_s} s\n{self.log()[-4000:]}")

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM, then wait. Returns the exit status; kills and raises ``ServerFailed`` when the time is up."""
        process = self._running()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerFailed(
                f"the server was still there {timeout_s} s after SIGTERM\n{self.log()[-4000:]}"
            ) from None

    def signal(self, number: int) -> None:
        """Send any signal to the server alone."""
        self._running().send_signal(number)

    def kill(self) -> None:
        """SIGKILL to the server alone; its embedded Postgres and Valkey are left to themselves, as in a crash."""
        process = self._running()
        process.kill()
        process.wait(10)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerFailed("the server was not started")
        return self._process

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base_url}/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    @property
    def exit_status(self) -> int | None:
        """How the process ended; None while it runs."""
        return self._running().poll()

    def kill_if_running(self) -> None:
        """``kill``, unless it has ended already or was never started."""
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def stop_if_running(self) -> None:
        """``stop``, unless it has ended already."""
        if self._process is not None and self._process.poll() is None:
            self.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_if_running()
