"""Servers for flow tests: real processes on real sockets, one Postgres and one Valkey for the session."""

from __future__ import annotations

import contextlib
import random

import httpx
import pytest
from api_client import Api
from server import ServerProcess

TIMEOUT = httpx.Timeout(30)
# Bounded, so that a leak of connections shows as a failure and not as a slow machine.
LIMITS = httpx.Limits(max_connections=400, max_keepalive_connections=50)


@pytest.fixture(scope="module")
def start_server(databases, redis_server, tmp_path_factory):
    """Start servers, each with a database of its own unless it is put ``beside`` another; all end with the module."""
    with contextlib.ExitStack() as stack:
        urls = {}

        def start(engine="scripted:?tokens_per_s=100&tokens=40&slots=64", *, beside=None, ready_s=60, **env):
            database = urls[beside] if beside else stack.enter_context(databases.one())
            env = {"CHATSVC_AUTH": "proxy", **env}
            data_dir = tmp_path_factory.mktemp("server") / "data"
            process = ServerProcess(data_dir, env, engine=engine, database_url=database, redis_url=redis_server)
            urls[process] = database
            process.start(ready_s)
            stack.callback(process.stop_if_running)
            return process

        yield start


@pytest.fixture
async def client():
    async with httpx.AsyncClient(timeout=TIMEOUT, limits=LIMITS) as client:
        yield client


@pytest.fixture
def seeded():
    """Random numbers whose seed is printed, so that a failure can be had again."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture
def api(client, server):
    return Api(client, server.base_url)
