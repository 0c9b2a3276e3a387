"""When a part goes away: what users see, and that nothing of what they saw is lost (L4, L6, L7)."""

import asyncio
import contextlib
import signal
import tempfile
from pathlib import Path

import httpx
import psycopg
import pytest
import redis
from api_client import Api
from log_server import LogServer
from reader import Rendered, read, read_to_the_end
from server import ServerProcess

from chatsvc.embedded import embedded_postgres


@contextlib.contextmanager
def short_directory():
    """Unix sockets need short paths, which pytest's own directories are not."""
    with tempfile.TemporaryDirectory(prefix="chatsvc-out-", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def log_server():
    with short_directory() as directory, LogServer(directory) as server:
        yield server


@pytest.fixture
def slow_server(start_server, log_server):
    return start_server(
        "scripted:?tokens_per_s=20&tokens=400", CHATSVC_REDIS_URL=log_server.url, CHATSVC_DATABASE_TIMEOUT_S="2"
    )


async def test_redis_that_restarts_empty_costs_a_pause_and_a_snapshot_but_no_text(slow_server, log_server, client):
    api = Api(client, slow_server.base_url)
    reply = await api.start(max_tokens=120)
    before = await read(client, api.stream_url(reply), cut=lambda seen: len(seen.text) > 40)
    stayed = asyncio.create_task(read_to_the_end(client, api.stream_url(reply)))
    log_server.kill()
    log_server.start()
    rendered = await read(client, api.stream_url(reply), before)
    watched = await stayed
    stored = await api.message_of(reply)
    assert stored["status"] == "complete"
    assert rendered.text == watched.text == stored["content"]
    assert rendered.snapshots >= 1
    assert rendered.end.data["finish_reason"] == "length"


async def test_redis_that_stays_away_costs_the_live_view_but_no_text(slow_server, log_server, client):
    api = Api(client, slow_server.base_url)
    reply = await api.start(max_tokens=100)
    seen = await read(client, api.stream_url(reply), cut=lambda seen: len(seen.text) > 40)
    log_server.kill()
    rendered = await read(client, api.stream_url(reply), seen)
    stored = await api.message_of(reply)
    assert (stored["status"], stored["content"]) == ("complete", rendered.text)
    assert rendered.of("snapshot")[-1].data["reason"] == "stored"


async def test_while_redis_is_away_a_message_is_refused_and_stop_still_stops(slow_server, log_server, client):
    api = Api(client, slow_server.base_url)
    reply = await api.start()
    await read(client, api.stream_url(reply), cut=lambda seen: len(seen.text) > 10)
    log_server.kill()
    conversation_id = await api.conversation()
    answer = await api.send(conversation_id)
    assert (answer.status_code, answer.json()["code"], answer.json()["retryable"]) == (503, "log_unavailable", True)
    assert int(answer.headers["retry-after"]) >= 1
    assert await api.messages(conversation_id) == {}
    ready = await api.call("GET", "/readyz")
    assert ready.json()["checks"]["redis"] != "ok"
    assert (await api.call("POST", f"/v1/responses/{reply['response_id']}/stop")).status_code == 202
    async with asyncio.timeout(60):
        while (await api.state(reply))["status"] != "stopped":
            await asyncio.sleep(0.02)
    log_server.start()
    async with asyncio.timeout(60):
        while (await api.send(conversation_id)).status_code != 202:
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("killed", [False, True], ids=["same process", "the next one"])
async def test_of_a_conversation_deleted_while_redis_is_away_nothing_remains_in_redis_either(
    start_server, client, killed
):
    with short_directory() as directory, LogServer(directory, "--save", "", "--appendonly", "yes") as log_server:
        server = start_server("scripted:?tokens_per_s=20&tokens=200", CHATSVC_REDIS_URL=log_server.url)
        api = Api(client, server.base_url)
        reply = await api.start()
        await read(client, api.stream_url(reply), cut=lambda seen: len(seen.text) > 10)
        log_server.kill()
        assert (await api.call("DELETE", f"/v1/conversations/{reply['conversation_id']}")).status_code == 204
        if killed:
            server.kill()
        log_server.start()
        if killed:
            server.start()
        with redis.Redis.from_url(log_server.url) as looking:
            async with asyncio.timeout(60):
                while list(looking.scan_iter("resp:*")):
                    await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_while_postgres_is_away_a_message_is_refused_and_a_running_reply_waits_with_its_end(
    client, redis_server, tmp_path
):
    with short_directory() as directory:
        async with contextlib.AsyncExitStack() as outer:
            first = await outer.enter_async_context(contextlib.AsyncExitStack())
            url = await first.enter_async_context(embedded_postgres(directory, print))
            server = ServerProcess(
                tmp_path / "data",
                {"CHATSVC_AUTH": "proxy", "CHATSVC_DATABASE_TIMEOUT_S": "1"},
                engine="scripted:?tokens_per_s=20&tokens=120",
                database_url=url,
                redis_url=redis_server,
            )
            with server:
                api = Api(client, server.base_url)
                ended = await api.start(max_tokens=1)
                await read_to_the_end(client, api.stream_url(ended))
                reply = await api.start()
                conversation_id = await api.conversation()
                seen = await read(client, api.stream_url(reply), cut=lambda seen: len(seen.text) > 10)
                whole = Rendered()
                reading = asyncio.create_task(read(client, api.stream_url(reply), whole))
                await asyncio.sleep(0.1)
                await first.aclose()
                answer = await api.send(conversation_id)
                assert (answer.status_code, answer.json()["code"]) == (503, "store_unavailable")
                assert answer.json()["retryable"] is True
                assert (await api.call("GET", "/healthz")).status_code == 200
                assert (await api.call("GET", "/readyz")).status_code == 503
                # A reply that runs here needs no Postgres to be read.
                joined = await read(client, api.stream_url(reply), cut=lambda joined: len(joined.text) > 10)
                assert whole.text.startswith(joined.text) or joined.text.startswith(whole.text)
                # Else the stream's route does not fail for good: an EventSource comes again.
                put_off = await client.get(api.stream_url(ended))
                assert put_off.status_code == 200
                assert put_off.text.startswith("retry: ")
                await no_more_text_comes(whole)
                assert not reading.done()
                await outer.enter_async_context(embedded_postgres(directory, print))
                rendered = await read_to_the_end(client, api.stream_url(reply), pause_s=0.2)
                assert (await reading).end.name == "done"
                assert rendered.text == whole.text == (await api.message_of(reply))["content"]
                assert rendered.text.startswith(seen.text)
                assert (await api.send(conversation_id)).status_code == 202


async def no_more_text_comes(rendered):
    """The engine writes 20 tokens a second; a whole second without one means it has ended."""
    length = -1
    while len(rendered.text) != length:
        length = len(rendered.text)
        await asyncio.sleep(1)


@pytest.mark.slow
async def test_a_killed_worker_leaves_its_reply_failed_with_what_was_shown_and_retryable(start_server, client):
    worker = start_server("scripted:?tokens_per_s=20&tokens=400", CHATSVC_SERVER_GRACE_S="1")
    other = start_server("scripted:?tokens_per_s=20&tokens=400", beside=worker, CHATSVC_SERVER_GRACE_S="1")
    doomed = Api(client, worker.base_url)
    api = Api(client, other.base_url, doomed.headers)
    # Whichever took the run: kill that one and read through the other.
    reply = await doomed.start()
    seen = await read(client, doomed.stream_url(reply), cut=lambda seen: len(seen.text) > 60)
    if "runs_active 1.0" not in (await doomed.call("GET", "/metrics")).text:
        worker, other, doomed, api = other, worker, api, doomed
    reader = asyncio.create_task(read(client, api.stream_url(reply)))
    await asyncio.sleep(0)
    worker.kill()
    async with asyncio.timeout(10):
        rendered = await reader
    assert rendered.end.name == "error"
    assert rendered.end.data["code"] == "worker_lost"
    assert rendered.end.data["retryable"] is True
    stored = await api.message_of(reply)
    assert (stored["status"], stored["error_code"]) == ("failed", "worker_lost")
    assert stored["content"] == rendered.text
    assert stored["content"].startswith(seen.text)
    following = await api.send(reply["conversation_id"], "Go on.")
    assert following.status_code == 202
    worker.start()


@pytest.mark.slow
async def test_a_run_that_had_shown_nothing_when_its_worker_died_is_answered_by_another(start_server, client):
    worker = start_server("scripted:?first_token_ms=60000", CHATSVC_TIERS_FREE_MAX_OPEN_REPLIES="100")
    other = start_server("scripted:?tokens_per_s=100&tokens=20", beside=worker, CHATSVC_ROLES="api,worker")
    doomed = Api(client, worker.base_url)
    api = Api(client, other.base_url, doomed.headers)
    replies = []
    # The two workers race for each run; go on until the slow one holds one.
    while "runs_active 1.0" not in (await doomed.call("GET", "/metrics")).text:
        replies.append(await doomed.start())
        await asyncio.sleep(0.05)
    worker.kill()
    async with asyncio.timeout(60):
        ends = [await read_to_the_end(client, api.stream_url(reply), pause_s=0.1) for reply in replies]
    assert {rendered.end.name for rendered in ends} == {"done"}
    for reply, rendered in zip(replies, ends, strict=True):
        assert rendered.text == (await api.message_of(reply))["content"] != ""
    worker.start()


@pytest.mark.slow
async def test_a_paused_worker_cannot_write_another_byte(start_server, client):
    worker = start_server("scripted:?tokens_per_s=20&tokens=600")
    reply = await Api(client, worker.base_url, {"x-forwarded-user": "pat"}).start()
    doomed = Api(client, worker.base_url, {"x-forwarded-user": "pat"})
    await read(client, doomed.stream_url(reply), cut=lambda seen: len(seen.text) > 40)
    other = start_server("scripted:?tokens=5", beside=worker)
    api = Api(client, other.base_url, doomed.headers)
    worker.signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(60):
            rendered = await read_to_the_end(client, api.stream_url(reply))
    finally:
        worker.signal(signal.SIGCONT)
    assert rendered.end.data["code"] == "worker_lost"
    async with asyncio.timeout(60):
        while "runs_active 0.0" not in (await doomed.call("GET", "/metrics")).text:
            await asyncio.sleep(0.05)
    again = await read_to_the_end(client, api.stream_url(reply))
    assert [event.id for event in again.events] == [event.id for event in rendered.events]
    assert again.text == rendered.text == (await api.message_of(reply))["content"]


@pytest.mark.slow
async def test_a_restarted_server_answers_what_was_queued_and_ends_what_was_running(start_server, client):
    server = start_server("scripted:?tokens_per_s=20&tokens=300&slots=1", CHATSVC_SERVER_GRACE_S="1")
    api = Api(client, server.base_url)
    running, waiting = await api.start(), await api.start()
    await read(client, api.stream_url(running), cut=lambda seen: len(seen.text) > 30)
    server.kill()
    server.start()
    async with asyncio.timeout(60):
        rendered = await read_to_the_end(client, api.stream_url(running), pause_s=0.2)
    assert rendered.end.data["code"] == "worker_lost"
    assert rendered.text == (await api.message_of(running))["content"] != ""
    begun = await read(client, api.stream_url(waiting), cut=lambda seen: len(seen.text) > 5)
    assert begun.text
    await api.call("POST", f"/v1/responses/{waiting['response_id']}/stop")
    assert (await read_to_the_end(client, api.stream_url(waiting))).end.data["finish_reason"] == "stopped"


@pytest.mark.slow
async def test_sigterm_with_100_open_streams_finishes_the_replies_and_is_gone_in_time(start_server, client):
    server = start_server("scripted:?tokens_per_s=30&tokens=450&slots=128", CHATSVC_SERVER_GRACE_S="60")
    apis = [Api(client, server.base_url) for _ in range(34)]
    replies = [(api, reply) for api in apis for reply in await asyncio.gather(*(api.start() for _ in range(3)))][:100]
    async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=200)) as streams:
        readers = [asyncio.create_task(read(streams, api.stream_url(reply))) for api, reply in replies]
        async with asyncio.timeout(60):
            while "chatsvc_streams_open 100.0" not in (await apis[0].call("GET", "/metrics")).text:
                await asyncio.sleep(0.02)
        stopping = asyncio.create_task(asyncio.to_thread(server.stop, 60))
        while (await apis[0].call("GET", "/readyz")).status_code != 503:
            await asyncio.sleep(0.01)
        refused = await apis[0].send(replies[0][1]["conversation_id"], "Late.")
        assert (refused.status_code, refused.json()["code"]) == (503, "draining")
        seen = await asyncio.gather(*readers)
        assert await stopping == 0
    assert {rendered.end.name for rendered in seen} == {"done"}
    server.start()
    for (api, reply), rendered in zip(replies, seen, strict=True):
        assert rendered.text == (await api.message_of(reply))["content"]


@pytest.mark.slow
async def test_sigterm_hands_over_what_cannot_finish_in_the_grace_time(start_server, client):
    server = start_server("scripted:?tokens_per_s=20&tokens=2000&slots=1", CHATSVC_SERVER_GRACE_S="1")
    api = Api(client, server.base_url)
    running, waiting = await api.start(), await api.start()
    seen = await read(client, api.stream_url(running), cut=lambda seen: len(seen.text) > 30)
    reader = asyncio.create_task(read(client, api.stream_url(running)))
    status = await asyncio.to_thread(server.stop, 15)
    assert status == 0
    rendered = await reader
    assert (rendered.end.name, rendered.end.data["code"], rendered.end.data["retryable"]) == ("error", "draining", True)
    server.start()
    stored = await api.message_of(running)
    assert (stored["status"], stored["content"]) == ("failed", rendered.text)
    assert stored["content"].startswith(seen.text)
    state = await api.state(waiting)
    assert state["status"] in {"queued", "streaming"}
    await api.call("POST", f"/v1/responses/{waiting['response_id']}/stop")


@pytest.mark.slow
async def test_a_claim_whose_answer_was_lost_is_found_and_the_run_is_answered(start_server, client):
    server = start_server("scripted:?tokens_per_s=20&tokens=600&slots=1")
    api = Api(client, server.base_url)
    before = await api.start()
    waiting = await api.start(max_tokens=10)
    claim = (
        "UPDATE runs SET status = 'streaming', attempt = attempt + 1, owner = w.id FROM workers w WHERE runs.id = %s"
        " AND status = 'queued'"
    )
    with psycopg.connect(server.database_url, autocommit=True) as connection:
        assert connection.execute(claim, [waiting["response_id"]]).rowcount == 1
    await api.call("POST", f"/v1/responses/{before['response_id']}/stop")
    async with asyncio.timeout(60):
        rendered = await read_to_the_end(client, api.stream_url(waiting), pause_s=0.1)
    assert rendered.end.name == "done"
    assert rendered.text == (await api.message_of(waiting))["content"] != ""
