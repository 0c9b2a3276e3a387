"""What replicas tell each other: news that all of them hear, and which replica a conversation's prefix is on.

Nothing rests on it. Redis may be lost at any time, with all that is in it: then nobody hears of anybody, and every
replica serves whatever waits, as it would alone. Postgres is the judge of who has a run, always.

    news:{p00}:<scope>                         a Redis Stream, the same for all replicas; only its last seconds matter
    home:{p00}:<scope>:<model>:<conversation>  which replica served its last turn, and the tokens cached then; expires

All keys carry one hash tag, so a Cluster keeps them in one place, and a scope: replicas are those that share a
database, whoever else uses the same Redis. Two connections: one reads, blocked; one does the rest.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import structlog

from chatsvc.errors import LogUnavailable
from chatsvc.streamlog.factory import HASH_TAG, locate_keys
from chatsvc.streamlog.redis_wire import Lane, pack

_log = structlog.get_logger(__name__)

HOME_TTL_S: Final = 900.0
"""A conversation stays with its replica for so long after its last turn."""
_NEWS_TTL_S: Final = 3600
_NEWS_KEPT_S: Final = 10.0
"""Who reads later than that is right again with the next of what each replica says of all that it has."""
_READ_AT_ONCE: Final = 1000
_BLOCK_S: Final = 5.0
_RETRY_FIRST_S: Final = 0.1
_RETRY_MOST_S: Final = 1.0


class Home(msgspec.Struct, frozen=True):
    """Where a conversation's prefix is."""

    replica_id: str
    cached_tokens: int = 0


Hear = Callable[[bytes], None]


class SharedState(abc.ABC):
    """All calls raise ``LogUnavailable`` when there is nothing shared now."""

    @abc.abstractmethod
    async def publish(self, news: bytes) -> None:
        """Let every replica hear this, this one included."""

    @abc.abstractmethod
    async def follow(self, hear: Hear) -> None:
        """Give ``hear`` all news that is published from now on, in order, until cancelled. Waits out what is away."""

    @abc.abstractmethod
    async def homes(self, names: Sequence[str]) -> Sequence[Home | None]:
        """Where these conversations' last turns were served, each named with its model."""

    @abc.abstractmethod
    async def settle(self, homes: Mapping[str, Home]) -> None:
        """Note where these conversations' turns are served, for ``HOME_TTL_S``."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Let go of connections."""


class RedisState(SharedState):
    """On whatever ``CHATSVC_REDIS_URL`` names; connects when it is first used."""

    def __init__(self, url: str, *, scope: str, timeout_s: float) -> None:
        """Raises ``ValueError`` for a URL that ``redis_url`` does not take."""
        self._news = f"news:{HASH_TAG}:{scope}".encode()
        self._homes = f"home:{HASH_TAG}:{scope}:"
        locate = locate_keys(url, timeout_s=timeout_s)
        # A command sent twice does no harm: news are totals, and the last home holds.
        self._talking = Lane(locate, timeout_s, repeats=True)
        self._hearing = Lane(locate, timeout_s)
        self._said_ms = 0
        """By Redis' clock, when something was said last: replicas' clocks may differ from it."""

    async def publish(self, news: bytes) -> None:
        oldest = b"%d" % max(0, self._said_ms - int(_NEWS_KEPT_S * 1000))
        entry_id, _ = await self._talk(
            pack(b"XADD", self._news, b"MINID", b"~", oldest, b"*", b"n", news),
            pack(b"EXPIRE", self._news, b"%d" % _NEWS_TTL_S),
        )
        self._said_ms = int(bytes(entry_id).partition(b"-")[0])

    async def follow(self, hear: Hear) -> None:
        wait_s = _RETRY_FIRST_S
        while True:
            try:
                last = await self._last()
                wait_s = _RETRY_FIRST_S
                while True:
                    last = await self._hear_after(last, hear)
            except LogUnavailable as error:
                # A command may still be blocked on that connection. What was said meanwhile is not asked for again:
                # replicas repeat what they have, and the store knows what waits.
                self._hearing.drop(also_unmade=False)
                _log.debug("nothing is heard of other replicas", reason=error.detail)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _RETRY_MOST_S)
            except asyncio.CancelledError:
                self._hearing.drop(also_unmade=False)
                raise

    async def _last(self) -> bytes:
        (last,) = _checked(await self._hearing.call([pack(b"XREVRANGE", self._news, b"+", b"-", b"COUNT", b"1")]))
        return bytes(last[0][0]) if last else b"0-0"

    async def _hear_after(self, last: bytes, hear: Hear) -> bytes:
        how = (b"COUNT", b"%d" % _READ_AT_ONCE, b"BLOCK", b"%d" % (_BLOCK_S * 1000))
        command = pack(b"XREAD", *how, b"STREAMS", self._news, last)
        (heard,) = _checked(await self._hearing.call([command], patience_s=_BLOCK_S))
        for _, entries in heard or ():
            for entry_id, (_, news, *_) in entries:
                hear(news)
                last = entry_id
        await asyncio.sleep(0)  # who was woken goes first: a run may be claimed before more is asked for
        return last

    async def homes(self, names: Sequence[str]) -> Sequence[Home | None]:
        if not names:
            return []
        commands = (pack(b"GET", self._key(name)) for name in names)
        return [_home(value) for value in await self._talk(*commands)]

    async def settle(self, homes: Mapping[str, Home]) -> None:
        ttl = b"%d" % (HOME_TTL_S * 1000)
        if homes:
            await self._talk(
                *(
                    pack(b"SET", self._key(name), b"%d %b" % (home.cached_tokens, home.replica_id.encode()), b"PX", ttl)
                    for name, home in homes.items()
                )
            )

    async def aclose(self) -> None:
        self._talking.close()
        self._hearing.close()

    def _key(self, name: str) -> bytes:
        return f"{self._homes}{name}".encode()

    async def _talk(self, *commands: bytes) -> list[Any]:
        return _checked(await self._talking.call(commands))


class MemoryState(SharedState):
    """The reference: for tests, several replicas in one process share a ``Board``."""

    def __init__(self, board: Board) -> None:
        self._board = board

    async def publish(self, news: bytes) -> None:
        self._here()
        for heard in self._board.listeners:
            heard.put_nowait(news)

    async def follow(self, hear: Hear) -> None:
        heard: asyncio.Queue[bytes] = asyncio.Queue()
        self._board.listeners.append(heard)
        try:
            while True:
                hear(await heard.get())
        finally:
            self._board.listeners.remove(heard)

    async def homes(self, names: Sequence[str]) -> Sequence[Home | None]:
        self._here()
        return [self._board.homes.get(name) for name in names]

    async def settle(self, homes: Mapping[str, Home]) -> None:
        self._here()
        self._board.homes |= homes

    async def aclose(self) -> None:
        """Nothing to let go of."""

    def _here(self) -> None:
        if self._board.away:
            raise LogUnavailable("there is nothing shared now")


class Board:
    """What ``MemoryState`` objects share. ``away`` as when Redis is."""

    def __init__(self) -> None:
        self.homes: dict[str, Home] = {}
        self.listeners: list[asyncio.Queue[bytes]] = []
        self.away = False


def _home(value: bytes | None) -> Home | None:
    if value is None:
        return None
    tokens, _, replica_id = value.decode().partition(" ")
    return Home(replica_id, int(tokens))


def _checked(replies: list[Any]) -> list[Any]:
    for reply in replies:
        if isinstance(reply, Exception):
            raise LogUnavailable(f"Redis refuses: {reply}")
    return replies
