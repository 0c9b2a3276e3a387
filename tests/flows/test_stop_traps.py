"""Stop on several replicas: through each of them, followed at once by the next message, with its listener cut (L9)."""

import asyncio
import itertools
import re
import tempfile
import time
from pathlib import Path

import psycopg
import pytest
from api_client import Api
from log_server import LogServer
from reader import read, read_to_the_end
from tries import best_of

MODELS = """
[models.talking]
engine = "scripted:?tokens_per_s=20&tokens=400&slots=64"
default = true
[models.thinking]
engine = "scripted:?first_token_ms=60000&slots=64"
[models.crowded]
engine = "scripted:?tokens_per_s=20&tokens=2000&slots=1"
[models.quick]
engine = "scripted:?tokens=5&slots=64"
"""
STAGES = {"queued": "crowded", "prefilling": "thinking", "decoding": "talking"}


@pytest.fixture(scope="module")
def log_server():
    with (
        tempfile.TemporaryDirectory(prefix="chatsvc-stop-", dir="/tmp") as directory,
        LogServer(Path(directory)) as log,
    ):
        yield log


@pytest.fixture(scope="module")
def replicas(start_server, log_server, tmp_path_factory):
    """Two that work, and one that only answers; they share what they run on."""
    config = tmp_path_factory.mktemp("models") / "chatsvc.toml"
    config.write_text(MODELS)
    env = {"CHATSVC_CONFIG": str(config), "CHATSVC_REDIS_URL": log_server.url, "CHATSVC_SERVER_GRACE_S": "1"}
    # A heartbeat finds stops that nobody has heard of: here it comes too late to help.
    env |= {"CHATSVC_LEASE_RENEW_S": "20", "CHATSVC_LEASE_TTL_S": "60"}
    first = start_server("", **env)
    return [first, start_server("", beside=first, **env), start_server("", beside=first, CHATSVC_ROLES="api", **env)]


@pytest.fixture
def user(client, replicas):
    """One user's calls through each replica."""

    def new():
        first = Api(client, replicas[0].base_url)
        return [first, *(Api(client, replica.base_url, first.headers) for replica in replicas[1:])]

    return new


@pytest.fixture
async def crowd(user):
    """All places of the crowded model are taken, so that whoever comes next has to wait."""
    api, *_ = user()
    replies = [await api.start(model="crowded") for _ in range(2)]
    for reply in replies:
        await read(api.client, api.stream_url(reply), cut=lambda seen: seen.text)
    yield
    for reply in replies:
        await stop(api, reply)


async def stop(api, reply):
    answer = await api.call("POST", f"/v1/responses/{reply['response_id']}/stop")
    while answer.status_code == 503:  # a connection to Postgres was cut under this very request
        answer = await api.call("POST", f"/v1/responses/{reply['response_id']}/stop")
    assert answer.status_code == 202, answer.text


async def at_stage(stage, api):
    """A reply that is being held at this stage."""
    reply = await api.start(model=STAGES[stage])
    if stage == "queued":
        assert reply["status"] == "queued"
    elif stage == "prefilling":
        await read(api.client, api.stream_url(reply), cut=lambda seen: seen.of("start"))
    else:
        await read(api.client, api.stream_url(reply), cut=lambda seen: seen.text)
    return reply


async def is_stopped(api, reply):
    """It has one end, and log and store tell the same."""
    rendered = await read_to_the_end(api.client, api.stream_url(reply))
    stored = await api.message_of(reply)
    assert (stored["status"], rendered.end.data["finish_reason"]) == ("stopped", "stopped")
    assert rendered.text == stored["content"]
    return rendered


async def working(apis, *models):
    """Sequences of these models that the engines of all replicas hold."""
    total = 0.0
    for api in apis:
        metrics = (await api.call("GET", "/metrics")).text
        for model in models:
            found = re.findall(
                rf'^chatsvc_engine_(?:running|waiting)\{{model="{model}"\}} (\S+)', metrics, re.MULTILINE
            )
            total += sum(map(float, found))
    return total


@pytest.mark.parametrize("stage", STAGES)
async def test_stop_through_every_replica_at_each_stage(user, crowd, stage):
    for number in range(6):
        apis = user()
        reply = await at_stage(stage, apis[number % 2])
        await stop(apis[number % 3], reply)
        async with asyncio.timeout(60):
            rendered = await is_stopped(apis[(number + 1) % 3], reply)
        assert bool(rendered.text) == (stage == "decoding")


@pytest.mark.alone
async def test_after_a_stop_the_engines_running_count_is_back_to_zero_within_a_second(user):
    apis = user()
    before = await working(apis, "thinking", "talking")

    async def back_after_s():
        replies = [await at_stage(stage, apis[0]) for stage in ("prefilling", "decoding", "decoding")]
        assert await working(apis, "thinking", "talking") == before + 3
        await asyncio.gather(*(stop(apis[2], reply) for reply in replies))
        stopped = time.monotonic()
        async with asyncio.timeout(60):
            while await working(apis, "thinking", "talking") > before:
                await asyncio.sleep(0.01)
        return time.monotonic() - stopped

    assert await best_of(3, back_after_s, enough=1) < 1


async def test_a_continued_reply_stopped_while_still_queued_shows_the_text_it_keeps(user, crowd):
    apis = user()
    api = apis[0]
    broken = await at_stage("decoding", api)
    await stop(api, broken)
    kept = (await is_stopped(api, broken)).text
    body = {"client_msg_id": "go-on", "continue": True, "model": "crowded"}
    answer = await api.call("POST", f"/v1/messages/{broken['message_id']}/responses", json=body)
    assert (answer.status_code, answer.json()["status"]) == (202, "queued"), answer.text
    reply = {**answer.json(), "conversation_id": broken["conversation_id"]}
    waiting = asyncio.create_task(read_to_the_end(api.client, apis[1].stream_url(reply)))
    await stop(apis[2], reply)
    late = await is_stopped(api, reply)
    for rendered in (await waiting, late):
        # The first may have come when the log was not there yet: the store tells the same then.
        assert rendered.text == kept == (await api.message_of(reply))["content"] != ""
        assert rendered.end.data["finish_reason"] == "stopped"
    assert [event.name for event in late.events] == ["delta", "done"]
    end = await api.client.get(api.stream_url(reply), headers={"last-event-id": str(late.last_id)})
    assert end.status_code == 204


@pytest.mark.parametrize("stage", STAGES)
async def test_send_0_ms_after_stop_is_taken_and_answered(user, crowd, stage):
    for stopping, sending in itertools.product(range(3), range(2)):
        apis = user()
        reply = await at_stage(stage, apis[0])
        await stop(apis[stopping], reply)
        answer = await apis[sending].send(reply["conversation_id"], "Something else.", model="quick")
        assert answer.status_code == 202, answer.text
        following = {**answer.json(), "conversation_id": reply["conversation_id"]}
        rendered = await read_to_the_end(apis[0].client, apis[0].stream_url(following))
        messages = await apis[0].messages(reply["conversation_id"])
        assert rendered.text == messages[following["message_id"]]["content"] != ""
        assert messages[following["user_message_id"]]["parent_id"] == reply["message_id"]
        assert messages[reply["message_id"]]["status"] == "stopped"
        await is_stopped(apis[0], reply)


async def test_stop_is_heard_though_the_listeners_connections_were_lost(user, replicas):
    apis = user()
    replies = [await at_stage("decoding", apis[0]) for _ in range(3)]
    others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    with psycopg.connect(replicas[0].database_url, autocommit=True) as connection:
        assert len(connection.execute(f"SELECT pg_terminate_backend(pid) {others}").fetchall()) >= 2
        # At once, while nobody listens; and once they listen again.
        await stop(apis[2], replies[0])
        async with asyncio.timeout(60):
            await is_stopped(apis[2], replies[0])
            while connection.execute(f"SELECT count(*) {others} AND query LIKE 'LISTEN %'").fetchone() != (2,):
                await asyncio.sleep(0.05)
    for reply in replies[1:]:
        await stop(apis[2], reply)
        async with asyncio.timeout(60):
            await is_stopped(apis[2], reply)


async def test_restart_redis_wait_stop(user, log_server):
    apis = user()
    before = await working(apis, "thinking", "talking")
    reply, waiting = await at_stage("decoding", apis[0]), await at_stage("prefilling", apis[1])
    log_server.kill()
    log_server.start()
    async with asyncio.timeout(60):
        while not all([(await api.call("GET", "/readyz")).status_code == 200 for api in apis]):
            await asyncio.sleep(0.1)
    # Wait until the reply is live again through the replica that does not run it.
    again = await read(apis[2].client, apis[2].stream_url(reply), cut=lambda seen: len(seen.of("delta")) > 2)
    assert again.end is None
    for one in (reply, waiting):
        await stop(apis[2], one)
        async with asyncio.timeout(60):
            await is_stopped(apis[2], one)
    async with asyncio.timeout(10):
        while await working(apis, "thinking", "talking") > before:
            await asyncio.sleep(0.01)
