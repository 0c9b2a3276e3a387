"""Connections to Postgres, and the one place where its errors become ours.

- A command takes one connection, and at most ``timeout_s``, waiting for the connection included. Longer, or a server
  that is away, refuses, or is full: ``StoreUnavailable``, and nothing of the command remains.
- A connection goes back only when it is idle and outside a transaction. Whoever was cancelled in the middle of a
  command takes the connection out of use, so that no answer ever reaches the next borrower (L10).
- Deadlocks and serialization failures are tried again here, a few times.

Connections are made when they are needed, a few at a time; who waits for one takes what comes first, a new one or one
that is given back. So a server that is away is reported at once with its own words, and one that has come back is used
at once. One that refuses more connections, or is slow to make them, does not fail who can share those there are.
"""

from __future__ import annotations

import asyncio
import random
import select
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import psycopg
from psycopg import errors as pg
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row
from psycopg.types.numeric import Int4

from chatsvc.errors import NotFound, StoreFull, StoreUnavailable

T = TypeVar("T")
Row = dict[str, Any]
Connection = psycopg.AsyncConnection[Row]
Params = Mapping[str, Any]

_ATTEMPTS: Final = 5
_WAIT_RETRY_S: Final = 0.25
_CONNECT_AT_ONCE: Final = 8
"""Every new connection is a process to the server: a large pool does not ask for all of its own in one moment."""
_CONNECT_AGAIN_S: Final = 0.25
_AWAY: Final = (
    psycopg.OperationalError,  # includes a lost connection, shutdown, too many connections, disk full, timeouts
    psycopg.InterfaceError,
    pg.ReadOnlySqlTransaction,  # a fail-over left us on the replica
    pg.IdleInTransactionSessionTimeout,
)
_CROWDED: Final = ("too many", "connection slots")
"""Words of a server that refuses one more connection. They have no code at this stage of a connection."""
_ROOM_PROBE: Final = "SELECT count(*) FROM (SELECT n FROM generate_series(1, 100000) AS n ORDER BY n DESC OFFSET 0) s"
"""Sorts more than fits the memory it gets: needs a few MB of the server's disk for a moment, and no rights."""
_INT4: Final = 1 << 31
_OURS: Final = (pg.ProgramLimitExceeded,)
"""Operational by class, but the fault of the command: it would fail for ever."""


class Database:
    """At most ``size`` connections, in autocommit: a statement is a transaction unless ``transaction`` says more."""

    def __init__(
        self,
        url: str,
        *,
        size: int,
        timeout_s: float,
        prepare: Callable[[Connection], Awaitable[None]] | None = None,
    ) -> None:
        """``prepare`` is done on each new connection before anybody gets it."""
        self._url = url
        self._prepare = prepare
        self._timeout_s = timeout_s
        self._size = size
        self._slots = asyncio.Semaphore(size)
        self._idle: deque[Connection] = deque()
        self._used = 0
        self._waiting: deque[asyncio.Future[Connection]] = deque()
        self._connecting: set[asyncio.Task[None]] = set()
        self._trying = 0
        self._refusal = ""
        """Why the server would not make one more connection, while others are shared."""
        self._full = False
        self._closed = False

    async def query(self, statement: str, params: Params | None = None) -> list[Row]:
        """Run one statement as one transaction and return its rows."""
        return await self._attempt(lambda connection: fetch(connection, statement, params))

    async def batch(self, *statements: tuple[str, Params]) -> list[list[Row]]:
        """Run statements as one transaction, sent together: one round trip. Each sees what those before it did."""

        async def work(connection: Connection) -> list[list[Row]]:
            # Without BEGIN, all statements up to the end of a pipeline are one transaction, which that end commits.
            async with connection.pipeline():
                cursors = [await connection.execute(statement, params) for statement, params in statements]
            return [await _rows(cursor) for cursor in cursors]

        return await self._attempt(work)

    async def transaction(self, work: Callable[[Connection], Awaitable[T]], *, snapshot: bool = False) -> T:
        """Run ``work`` in one transaction; it may be run again after a deadlock, so it must not act on anything else.

        ``snapshot``: all its statements see the database at one moment, and write nothing.
        """

        async def within(connection: Connection) -> T:
            async with connection.transaction():
                if snapshot:
                    await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                return await work(connection)

        return await self._attempt(within)

    @property
    def open(self) -> int:
        """Connections there are, those being made included."""
        return self._used + len(self._idle) + len(self._connecting)

    async def ping(self) -> None:
        """Return when the server answers and, if its disk was full last time, has room. Raises ``StoreUnavailable``."""
        await self.query("SELECT 1")
        if self._full:
            await self.transaction(_ask_for_room)
            self._full = False

    async def warm(self, count: int) -> None:
        """Have so many connections before they are needed, or fewer where they cannot be made now.

        A new one takes some ten steps of the event loop: quick at the start, slow under load.
        """
        wanted = range(min(count, self._size) - self.open)
        made = await asyncio.gather(*(self._new() for _ in wanted), return_exceptions=True)
        for connection in made:
            if not isinstance(connection, BaseException):
                await self._give(connection)

    async def wait(self, wait_s: float) -> None:
        """Return when the server answers; raises ``StoreUnavailable`` when it does not for so long."""
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            try:
                await self.query("SELECT 1")
            except StoreUnavailable:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
            else:
                return
            await asyncio.sleep(_WAIT_RETRY_S)

    async def close(self) -> None:
        """Close all connections; those in use are closed when they come back."""
        self._closed = True
        tasks = list(self._connecting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._idle:
            await self._idle.pop().close()

    async def _attempt(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        for left in reversed(range(_ATTEMPTS)):
            try:
                # The server's own limit strikes first; this one is for a server or a network that is silent.
                async with asyncio.timeout(self._timeout_s + 1), self._connection() as connection:
                    return await work(connection)
            except _OURS:
                raise
            except (pg.DeadlockDetected, pg.SerializationFailure) as error:
                if not left:
                    raise StoreUnavailable("The database is too busy with the same rows.") from error
            except pg.DiskFull as error:
                self._full = True
                raise StoreFull(
                    f"The database server has no room left to write: {_reason(error)} Nothing of this was kept. Make"
                    " room on its disk; it goes on by itself then."
                ) from error
            except _AWAY as error:
                raise StoreUnavailable(f"The database cannot do this now: {_reason(error)}") from error
            except TimeoutError as error:
                raise StoreUnavailable(
                    f"The database did not answer within {self._timeout_s:g} s, or all {self._size} connections to it"
                    f" were in use for so long.{self._refusal and f' It makes no more: {self._refusal}'}"
                ) from error
            except (psycopg.DataError, UnicodeEncodeError) as error:
                # Refused by the driver before it was sent: NUL or half a surrogate pair. Text is cleaned before it
                # comes here, so this was an id, and no row has such an id.
                if getattr(error, "sqlstate", None) is not None:
                    raise
                raise NotFound("There is no such thing.") from error
            await asyncio.sleep(random.uniform(0, 0.02))  # noqa: S311 - only to part the two
        raise AssertionError("unreachable")

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        async with self._slots:
            connection = await self._take()
            try:
                yield connection
            finally:
                self._used -= 1
                if connection.info.transaction_status == TransactionStatus.IDLE:
                    await self._give(connection)
                else:
                    await connection.close()

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            try:
                if _readable(connection):
                    await connection.execute("")
            except psycopg.Error:
                # The server closed it while it lay here (a restart, say): the next one, or a new one, will do.
                await connection.close()
            except BaseException:
                await connection.close()
                raise
            else:
                self._used += 1
                return connection
        waiter: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._connect_more()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._used -= 1
                await self._give(waiter.result())
            raise

    async def _give(self, connection: Connection) -> None:
        """To who has waited longest; else it lies idle."""
        if waiter := self._longest_waiting():
            self._used += 1
            waiter.set_result(connection)
        elif self._closed:
            await connection.close()
        else:
            self._idle.append(connection)

    def _longest_waiting(self) -> asyncio.Future[Connection] | None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                return waiter
        return None

    def _connect_more(self) -> None:
        """A new connection for each who waits, a few at a time. With those in use they are never more than ``size``."""
        wanted = sum(not waiter.done() for waiter in self._waiting)
        while not self._closed and len(self._connecting) < min(_CONNECT_AT_ONCE, wanted):
            task = asyncio.create_task(self._connect(), name="connect to Postgres")
            self._connecting.add(task)
            task.add_done_callback(self._connected)

    def _connected(self, task: asyncio.Task[None]) -> None:
        self._connecting.discard(task)
        self._connect_more()

    async def _new(self) -> Connection:
        connection = await connect(self._url, timeout_s=self._timeout_s)
        if self._prepare is not None:
            try:
                await self._prepare(connection)
            except BaseException:
                await connection.close()
                raise
        return connection

    async def _connect(self) -> None:
        refused = None
        self._trying += 1
        try:
            connection = await self._new()
        except Exception as error:  # noqa: BLE001 - it is raised by who waits
            refused = error
        finally:
            self._trying -= 1
        if refused is None:
            self._refusal = ""
            await self._give(connection)
        elif _crowded(refused) and (self._used or self._trying):
            # Those that others use now come back sooner or later.
            self._refusal = _reason(refused)
            await asyncio.sleep(_CONNECT_AGAIN_S)
        elif waiter := self._longest_waiting():
            waiter.set_exception(refused)


async def connect(url: str, *, timeout_s: float) -> Connection:
    """A new connection with the settings that all code here relies on. Raises ``psycopg.Error``."""
    milliseconds = str(round(timeout_s * 1000))
    connection = await psycopg.AsyncConnection[Row].connect(
        url,
        autocommit=True,
        row_factory=dict_row,
        client_encoding="utf8",
        connect_timeout=max(2, round(timeout_s)),
        prepare_threshold=0,
        keepalives_idle=30,
        tcp_user_timeout=milliseconds,
        application_name="chatsvc",
    )
    try:
        await connection.execute(
            "SELECT set_config('statement_timeout', %(ms)s, false), set_config('TimeZone', 'UTC', false),"
            # Each statement has one good plan. Planning anew for the values at hand costs more than running it.
            " set_config('plan_cache_mode', 'force_generic_plan', false),"
            # A process that was stopped in the middle of a transaction must not keep its locks from the others.
            " set_config('idle_in_transaction_session_timeout', %(ms)s, false)",
            {"ms": milliseconds},
        )
    except BaseException:
        await connection.close()
        raise
    return connection


async def fetch(connection: Connection, statement: str, params: Params | None = None) -> list[Row]:
    """All rows of a statement; none for one that returns nothing."""
    return await _rows(await connection.execute(statement, params))


async def _rows(cursor: psycopg.AsyncCursor[Row]) -> list[Row]:
    # ``description`` would tell too, but builds an object for each column to do so.
    return [] if cursor.rownumber is None else await cursor.fetchall()


async def _ask_for_room(connection: Connection) -> None:
    await connection.execute("SET LOCAL work_mem = '64kB'")
    await connection.execute(_ROOM_PROBE)


def int4(value: int | None) -> int | None:
    """A number that is sent as ``integer`` whatever its size: by default each size has a type, and so a plan."""
    if value is None or not -_INT4 <= value < _INT4:
        return value  # the column decides whether it takes so large a number
    return Int4(value)


def _readable(connection: Connection) -> bool:
    """Whether something has arrived on an idle connection: most likely the news that the server has closed it."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(0))


def _crowded(error: Exception) -> bool:
    """Whether the server is well, and only will not, or not so soon, make one more connection."""
    return isinstance(error, pg.ConnectionTimeout) or any(words in str(error) for words in _CROWDED)


def _reason(error: BaseException) -> str:
    """The server's or the driver's own first line; it names hosts and limits, never values of rows."""
    diagnosed = getattr(getattr(error, "diag", None), "message_primary", None)
    return (diagnosed or str(error).strip().split("\n")[0] or type(error).__name__).rstrip(".") + "."
