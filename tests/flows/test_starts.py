"""A server that is started where something is missing says what, why, and what to do."""

import asyncio
import contextlib
import json
import os
import pty
import signal
import subprocess
import sys

import pytest
from api_client import Api
from reader import read
from server import ServerProcess, free_port


def lines(server, level):
    """The log lines of one level."""
    parsed = (json.loads(line) for line in server.log().splitlines() if line.startswith("{"))
    return [line for line in parsed if line["level"] == level]


async def test_a_wrong_redis_address_is_warned_of_once_and_refuses_new_messages_only(start_server, client):
    url = f"redis://:secret@127.0.0.1:{free_port()}/0"
    server = start_server(CHATSVC_REDIS_URL=url, CHATSVC_DATABASE_TIMEOUT_S="1")
    (warning,) = [line for line in lines(server, "warning") if line["message"].startswith("Redis does not answer")]
    assert "CHATSVC_REDIS_URL" in warning["message"]
    assert "503 log_unavailable" in warning["message"]
    assert warning["reason"]
    assert "secret" not in server.log()
    api = Api(client, server.base_url)
    ready = await api.call("GET", "/readyz")
    assert ready.status_code == 200
    assert ready.json()["checks"]["redis"] != "ok"
    refused = await api.send(await api.conversation(), "hi")
    assert (refused.status_code, refused.json()["code"]) == (503, "log_unavailable")


async def test_nothing_is_warned_of_where_redis_answers(start_server):
    server = start_server()
    assert [line for line in lines(server, "warning") if "Redis" in line["message"]] == []


async def test_a_second_signal_is_invited_and_is_not_called_the_end_of_the_grace_time(start_server, client):
    server = start_server("scripted:?tokens_per_s=5&tokens=400")
    api = Api(client, server.base_url)
    reply = await api.start("Tell me a story.")
    await read(client, api.stream_url(reply), cut=lambda seen: len(seen.text) > 5)
    server.signal(signal.SIGINT)
    while (await api.call("GET", "/readyz")).status_code != 503:
        await asyncio.sleep(0.01)
    server.signal(signal.SIGINT)
    async with asyncio.timeout(30):
        while server.exit_status is None:
            await asyncio.sleep(0.05)
    assert server.exit_status == 0
    (leaving,) = [line for line in lines(server, "info") if line["message"] == "shutting down"]
    assert (leaving["running"], leaving["grace_s"]) == (1, 60)
    assert "second" in leaving["hint"]
    cut_short = [line["still_running"] for line in lines(server, "warning") if "still_running" in line]
    assert cut_short == [1]
    assert "grace time is over" not in server.log()


class Terminal:
    """What a server writes on a terminal, which is its standard error."""

    def __init__(self, environment):
        self._ours, theirs = pty.openpty()
        self._written = ""
        self.server = subprocess.Popen(
            [sys.executable, "-m", "chatsvc"], env=environment, stderr=theirs, start_new_session=True
        )
        os.close(theirs)

    async def line_with(self, words):
        """Read on to the end of a line with these words; returns all that was written up to there."""
        async with asyncio.timeout(60):
            while words not in self._written.rpartition("\n")[0]:
                self._written += (await asyncio.to_thread(os.read, self._ours, 4096)).decode()
        return self._written

    async def the_rest(self):
        """All that was written, once the server has ended."""
        with contextlib.suppress(OSError):  # how the system says that nobody writes here any more
            while read := await asyncio.to_thread(os.read, self._ours, 4096):
                self._written += read.decode()
        self.server.wait(10)
        return self._written

    def close(self):
        if self.server.poll() is None:
            self.server.kill()
            self.server.wait(10)
        os.close(self._ours)


@pytest.fixture
def on_a_terminal(postgres_url, redis_server, data_dir):
    """Start a server on a terminal; returns the terminal and the server's address."""
    with contextlib.ExitStack() as stack:

        def start(**env):
            described = ServerProcess(
                data_dir,
                {"TERM": "dumb", "NO_COLOR": "1", **env},
                engine="scripted:?tokens_per_s=5&tokens=400",
                database_url=postgres_url,
                redis_url=redis_server,
            )
            terminal = Terminal(described.environment)
            stack.callback(terminal.close)
            return terminal, described.base_url

        yield start


async def test_on_a_terminal_plain_sentences_tell_the_address_and_the_wait_for_replies(on_a_terminal, client):
    terminal, base = on_a_terminal(CHATSVC_LOG_FORMAT="")
    shown = await terminal.line_with("(Ctrl-C ends it)")
    assert shown.splitlines()[-1] == f"chatsvc is at {base}/ (Ctrl-C ends it)"
    api = Api(client, base)
    reply = await api.start("Tell me a story.")
    await read(client, api.stream_url(reply), cut=lambda seen: len(seen.text) > 5)
    terminal.server.send_signal(signal.SIGINT)
    shown = await terminal.line_with("press Ctrl-C again")
    assert "Waiting up to 60 s for 1 reply; press Ctrl-C again to end now." in shown.splitlines()
    terminal.server.send_signal(signal.SIGINT)
    assert "grace time is over" not in await terminal.the_rest()
    assert terminal.server.returncode == 0


async def test_where_lines_are_json_nothing_else_is_written(on_a_terminal):
    terminal, _ = on_a_terminal(CHATSVC_LOG_FORMAT="json")
    await terminal.line_with('"ready"')
    terminal.server.send_signal(signal.SIGTERM)
    for line in (await terminal.the_rest()).splitlines():
        json.loads(line)
    assert terminal.server.returncode == 0
