"""Two regions with their own server, Postgres and Valkey.

Postgres is replicated by the very statements of ``docs/regions.md``.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
from pathlib import Path

import psycopg
from databases import in_database
from log_server import LogServer
from server import ServerProcess, free_port

from chatsvc.embedded import embedded_postgres
from chatsvc.store import migrate

SECRET = "b8f1" * 16
ENGINE = "scripted:?first_token_ms=800&tokens_per_s=40&tokens=1200&slots=64"
"""Replies of half a minute: ask for fewer tokens, or stop what you have seen."""
DOCS = Path(__file__).parents[2] / "docs" / "regions.md"
PEER = """
[regions]
secret = "{secret}"
[regions.{name}]
urls = [{urls}]
"""


@contextlib.contextmanager
def postgres():
    """A server for as long as the block runs."""
    settings = {"wal_level": "logical", "fsync": "off"}
    with (
        tempfile.TemporaryDirectory(prefix="chatsvc-test-", dir="/tmp") as directory,
        asyncio.Runner() as runner,
    ):
        opening = embedded_postgres(Path(directory), lambda _: None, settings=settings)
        stack = contextlib.AsyncExitStack()
        try:
            yield runner.run(stack.enter_async_context(opening))
        finally:
            runner.run(stack.aclose())


@contextlib.contextmanager
def replicated_databases():
    """Two Postgres servers, replicated into each other as the documentation says."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(postgres()) for _ in ("eu", "us")]
        publish, subscribe, mend = re.findall(r"```sql\n(.*?)```", DOCS.read_text(), re.DOTALL)
        urls = {}
        for name, server in zip(("eu", "us"), servers, strict=True):
            with psycopg.connect(server, autocommit=True) as connection:
                connection.execute("CREATE DATABASE chat")
            urls[name] = in_database(server, "chat")
            with asyncio.Runner() as runner:
                runner.run(migrate(urls[name]))
            with psycopg.connect(urls[name], autocommit=True) as connection:
                connection.execute(publish)
                connection.execute(mend)
        for name, other in (("eu", "us"), ("us", "eu")):
            with psycopg.connect(urls[name], autocommit=True) as connection:
                statement = re.sub(r"CONNECTION '.*?'", f"CONNECTION '{urls[other]}'", subscribe)
                connection.execute(statement.replace("from_eu", f"from_{other}"))
        yield urls
        for name, other in (("eu", "us"), ("us", "eu")):
            with psycopg.connect(urls[name], autocommit=True) as connection:
                connection.execute(f"DROP SUBSCRIPTION chatsvc_from_{other}")


@contextlib.contextmanager
def two_regions(databases, new_directory):
    """A server each in ``eu`` and ``us``; the first of each other's addresses leads nowhere."""
    ports = {"eu": free_port(), "us": free_port()}
    with contextlib.ExitStack() as stack:
        servers = {}
        for name, other in (("eu", "us"), ("us", "eu")):
            directory = new_directory(name)
            urls = f'"http://127.0.0.1:{free_port()}", "http://127.0.0.1:{ports[other]}/"'
            (directory / "chatsvc.toml").write_text(PEER.format(secret=SECRET, name=other, urls=urls))
            log = stack.enter_context(LogServer(directory))
            servers[name] = ServerProcess(
                directory / "data",
                {
                    "CHATSVC_AUTH": "proxy",
                    "CHATSVC_REGION": name,
                    "CHATSVC_CONFIG": str(directory / "chatsvc.toml"),
                    "CHATSVC_STREAM_HEARTBEAT_S": "0.5",
                    "CHATSVC_SERVER_GRACE_S": "1",
                },
                engine=ENGINE,
                database_url=databases[name],
                redis_url=log.url,
                port=ports[name],
            )
            servers[name].start()
            stack.callback(servers[name].stop_if_running)
        yield servers
