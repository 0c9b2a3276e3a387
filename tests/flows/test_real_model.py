"""The laptop's engine with its real model, through the whole service."""

import asyncio
import time

import pytest
from api_client import Api
from reader import Rendered, read, read_to_the_end
from tries import best_of

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]

CUTS = 5


@pytest.fixture(scope="module")
def server(start_server):
    return start_server("transformers:", ready_s=300)


async def test_the_capital_of_france_is_paris(api):
    reply = await api.start("What is the capital of France?", temperature=0)
    rendered = await read_to_the_end(api.client, api.stream_url(reply))
    assert "Paris" in rendered.text
    assert rendered.text == (await api.message_of(reply))["content"]


async def test_20_replies_of_the_real_model_cut_five_times_each_are_shown_as_they_are_stored(server, client, seeded):
    async def one(api, number):
        reply = await api.start(f"Tell me {number} things about the sea.", max_tokens=60)
        rendered, cuts = Rendered(), 0
        while rendered.end is None:
            at = len(rendered.events) + seeded.randint(1, 2)
            cut = (lambda seen, at=at: len(seen.events) >= at) if cuts < CUTS else None
            await read(client, api.stream_url(reply), rendered, cut=cut)
            cuts += rendered.end is None
            await asyncio.sleep(seeded.uniform(0, 0.1))
        stored = await api.message_of(reply)
        assert stored["status"] == "complete"
        assert rendered.text == stored["content"] != ""
        return cuts

    apis = [Api(client, server.base_url) for _ in range(10)]
    cuts = await asyncio.gather(*(one(api, number) for number in range(2) for api in apis))
    assert len(cuts) == 20
    assert min(cuts) >= CUTS


async def test_a_stop_frees_the_real_engine_within_a_second(api):
    idle = 'chatsvc_engine_running{model="SmolLM2-135M-Instruct"} 0.0'

    async def freed_after_s():
        reply = await api.start("Write a long story about a lighthouse.", max_tokens=500)
        await read(api.client, api.stream_url(reply), cut=lambda seen: len(seen.text) > 30)
        await api.call("POST", f"/v1/responses/{reply['response_id']}/stop")
        rendered = await read_to_the_end(api.client, api.stream_url(reply))
        assert rendered.end.data["finish_reason"] == "stopped"
        assert rendered.text == (await api.message_of(reply))["content"]
        ended = time.monotonic()
        async with asyncio.timeout(60):
            while idle not in (await api.call("GET", "/metrics")).text:
                await asyncio.sleep(0.05)
        return time.monotonic() - ended

    assert await best_of(3, freed_after_s, enough=1) < 1


async def test_the_second_turn_is_answered_with_the_first_in_mind_and_counts_what_was_cached(api):
    first = await api.start("My name is Ada. Say hello.", max_tokens=20)
    await read_to_the_end(api.client, api.stream_url(first))
    second = await api.start("Go on.", conversation_id=first["conversation_id"], max_tokens=20)
    await read_to_the_end(api.client, api.stream_url(second))
    used = [(await api.state(reply))["usage"] for reply in (first, second)]
    assert used[1]["prompt_tokens"] > used[0]["prompt_tokens"] + used[0]["output_tokens"]
    assert 0 <= used[1]["cached_tokens"] <= used[1]["prompt_tokens"]
