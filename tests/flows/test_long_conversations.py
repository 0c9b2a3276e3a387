"""Conversations and their model's window, from outside: what is refused, what is left out, and that it is told."""

import asyncio
import uuid

import pytest
from api_client import Api
from reader import read_to_the_end

from chatsvc.api.openapi_examples import ANSWERS

WORDS = "the cat sat on the mat and saw a long grey rat "  # 12 tokens
PATIENCE_S = 60


@pytest.fixture(scope="module")
def server(start_server):
    return start_server("scripted:?tokens=24&window=1024")


async def turn(api, conversation_id, content, **body):
    """A whole turn: its POST's answer, and what its stream said."""
    reply = await api.start(content, conversation_id, **body)
    seen = await read_to_the_end(api.client, api.stream_url(reply))
    assert seen.end.name == "done"
    return reply, seen


async def context_of(api, reply):
    answer = await api.call("GET", f"/v1/responses/{reply['response_id']}/context")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_the_event_and_the_route_say_the_same_about_a_prompt(api):
    conversation_id = await api.conversation(system_prompt="Be brief.")
    await turn(api, conversation_id, WORDS)
    reply, seen = await turn(api, conversation_id, "And then?")
    [event] = seen.of("context")
    context = await context_of(api, reply)
    for name in ("condensed", "prompt_tokens", "cached_tokens", "window", "left_out", "parts"):
        assert event.data[name] == context[name], name
    assert (event.data["summary_through"], event.data["retrieved"]) == (None, [])
    assert context["prompt_tokens"] == seen.end.data["usage"]["prompt_tokens"] == sum(context["parts"].values())
    assert 0 < context["cached_tokens"] == seen.end.data["usage"]["cached_tokens"]
    assert (context["window"], context["reply_reserve"], context["left_out"]) == (1024, 256, 0)
    assert {name for name, tokens in context["parts"].items() if tokens} == {"system", "verbatim", "question"}


async def test_what_has_no_room_beside_a_long_question_is_left_out_of_that_prompt_and_told(api):
    conversation_id = await api.conversation(system_prompt="Be brief.")
    for number in range(3):
        await turn(api, conversation_id, f"{number} {WORDS * 8}")
    long, seen = await turn(api, conversation_id, WORDS * 45)
    context = await context_of(api, long)
    assert context["left_out"] == seen.of("context")[0].data["left_out"] > 0
    assert context["prompt_tokens"] + context["reply_reserve"] <= context["window"]
    assert context["parts"]["system"] > 0
    assert context["parts"]["question"] >= 12 * 45
    assert len(await api.messages(conversation_id)) == 8
    # Nothing of it is lost: an edit of the long question into a short one has all of them again.
    parent = (await api.messages(conversation_id))[long["user_message_id"]]["parent_id"]
    short, _ = await turn(api, conversation_id, "And?", parent_id=parent)
    assert (await context_of(api, short))["left_out"] == 0


async def test_a_pinned_message_is_still_shown_when_it_is_folded_and_every_answer_says_that_it_is_pinned(api):
    conversation_id = await api.conversation()
    first, _ = await turn(api, conversation_id, f"The code word is heron. {WORDS * 4}")
    pin = f"/v1/messages/{first['user_message_id']}"
    answer = await api.call("PATCH", pin, json={"pinned": True})
    assert (answer.status_code, answer.json()["pinned"]) == (200, True)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            reply, seen = await turn(api, conversation_id, WORDS * 8)
            if seen.of("context")[0].data["condensed"]:
                break
    context = await context_of(api, reply)
    assert context["summary"]["version"] == 1
    assert context["parts"]["summary"] > 0
    assert context["parts"]["pinned"] >= 12 * 4
    shown = {name: set(value) for name, value in context.items() if isinstance(value, dict)}
    assert shown == {name: set(ANSWERS["getContext"][name]) for name in ("parts", "summary")}
    page = await api.call("GET", f"/v1/conversations/{conversation_id}/messages?leaf={first['message_id']}")
    assert [message["pinned"] for message in page.json()["data"]] == [False, True]
    assert (await api.messages(conversation_id))[first["user_message_id"]]["pinned"] is True
    assert (await api.call("PATCH", pin, json={"pinned": False})).json()["pinned"] is False
    reply, _ = await turn(api, conversation_id, "And now?")
    assert (await context_of(api, reply))["parts"]["pinned"] == 0


@pytest.mark.parametrize(
    ("body", "status"), [({"pinned": None}, 400), ({"pinned": 1}, 400), ({}, 400), ({"content": "x"}, 400)]
)
async def test_a_bad_change_of_a_message_is_refused(api, body, status):
    reply, _ = await turn(api, await api.conversation(), "hi")
    answer = await api.call("PATCH", f"/v1/messages/{reply['message_id']}", json=body)
    assert (answer.status_code, answer.json()["code"]) == (status, "invalid_input")


async def test_a_system_prompt_of_more_than_half_the_window_is_refused_when_it_is_set(api):
    long = WORDS * 50
    refused = await api.call("POST", "/v1/conversations", json={"system_prompt": long})
    document = refused.json()
    assert (refused.status_code, document["code"], document["field"]) == (
        422,
        "system_prompt_too_long",
        "system_prompt",
    )
    assert (document["tokens"] > document["limit"], document["limit"], document["window"]) == (True, 512, 1024)
    assert str(document["tokens"]) in document["detail"]
    conversation_id = await api.conversation(system_prompt=WORDS * 20)
    refused = await api.call("PATCH", f"/v1/conversations/{conversation_id}", json={"system_prompt": long})
    assert (refused.status_code, refused.json()["code"]) == (422, "system_prompt_too_long")
    kept = (await api.call("GET", f"/v1/conversations/{conversation_id}")).json()
    assert kept["system_prompt"] == WORDS * 20
    assert (await api.call("PATCH", f"/v1/conversations/{conversation_id}", json={"title": "x"})).status_code == 200


async def test_what_a_waiting_replys_prompt_is_made_of_is_not_known_yet(start_server, client):
    server = start_server("scripted:?slots=1&tokens_per_s=20&tokens=1000")
    api = Api(client, server.base_url)
    running, waiting = await api.start("one"), await api.start("two")
    assert (await context_of(api, running))["parts"]["question"] > 0
    answer = await api.call("GET", f"/v1/responses/{waiting['response_id']}/context")
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    assert "not known yet" in answer.json()["detail"]
    for reply in (waiting, running):
        await api.call("POST", f"/v1/responses/{reply['response_id']}/stop")
    answer = await api.call("GET", f"/v1/responses/{waiting['response_id']}/context")
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    assert "ended before it had one" in answer.json()["detail"]
    unknown = await api.call("GET", f"/v1/responses/resp_local_{uuid.uuid4().hex}/context")
    assert unknown.status_code == 404
