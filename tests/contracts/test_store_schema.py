"""The schema: made by any number of processes at once, whole or not at all."""

import asyncio
import shutil
import sys
from pathlib import Path

import psycopg
import pytest
from structlog.testing import capture_logs

from chatsvc.errors import ConfigError, StoreUnavailable
from chatsvc.store import migrate, schema

MIGRATE = "import asyncio, sys; from chatsvc.store import migrate; asyncio.run(migrate(sys.argv[1]))"


def tables(url):
    with psycopg.connect(url) as connection:
        rows = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
    return {name for (name,) in rows}


def versions(url):
    with psycopg.connect(url) as connection:
        return connection.execute("SELECT version_num FROM alembic_version").fetchall()


async def test_migrating_again_changes_nothing(postgres_url):
    before = tables(postgres_url)
    await migrate(postgres_url)
    assert tables(postgres_url) == before
    assert {"users", "conversations", "messages", "runs", "workers", "secrets"} < before


async def test_four_processes_may_migrate_one_empty_database_at_once(empty_postgres_url):
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", MIGRATE, empty_postgres_url, stderr=asyncio.subprocess.PIPE, cwd=Path.cwd()
        )
        for _ in range(4)
    ]
    ended = await asyncio.gather(*(process.communicate() for process in processes))
    assert [process.returncode for process in processes] == [0] * 4, ended
    assert versions(empty_postgres_url) == [(NEWEST,)]


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """The migrations in a directory of their own, which the package finds instead of its own."""
    package = tmp_path / "chatsvc" / "store"
    package.mkdir(parents=True)
    copy = shutil.copytree(Path(schema._scripts()), tmp_path / "migrations")
    monkeypatch.setattr(schema, "__file__", str(package / "schema.py"))
    return copy / "versions"


NEWEST = max(path.name.split("_")[0] for path in (schema._scripts() / "versions").glob("[0-9]*.py"))
NEXT = """
from alembic import op
revision, down_revision = "9999", "{newest}"
def upgrade():
    op.execute({sql!r})
"""


async def test_a_migration_that_fails_leaves_nothing_behind_and_is_an_error(empty_postgres_url, scripts):
    (scripts / "9999_bad.py").write_text(NEXT.format(newest=NEWEST, sql="CREATE TABLE half (); SELECT 1 / 0"))
    with pytest.raises(ConfigError, match="cannot be migrated, and was left as it was: division by zero"):
        await migrate(empty_postgres_url)
    assert tables(empty_postgres_url) == set()


async def test_a_failed_migration_ends_the_process_with_an_error(empty_postgres_url):
    with psycopg.connect(empty_postgres_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE runs ()")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", MIGRATE, empty_postgres_url, stderr=asyncio.subprocess.PIPE, cwd=Path.cwd()
    )
    _, said = await process.communicate()
    assert process.returncode != 0
    assert b'relation "runs" already exists' in said
    assert tables(empty_postgres_url) == {"runs"}


async def test_a_migration_waits_for_a_table_without_making_others_wait(postgres_url, scripts, monkeypatch):
    monkeypatch.setattr(schema, "_TABLE_LOCK_S", 0.2)
    (scripts / "9999_more.py").write_text(NEXT.format(newest=NEWEST, sql="ALTER TABLE messages ADD COLUMN more int"))
    async with (
        await psycopg.AsyncConnection.connect(postgres_url) as long,
        await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as other,
    ):
        await long.execute("SELECT count(*) FROM messages")
        with capture_logs() as logs:
            migrating = asyncio.create_task(migrate(postgres_url))
            async with asyncio.timeout(30):
                while not logs:
                    await other.execute("SELECT count(*) FROM messages")
                    await asyncio.sleep(0.01)
                await long.rollback()
                await migrating
    assert "tried again" in logs[0]["event"]
    assert versions(postgres_url) == [("9999",)]


async def test_a_table_that_is_never_free_is_said(postgres_url, scripts, monkeypatch):
    monkeypatch.setattr(schema, "_TABLE_LOCK_S", 0.05)
    monkeypatch.setattr(schema, "_TABLES_S", 0.1)
    (scripts / "9999_more.py").write_text(NEXT.format(newest=NEWEST, sql="ALTER TABLE messages ADD COLUMN more int"))
    async with await psycopg.AsyncConnection.connect(postgres_url) as long:
        await long.execute("SELECT count(*) FROM messages")
        with pytest.raises(StoreUnavailable, match="pg_stat_activity"):
            await migrate(postgres_url)
    assert versions(postgres_url) == [(NEWEST,)]


async def test_a_schema_of_a_later_version_is_refused(postgres_url, scripts):
    (scripts / "9999_later.py").write_text(NEXT.format(newest=NEWEST, sql="CREATE TABLE later ()"))
    await migrate(postgres_url)
    (scripts / "9999_later.py").unlink()
    with pytest.raises(ConfigError, match="does not know"):
        await migrate(postgres_url)
    assert "later" in tables(postgres_url)


async def test_missing_rights_are_said_plainly(postgres_server, empty_postgres_url):
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS guest")
        connection.execute("CREATE ROLE guest LOGIN")
    with pytest.raises(ConfigError, match="permission denied for schema public"):
        await migrate(empty_postgres_url.replace("//chatsvc@", "//guest@"))


async def test_a_database_that_cannot_hold_every_character_is_refused(postgres_server):
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute("DROP DATABASE IF EXISTS latin")
        connection.execute("CREATE DATABASE latin TEMPLATE template0 ENCODING 'LATIN1' LOCALE_PROVIDER libc LOCALE 'C'")
    url = postgres_server.replace("/postgres?", "/latin?")
    with pytest.raises(ConfigError, match="LATIN1"):
        await migrate(url)
    assert tables(url) == set()


@pytest.mark.parametrize("url", ["mysql://x/y", "no url at all"])
async def test_what_is_no_postgres_url_is_said_at_once(url):
    with pytest.raises(ConfigError, match="CHATSVC_DATABASE_URL"):
        await migrate(url)


async def test_a_database_or_user_that_does_not_exist_is_said_at_once(postgres_server):
    for url in (postgres_server.replace("/postgres?", "/nowhere?"), postgres_server.replace("chatsvc@", "nobody@")):
        with pytest.raises(ConfigError, match="does not exist"):
            await migrate(url, wait_s=3600)


async def test_the_wheel_holds_the_migrations_inside_the_package(scripts, tmp_path, postgres_url):
    (tmp_path / "migrations").rename(tmp_path / "chatsvc" / "_migrations")
    await migrate(postgres_url)
    assert schema._scripts() == tmp_path / "chatsvc" / "_migrations"


class StillTime:
    """Passes by what is slept."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


async def test_a_server_that_is_waited_for_is_named_at_once_and_again(monkeypatch):
    monkeypatch.setattr(schema, "time", StillTime())
    monkeypatch.setattr(schema, "_SAY_EVERY_S", 0.5)
    with capture_logs() as said, pytest.raises(StoreUnavailable) as caught:
        await migrate("postgresql://u:secret@127.0.0.1:1/x", wait_s=1)
    assert len(said) == 2, said
    for line in said:
        assert line["log_level"] == "warning"
        assert "CHATSVC_DATABASE_URL" in line["event"]
        assert line["waiting_s"] == 1
        assert "Connection refused. Is the server running" in line["reason"]
    assert "did not answer within 1 s" in caught.value.detail
    assert "CHATSVC_DATABASE_URL" in caught.value.detail
    assert "Connection refused. Is the server running" in caught.value.detail
    assert "secret" not in f"{said}{caught.value}"
