"""One client_msg_id starts one generation, however many POSTs race (L8); and how many replies a user may have open."""

import asyncio

import pytest
from api_client import Api
from reader import read_to_the_end

ENGINE = "scripted:?tokens_per_s=100&tokens=6000&window=30000"
"""A reply of one minute, unless fewer tokens are asked for."""


@pytest.fixture(scope="module")
def server(start_server):
    return start_server(ENGINE)


@pytest.fixture(scope="module")
def replica(start_server, server):
    return start_server(ENGINE, beside=server)


async def test_50_parallel_posts_on_two_replicas_start_one_run(api, replica, client):
    other = Api(client, replica.base_url, api.headers)
    conversation_id = await api.conversation()
    answers = await asyncio.gather(
        *(one.send(conversation_id, "Once.", client_msg_id="the-same", max_tokens=30) for one in [api, other] * 25)
    )
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["response_id"] for answer in answers}) == 1
    messages = await api.messages(conversation_id)
    assert sorted(message["role"] for message in messages.values()) == ["assistant", "user"]
    reply = {**answers[0].json(), "conversation_id": conversation_id}
    rendered = await read_to_the_end(client, api.stream_url(reply))
    assert rendered.text == (await api.message_of(reply))["content"]
    assert len(await api.messages(conversation_id)) == 2


async def test_a_repeated_post_gives_the_same_answer_also_after_the_end(api):
    conversation_id = await api.conversation()
    first = await api.send(conversation_id, "Once.", client_msg_id="again", max_tokens=30)
    reply = {**first.json(), "conversation_id": conversation_id}
    await read_to_the_end(api.client, api.stream_url(reply))
    second = await api.send(conversation_id, "Once.", client_msg_id="again", max_tokens=30)
    assert second.status_code == 202
    for name in ("message_id", "user_message_id", "response_id"):
        assert second.json()[name] == first.json()[name]
    assert second.json()["status"] == "complete"


@pytest.mark.parametrize(
    "change", [{"content": "Other."}, {"max_tokens": 5}, {"temperature": 0.1}, {"parent_id": None}]
)
async def test_the_same_id_with_another_request_is_a_conflict(api, change):
    conversation_id = await api.conversation()
    client_msg_id = f"conflict-{change}"
    body = {"content": "One.", "client_msg_id": client_msg_id, "max_tokens": 30}
    reply = {**(await api.send(conversation_id, **body)).json(), "conversation_id": conversation_id}
    answer = await api.send(conversation_id, **{**body, **change})
    assert (answer.status_code, answer.json()["code"]) == (409, "idempotency_mismatch")
    await read_to_the_end(api.client, api.stream_url(reply))


async def test_a_reader_on_a_replica_that_does_not_write_the_reply_sees_the_same(api, replica, client):
    reply = await api.start(max_tokens=30)
    other = Api(client, replica.base_url, api.headers)
    here, there = await asyncio.gather(
        read_to_the_end(client, api.stream_url(reply)), read_to_the_end(client, other.stream_url(reply))
    )
    logged = [[(event.id, event.name, event.data) for event in one.events if event.id] for one in (here, there)]
    assert logged[0] == logged[1]


async def test_a_message_on_a_branch_whose_reply_runs_is_refused_with_that_reply(api):
    reply = await api.start()
    answer = await api.send(reply["conversation_id"], "Impatient.")
    assert (answer.status_code, answer.json()["code"]) == (409, "conversation_busy")
    assert answer.json()["response_id"] == reply["response_id"]
    await api.call("POST", f"/v1/responses/{reply['response_id']}/stop")
    await read_to_the_end(api.client, api.stream_url(reply))
    assert len(await api.messages(reply["conversation_id"])) == 2


async def test_a_fourth_open_reply_is_refused_with_what_is_open(start_server, client):
    api = Api(client, start_server("scripted:?first_token_ms=30000", CHATSVC_SERVER_GRACE_S="1").base_url)
    replies = [await api.start() for _ in range(3)]
    conversation_id = await api.conversation()
    answer = await api.send(conversation_id)
    assert (answer.status_code, answer.json()["code"]) == (429, "too_many_replies")
    assert sorted(answer.json()["open"]) == sorted(reply["response_id"] for reply in replies)
    assert await api.messages(conversation_id) == {}
    me = (await api.call("GET", "/v1/me")).json()
    assert me["quota"]["open_replies"]["left"] == 0
    for reply in replies:
        await api.call("POST", f"/v1/responses/{reply['response_id']}/stop")
    await asyncio.gather(*(read_to_the_end(client, api.stream_url(reply)) for reply in replies))
    assert (await api.send(conversation_id)).status_code == 202


async def test_of_20_parallel_posts_by_one_user_three_are_taken(start_server, client):
    server = start_server("scripted:?first_token_ms=30000", CHATSVC_SERVER_GRACE_S="1")
    api = Api(client, server.base_url)
    conversations = [await api.conversation() for _ in range(20)]
    answers = await asyncio.gather(*(api.send(conversation_id) for conversation_id in conversations))
    assert sorted(answer.status_code for answer in answers) == [202] * 3 + [429] * 17
