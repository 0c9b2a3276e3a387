"""A Postgres of its own for a test that hurts it: stopped in any way, frozen, or short of disk."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self
from urllib.parse import quote

import psutil
import psycopg

from chatsvc.embedded import postgres as embedded

FAST = signal.SIGINT
"""Open transactions are rolled back, connections told."""
IMMEDIATE = signal.SIGQUIT
"""As in a crash: recovery at the next start."""


class PostgresServer:
    """One data directory and one URL over all its starts. Unlike the embedded one it stays down until ``start``."""

    def __init__(self, directory: Path, **settings: str) -> None:
        self._server = embedded._prepare(directory, lambda _: None, settings)
        self.url = f"postgresql://chatsvc@/postgres?host={quote(str(self._server.sockets), safe='')}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start and wait until it answers."""
        for path in self._server.stale:
            path.unlink(missing_ok=True)
        with self._server.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._server.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._server.directory,
                start_new_session=True,
                **self._server.account.popen,
            )
        deadline = time.monotonic() + 60
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(self._server.log.read_text()[-2000:])
            time.sleep(0.05)

    def stop(self, sign: int = FAST) -> None:
        """Shut down in one of the two ways, and wait until it is gone."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(sign)
            self._process.wait(60)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Every process of the server stands still for the length of a block; connections stay open, silent."""
        assert self._process is not None
        postmaster = psutil.Process(self._process.pid)
        processes = [postmaster, *postmaster.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        try:
            yield
        finally:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

    def _answers(self) -> bool:
        with contextlib.suppress(psycopg.OperationalError), psycopg.connect(self.url, connect_timeout=5):
            return True
        return False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(IMMEDIATE)
