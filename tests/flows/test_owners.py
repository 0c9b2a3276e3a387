"""No user sees another's: owner, other and anonymous on every route and every id (L10)."""

import json
import re
import uuid

import pytest
from api_client import Api
from reader import read_to_the_end

ROUTES = [
    ("GET", "/v1/conversations/{conversation}", None),
    ("GET", "/v1/conversations/{conversation}/messages", None),
    ("GET", "/v1/conversations/{conversation}/messages?leaf={message}", None),
    ("PATCH", "/v1/conversations/{conversation}", {"title": "mine"}),
    ("PATCH", "/v1/conversations/{conversation}", {"head_message_id": "{message}"}),
    ("POST", "/v1/conversations/{conversation}/messages", {"content": "hi", "client_msg_id": "{fresh}"}),
    (
        "POST",
        "/v1/conversations/{conversation}/messages",
        {"content": "hi", "client_msg_id": "{fresh}", "parent_id": "{message}"},
    ),
    ("POST", "/v1/messages/{user_message}/responses", {"client_msg_id": "{fresh}"}),
    ("POST", "/v1/messages/{message}/responses", {"client_msg_id": "{fresh}"}),
    ("GET", "/v1/responses/{response}", None),
    ("GET", "/v1/responses/{response}/context", None),
    ("GET", "/v1/conversations/{conversation}/summaries", None),
    ("GET", "/v1/conversations/{conversation}/summaries?leaf={message}", None),
    ("PATCH", "/v1/messages/{message}", {"pinned": True}),
    ("GET", "/v1/responses/{response}/stream", None),
    ("POST", "/v1/responses/{response}/stop", None),
    ("DELETE", "/v1/conversations/{conversation}", None),
    ("PATCH", "/v1/me/memories/{memory}", {"text": "I live in Porto."}),
    ("DELETE", "/v1/me/memories/{memory}", None),
]
SUMMARY = "/v1/conversations/{conversation}/summaries/{message}"
"""There is one after a fold only: what others get of it is tested with the rest of summaries, in test_summaries.py."""


@pytest.fixture(scope="module")
def server(start_server):
    return start_server("scripted:?tokens_per_s=500&tokens=10")


async def finished_reply(api):
    reply = await api.start()
    await read_to_the_end(api.client, api.stream_url(reply))
    memory = (await api.call("POST", "/v1/me/memories", json={"text": "I live in Lisbon."})).json()
    return {
        "memory": memory["id"],
        "conversation": reply["conversation_id"],
        "message": reply["message_id"],
        "user_message": reply["user_message_id"],
        "response": reply["response_id"],
    }


def filled(template, ids):
    text = json.dumps(template)
    for name, value in {**ids, "fresh": uuid.uuid4().hex}.items():
        text = text.replace(f"{{{name}}}", value)
    return json.loads(text)


async def call(api, route, ids):
    method, path, body = route
    kwargs = {} if body is None else {"json": filled(body, ids)}
    return await api.call(method, filled(path, ids), **kwargs)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route[0]} {route[1]} {route[2] or ''}")
async def test_a_route_answers_its_owner_and_nobody_else(api, client, server, route):
    ids = await finished_reply(api)
    before = await api.messages(ids["conversation"])
    other = Api(client, server.base_url)
    await finished_reply(other)
    anonymous = Api(client, server.base_url, {"x-nobody": "1"})
    assert (await call(anonymous, route, ids)).status_code == 401
    refused = await call(other, route, ids)
    assert refused.status_code == 404
    unknown = {name: value[:-8] + "00000000" for name, value in ids.items()}
    never_was = await call(other, route, unknown)
    # An id that never was and another's id are told apart by nothing.
    assert refused.json() == never_was.json()
    assert await api.messages(ids["conversation"]) == before
    assert (await call(api, route, ids)).status_code in {200, 201, 202, 204}


async def test_a_summary_is_rewritten_by_nobody_unknown(api, client, server):
    ids = await finished_reply(api)
    anonymous = Api(client, server.base_url, {"x-nobody": "1"})
    assert (await call(anonymous, ("PUT", SUMMARY, {"text": "x", "version": 1}), ids)).status_code == 401


async def test_every_route_with_an_id_is_asked_here(client, server):
    paths = (await client.get(f"{server.base_url}/schema")).json()["paths"]
    served = {(method.upper(), path) for path, item in paths.items() if "{" in path for method in item}
    asked = {(method, path) for method, path, _ in ROUTES} | {("PUT", SUMMARY)}
    assert unnamed(served) == unnamed(asked)


def unnamed(routes):
    """Without the names of the ids, and without queries."""
    return {(method, re.sub(r"\{.*?\}", "{}", path.partition("?")[0])) for method, path in routes}


async def test_the_other_users_parent_is_no_parent(api, client, server):
    ids = await finished_reply(api)
    other = Api(client, server.base_url)
    conversation_id = await other.conversation()
    answer = await other.send(conversation_id, "hi", parent_id=ids["message"])
    assert (answer.status_code, answer.json()["code"]) == (422, "unknown_parent")
    change = {"head_message_id": ids["message"]}
    answer = await other.call("PATCH", f"/v1/conversations/{conversation_id}", json=change)
    assert answer.status_code == 422


async def test_lists_hold_the_callers_own_only(api, client, server):
    ids = await finished_reply(api)
    other = Api(client, server.base_url)
    assert (await other.call("GET", "/v1/conversations")).json()["data"] == []
    mine = (await api.call("GET", "/v1/conversations")).json()["data"]
    assert [conversation["id"] for conversation in mine] == [ids["conversation"]]
    me = (await other.call("GET", "/v1/me")).json()
    assert me["usage"]["prompt_tokens"] == 0


async def test_the_same_client_msg_id_of_two_users_are_two_messages(api, client, server):
    other = Api(client, server.base_url)
    first = await api.start(client_msg_id="mine")
    second = await other.start(client_msg_id="mine")
    assert first["response_id"] != second["response_id"]


async def test_identity_follows_the_header_within_one_connection(client, server):
    for name in ("ada", "bob", "ada"):
        me = await client.get(f"{server.base_url}/v1/me", headers={"x-forwarded-user": name})
        assert me.json()["user"]["id"] == name
    assert (await client.get(f"{server.base_url}/v1/me")).status_code == 401


async def test_the_tier_comes_from_the_header_and_unknown_ones_are_free(client, server):
    for given, tier in (("pro", "pro"), ("plus", "plus"), ("platinum", "free"), (None, "free")):
        headers = {"x-forwarded-user": "tia"} | ({"x-forwarded-tier": given} if given else {})
        assert (await client.get(f"{server.base_url}/v1/me", headers=headers)).json()["tier"] == tier


async def test_headers_of_an_untrusted_peer_are_worth_nothing(start_server, client):
    server = start_server(CHATSVC_AUTH_TRUSTED_PROXIES="10.0.0.0/8")
    answer = await client.get(
        f"{server.base_url}/v1/me", headers={"x-forwarded-user": "ada", "x-forwarded-for": "10.0.0.1"}
    )
    assert (answer.status_code, answer.json()["code"]) == (401, "not_authenticated")
