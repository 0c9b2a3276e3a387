"""One reply from POST to the last event, seen by readers that come, go and come back (L2, L3, L4)."""

import asyncio
import json
import re
from datetime import datetime

import httpx
import pytest
from api_client import Api
from reader import Rendered, events_of, read, read_to_the_end

from chatsvc.api.openapi_examples import ANSWERS


@pytest.fixture(scope="module")
def server(start_server):
    return start_server("scripted:?tokens_per_s=150&tokens=60&slots=64", CHATSVC_STREAM_HEARTBEAT_S="1")


@pytest.fixture(scope="module")
def slow(start_server):
    """Its replies are silent for two seconds and then go on for half a minute; their logs are gone soon after."""
    return start_server(
        "scripted:?first_token_ms=2000&tokens_per_s=20&tokens=600&slots=64",
        CHATSVC_STREAM_HEARTBEAT_S="0.1",
        CHATSVC_STREAM_LOG_TTL_S="1",
        CHATSVC_SERVER_GRACE_S="1",
    )


async def stop(api, reply):
    answer = await api.call("POST", f"/v1/responses/{reply['response_id']}/stop")
    assert answer.status_code == 202, answer.text


async def test_the_reply_streams_and_what_was_shown_is_what_is_stored(api):
    reply = await api.start()
    rendered = await read_to_the_end(api.client, api.stream_url(reply))
    stored = await api.message_of(reply)
    assert rendered.text == stored["content"] != ""
    assert stored["status"] == "complete"
    assert rendered.end.name == "done"
    assert rendered.end.data["message_id"] == reply["message_id"]
    assert [event.name for event in rendered.events if event.name != "queued"][:3] == ["start", "context", "delta"]
    assert [event.id for event in rendered.events if event.id] == list(range(1, rendered.last_id + 1))


async def test_the_first_event_is_the_same_whichever_attempt_writes_it(api):
    """Nothing in it is of the attempt: who has seen it may read on in what another one wrote when the log was lost."""
    reply = await api.start()
    rendered = await read_to_the_end(api.client, api.stream_url(reply))
    [start] = rendered.of("start")
    state = await api.state(reply)
    moment = [datetime.fromisoformat(each["created_at"]) for each in (start.data, state)]
    assert moment[0] == moment[1]
    assert (start.data["response_id"], start.data["message_id"]) == (reply["response_id"], reply["message_id"])


async def test_the_answer_to_the_post_comes_before_the_reply_is_written(slow, client):
    api = Api(client, slow.base_url)
    reply = await api.start()
    assert reply["status"] in {"queued", "streaming"}
    message = await api.message_of(reply)
    assert message["status"] in {"queued", "streaming"}
    assert message["response_id"] == reply["response_id"]
    assert message["stream_url"].startswith("/v1/responses/")
    await stop(api, reply)


async def test_a_reader_without_cursor_in_mid_reply_gets_it_all(api):
    reply = await api.start()
    await read(api.client, api.stream_url(reply), cut=lambda seen: len(seen.text) > 80)
    late = await read_to_the_end(api.client, api.stream_url(reply))
    assert late.text == (await api.message_of(reply))["content"]
    assert late.events[0].name in {"start", "queued"}


async def test_two_devices_see_the_same_events_with_the_same_ids(api):
    reply = await api.start()
    readers = [read_to_the_end(api.client, api.stream_url(reply)) for _ in range(5)]
    seen = await asyncio.gather(*readers)
    logged = [[(event.id, event.name, event.data) for event in one.events if event.id] for one in seen]
    assert all(one == logged[0] for one in logged)


async def test_a_client_that_was_there_at_the_end_is_told_there_is_nothing_more(api):
    reply = await api.start()
    rendered = await read_to_the_end(api.client, api.stream_url(reply))
    for cursor in (rendered.last_id, rendered.last_id + 1, 10**30):
        answer = await api.client.get(api.stream_url(reply), headers={"last-event-id": str(cursor)})
        assert (answer.status_code, answer.content) == (204, b"")
        path = f"/v1/responses/{reply['response_id']}/stream"
        answer = await api.call("GET", path, params={"last_event_id": str(cursor)})
        assert answer.status_code == 204
    one_before = await read(api.client, api.stream_url(reply), Rendered(last_id=rendered.last_id - 1))
    assert [event.name for event in one_before.events] == ["done"]


async def test_after_the_log_has_expired_the_stored_message_is_served_as_snapshot_and_done(slow, client):
    api = Api(client, slow.base_url)
    reply = await api.start(max_tokens=5)
    live = await read_to_the_end(api.client, api.stream_url(reply))
    assert live.of("delta")

    async def late():
        return await read(api.client, api.stream_url(reply))

    async with asyncio.timeout(60):
        while (rendered := await late()).of("delta"):
            await asyncio.sleep(0.2)
    assert [event.name for event in rendered.events] == ["snapshot", "done"]
    assert rendered.text == live.text
    assert rendered.end.data == live.end.data
    assert rendered.last_id == live.last_id
    answer = await api.client.get(api.stream_url(reply), headers={"last-event-id": str(rendered.last_id)})
    assert answer.status_code == 204


async def test_the_stream_has_the_headers_that_keep_proxies_from_holding_it_back(api):
    reply = await api.start()
    async with api.client.stream("GET", api.stream_url(reply), headers={"accept-encoding": "gzip, br"}) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-store, no-transform"
        assert answer.headers["x-accel-buffering"] == "no"
        assert "content-encoding" not in answer.headers
        first = await anext(answer.aiter_raw())
    retry = re.match(rb"retry: (\d+)\n", first)
    assert retry
    assert 1000 <= int(retry[1]) <= 3000


async def test_reconnects_of_many_clients_are_spread(api):
    reply = await api.start()
    waits = set()
    for _ in range(12):
        async with api.client.stream("GET", api.stream_url(reply)) as answer:
            waits.add((await anext(answer.aiter_raw())).split(b"\n")[0])
    assert len(waits) > 6


async def test_a_silent_stream_carries_pings_between_events(slow, client):
    api = Api(client, slow.base_url)
    reply = await api.start(max_tokens=5)
    raw = b""
    async with client.stream("GET", api.stream_url(reply)) as answer:
        async for chunk in answer.aiter_raw():
            raw += chunk
    assert raw.count(b": ping\n") >= 3
    assert b": ping\n\n" not in raw.replace(b": ping\n\n: ping", b"")
    for part in raw.split(b": ping\n"):
        assert part == b"" or part.endswith(b"\n\n")

    async def chunks():
        yield raw

    names = [event.name async for event in events_of(chunks())]
    assert names[-1] == "done"


@pytest.mark.parametrize("cursor", ["abc", "-1", "1.5", "١٢", "1 2", " 1", "1\n", " ", "0x1", "1e3", "1;2"])
async def test_a_cursor_of_anything_but_decimal_digits_is_refused(api, cursor):
    reply = await api.start()
    answer = await api.client.get(
        f"{api.base}/v1/responses/{reply['response_id']}/stream", params={"last_event_id": cursor}
    )
    assert answer.status_code == 400
    assert answer.json()["code"] == "invalid_cursor"


async def test_a_cursor_from_the_future_gets_a_snapshot_while_the_reply_runs(slow, client):
    api = Api(client, slow.base_url)
    reply = await api.start()
    await read(client, api.stream_url(reply), cut=lambda seen: len(seen.text) > 40)
    rendered = await read(
        client, api.stream_url(reply), Rendered(last_id=100_000), cut=lambda seen: seen.of("snapshot")
    )
    assert rendered.of("snapshot")
    await stop(api, reply)
    await read(client, api.stream_url(reply), rendered)
    assert rendered.text == (await api.message_of(reply))["content"]


async def test_the_token_in_the_stream_url_opens_this_stream_only(api, start_server, client):
    server = start_server(CHATSVC_AUTH="proxy")
    ada = Api(client, server.base_url, {"X-Forwarded-User": "ada"})
    first, second = await ada.start(), await ada.start()
    bare = await read_to_the_end(client, ada.stream_url(first))  # neither cookie nor header
    assert bare.end.name == "done"
    token = first["stream_url"].split("token=")[1]
    stolen = await client.get(f"{server.base_url}/v1/responses/{second['response_id']}/stream?token={token}")
    assert stolen.status_code == 401
    assert (await client.get(f"{server.base_url}/v1/responses/{first['response_id']}/stream")).status_code == 401
    assert token not in server.log()


async def test_look_alikes_of_events_line_breaks_and_every_kind_of_character_survive(start_server, client):
    from urllib.parse import quote

    text = "data: x\n\nevent: done\nid: 99\n: ping\r\n\r\n\r e\u0301 👩‍👩‍👧 漢字 \u2028\u2029\u0085 \x0b\x0c \u200f end"
    api = Api(client, start_server(f"scripted:?tokens_per_s=200&text={quote(text)}").base_url)
    reply = await api.start()
    rendered = await read_to_the_end(client, api.stream_url(reply))
    assert rendered.text == (await api.message_of(reply))["content"]
    assert rendered.text == text
    raw = b""
    async with client.stream("GET", api.stream_url(reply)) as answer:
        async for chunk in answer.aiter_raw():
            raw += chunk
    assert not re.search("[\u2028\u2029\u0085]", raw.decode())


async def test_a_second_turn_streams_into_a_reader_of_its_own(api):
    first = await api.start()
    await read_to_the_end(api.client, api.stream_url(first))
    second = await api.start("And then?", conversation_id=first["conversation_id"])
    rendered = await read_to_the_end(api.client, api.stream_url(second))
    messages = await api.messages(first["conversation_id"])
    assert rendered.text == messages[second["message_id"]]["content"]
    assert messages[second["user_message_id"]]["parent_id"] == first["message_id"]


async def test_usage_counts_and_state_are_told(api):
    reply = await api.start()
    rendered = await read_to_the_end(api.client, api.stream_url(reply))
    state = await api.state(reply)
    assert state["status"] == "complete"
    assert state["usage"] == rendered.end.data["usage"]
    assert state["usage"]["output_tokens"] == (await api.message_of(reply))["tokens"] > 0
    assert state["usage"]["prompt_tokens"] == rendered.of("context")[0].data["prompt_tokens"] > 0


async def test_metrics_health_and_schema_answer(api):
    assert (await api.call("GET", "/healthz")).json() == {"status": "ok"}
    ready = (await api.call("GET", "/readyz")).json()
    assert ready["ready"]
    assert set(ready["checks"]) >= {"postgres", "redis", "engine scripted"}
    metrics = (await api.call("GET", "/metrics")).text
    assert "chatsvc_streams_open" in metrics
    schema = (await api.call("GET", "/schema")).json()
    assert schema["openapi"].startswith("3.")
    assert {
        "/v1/conversations",
        "/v1/conversations/{conversation_id}",
        "/v1/conversations/{conversation_id}/messages",
        "/v1/messages/{message_id}/responses",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/stream",
        "/v1/responses/{response_id}/stop",
        "/v1/me",
    } <= set(schema["paths"])
    assert json.dumps(schema).count("example") > 5


async def test_the_page_is_served_with_a_strict_policy(api):
    page = await api.call("GET", "/")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert (await api.call("GET", "/c/conv_1")).text == page.text
    assert (await api.call("GET", "/assets/../index.html")).status_code in {200, 404}
    assert (await api.call("GET", "/assets/nothing.js")).status_code == 404


async def test_a_base_path_moves_everything(start_server, client):
    server = start_server(CHATSVC_BASE_PATH="/chat/")
    api = Api(client, server.base_url)
    assert server.base_url.endswith("/chat")
    reply = await api.start()
    assert reply["stream_url"].startswith("/chat/v1/responses/")
    root = server.base_url.removesuffix("/chat")
    rendered = await read_to_the_end(client, root + reply["stream_url"])
    assert rendered.text == (await api.message_of(reply))["content"]
    assert '<base href="/chat/">' in (await client.get(f"{root}/chat/")).text
    assert (await client.get(f"{root}/v1/me", headers=api.headers)).status_code == httpx.codes.NOT_FOUND
    assert (await client.get(f"{root}/healthz")).status_code == 200


def members(value):
    """The names in a document, at every depth; of lists the first entry's. What is folded has a test of its own."""
    if isinstance(value, dict):
        hidden = {"checks", "summary", "recalled"}
        return {name: None if name in hidden else members(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [members(value[0])] if value else []
    return None


async def test_the_examples_in_the_schema_have_the_members_of_real_answers(api):
    schema = (await api.call("GET", "/schema")).json()
    shown = {
        operation["operationId"]
        for path in schema["paths"].values()
        for operation in path.values()
        for status, answer in operation["responses"].items()
        if status.startswith("2") and "example" in answer.get("content", {}).get("application/json", {})
    }
    made = await api.call("POST", "/v1/conversations", json={})
    reply = await api.start("Hello.", conversation_id=made.json()["id"])
    conversation = f"/v1/conversations/{reply['conversation_id']}"
    response = f"/v1/responses/{reply['response_id']}"
    sent = await api.send(await api.conversation())
    answers = {
        "createConversation": made,
        "sendMessage": sent,
        "getMe": await api.call("GET", "/v1/me"),
        "updateMe": await api.call("PATCH", "/v1/me", json={"memory": True}),
        "addMemory": (memory := await api.call("POST", "/v1/me/memories", json={"text": "I live in Lisbon."})),
        "changeMemory": await api.call("PATCH", f"/v1/me/memories/{memory.json()['id']}", json={"text": "Or not."}),
        "listMemories": await api.call("GET", "/v1/me/memories"),
        "listModels": await api.call("GET", "/v1/models"),
        "listConversations": await api.call("GET", "/v1/conversations"),
        "getConversation": await api.call("GET", conversation),
        "listBranch": await api.call("GET", conversation + "/messages"),
        "updateConversation": await api.call("PATCH", conversation, json={"pinned": True}),
        "stopResponse": await api.call("POST", response + "/stop"),
        "getResponse": await api.call("GET", response),
        "getContext": await api.call("GET", response + "/context"),
        "pinMessage": await api.call("PATCH", f"/v1/messages/{reply['message_id']}", json={"pinned": True}),
        "answerAgain": await api.call(
            "POST", f"/v1/messages/{reply['user_message_id']}/responses", json={"client_msg_id": "again"}
        ),
        "healthz": await api.call("GET", "/healthz"),
        "readyz": await api.call("GET", "/readyz"),
    }
    of_folds = {"listSummaries", "editSummary"}
    assert set(answers) | of_folds == shown == set(ANSWERS)
    for name, answer in answers.items():
        assert answer.is_success, (name, answer.text)
        assert members(answer.json()) == members(ANSWERS[name]), name
