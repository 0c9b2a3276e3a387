"""The socket that the service listens on, and how many connections it may hand out.

Peers that vanish without a word, or read nothing, are the kernel's to notice. Accepted sockets inherit how soon, and
how much it keeps for them.
"""

from __future__ import annotations

import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import structlog

from chatsvc.errors import ConfigError

_log = structlog.get_logger(__name__)

DEAD_PEER: Final = 0.75
"""In heartbeats: a peer that acknowledges nothing for so long is dropped, and so is one that reads nothing while there
is something for it (RFC 5482, ``TCP_USER_TIMEOUT``). A silent stream is written to after 1 1/8 heartbeats at the
latest, so a peer that vanished is noticed within two.
"""
UNSENT_BYTES: Final = 64 * 1024
"""What the kernel takes from us for a connection beyond what is under way to the peer (``TCP_NOTSENT_LOWAT``). Without
a bound it takes megabytes for a peer that does not read, where neither our own bounds nor ``/metrics`` see them.
"""
SPARE_DESCRIPTORS: Final = 256
"""File descriptors that are not given to connections: databases, engines and files need some."""


@contextmanager
def bound(host: str, port: int, *, heartbeat_s: float) -> Iterator[socket.socket]:
    """The bound socket; it listens once everything else is open. Raises ``ConfigError`` when the address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        _notice_dead_peers(listener, heartbeat_s)
        listener.setblocking(False)
        try:
            listener.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(
                [f"cannot listen on {host}:{port}: {reason}. Stop what uses it, or choose another CHATSVC_PORT."]
            ) from error
        yield listener


def _notice_dead_peers(listener: socket.socket, heartbeat_s: float) -> None:
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(heartbeat_s * DEAD_PEER * 1000)))
    # For connections on which nothing is written.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        seconds = min(max(1, round(heartbeat_s)), 32_767)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds)


def most_connections() -> int:
    """Raise the limit of open files as far as the system lets us; returns how many connections fit in it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError) as error:
            _log.warning("the limit of open files stays as it is", limit=soft, reason=str(error))
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(soft - SPARE_DESCRIPTORS, soft // 2)
