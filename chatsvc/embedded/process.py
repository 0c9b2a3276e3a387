"""A server process that outlives us only when we are killed, and is found again then.

Every process of a server inherits an open lock file with our ``flock`` on it. A held lock therefore means "a server is
on this data set" and nothing else, whatever process ids have been used again since. That decides what a start does:

    lock free                  → nothing runs here: start a server
    lock held, server answers  → left over from a process that was killed: use it
    lock held, no answer       → it is starting or stopping: wait, then say so

A server that dies while we run (killed for memory, or ended by a full disk) is started again, with back-off, until that
succeeds: what it had written is in its files. Nothing that goes wrong while we look at it, as when no file can be
opened for want of descriptors, ends that.

Servers run in a session of their own, so that Ctrl-C in a terminal reaches us and not them. They listen on a Unix
socket in a directory that only their user may enter, never on TCP.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from chatsvc.embedded.datadir import full_disk, held, lines, open_private, refusal, take, unusable
from chatsvc.errors import ConfigError

_log = structlog.get_logger(__name__)

Progress = Callable[[str], None]
"""Told what a slow start is doing, one short line at a time."""

_START_S: Final = 60.0
_STOP_S: Final = 30.0
_POLL_S: Final = 0.02
_WATCH_S: Final = 0.5
_LONGEST_BACK_OFF_S: Final = 10.0
_LOG_KEPT_BYTES: Final = 10_000_000
_MAX_SOCKET_PATH: Final = 100
"""``sun_path`` holds 108 bytes on Linux and 104 on macOS, the closing NUL included."""


class Account(msgspec.Struct, frozen=True):
    """Who a server runs as; ``switch`` when that is not who we are."""

    uid: int
    gid: int
    switch: bool

    @property
    def popen(self) -> dict[str, Any]:
        """Arguments for ``subprocess``."""
        return {"user": self.uid, "group": self.gid, "extra_groups": []} if self.switch else {}


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """All that the machinery here must know of a server whose data is in place."""

    title: str
    argv: Sequence[str]
    directory: Path
    """Its data."""
    sockets: Path
    account: Account
    pid_file: Path
    stale: Sequence[Path]
    """Files that name a process, to be removed when none of ours lives."""
    ready: Callable[[], bool]
    stop_signal: signal.Signals
    kill_signal: signal.Signals
    """When it does not stop in time."""

    @property
    def log(self) -> Path:
        """What the server has to say."""
        return self.directory.with_suffix(".log")

    @property
    def lock(self) -> Path:
        """Held by every process of the server."""
        return self.directory.with_suffix(".lock")


@asynccontextmanager
async def running(server: Server, progress: Progress) -> AsyncIterator[None]:
    """Start the server, or find the one that is left over; stop it on the way out, also when we are cancelled.

    Raises ``ConfigError`` with the end of its log when it does not come up.
    """
    keeper = _Keeper(server, progress)
    watch = None
    try:
        await keeper.bring_up()
        if keeper.child is None:
            progress(f"Using the {server.title} that is still running")
        watch = asyncio.create_task(keeper.run(), name=f"keep {server.title} running")
        watch.add_done_callback(_die_with)
        yield
    finally:
        if watch is not None:
            watch.remove_done_callback(_die_with)
            watch.cancel()
            await asyncio.wait([watch])
        await _stop(server, keeper.child)
        if server.sockets != server.directory:
            with suppress(OSError):  # left behind when something else is in it
                server.sockets.rmdir()


def _die_with(watch: asyncio.Task[None]) -> None:
    """Nobody would start the server again: better to shut down and be restarted."""
    error = None if watch.cancelled() else watch.exception()
    _log.error("a server of our own is not looked after any more", part=watch.get_name(), exc_info=error)
    signal.raise_signal(signal.SIGTERM)


class _Keeper:
    """Starts one server, and starts it again when it has died. ``child`` is None for one that was found running."""

    def __init__(self, server: Server, progress: Progress) -> None:
        self._server = server
        self._progress = progress
        self.child: subprocess.Popen[bytes] | None = None

    async def bring_up(self) -> None:
        """Return when the server answers. Raises ``ConfigError``, or ``OSError`` when it cannot be looked at."""
        server = self._server
        if self.child is None or self.child.poll() is not None:  # else an earlier try was given up while it started
            self.child = _spawn_if_free(server, self._progress)
        deadline = time.monotonic() + _START_S
        while not await asyncio.to_thread(server.ready):
            if self.child is None:
                self.child = _spawn_if_free(server, self._progress)
            elif self.child.poll() is not None:
                raise _failed(server, f"ended with status {self.child.returncode}")
            if time.monotonic() > deadline:
                raise _failed(server, f"did not answer within {_START_S:.0f} s")
            await asyncio.sleep(_POLL_S)

    async def run(self) -> None:
        """Bring the server up again whenever it has died, until cancelled."""
        back_off_s = 0.0
        died = False
        while True:
            await asyncio.sleep(back_off_s or _WATCH_S)
            try:
                if died or not self._lives():
                    if not died:
                        died = True
                        self._progress(f"{self._server.title} has died, and is started again")
                    await self.bring_up()
                    died = False
                    self._progress(f"{self._server.title} is back")
                back_off_s = 0.0
            except ConfigError as error:
                back_off_s = _next_wait(back_off_s)
                self._progress(f"{error} It is tried again in {back_off_s:g} s.")
            except Exception as error:  # noqa: BLE001 - logged; nobody else would start it again
                back_off_s = _next_wait(back_off_s)
                _log.exception(
                    "a server of our own could not be looked at; it is tried again",
                    server=self._server.title,
                    error_type=type(error).__name__,
                    wait_s=back_off_s,
                )

    def _lives(self) -> bool:
        return held(self._server.lock) if self.child is None else self.child.poll() is None


def _next_wait(back_off_s: float) -> float:
    return min(2 * back_off_s or _WATCH_S, _LONGEST_BACK_OFF_S)


def _spawn_if_free(server: Server, progress: Progress) -> subprocess.Popen[bytes] | None:
    """Start the server with the lock in its hands; None when another one holds the lock."""
    try:
        with open_private(server.lock) as lock:
            if not take(lock.fileno()):
                return None
            if server.ready():
                raise refusal(f"A {server.title} that is not ours runs on {server.directory}. Stop it.")
            # No process of ours lives: what these say is about none, or about one that has got the same id since.
            for path in server.stale:
                path.unlink(missing_ok=True)
            if server.log.exists() and server.log.stat().st_size > _LOG_KEPT_BYTES:
                server.log.replace(server.log.with_suffix(".log.1"))
            progress(f"Starting {server.title}")
            with open_private(server.log) as log:
                return subprocess.Popen(  # noqa: S603 - the program was found by us
                    server.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=server.directory,
                    env={"PATH": os.defpath, "LC_ALL": "C"},
                    start_new_session=True,
                    pass_fds=[lock.fileno()],
                    **server.account.popen,
                )
    except OSError as error:
        raise unusable(server.directory, error) from error


async def _stop(server: Server, child: subprocess.Popen[bytes] | None) -> None:
    """Ask the server to stop, insist after a while, and return once none of its processes is left."""

    def gone() -> bool:
        # A child of ours is a zombie until it is polled.
        return (child is None or child.poll() is not None) and not held(server.lock)

    for sign in (server.stop_signal, server.kill_signal):
        deadline = time.monotonic() + _STOP_S
        if child is not None:
            child.send_signal(sign)
        elif held(server.lock) and (first := lines(server.pid_file)[:1]):
            with suppress(ProcessLookupError):
                os.kill(int(first[0]), sign)
        while time.monotonic() < deadline:
            if gone():
                return
            await asyncio.sleep(_POLL_S)


def answers(address: Path, question: bytes, answer: bytes) -> bool:
    """Whether something listens on the Unix socket, and begins its answer like that, within a second."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1)
        try:
            connection.connect(str(address))
            connection.sendall(question)
            return connection.recv(len(answer)) == answer
        except OSError:
            return False


def socket_directory(data: Path, name: str, account: Account) -> Path:
    """Where the socket goes: with the data, or in a short directory of its own when that path is too long.

    Commas and quotes in the path would be read as a list by Postgres and its clients.
    """
    if len(os.fsencode(data / name)) <= _MAX_SOCKET_PATH and not set(str(data)) & set(",\"'"):
        return data
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    base = Path(runtime) if runtime and not account.switch else Path(tempfile.gettempdir())
    path = base / f"chatsvc-{account.uid}-{hashlib.sha256(os.fsencode(data)).hexdigest()[:16]}"
    path.mkdir(mode=0o700, exist_ok=True)
    if account.switch and path.lstat().st_uid == os.geteuid():
        os.chown(path, account.uid, account.gid, follow_symlinks=False)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != account.uid or found.st_mode & 0o077:
        raise refusal(f"{path} must be a directory that only user {account.uid} can enter. Remove it and try again.")
    return path


def _failed(server: Server, what: str) -> ConfigError:
    end = " | ".join(lines(server.log)[-3:])
    said = f"Its log, {server.log}, ends: {end}"
    advice = full_disk(server.directory)
    return refusal(" ".join(filter(None, [f"The embedded {server.title} in {server.directory} {what}.", advice, said])))
