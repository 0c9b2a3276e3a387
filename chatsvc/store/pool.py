"""Connections to Postgres, and the one place where its errors become ours.

- A command takes one connection, and at most ``timeout_s``, waiting for the connection included. Longer, or a server
  that is away, refuses, or is full: ``StoreUnavailable``, and nothing of the command remains.
- A connection goes back only when it is idle and outside a transaction. Whoever was cancelled in the middle of a
  command takes the connection out of use, so that no answer ever reaches the next borrower (L10).
- Deadlocks and serialization failures are tried again here, a few times.

Connections are made when they are needed and by who needs them. So a server that is away is reported at once with its
own words, and one that has come back is used at once: there is no background task that waits out a back-off.
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

from chatsvc.errors import NotFound, StoreUnavailable

T = TypeVar("T")
Row = dict[str, Any]
Connection = psycopg.AsyncConnection[Row]
Params = Mapping[str, Any]

_ATTEMPTS: Final = 5
_WAIT_RETRY_S: Final = 0.25
_AWAY: Final = (
    psycopg.OperationalError,  # includes a lost connection, shutdown, too many connections, disk full, timeouts
    psycopg.InterfaceError,
    pg.ReadOnlySqlTransaction,  # a fail-over left us on the replica
    pg.IdleInTransactionSessionTimeout,
)
_OURS: Final = (pg.ProgramLimitExceeded,)
"""Operational by class, but the fault of the command: it would fail for ever."""


class Database:
    """At most ``size`` connections, in autocommit: a statement is a transaction unless ``transaction`` says more."""

    def __init__(self, url: str, *, size: int, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._size = size
        self._slots = asyncio.Semaphore(size)
        self._idle: deque[Connection] = deque()
        self._closed = False

    async def query(self, statement: str, params: Params | None = None) -> list[Row]:
        """Run one statement as one transaction and return its rows."""
        return await self._attempt(lambda connection: fetch(connection, statement, params))

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
            except _AWAY as error:
                raise StoreUnavailable(f"The database cannot do this now: {_reason(error)}") from error
            except TimeoutError as error:
                raise StoreUnavailable(
                    f"The database did not answer within {self._timeout_s:g} s, or all {self._size} connections to it"
                    " were in use for so long."
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
                idle = connection.info.transaction_status == TransactionStatus.IDLE
                if idle and not self._closed:
                    self._idle.append(connection)
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
                return connection
        return await connect(self._url, timeout_s=self._timeout_s)


async def connect(url: str, *, timeout_s: float) -> Connection:
    """A new connection with the settings that all code here relies on. Raises ``psycopg.Error``."""
    milliseconds = str(round(timeout_s * 1000))
    connection = await psycopg.AsyncConnection[Row].connect(
        url,
        autocommit=True,
        row_factory=dict_row,
        client_encoding="utf8",
        connect_timeout=max(2, round(timeout_s)),
        keepalives_idle=30,
        tcp_user_timeout=milliseconds,
        application_name="chatsvc",
    )
    try:
        await connection.execute(
            "SELECT set_config('statement_timeout', %(ms)s, false), set_config('TimeZone', 'UTC', false),"
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
    cursor = await connection.execute(statement, params)
    return await cursor.fetchall() if cursor.description else []


def _readable(connection: Connection) -> bool:
    """Whether something has arrived on an idle connection: most likely the news that the server has closed it."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(0))


def _reason(error: BaseException) -> str:
    """The server's or the driver's own first line; it names hosts and limits, never values of rows."""
    diagnosed = getattr(getattr(error, "diag", None), "message_primary", None)
    return (diagnosed or str(error).strip().split("\n")[0] or type(error).__name__).rstrip(".") + "."
