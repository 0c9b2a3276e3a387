"""A disk that is full: said as such, nothing half written, and all goes on by itself once there is room (L4)."""

import asyncio
import contextlib
import re
import secrets
import time

import psutil
import psycopg
import pytest
from api_client import Api
from postgres_server import PostgresServer
from reader import Rendered, read
from server import ServerProcess
from small_disk import small_disk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ENOUGH = {
    "CHATSVC_AUTH": "proxy",
    "CHATSVC_DATABASE_TIMEOUT_S": "2",
    "CHATSVC_SERVER_GRACE_S": "1",
    "CHATSVC_TIERS_FREE_MAX_OPEN_REPLIES": "1000",
}
"""Environment of a server that refuses no message for its user's sake."""


LARGE, SMALL = 20_000, 5


async def until_refused(api, size=LARGE):
    """Send messages to new conversations until one is refused; the last answer, and the conversation it was for."""
    async with asyncio.timeout(60):
        while True:
            answer = await api.call("POST", "/v1/conversations", json={})
            if answer.status_code != 201:
                return answer, None
            conversation_id = answer.json()["id"]
            # What cannot be compressed needs new pages soon.
            answer = await api.send(conversation_id, secrets.token_hex(size), max_tokens=1)
            if answer.status_code != 202:
                return answer, conversation_id


async def reading_to_the_end(client, api, reply, seen):
    """Come back until the reply has ended, whatever happens to the stream."""
    while seen.end is None:
        with contextlib.suppress(Exception):
            await read(client, api.stream_url(reply), seen)
        await asyncio.sleep(0.1)
    return seen


def whole(rows):
    """Each reply hangs on a user message, and each user message has one."""
    return all(parent is not None if role == "assistant" else answers == 1 for role, parent, answers in rows)


MESSAGES = """
    SELECT m.role, m.parent_id, (SELECT count(*) FROM messages a WHERE a.parent_id = m.id AND a.role = 'assistant')
    FROM messages m
"""


async def test_a_full_disk_of_postgres_is_said_as_such_and_replies_wait_with_their_end(client, redis_server, tmp_path):
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(small_disk(160))
        postgres = stack.enter_context(PostgresServer(disk.path / "data", fsync="off"))
        server = ServerProcess(
            tmp_path / "data",
            ENOUGH,
            engine="scripted:?tokens_per_s=200&tokens=2000&slots=1000",
            database_url=postgres.url,
            redis_url=redis_server,
        )
        stack.callback(server.stop_if_running)
        server.start()
        api = Api(client, server.base_url)
        # As long as it cannot be written into room that is there anyway.
        reply = await api.start(max_tokens=2000)
        seen = Rendered()
        reading = asyncio.create_task(reading_to_the_end(client, api, reply, seen))
        disk.fill()
        await until_refused(api)
        answer, conversation_id = await until_refused(api, SMALL)
        problem = answer.json()
        assert (answer.status_code, problem["code"], problem["retryable"]) == (503, "store_full", True)
        assert answer.headers["content-type"] == "application/problem+json"
        assert int(answer.headers["retry-after"]) >= 1
        assert "No space left on device" in problem["detail"]
        assert "Make room" in problem["detail"]
        ready = await api.call("GET", "/readyz")
        assert ready.status_code == 503
        assert "no room left" in ready.json()["checks"]["postgres"]
        assert (await api.call("GET", "/healthz")).status_code == 200
        # All text is there, and its end is not, for as long as it cannot be kept.
        async with asyncio.timeout(60):
            while "waiting for the store" not in server.log():
                await asyncio.sleep(0.1)
        assert seen.end is None
        if conversation_id is not None:
            assert await api.messages(conversation_id) == {}
        disk.make_room()
        async with asyncio.timeout(60):
            await reading
        stored = await api.message_of(reply)
        assert (seen.end.name, stored["status"], stored["content"]) == ("done", "complete", seen.text)
        async with asyncio.timeout(60):
            while (await api.call("GET", "/readyz")).status_code != 200:
                await asyncio.sleep(0.1)
        assert (await api.send(await api.conversation())).status_code == 202
        with psycopg.connect(postgres.url) as connection:
            assert whole(connection.execute(MESSAGES).fetchall())
        assert server.exit_status is None


def embedded_postgres_of(data_dir):
    """The embedded Postgres: its URL and its process."""
    directory = data_dir / "postgres"
    pid = int((directory / "postmaster.pid").read_text().split()[0])
    return f"postgresql://chatsvc@/postgres?host={directory}", psutil.Process(pid)


async def test_embedded_servers_on_a_full_disk_come_back_with_everything_once_there_is_room(client):
    with small_disk(300) as disk:
        data_dir = disk.path / "data"
        server = ServerProcess(data_dir, ENOUGH, engine="scripted:?tokens_per_s=20&tokens=2000&slots=1000")
        # Its own log is on another disk.
        server.log_path = data_dir.parent.parent / f"{disk.path.name}.log"
        with server:
            api = Api(client, server.base_url)
            reply = await api.start(max_tokens=160)
            seen = Rendered()
            reading = asyncio.create_task(reading_to_the_end(client, api, reply, seen))
            while not seen.text:
                await asyncio.sleep(0.05)
            disk.fill()
            disk.fill_to_the_last_byte()
            answer, _ = await until_refused(api)
            problem = answer.json()
            assert (answer.status_code, problem["retryable"]) == (503, True)
            assert problem["code"] in {"store_full", "log_unavailable"}
            # Postgres itself ends when it cannot begin another file of its journal.
            url, postmaster = embedded_postgres_of(data_dir)
            with contextlib.suppress(psycopg.Error), psycopg.connect(url, autocommit=True) as connection:
                for _ in range(50):
                    connection.execute("SELECT pg_logical_emit_message(false, 'fill', 'x'), pg_switch_wal()")
            await asyncio.to_thread(psutil.wait_procs, [postmaster], 60)
            assert not postmaster.is_running()
            answer = await api.call("POST", "/v1/conversations", json={})
            assert (answer.status_code, answer.json()["code"]) == (503, "store_unavailable")
            async with asyncio.timeout(60):
                while "The disk there is full, 0 MB are left" not in server.log():
                    await asyncio.sleep(0.1)
            disk.make_room()
            async with asyncio.timeout(60):
                await reading
            stored = await api.message_of(reply)
            assert (stored["status"], stored["content"]) == ("complete", seen.text)
            async with asyncio.timeout(60):
                while (await api.send(await api.conversation())).status_code != 202:
                    await asyncio.sleep(0.1)
            url, _ = embedded_postgres_of(data_dir)
            with psycopg.connect(url) as connection:
                assert whole(connection.execute(MESSAGES).fetchall())
        server.log_path.unlink()


def refused_start(server):
    """Start a server that will not come up; what it says."""
    server.launch()
    deadline = time.monotonic() + 60
    while server.exit_status is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.exit_status in {1, 2}
    return server.log()


@pytest.mark.parametrize("left", [0, 70_000_000], ids=["nothing left", "too little left"])
def test_a_first_start_on_a_full_disk_says_so_and_the_next_one_with_room_succeeds(left):
    with small_disk(300) as disk:
        disk.fill(but=left)
        if not left:
            disk.fill_to_the_last_byte()
        server = ServerProcess(disk.path / "data", ENOUGH)
        server.data_dir.mkdir()
        server.log_path = disk.path.parent / f"{disk.path.name}.log"
        said = refused_start(server)
        server.log_path.unlink()
        assert "Traceback" not in said
        assert str(server.data_dir) in said
        assert re.search("No space left on device|The disk there is full, [67]. MB are left", said)
        assert "room" in said
        assert "CHATSVC_DATA_DIR" in said
        disk.make_room()
        with server:
            pass
        server.log_path.unlink()


async def test_a_start_with_data_on_a_full_disk_loses_none_of_it(client):
    with small_disk(300) as disk:
        server = ServerProcess(disk.path / "data", ENOUGH)
        server.log_path = disk.path.parent / f"{disk.path.name}.log"
        api = Api(client, server.base_url)
        with server:
            reply = await api.start(max_tokens=20)
            seen = await read(client, api.stream_url(reply))
        disk.fill()
        disk.fill_to_the_last_byte()
        server.launch()
        deadline = time.monotonic() + 60
        while server.exit_status is None and not server._is_ready() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if server.exit_status is None:
            # It gets by with the room that its files have.
            server.stop()
        else:
            assert "Traceback" not in server.log()
            assert "room" in server.log()
        disk.make_room()
        with server:
            assert (await api.message_of(reply))["content"] == seen.text
        server.log_path.unlink()
