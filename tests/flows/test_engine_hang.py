"""An engine that stops answering, without a model: what the real one's death is in test_core_death.py (L6)."""

import asyncio
import time

import pytest
from reader import read, read_to_the_end
from tries import best_of

SHOWN = 5


@pytest.fixture(scope="module")
def server(start_server):
    # At the pace of a word each 50 ms; every reply hangs its engine after five.
    return start_server(f"scripted:?tokens_per_s=20&tokens=40&fault=hang@{SHOWN}", CHATSVC_SERVER_GRACE_S="1")


async def ready(api):
    return (await api.call("GET", "/readyz")).status_code == 200


async def becomes(api, wanted):
    async with asyncio.timeout(60):
        while await ready(api) is not wanted:
            await asyncio.sleep(0.02)


async def test_a_hung_engine_ends_its_replies_within_10_seconds_and_the_replica_turns_unready_and_comes_back(api):
    async def ended_after_s():
        reply = await api.start("Tell me a story.")
        began = time.monotonic()
        reading = asyncio.create_task(read_to_the_end(api.client, api.stream_url(reply)))
        await becomes(api, False)
        rendered = await reading
        took_s = time.monotonic() - began
        assert (rendered.end.name, rendered.end.data["retryable"]) == ("error", True)
        stored = await api.message_of(reply)
        assert (stored["status"], stored["content"]) == ("failed", rendered.text)
        assert rendered.text
        await becomes(api, True)
        return took_s

    limit_s = 10 + SHOWN / 20
    assert await best_of(2, ended_after_s, enough=limit_s) < limit_s


async def test_while_the_engine_is_away_a_message_is_refused_for_now_and_nothing_is_kept_of_it(api):
    reply = await api.start("Tell me a story.")
    await read(api.client, api.stream_url(reply), cut=lambda seen: seen.text)
    conversation_id = await api.conversation()
    await becomes(api, False)
    async with asyncio.timeout(60):
        while (answer := await api.send(conversation_id)).status_code == 202:
            await read_to_the_end(api.client, api.base + answer.json()["stream_url"])
    assert (answer.status_code, answer.json()["code"], answer.json()["retryable"]) == (503, "engine_unavailable", True)
    assert int(answer.headers["retry-after"]) >= 1
    await becomes(api, True)
