"""A model whose server is not there when the service starts is waited for, and keeps nobody else waiting."""

import asyncio
import contextlib
import itertools
import json
import re
from http import HTTPStatus

import httpx
import pytest
from api_client import Api
from reader import read_to_the_end
from server import ServerFailed, ServerProcess, free_port

KEY = "sesame"
CONFIG = """
[models.here]
engine = "scripted:?tokens=5"
default = true

[models.there]
engine = "openai:http://127.0.0.1:{port}/v1#far"
"""


def answered(status, body):
    text = body if isinstance(body, str) else json.dumps(body)
    kind = "text/event-stream" if isinstance(body, str) else "application/json"
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {kind}\r\nconnection: close"
    return f"{head}\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode()


def reply(text):
    events = [
        {"choices": [{"index": 0, "delta": {"content": text}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    ]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


@contextlib.asynccontextmanager
async def far_server(port, *, key=KEY, hangs_at=None):
    """The least that speaks OpenAI's protocol: one model with a window of its own, one key, and one reply.

    ``hangs_at``: the request, counted from 1, that gets no answer before the asker goes away.
    """
    requests = itertools.count(1)

    async def serve(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        # Read whole: a connection that is closed with something unread in it is reset, and takes the answer with it.
        await reader.readexactly(int(found[1]) if (found := re.search(r"(?i)content-length: (\d+)", head)) else 0)
        if next(requests) == hangs_at:
            await reader.read()
        elif f"authorization: Bearer {key}" not in head:
            writer.write(answered(401, {"error": {"message": "no"}}))
        elif head.startswith("GET /v1/models "):
            writer.write(answered(200, {"data": [{"id": "far", "max_model_len": 12_000}]}))
        else:
            writer.write(answered(200, reply("Words from afar.")))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", port):
        yield


def configured(tmp_path, text):
    path = tmp_path / "chatsvc.toml"
    path.write_text(text)
    return {"CHATSVC_CONFIG": str(path), "CHATSVC_OPENAI_API_KEY": KEY}


async def model(api, name):
    [found] = [model for model in (await api.call("GET", "/v1/models")).json()["data"] if model["id"] == name]
    return found


async def ready(api, name):
    async with asyncio.timeout(90):
        while not (await model(api, name))["ready"]:
            await asyncio.sleep(0.1)


async def text_of(client, api, **body):
    reply = await api.start(**body)
    return (await read_to_the_end(client, api.stream_url(reply))).text


async def test_the_others_are_served_meanwhile_and_it_is_when_its_server_has_come(start_server, client, tmp_path):
    port = free_port()
    server = start_server("", **configured(tmp_path, CONFIG.format(port=port)))
    api = Api(client, server.base_url)
    assert await text_of(client, api) != ""

    there = await model(api, "there")
    assert (there["ready"], there["window"]) == (False, None)
    checks = (await api.call("GET", "/readyz")).json()["checks"]
    assert checks["engine here"] == "ok"
    assert f"127.0.0.1:{port}/v1 cannot be reached" in checks["engine there"]
    metrics = (await api.call("GET", "/metrics")).text
    assert 'chatsvc_engine_ready{model="there"} 0.0' in metrics
    assert 'chatsvc_engine_ready{model="here"} 1.0' in metrics
    conversation = await api.conversation(model="there")
    refused = await api.send(conversation)
    assert (refused.status_code, refused.json()["code"]) == (503, "engine_unavailable")
    assert refused.json()["retryable"] is True
    [warning] = [json.loads(line) for line in server.log().splitlines() if "Not every model" in line]
    assert (warning["level"], warning["models"]) == ("warning", ["there"])

    async with far_server(port):
        await ready(api, "there")
        assert (await model(api, "there"))["window"] == 12_000
        assert await text_of(client, api, conversation_id=conversation) == "Words from afar."


def beside(database_url, redis_server, tmp_path, env, engine="", name="data"):
    return ServerProcess(tmp_path / name, env, engine=engine, database_url=database_url, redis_url=redis_server)


async def told(api, part, words):
    """What ``/readyz`` says of a part, once that has these words in it."""
    async with asyncio.timeout(90):
        while words not in (said := (await api.call("GET", "/readyz")).json()["checks"][part]):
            await asyncio.sleep(0.1)
    return said


async def alive(server, client):
    """It answers, whether or not it is ready."""
    async with asyncio.timeout(60):
        while True:
            assert server.exit_status is None, server.log()
            with contextlib.suppress(httpx.TransportError):
                return (await client.get(f"{server.base_url}/healthz")).status_code
            await asyncio.sleep(0.1)


async def test_a_service_without_any_model_yet_waits_for_one_and_says_so(databases, redis_server, client, tmp_path):
    port = free_port()
    env = {"CHATSVC_AUTH": "proxy", "CHATSVC_OPENAI_API_KEY": KEY}
    with databases.one() as database:
        server = beside(database, redis_server, tmp_path, env, f"openai:http://127.0.0.1:{port}/v1#far")
        server.launch()
        try:
            assert await alive(server, client) == HTTPStatus.OK
            api = Api(client, server.base_url)
            unready = await api.call("GET", "/readyz")
            assert unready.status_code == 503
            assert "cannot be reached" in unready.json()["checks"]["engine far"]
            assert "No model can be used yet" in server.log()
            conversation = await api.conversation()
            assert (await api.send(conversation)).json()["code"] == "engine_unavailable"
            async with far_server(port, key="another"):
                assert "set CHATSVC_OPENAI_API_KEY" in await told(api, "engine far", "401")
            async with far_server(port):
                await asyncio.to_thread(server.wait_ready, 90)
                assert await text_of(client, api, conversation_id=conversation) == "Words from afar."
        finally:
            await asyncio.to_thread(server.stop_if_running)


async def test_from_its_first_answer_on_a_service_knows_which_models_are_away(
    databases, redis_server, client, tmp_path
):
    port = free_port()
    slow = f'[models.near]\nengine = "openai:http://127.0.0.1:{port}/v1#far"\n'
    env = configured(tmp_path, slow + CONFIG.format(port=free_port())) | {"CHATSVC_AUTH": "proxy"}
    with databases.one() as database:
        server = beside(database, redis_server, tmp_path, env)
        # Started, and then slow to say how it is: what comes after it must be known all the same.
        async with far_server(port, hangs_at=2):
            server.launch()
            try:
                await alive(server, client)
                api = Api(client, server.base_url)
                checks = (await api.call("GET", "/readyz")).json()["checks"]
                assert "cannot be reached" in checks["engine there"]
                assert checks["engine here"] == "ok"
                refused = await api.send(await api.conversation(model="there"))
                assert refused.json()["code"] == "engine_unavailable"
            finally:
                await asyncio.to_thread(server.stop_if_running)


async def test_a_server_that_is_there_and_wants_another_key_ends_the_start_with_what_to_do(
    databases, redis_server, tmp_path
):
    port = free_port()
    with databases.one() as database:
        env = configured(tmp_path, CONFIG.format(port=port)) | {"CHATSVC_OPENAI_API_KEY": "open"}
        server = beside(database, redis_server, tmp_path, env)
        async with far_server(port):
            with pytest.raises(ServerFailed, match="ended with"):
                await asyncio.to_thread(server.start, 60)
    assert "set CHATSVC_OPENAI_API_KEY" in server.log()


async def test_a_message_to_a_replica_whose_model_is_away_is_answered_by_one_that_has_it(
    databases, redis_server, client, tmp_path
):
    port = free_port()
    env = {"CHATSVC_AUTH": "proxy"}
    lacking = configured(tmp_path, CONFIG.format(port=free_port())) | env
    with databases.one() as database:
        first = beside(database, redis_server, tmp_path, lacking)
        (tmp_path / "second").mkdir()
        having = configured(tmp_path / "second", CONFIG.format(port=port)) | env
        second = beside(database, redis_server, tmp_path, having, name="second-data")
        try:
            async with far_server(port):
                await asyncio.gather(asyncio.to_thread(first.start, 60), asyncio.to_thread(second.start, 60))
                api = Api(client, first.base_url)
                await ready(api, "there")
                assert (await api.call("GET", "/readyz")).json()["checks"]["engine there"] != "ok"
                conversation = await api.conversation(model="there")
                assert await text_of(client, api, conversation_id=conversation) == "Words from afar."
                await asyncio.to_thread(second.stop)
                async with asyncio.timeout(60):
                    while (await model(api, "there"))["ready"]:
                        await asyncio.sleep(0.1)
                assert (await api.send(conversation)).json()["code"] == "engine_unavailable"
        finally:
            await asyncio.to_thread(first.stop_if_running)
            await asyncio.to_thread(second.stop_if_running)
