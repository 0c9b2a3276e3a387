"""The data directory: made, locked, and judged. Every fault with it becomes one plain ``ConfigError``."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from chatsvc.errors import ConfigError

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_IN_THE_WAY: Final = frozenset({errno.EEXIST, errno.ENOTDIR, errno.ENOENT})
_ALMOST_NONE_BYTES: Final = 1_000_000


@contextmanager
def lock_data_dir(data_dir: Path) -> Iterator[None]:
    """Make the data directory and keep it ours. Raises ``ConfigError`` when it is in use or cannot be written."""
    with ExitStack() as stack:
        try:
            data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = stack.enter_context((data_dir / "lock").open("a+b", buffering=0))
            if not take(file.fileno()):
                file.seek(0)
                holder = file.read(20).decode(errors="replace").strip() or "unknown"
                raise refusal(
                    f"{data_dir} is in use by another chatsvc, process {holder}. Stop that one, or set"
                    " CHATSVC_DATA_DIR to another directory."
                )
            file.truncate(0)
            file.write(b"%d\n" % os.getpid())
        except OSError as error:
            raise unusable(data_dir, error) from error
        yield


def take(descriptor: int) -> bool:
    """Take the ``flock`` on an open file unless another has it; it is given back when the last copy is closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_private(path: Path) -> BinaryIO:
    """Open a file of ours to append to it; nobody else may read what a server logs."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab")


def held(path: Path) -> bool:
    """Whether another process holds the lock on this file."""
    if not path.exists():
        return False
    with open_private(path) as file:
        return not take(file.fileno())


def lines(path: Path) -> list[str]:
    """The lines of a small file without blanks at their ends; none when it is missing."""
    try:
        return [line.strip() for line in path.read_text(errors="replace").splitlines()]
    except FileNotFoundError:
        return []


def refusal(problem: str) -> ConfigError:
    """One problem, in a sentence that ends with what to do."""
    return ConfigError([problem])


def unusable(path: Path, error: OSError) -> ConfigError:
    """The operating system does not let us use a path: missing rights, full, read-only, …."""
    if error.errno in _IN_THE_WAY and (other := _no_directory(path)):
        named = "it" if other == path else other
        return refusal(f"{path} cannot be used: {named} is no directory. Move it away, or set CHATSVC_DATA_DIR.")
    advice = "Make it writable, or set CHATSVC_DATA_DIR."
    if error.errno in _NO_ROOM:
        advice = "Make room there, or set CHATSVC_DATA_DIR to a directory on a larger disk."
    return refusal(f"{path} cannot be used: {error.strerror or error}. {advice}")


def _no_directory(path: Path) -> Path | None:
    """What stands where ``path``, or a directory above it, has to be: a file, or a link that leads nowhere."""
    return next((each for each in (*reversed(path.parents), path) if os.path.lexists(each) and not each.is_dir()), None)


def full_disk(path: Path, needed_bytes: int = _ALMOST_NONE_BYTES) -> str:
    """A sentence on the disk that holds ``path`` when it has less than that left, else nothing.

    A server on it may not say so itself: its log lies there too.
    """
    try:
        free = shutil.disk_usage(path).free
    except OSError:
        return ""
    if free >= needed_bytes:
        return ""
    return (
        f"The disk there is full, {free // 1_000_000} MB are left: make room, or set CHATSVC_DATA_DIR to a directory on"
        " a larger disk."
    )
