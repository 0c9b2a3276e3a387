"""What a user has left is told with every message, refused with the numbers, and the same on every replica."""

import math
import re
from datetime import UTC, datetime, timedelta

import pytest
from api_client import Api
from reader import read_to_the_end

# What is expected to cost much goes on for long, so that it is still expected when the next message is sent.
ENGINE = "scripted:?tokens_per_s=200&tokens=20000&window=100000"
BUDGET = {"CHATSVC_TIERS_FREE_BUDGET": "2000", "CHATSVC_TIERS_FREE_BUDGET_WINDOW_S": "3600"}


@pytest.fixture(scope="module")
def server(start_server):
    return start_server(ENGINE, **BUDGET)


@pytest.fixture(scope="module")
def replica(start_server, server):
    return start_server(ENGINE, beside=server, **BUDGET)


async def quota(api):
    return (await api.call("GET", "/v1/me")).json()["quota"]


async def test_each_message_says_what_is_left_and_me_says_the_same(server, client):
    api = Api(client, server.base_url)
    assert (await quota(api))["budget"] == {"limit": 2000, "used": 0, "left": 2000}
    conversation = await api.conversation()
    answer = await api.send(conversation, max_tokens=100)
    left = int(answer.headers["x-ratelimit-remaining-tokens"])
    assert 1600 < left < 1700  # what it is expected to cost is taken off at once
    assert answer.headers["x-ratelimit-limit-tokens"] == "2000"
    assert (answer.headers["x-ratelimit-limit-requests"], answer.headers["x-ratelimit-remaining-requests"]) == (
        "3", "2"
    )  # fmt: skip
    await read_to_the_end(client, api.stream_url(answer.json()))
    run = await api.state(answer.json())
    cost = run["usage"]["prompt_tokens"] - 0.9 * run["usage"]["cached_tokens"] + 3 * run["usage"]["output_tokens"]
    assert (await quota(api))["budget"] == {"limit": 2000, "used": math.ceil(cost), "left": 2000 - math.ceil(cost)}
    again = await api.send(conversation, max_tokens=10)
    assert re.fullmatch(r"1h\d+m\d+s|5\dm\d+s", again.headers["x-ratelimit-reset-tokens"])
    paths = (await client.get(f"{server.base_url}/schema")).json()["paths"]
    described = paths["/v1/conversations/{conversation_id}/messages"]["post"]["responses"]["202"]["headers"]
    assert set(described) == {name for name in again.headers if name.startswith("x-ratelimit-")}


async def test_a_used_up_budget_refuses_on_every_replica_says_when_it_refills_and_loses_nothing(
    server, replica, client
):
    api = Api(client, server.base_url)
    conversation = await api.conversation()
    for _ in range(4):
        await read_to_the_end(client, api.stream_url((await api.send(conversation, max_tokens=100)).json()))
    before = await api.messages(conversation)
    for base_url in (server.base_url, replica.base_url):
        there = Api(client, base_url, api.headers)
        refused = await there.send(conversation)
        assert refused.status_code == 429
        problem = refused.json()
        assert (problem["code"], problem["retryable"], problem["limit"]) == ("quota_exceeded", True, 2000)
        assert problem["left"] < problem["cost"]
        assert "minutes" in problem["detail"]
        assert 3000 < int(refused.headers["retry-after"]) <= 3900
        assert refused.headers["x-ratelimit-remaining-tokens"] == str(problem["left"])
        # The oldest part is free first. All was used in one step of five minutes, or in two that follow.
        told, oldest = (datetime.fromisoformat(each["refills_at"]) for each in (problem, await quota(there)))
        assert told - oldest in {timedelta(), timedelta(minutes=5)}
        assert timedelta(0) <= told - datetime.now(UTC) <= timedelta(seconds=int(refused.headers["retry-after"]))
        # What was streamed can be read, stopped and deleted all the same.
        assert await there.messages(conversation) == before
    smaller = await api.send(conversation, max_tokens=10)
    assert smaller.status_code == 202


async def test_one_users_budget_is_no_other_ones(server, client):
    spender, other = Api(client, server.base_url), Api(client, server.base_url)
    spent = await spender.start(max_tokens=1000)
    assert (await spender.send(await spender.conversation(), max_tokens=1000)).status_code == 429
    begun = await other.start(max_tokens=1000)
    for api, reply in ((spender, spent), (other, begun)):
        await api.call("POST", f"/v1/responses/{reply['response_id']}/stop")


async def test_a_deleted_conversation_gives_no_budget_back(server, client):
    api = Api(client, server.base_url)
    reply = await api.start(max_tokens=100)
    await read_to_the_end(client, api.stream_url(reply))
    used = (await quota(api))["budget"]["used"]
    assert used > 300
    await api.call("DELETE", f"/v1/conversations/{reply['conversation_id']}")
    assert (await quota(api))["budget"]["used"] == used


async def test_a_full_line_is_refused_with_503_and_other_tiers_are_not(start_server, client):
    server = start_server(
        "scripted:?tokens_per_s=1&tokens=100&slots=1", CHATSVC_TIERS_FREE_MAX_QUEUED="2", CHATSVC_SERVER_GRACE_S="1"
    )
    apis = [Api(client, server.base_url) for _ in range(4)]
    for api in apis[:3]:  # one runs, two wait
        await api.start()
    refused = await apis[3].send(await apis[3].conversation())
    assert (refused.status_code, refused.json()["code"]) == (503, "queue_full")
    assert int(refused.headers["retry-after"]) > 0
    pro = Api(client, server.base_url, {"x-forwarded-user": "pat", "x-forwarded-tier": "pro"})
    assert (await pro.start())["status"] == "queued"
    metrics = (await client.get(f"{server.base_url}/metrics")).text
    assert 'chatsvc_refused_total{code="queue_full",tier="free"} 1.0' in metrics
    assert "chatsvc_degradation_step{" in metrics
