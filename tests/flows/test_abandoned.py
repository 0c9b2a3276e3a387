"""Replies that nobody waits for: stopped where the tier says so, and only when nobody truly does."""

import asyncio

import pytest
from api_client import Api
from reader import read, read_to_the_end


@pytest.fixture(scope="module")
def server(start_server):
    # Presence is noted every five seconds, so a limit has to be longer than that.
    return start_server("scripted:?tokens_per_s=20&tokens=2000", CHATSVC_TIERS_FREE_ABANDON_AFTER_S="7")


def user(client, server, tier):
    api = Api(client, server.base_url)
    api.headers["x-forwarded-tier"] = tier
    return api


async def says_that_nobody_read_it(api, reply):
    message, state = await api.message_of(reply), await api.state(reply)
    assert (message["status"], message["finish_reason"], message["error_code"]) == ("stopped", "stopped", "abandoned")
    assert state["error"]["code"] == "abandoned"
    assert state["error"]["message"] == "Nobody was reading, so it was stopped."
    end = (await read_to_the_end(api.client, api.stream_url(reply))).end
    assert (end.name, end.data["finish_reason"], end.data["error_code"]) == ("done", "stopped", "abandoned")


@pytest.mark.slow
async def test_a_free_reply_without_a_reader_is_stopped_and_its_text_kept(server, client):
    free = user(client, server, "free")
    left, never_read, background = await asyncio.gather(
        free.start("One."), free.start("Two."), free.start("Three.", background=True)
    )
    pro = user(client, server, "pro")
    kept = await pro.start("Four.")
    seen = await read(client, free.stream_url(left), cut=lambda seen: len(seen.text) > 30)
    async with asyncio.timeout(60):
        # Asked, not read: who reads it waits for it.
        while {(await free.state(reply))["status"] for reply in (left, never_read)} != {"stopped"}:
            await asyncio.sleep(0.2)
    assert (await free.message_of(left))["content"].startswith(seen.text)
    for reply in (left, never_read):
        await says_that_nobody_read_it(free, reply)
    assert (await free.state(background))["status"] == "streaming"
    assert (await pro.state(kept))["status"] == "streaming"
    assert "chatsvc_runs_abandoned_total 2.0" in (await free.call("GET", "/metrics")).text
    for api, reply in ((free, background), (pro, kept)):
        await api.call("POST", f"/v1/responses/{reply['response_id']}/stop")
        end = (await read_to_the_end(client, api.stream_url(reply))).end
        assert (end.data["finish_reason"], end.data.get("error_code")) == ("stopped", None), "stopped by hand"
        assert (await api.message_of(reply))["error_code"] is None


@pytest.mark.slow
async def test_a_reader_that_keeps_coming_back_keeps_its_reply_on_any_replica(start_server, server, client):
    replica = start_server("scripted:?", beside=server, CHATSVC_ROLES="api")
    here = user(client, server, "free")
    there = Api(client, replica.base_url, here.headers)
    reply = await here.start("Five.", max_tokens=300)
    rendered = await read_to_the_end(
        client, there.stream_url(reply), cut=lambda seen: len(seen.events) % 40 == 0, pause_s=1.0
    )
    assert rendered.end.data["finish_reason"] == "length"
    assert rendered.text == (await here.message_of(reply))["content"]
