"""A real disk of a few megabytes, to be filled: a tmpfs, which only root can mount."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


class SmallDisk:
    """``path`` is on the disk. ``fill`` takes all that is left; ``make_room`` gives it back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self, *, but: int = 0) -> None:
        """Leave ``but`` bytes."""
        status = os.statvfs(self.path)
        with self._filler.open("ab") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), file.tell(), max(4096, status.f_bavail * status.f_frsize - but))

    def fill_to_the_last_byte(self) -> None:
        """Also what others give back meanwhile."""
        with self._filler.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def make_room(self) -> None:
        """Remove what ``fill`` wrote."""
        self._filler.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(megabytes: int) -> Iterator[SmallDisk]:
    """Mount one for the length of a block; skips the test where that is not allowed."""
    with tempfile.TemporaryDirectory(prefix="chatsvc-disk-", dir="/tmp") as directory:
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0755", "tmpfs", directory]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
        try:
            yield SmallDisk(Path(directory))
        finally:
            subprocess.run(["umount", "--lazy", directory], check=True)
