"""See how the schema stands, and bring it up to date: alembic's migrations in one transaction, one process at a time.

The lock is an advisory one of Postgres, held by a connection of its own for as long as the migrations take; others
wait for it and then find nothing left to do.
"""

from __future__ import annotations

import asyncio
import enum
import time
from pathlib import Path
from typing import Final

import alembic.command
import alembic.script
import alembic.util
import psycopg
import sqlalchemy
import structlog
from alembic.config import Config
from sqlalchemy.exc import SQLAlchemyError

from chatsvc.errors import ConfigError, StoreFull, StoreUnavailable
from chatsvc.store.pool import Database

_log = structlog.get_logger(__name__)

_LOCK: Final = 0x63_68_61_74_73_76_63  # "chatsvc"
_LOCK_TIMEOUT: Final = "10min"
_TABLE_LOCK_S: Final = 3.0
"""A table that others use is waited for so long at a time: whoever comes meanwhile waits behind us."""
_TABLES_S: Final = 600.0
"""For so long it is tried again."""
_RETRY_S: Final = 0.25
_SAY_EVERY_S: Final = 10.0
_PERMANENT: Final = ("does not exist", "authentication failed", "no pg_hba.conf entry", "no password supplied")
"""Refusals that waiting does not cure. They have no codes at this stage of a connection; said in another language they
are waited for like the others."""


_VERSIONED: Final = "SELECT to_regclass('alembic_version') IS NOT NULL AS is_there"
_VERSION: Final = "SELECT version_num FROM alembic_version"


class Schema(enum.Enum):
    """How a database's schema stands to this version's."""

    NONE = "none"
    OLDER = "older"
    NEWEST = "newest"


async def look(url: str, *, timeout_s: float) -> Schema:
    """Connect once and see what schema there is; nothing is changed.

    Raises ``StoreUnavailable``, and ``ConfigError`` when a newer version of chatsvc made the schema.
    """
    database = Database(url, size=1, timeout_s=timeout_s)
    try:
        await database.ping()
        [found] = await database.query(_VERSIONED)
        rows = await database.query(_VERSION) if found["is_there"] else []
    finally:
        await database.close()
    return _standing([row["version_num"] for row in rows])


def _standing(versions: list[str]) -> Schema:
    if not versions:
        return Schema.NONE
    scripts = alembic.script.ScriptDirectory.from_config(_config())
    if versions == scripts.get_heads():
        return Schema.NEWEST
    try:
        scripts.get_revisions(versions)
    except alembic.util.CommandError as error:
        raise _unknown(error) from error
    return Schema.OLDER


async def migrate(url: str, *, wait_s: float = 30.0) -> None:
    """Upgrade the schema to the newest version. Safe in any number of processes at once.

    Waits ``wait_s`` seconds for the server to come up, and says so in the log. Raises ``StoreUnavailable`` when it does
    not, and ``ConfigError`` when the database cannot be used: a migration failed (nothing of it remains), a newer
    version made the schema, or rights are missing.
    """
    await asyncio.to_thread(_migrate, url, wait_s)


def _migrate(url: str, wait_s: float) -> None:
    try:
        with _connect(url, wait_s) as guard:
            guard.execute(f"SET lock_timeout = '{_LOCK_TIMEOUT}'")
            guard.execute("SELECT pg_advisory_lock(%s)", (_LOCK,))
            encoding = guard.info.parameter_status("server_encoding")
            if encoding != "UTF8":
                raise ConfigError([f"The database is encoded in {encoding}. Make one with ENCODING 'UTF8'."])
            _upgrade_when_free(url)
    except alembic.util.CommandError as error:
        raise _unknown(error) from error
    except (SQLAlchemyError, psycopg.Error) as error:
        cause = getattr(error, "orig", None) or error
        if isinstance(cause, psycopg.errors.DiskFull):
            raise StoreFull(
                f"The database server has no room left to bring the schema up to date: {_one_line(cause)}. Nothing of"
                " this was kept. Make room on its disk and start again."
            ) from error
        if isinstance(cause, psycopg.errors.LockNotAvailable):
            raise StoreUnavailable(
                f"The schema cannot be brought up to date: for {_TABLES_S:g} s others have held locks on it."
                " Nothing was changed. Look for long transactions in pg_stat_activity, and start again."
            ) from error
        if isinstance(cause, psycopg.OperationalError):
            raise StoreUnavailable(f"Postgres went away during the migration: {_one_line(cause)}") from error
        raise ConfigError([f"The database cannot be migrated, and was left as it was: {_one_line(cause)}"]) from error


def _upgrade_when_free(url: str) -> None:
    """Upgrade, and while other transactions have the tables begin again, so that nobody waits behind us for long."""
    began = time.monotonic()
    while True:
        try:
            return _upgrade(url)
        except SQLAlchemyError as error:
            if not isinstance(getattr(error, "orig", None), psycopg.errors.LockNotAvailable):
                raise
            if time.monotonic() - began > _TABLES_S:
                raise
            _log.warning("the migration waits for tables that other transactions use, and is tried again")
        time.sleep(_TABLE_LOCK_S)


def _upgrade(url: str) -> None:
    config = _config()
    # The URL goes to psycopg as it is: SQLAlchemy would understand another dialect of it.
    engine = sqlalchemy.create_engine(
        "postgresql+psycopg://", creator=lambda: _impatient(url), poolclass=sqlalchemy.NullPool
    )
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, "head")


def _impatient(url: str) -> psycopg.Connection:
    connection = psycopg.connect(url)
    connection.execute("SELECT set_config('lock_timeout', %s, false)", (f"{_TABLE_LOCK_S * 1000:.0f}ms",))
    connection.commit()
    return connection


def _connect(url: str, wait_s: float) -> psycopg.Connection:
    """A connection with autocommit, tried again while the server is away."""
    began = said = time.monotonic()
    said -= _SAY_EVERY_S
    while True:
        try:
            return psycopg.connect(url, autocommit=True, connect_timeout=5)
        except psycopg.ProgrammingError as error:
            raise ConfigError([f"CHATSVC_DATABASE_URL is not a Postgres URL: {_one_line(error)}"]) from error
        except psycopg.OperationalError as error:
            if any(words in str(error) for words in _PERMANENT):
                raise ConfigError(
                    [f"Postgres refuses the user or the database in CHATSVC_DATABASE_URL: {_one_line(error)}"]
                ) from error
            now = time.monotonic()
            left_s = began + wait_s - now
            if left_s <= 0:
                raise StoreUnavailable(
                    f"Postgres did not answer within {wait_s:g} s. Is it running, and is CHATSVC_DATABASE_URL right?"
                    f" The last attempt: {_one_line(error)}"
                ) from error
            if now - said >= _SAY_EVERY_S:
                said = now
                _log.warning(
                    "Postgres does not answer yet and is waited for; its address is CHATSVC_DATABASE_URL",
                    waiting_s=max(1, round(left_s)),
                    reason=_one_line(error),
                )
        time.sleep(_RETRY_S)


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_scripts()).replace("%", "%%"))
    return config


def _unknown(error: alembic.util.CommandError) -> ConfigError:
    return ConfigError([f"The database has a schema that this version of chatsvc does not know: {error}"])


def _scripts() -> Path:
    """The migrations: beside the package in a source checkout, inside it in a wheel."""
    package = Path(__file__).parent.parent
    for path in (package / "_migrations", package.parent / "migrations"):
        if (path / "env.py").exists():
            return path
    raise ConfigError([f"The migrations are missing from {package}; install chatsvc again."])


def _one_line(error: BaseException) -> str:
    """What the server or the driver says, its lines made into sentences; the last one has no full stop."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    return " ".join(line if line[-1] in ".:;,?!" else f"{line}." for line in lines).removesuffix(".")
