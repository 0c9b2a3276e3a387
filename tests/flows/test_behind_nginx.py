"""The shipped nginx sample with a real nginx in front of a real server: who is calling, and streams as they come."""

import asyncio
import contextlib
import shutil
import subprocess
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from api_client import Api
from httpx_sse import aconnect_sse
from reader import read
from server import free_port
from tries import best_of

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed (Debian: nginx-light)")

SAMPLE = Path(__file__).parents[2] / "deploy" / "nginx.conf"
# What an nginx does that nobody has told about streams, but for the address; compression is what distributions add.
PLAIN = """
worker_processes 1;
pid /tmp/nginx.pid;
events {}
http {
    gzip on;
    gzip_types *;
    gzip_min_length 0;
    server { listen 8080; location / { proxy_pass http://chatsvc-1:8080; proxy_set_header X-Forwarded-User ann; } }
}
"""
ANN = {"cookie": "who=ann"}
SLOW = "scripted:?tokens_per_s=5&tokens=40&slots=64"


class SignIn(BaseHTTPRequestHandler):
    """What oauth2-proxy answers to ``/oauth2/auth``: 202 and the user's name, or 401. The cookie is the name."""

    def do_GET(self):
        who = (self.headers["cookie"] or "").removeprefix("who=")
        self.send_response(202 if who else 401)
        if who:
            self.send_header("X-Auth-Request-User", who)
            self.send_header("X-Auth-Request-Groups", "staff,chat-plus")
        self.end_headers()

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture(scope="module")
def server(start_server):
    return start_server(SLOW)


@pytest.fixture(scope="module")
def sign_in():
    with ThreadingHTTPServer(("127.0.0.1", 0), SignIn) as http:
        thread = Thread(target=http.serve_forever)
        thread.start()
        yield http.server_port
        http.shutdown()
        thread.join()


class Replica(BaseHTTPRequestHandler):
    """Stands in for a replica: a yes to everything, to a POST with the status that its server was given."""

    def do_GET(self):
        self._answer(200)

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self._answer(self.server.answer_to_post)

    def _answer(self, status):
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        """Say nothing."""


@contextlib.contextmanager
def replica(port, answer_to_post=202):
    """Listens for the length of a block; then its port refuses connections, as that of a process that is gone does."""
    with ThreadingHTTPServer(("127.0.0.1", port), Replica) as http:
        http.answer_to_post = answer_to_post
        thread = Thread(target=http.serve_forever, args=[0.01])
        thread.start()
        yield
        http.shutdown()
        thread.join()


@pytest.fixture
def nginx(server, sign_in, tmp_path):
    """Start nginx with a configuration whose names and ports are put where the test's are; returns its address.

    ``replicas`` are the ports of both; by default nobody listens on the second.
    """
    command = ["nginx", "-e", tmp_path / "log", "-c", tmp_path / "nginx.conf"]

    def start(text, replicas=None):
        port = free_port()
        one, two = replicas or (server.port, free_port())
        places = {
            "chatsvc-1:8080": f"127.0.0.1:{one}",
            "chatsvc-2:8080": f"127.0.0.1:{two}",
            "oauth2-proxy:4180": f"127.0.0.1:{sign_in}",
            "listen 8080": f"listen 127.0.0.1:{port}",
            "worker_processes auto": "worker_processes 1",
            "/tmp/nginx.pid": str(tmp_path / "pid"),
        }
        for name, place in places.items():
            text = text.replace(name, place)
        (tmp_path / "nginx.conf").write_text(text)
        subprocess.run(command, check=True)
        return f"http://127.0.0.1:{port}"

    yield start
    if (tmp_path / "pid").exists():
        subprocess.run([*command, "-s", "quit"], check=True)


@pytest.fixture
def behind(nginx, client):
    """The API through the sample, as the user Ann."""
    return Api(client, nginx(SAMPLE.read_text()), ANN)


async def test_nobody_gets_in_without_signing_in(behind, client):
    program = await client.get(f"{behind.base}/v1/me")
    person = await client.get(f"{behind.base}/", headers={"accept": "text/html,*/*"})
    assert program.status_code == 401
    assert (person.status_code, person.headers["location"]) == (302, f"{behind.base}/oauth2/start?rd=/")


async def test_a_client_cannot_say_who_it_is(behind, client):
    forged = {**ANN, "X-Forwarded-User": "root", "X-Forwarded-Tier": "pro"}
    me = (await client.get(f"{behind.base}/v1/me", headers=forged)).json()
    assert (me["user"]["id"], me["tier"]) == ("ann", "plus")


async def test_metrics_are_kept_from_users(behind, client):
    for path in ("/metrics", "/metrics/", "//metrics", "/%6detrics"):
        answer = await client.get(f"{behind.base}{path}", headers=ANN)
        assert (answer.status_code, "chatsvc_" in answer.text) == (404, False), path


async def test_a_replica_that_is_away_is_passed_over(behind):
    """Half of the configured replicas do not exist."""
    for _ in range(6):
        assert (await behind.call("GET", "/v1/me")).status_code == 200


async def test_replicas_that_are_restarted_one_after_the_other_leave_no_gap(nginx, client):
    one, two = free_port(), free_port()
    base = nginx(SAMPLE.read_text(), (one, two))
    answers = []
    for port in (one, two, one):
        with replica(port):
            answers += [(await client.get(f"{base}/v1/me", headers=ANN)).status_code for _ in range(4)]
    assert answers == [200] * 12


async def test_what_a_replica_going_down_takes_no_more_the_other_takes(nginx, client):
    one, two = free_port(), free_port()
    base = nginx(SAMPLE.read_text(), (one, two))

    async def post():
        answer = await client.post(f"{base}/v1/conversations", headers=ANN, json={})
        return answer.status_code

    with replica(one, answer_to_post=503):
        with replica(two):
            assert [await post() for _ in range(4)] == [202] * 4
        with replica(two, answer_to_post=503):
            assert [await post() for _ in range(4)] == [503] * 4
            # Both refuse messages, and serve whatever else they are asked for.
            assert (await client.get(f"{base}/v1/me", headers=ANN)).status_code == 200


@pytest.mark.parametrize("text", [SAMPLE.read_text(), PLAIN], ids=["sample", "plain"])
async def test_tokens_come_through_as_they_are_made(nginx, client, text):
    api = Api(client, nginx(text), ANN)
    reply = await api.start()
    deltas = 0
    headers = {**ANN, "accept-encoding": "gzip"}
    async with asyncio.timeout(60), aconnect_sse(client, "GET", api.stream_url(reply), headers=headers) as source:
        async for event in source.aiter_sse():
            deltas += event.event == "delta"
            if deltas == 6:
                break
    # What is held back arrives with the reply's end, which is six seconds away.
    assert (await api.state(reply))["status"] == "streaming"
    assert (await api.call("POST", f"/v1/responses/{reply['response_id']}/stop")).status_code == 202


async def first_token_at(client, url):
    headers = {**ANN, "accept-encoding": "gzip"}
    async with aconnect_sse(client, "GET", url, headers=headers) as source:
        await anext(event async for event in source.aiter_sse() if event.event == "delta")
    return time.monotonic()


@pytest.mark.alone
@pytest.mark.parametrize("text", [SAMPLE.read_text(), PLAIN], ids=["sample", "plain"])
async def test_the_first_token_comes_through_within_500_ms_of_the_models(server, nginx, client, text):
    """The model's: as a program beside the server sees it. The one behind nginx accepts gzip."""
    api = Api(client, nginx(text), ANN)

    async def late_s():
        reply = await api.start()
        arriving = asyncio.create_task(first_token_at(client, api.stream_url(reply)))
        await read(client, server.base_url + reply["stream_url"], cut=lambda seen: seen.text)
        said = time.monotonic()
        async with asyncio.timeout(60):
            late = await arriving - said
        assert (await api.call("POST", f"/v1/responses/{reply['response_id']}/stop")).status_code == 202
        return late

    assert await best_of(3, late_s, enough=0.5) < 0.5


async def test_a_stream_that_is_cut_at_the_proxy_goes_on_where_it_was(behind, client):
    reply = await behind.start(max_tokens=12)
    text, last = "", "0"
    while True:
        headers = {**ANN, "last-event-id": last}
        async with aconnect_sse(client, "GET", behind.stream_url(reply), headers=headers) as source:
            async for event in source.aiter_sse():
                last = event.id or last
                text += event.json()["text"] if event.event == "delta" else ""
                if event.event in {"delta", "done"}:
                    break
            if event.event == "done":
                break
    assert text == (await behind.message_of(reply))["content"]
