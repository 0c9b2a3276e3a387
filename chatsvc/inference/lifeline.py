"""Ends processes that would outlive this one.

A child that some library started keeps its memory, and a GPU's, when this process is killed outright. So a tiny process
of our own holds one end of a pipe and a list of process ids; when the pipe closes without a farewell, it kills them.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Final

_WATCHER: Final = """
import os, signal, sys
pids = [int(line) for line in sys.stdin]
for pid in pids:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


class Lifeline:
    """``start`` it, ``hold`` processes once their ids are known, ``aclose`` it when they have ended properly."""

    def __init__(self) -> None:
        self._watcher: asyncio.subprocess.Process | None = None
        self._held: set[int] = set()

    async def start(self) -> None:
        """Start the watching process."""
        self._watcher = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _WATCHER),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            # Ctrl-C in a terminal reaches the whole group, and must not end the watcher before its ward.
            start_new_session=True,
        )

    def hold(self, pid: int) -> None:
        """Have this process killed should ours vanish."""
        if self._watcher is None or self._watcher.stdin is None or pid in self._held:
            return
        self._held.add(pid)
        self._watcher.stdin.write(b"%d\n" % pid)

    async def aclose(self) -> None:
        """Let go: what is held lives on. Idempotent."""
        watcher, self._watcher = self._watcher, None
        if watcher is None:
            return
        # Killed before the pipe closes, or it would do its work: ids may be others' by now.
        with contextlib.suppress(ProcessLookupError):
            watcher.kill()
        await watcher.wait()
