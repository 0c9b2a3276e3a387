"""Bad input gets a problem document that names the field, and writes nothing."""

import asyncio
import json

import pytest
from api_client import Api
from reader import read_to_the_end


@pytest.fixture(scope="module")
def server(start_server):
    return start_server("scripted:?tokens_per_s=500&tokens=20&window=512", CHATSVC_SERVER_MAX_CONTENT_CHARS="5000")


def problem(answer, status, code):
    """Check the document's form; returns it."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert document["code"] == code
    assert document["status"] == status
    assert {"type", "title", "detail", "retryable"} <= set(document)
    return document


MESSAGE = {"content": "hi", "client_msg_id": "1"}


@pytest.mark.parametrize(
    ("change", "status", "code", "field"),
    [
        ({"content": ""}, 400, "invalid_input", "content"),
        ({"content": "  \n\t "}, 400, "invalid_input", "content"),
        ({"content": 7}, 400, "invalid_input", "content"),
        ({"content": None}, 400, "invalid_input", "content"),
        ({"content": ["a"]}, 400, "invalid_input", "content"),
        ({"content": "x" * 5001}, 400, "invalid_input", "content"),
        ({"content": "word " * 900}, 422, "message_too_long", "content"),
        ({"client_msg_id": ""}, 400, "invalid_input", "client_msg_id"),
        ({"client_msg_id": "x" * 201}, 400, "invalid_input", "client_msg_id"),
        ({"client_msg_id": "a\x00b"}, 400, "invalid_input", "client_msg_id"),
        ({"client_msg_id": 5}, 400, "invalid_input", "client_msg_id"),
        ({"parent_id": "msg_" + "0" * 32}, 422, "unknown_parent", "parent_id"),
        ({"parent_id": "x" * 500}, 400, "invalid_input", "parent_id"),
        ({"parent_id": 3}, 400, "invalid_input", "parent_id"),
        ({"model": "no-such-model"}, 422, "unknown_model", "model"),
        ({"max_tokens": 0}, 400, "invalid_input", "max_tokens"),
        ({"max_tokens": -5}, 400, "invalid_input", "max_tokens"),
        ({"max_tokens": "many"}, 400, "invalid_input", "max_tokens"),
        ({"max_tokens": 100_000}, 422, "message_too_long", "content"),
        ({"temperature": -0.1}, 400, "invalid_input", "temperature"),
        ({"temperature": 2.1}, 400, "invalid_input", "temperature"),
        ({"temperature": "hot"}, 400, "invalid_input", "temperature"),
        ({"background": "yes"}, 400, "invalid_input", "background"),
        ({"contents": "hi"}, 400, "invalid_input", "contents"),
    ],
)
async def test_a_bad_message_is_refused_with_its_field_and_nothing_is_written(api, change, status, code, field):
    conversation_id = await api.conversation()
    answer = await api.call("POST", f"/v1/conversations/{conversation_id}/messages", json={**MESSAGE, **change})
    assert problem(answer, status, code)["field"] == field
    assert await api.messages(conversation_id) == {}
    good = await api.send(conversation_id, "hi", client_msg_id="1")
    assert good.status_code == 202


@pytest.mark.parametrize("missing", ["content", "client_msg_id"])
async def test_a_missing_field_is_named(api, missing):
    conversation_id = await api.conversation()
    body = {name: value for name, value in MESSAGE.items() if name != missing}
    answer = await api.call("POST", f"/v1/conversations/{conversation_id}/messages", json=body)
    assert problem(answer, 400, "invalid_input")["field"] == missing


@pytest.mark.parametrize(
    "body", [b"", b"{", b"nonsense", b"[]", b'"text"', b"\xff\xfe", b'{"content": "\xff"}', b"null"]
)
async def test_a_body_that_is_no_json_object_is_refused(api, body):
    conversation_id = await api.conversation()
    answer = await api.client.post(
        f"{api.base}/v1/conversations/{conversation_id}/messages",
        content=body,
        headers={**api.headers, "content-type": "application/json"},
    )
    problem(answer, 400, "invalid_input")


async def test_a_body_that_is_missing_is_said_to_be(api):
    document = problem(await api.call("POST", "/v1/conversations"), 400, "invalid_input")
    assert document["field"] == "body"
    assert document["detail"].startswith("body: is missing; send a JSON object")


async def test_the_refusal_of_an_unknown_field_lists_those_there_are(api):
    answer = await api.call("POST", "/v1/conversations", json={"name": "x"})
    assert problem(answer, 400, "invalid_input")["detail"].endswith("fields are model, system_prompt, temporary, title")


async def test_unknown_paths_and_methods_are_told_what_there_is(api):
    nowhere = problem(await api.call("GET", "/v1/nothing"), 404, "not_found")
    assert "/v1/nothing" in nowhere["detail"]
    assert "/schema" in nowhere["detail"]
    refused = problem(await api.call("PUT", "/v1/conversations"), 405, "method_not_allowed")
    assert refused["detail"] == "PUT is not allowed here; allowed: GET, OPTIONS, POST."


async def test_metrics_name_their_character_set_once(api):
    answer = await api.call("GET", "/metrics")
    assert answer.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"


async def test_the_numbers_are_in_the_refusal_of_what_does_not_fit(api):
    conversation_id = await api.conversation()
    answer = await api.send(conversation_id, "word " * 900)
    document = problem(answer, 422, "message_too_long")
    assert document["window"] == 512
    assert document["message_tokens"] > document["limit"] > 0
    assert str(document["message_tokens"]) in document["detail"]
    assert str(document["limit"]) in document["detail"]
    assert await api.messages(conversation_id) == {}


async def test_a_body_over_one_mebibyte_is_refused_unread(api):
    conversation_id = await api.conversation()
    big = {**MESSAGE, "content": "x" * 1_100_000}
    answer = await api.call("POST", f"/v1/conversations/{conversation_id}/messages", json=big)
    document = problem(answer, 413, "payload_too_large")
    assert "1,048,576 bytes" in document["detail"]


async def test_a_body_of_unknown_length_over_one_mebibyte_is_refused_too(api):
    conversation_id = await api.conversation()

    async def chunks():
        for _ in range(20):
            yield b"x" * 100_000

    answer = await api.client.post(
        f"{api.base}/v1/conversations/{conversation_id}/messages",
        content=chunks(),
        headers={**api.headers, "content-type": "application/json"},
    )
    problem(answer, 413, "payload_too_large")


async def test_the_answer_to_nobody_can_not_be_a_parent(api):
    """A user's message takes answers, not messages."""
    reply = await api.start()
    await read_to_the_end(api.client, api.stream_url(reply))
    answer = await api.send(reply["conversation_id"], "hi", parent_id=reply["user_message_id"])
    problem(answer, 422, "unknown_parent")


async def test_a_parent_of_another_conversation_is_unknown(api):
    reply = await api.start()
    await read_to_the_end(api.client, api.stream_url(reply))
    other = await api.conversation()
    answer = await api.send(other, "hi", parent_id=reply["message_id"])
    problem(answer, 422, "unknown_parent")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"title": ""}, "title"),
        ({"title": "x" * 301}, "title"),
        ({"title": 5}, "title"),
        ({"system_prompt": "x" * 100_001}, "system_prompt"),
        ({"temporary": 1}, "temporary"),
        ({"model": ""}, "model"),
        ({"name": "x"}, "name"),
    ],
)
async def test_a_bad_conversation_is_refused_with_its_field(api, body, field):
    answer = await api.call("POST", "/v1/conversations", json=body)
    assert problem(answer, 400, "invalid_input")["field"] == field
    assert (await api.call("GET", "/v1/conversations")).json()["data"] == []


async def test_a_model_that_is_not_served_is_refused_when_it_is_set(api):
    answer = await api.call("POST", "/v1/conversations", json={"model": "no-such-model"})
    assert problem(answer, 422, "unknown_model")["field"] == "model"
    conversation_id = await api.conversation()
    answer = await api.call("PATCH", f"/v1/conversations/{conversation_id}", json={"model": "no-such-model"})
    assert problem(answer, 422, "unknown_model")["field"] == "model"


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "limit=-1", "cursor=nonsense", "cursor=%00"])
async def test_bad_paging_is_refused(api, query):
    answer = await api.call("GET", f"/v1/conversations?{query}")
    problem(answer, 400, "invalid_cursor" if "cursor" in query else "invalid_input")


async def test_a_head_that_is_not_of_this_conversation_is_refused(api):
    reply = await api.start()
    conversation_id = await api.conversation()
    change = {"head_message_id": reply["message_id"]}
    answer = await api.call("PATCH", f"/v1/conversations/{conversation_id}", json=change)
    problem(answer, 422, "unknown_parent")


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/nothing"), ("GET", "/v2"), ("PUT", "/v1/conversations"), ("DELETE", "/v1/me")]
)
async def test_unknown_paths_and_methods_get_a_problem_document_too(api, method, path):
    answer = await api.call(method, path)
    problem(answer, 404 if method == "GET" else 405, "not_found" if method == "GET" else "method_not_allowed")


async def test_nul_and_lone_surrogates_become_replacement_characters(api):
    conversation_id = await api.conversation()
    raw = json.dumps({"content": "a\x00b", "client_msg_id": "n"})
    answer = await api.client.post(
        f"{api.base}/v1/conversations/{conversation_id}/messages",
        content=raw,
        headers={**api.headers, "content-type": "application/json"},
    )
    assert answer.status_code == 202
    messages = await api.messages(conversation_id)
    assert messages[answer.json()["user_message_id"]]["content"] == "a\ufffdb"


async def test_another_site_and_a_foreign_host_name_are_refused(api, start_server, client):
    answer = await client.post(
        f"{api.base}/v1/conversations", json={}, headers={**api.headers, "origin": "https://evil.example"}
    )
    problem(answer, 403, "not_allowed")
    local = start_server(CHATSVC_AUTH="none")
    answer = await client.get(f"{local.base_url}/v1/me", headers={"host": "evil.example"})
    problem(answer, 403, "not_allowed")
    assert (await Api(client, local.base_url).call("GET", "/v1/me")).json()["user"] == {"id": "local"}


async def test_random_bytes_never_get_anything_but_an_honest_refusal(api, seeded):
    conversation_id = await api.conversation()

    async def one(number):
        body = bytes(seeded.randrange(256) for _ in range(seeded.randrange(200)))
        answer = await api.client.request(
            seeded.choice(["POST", "PATCH"]),
            f"{api.base}/v1/conversations/{seeded.choice([conversation_id, 'x', 'conv_%00', '%ff'])}",
            content=body,
            headers={**api.headers, "content-type": "application/json"},
        )
        assert 400 <= answer.status_code < 500, (number, answer.status_code, answer.text)
        assert answer.headers["content-type"] == "application/problem+json"

    await asyncio.gather(*(one(number) for number in range(100)))
