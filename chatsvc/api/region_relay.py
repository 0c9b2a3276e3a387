"""A stream from another region, passed on byte by byte as it comes.

Nothing is held back, so what has been passed on may end within an event. ``Progress`` knows where it stands: the last
id of a whole event, whether the reply has ended, and whether the last byte lies between two events. Only there can the
stream go on from another replica on the same connection; else the client is let go, and resumes by its cursor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Final, Protocol, TypeVar
from urllib.parse import urlencode

import structlog

from chatsvc.api.region_client import Answer, ConnectionFailed
from chatsvc.api.region_peer import EVENT_STREAM, Peer, RegionUnreachable
from chatsvc.events import TERMINAL_NAMES
from chatsvc.limits import Principal
from chatsvc.streamlog.subscription import Overrun

_log = structlog.get_logger(__name__)
T = TypeVar("T")

_TERMINAL: Final = frozenset(name.encode() for name in TERMINAL_NAMES)
_MOST_OF_A_LINE: Final = 64
"""So much of an unfinished line is kept: more than any that is looked at, ``id`` and ``event``."""


class Progress:
    """Where a stream stands. Lines end as this service ends them, by one line feed."""

    def __init__(self, last_id: int) -> None:
        self.last_id = last_id
        """Id of the last whole event that has one."""
        self.ended = False
        """The terminal event has been passed on."""
        self._line = b""
        self._within = False
        self._id = last_id
        self._event = b""

    @property
    def between_events(self) -> bool:
        """No event has been begun and not finished."""
        return not self._within and not self._line

    def take(self, data: bytes) -> None:
        """Note what is passed on."""
        *lines, rest = (self._line + data).split(b"\n")
        for line in lines:
            self._take_line(line)
        self._line = rest[:_MOST_OF_A_LINE]

    def _take_line(self, line: bytes) -> None:
        name, _, value = line.partition(b": ")
        if not line:
            self.last_id = self._id
            self.ended = self.ended or self._event in _TERMINAL
            self._within, self._event = False, b""
        elif name == b"id" and value.isdigit():
            self._within, self._id = True, int(value)
        elif name == b"event":
            self._within, self._event = True, value
        elif name not in {b"", b"retry"}:
            self._within = True


class Pipe(Protocol):
    """The way to the client (``sse.py``)."""

    @property
    def closed(self) -> bool: ...
    def on_close(self, callback: Callable[[], None]) -> None: ...
    def write(self, frames: bytes) -> bool: ...
    async def drain(self) -> None: ...
    def close(self) -> None: ...


class StreamRequest:
    """What a client asked for: one reply's stream in another region."""

    def __init__(self, peer: Peer, path: str, token: str, principal: Principal | None) -> None:
        self.peer = peer
        self._path = path
        self._token = token
        self._principal = principal

    def ask(self, cursor: int) -> AbstractAsyncContextManager[tuple[Answer, bytes]]:
        """Ask for what comes after ``cursor``. The cursor goes into the query, where the signature covers it."""
        query = {"last_event_id": str(cursor)} | ({"token": self._token} if self._token else {})
        return self.peer.ask("GET", f"{self._path}?{urlencode(query)}", self._principal)


class ClientGone(Exception):
    """Nobody is waiting for the answer any more."""


async def unless(gone: Awaitable[object], work: Awaitable[T]) -> T:
    """Do the work, but no longer than until ``gone``. Raises ``ClientGone``, and what the work raises."""
    tasks = working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return await working
        raise ClientGone
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def relay(
    request: StreamRequest,
    answer: Answer,
    pipe: Pipe,
    stack: AsyncExitStack,
    *,
    cursor: int,
    idle_s: float,
    note: Callable[[str], None],
) -> None:
    """Pass a stream on to its end. Further connections are opened onto ``stack``; ``note`` is told ``moved``, ``lost``.

    A connection that is lost between two events is replaced by another, if it had brought any: a region that takes
    connections and says nothing is left to the client's patience.
    """
    progress = Progress(cursor)
    while not pipe.closed:
        begun_at = progress.last_id
        pipe.on_close(answer.abort)
        lost = await pump(answer, pipe, progress, idle_s=idle_s)
        answer.abort()
        if not lost or pipe.closed:
            return
        again = None
        if progress.between_events and progress.last_id > begun_at:
            again = await _another(request, pipe, stack, progress.last_id)
        note("moved" if again else "lost")
        _log.info(
            "a stream from another region broke", region=request.peer.name, reason=lost, goes_on=again is not None
        )
        if again is None:
            return
        answer = again


async def _another(request: StreamRequest, pipe: Pipe, stack: AsyncExitStack, cursor: int) -> Answer | None:
    gone = asyncio.Event()
    pipe.on_close(gone.set)
    try:
        answer, _ = await unless(gone.wait(), stack.enter_async_context(request.ask(cursor)))
    except (RegionUnreachable, ClientGone):
        return None
    return answer if answer.media_type == EVENT_STREAM else None


async def pump(answer: Answer, pipe: Pipe, progress: Progress, *, idle_s: float) -> str:
    """Pass on until the reply's end, or until one side fails. Returns how the other region's side did, if it did.

    A client that takes nothing is not read ahead of, and is let go after ``idle_s`` seconds.
    """
    try:
        while not progress.ended:
            data = await answer.read(idle_s)
            if not data:
                return "the stream was ended"
            if not pipe.write(data):
                break
            progress.take(data)
            async with asyncio.timeout(idle_s):
                await pipe.drain()
    except ConnectionFailed as error:
        return str(error)
    except TimeoutError:
        pipe.close()
    except Overrun:
        pass  # the client is gone, and whoever owns the pipe knows
    return ""
