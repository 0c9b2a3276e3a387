"""Fixtures shared by all suites: a real Postgres and a real Valkey of our own, empty for every test."""

from __future__ import annotations

import asyncio
import os
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import psycopg
import pytest
import redis
from databases import Databases, in_database, new_database
from hypothesis import HealthCheck, settings

from chatsvc.embedded import embedded_postgres, embedded_redis
from chatsvc.store import migrate, open_store

# Read by a library when it is imported: no test looks for models elsewhere, and none waits until that has failed.
os.environ["HF_HUB_OFFLINE"] = "1"

# How long an example takes says more of the machine than of the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Nothing a test writes must survive a power cut.
FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


def quiet(line):
    """Progress that nobody reads."""


def new_directory():
    """A directory that another account may pass through: pytest shuts its own again whenever a session starts."""
    return tempfile.TemporaryDirectory(prefix="chatsvc-test-", dir="/tmp")


def serve(open_server):
    """Run a server for as long as a session-wide fixture lives."""
    with new_directory() as directory, asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            yield runner.run(stack.enter_async_context(open_server(Path(directory))))
        finally:
            runner.run(stack.aclose())


@pytest.fixture
def data_dir():
    """An empty directory for servers of the test's own."""
    with new_directory() as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def postgres_server():
    """URL of a Postgres that the whole session shares; use ``postgres_url`` unless you test the server itself."""
    yield from serve(lambda directory: embedded_postgres(directory, quiet, settings=FAST))


@pytest.fixture(scope="session")
def redis_server():
    """URL of a Valkey that the whole session shares; use ``redis_url``."""
    yield from serve(lambda directory: embedded_redis(directory, quiet))


@pytest.fixture(scope="session")
def migrated_template(postgres_server):
    """Name of a migrated, empty database to be copied."""
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute("CREATE DATABASE template_migrated")
    with asyncio.Runner() as runner:
        runner.run(migrate(in_database(postgres_server, "template_migrated")))
    return "template_migrated"


@pytest.fixture(scope="session")
def databases(postgres_server, migrated_template):
    """Databases with the newest schema and no rows, as many as are wanted."""
    return Databases(postgres_server, migrated_template)


@pytest.fixture
def empty_postgres_url(postgres_server):
    """URL of a new database with nothing in it."""
    yield from new_database(postgres_server, "template0")


@pytest.fixture
def postgres_url(databases):
    """URL of a database with the newest schema and no rows."""
    with databases.one() as url:
        yield url


@pytest.fixture
async def store(postgres_url):
    """A store on a new, empty database."""
    async with open_store(postgres_url, pool_size=10, timeout_s=5, wait_s=0) as opened:
        yield opened


@pytest.fixture
def redis_url(redis_server):
    """URL of a Valkey without any key."""
    with redis.Redis.from_url(redis_server) as client:
        client.flushall()
    return redis_server
