"""A bounded buffer between a log and one client: the plain sink, for whoever takes frames at their own pace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from chatsvc.streamlog.subscription import Overrun


class Outbox:
    """Holds what the client has not taken yet; over its bounds it is full for good and the client is to be cut.

    One write may exceed the byte bound, so that a long snapshot is no reason to cut a client that is quick.
    """

    __slots__ = (
        "_bytes",
        "_callback",
        "_closed",
        "_filled",
        "_finished",
        "_frames",
        "_max_bytes",
        "_max_events",
        "_taken",
    )

    def __init__(self, *, max_events: int, max_bytes: int) -> None:
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._frames: list[bytes] = []
        self._bytes = 0
        self._closed = False
        self._finished = False
        self._filled = asyncio.Event()
        self._taken = asyncio.Event()
        self._callback: Callable[[], None] | None = None

    @property
    def closed(self) -> bool:
        """Nothing more is taken in."""
        return self._closed

    @property
    def held(self) -> int:
        """Bytes that have not been taken yet."""
        return self._bytes

    def on_close(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    def write(self, frames: bytes) -> bool:
        if self._closed or len(self._frames) >= self._max_events or self._bytes >= self._max_bytes:
            self.close()
            return False
        self._frames.append(frames)
        self._bytes += len(frames)
        self._filled.set()
        return True

    async def drain(self) -> None:
        while self._frames and not self._closed:
            self._taken.clear()
            await self._taken.wait()
        if self._closed:
            raise Overrun

    def finish(self) -> None:
        """No more follows; what is held is still to be taken."""
        self._finished = True
        self._filled.set()

    def close(self) -> None:
        """Drop everything; wake whoever waits on either side. Idempotent."""
        self._closed = True
        self._frames.clear()
        self._bytes = 0
        self._filled.set()
        self._taken.set()
        if self._callback is not None:
            self._callback()

    async def take(self) -> bytes:
        """All that is held, joined; empty once finished or closed."""
        while not self._frames and not self._finished and not self._closed:
            self._filled.clear()
            await self._filled.wait()
        frames = b"".join(self._frames)
        self._frames.clear()
        self._bytes = 0
        self._taken.set()
        return frames
