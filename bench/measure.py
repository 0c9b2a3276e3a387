"""What processes cost: CPU seconds and memory, summed over all that belong to one side."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import psutil


def free_port() -> int:
    """A TCP port on the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Counted:
    """Processes by role. A role may have several, as a database has."""

    def __init__(self, **roles: Iterable[int]) -> None:
        self._roles = {role: [psutil.Process(pid) for pid in pids] for role, pids in roles.items()}

    def cpu_s(self) -> dict[str, float]:
        """User and system time used so far, by role."""
        return {
            role: sum(sum(process.cpu_times()[:2]) for process in processes) for role, processes in self._roles.items()
        }

    def rss(self) -> int:
        """Resident memory of all together, in bytes."""
        return sum(process.memory_info().rss for processes in self._roles.values() for process in processes)


def percentile(values: Iterable[float], share: float) -> float:
    """The value below which ``share`` of all lie."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else float("nan")
