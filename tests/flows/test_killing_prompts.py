"""A prompt that ends every process that begins it takes three of them down, and no more (L6)."""

import asyncio

import pytest
from api_client import Api
from reader import read_to_the_end

from chatsvc.run import MOST_LOSSES

# Not before the POST is answered, which may be by the process that is to go.
KILLS = "scripted:?tokens=20&first_token_ms=500&fault=exit@0&fault_on=Farewell"
LEASE = {"CHATSVC_LEASE_RENEW_S": "1", "CHATSVC_LEASE_TTL_S": "3"}


@pytest.mark.slow
async def test_a_prompt_that_kills_its_workers_leaves_the_service_standing_and_is_failed_and_retryable(
    start_server, client
):
    first = start_server(KILLS, **LEASE)
    servers = [first, *(start_server(KILLS, beside=first, **LEASE) for _ in range(MOST_LOSSES))]
    reply = await Api(client, first.base_url, {"x-forwarded-user": "eve"}).start("Farewell")

    async with asyncio.timeout(120):
        while len(alive := [server for server in servers if server.exit_status is None]) > 1:
            await asyncio.sleep(0.1)
    [survivor] = alive
    api = Api(client, survivor.base_url, {"x-forwarded-user": "eve"})
    async with asyncio.timeout(60):
        rendered = await read_to_the_end(client, api.stream_url(reply), pause_s=0.1)
    assert (rendered.end.name, rendered.end.data["code"], rendered.end.data["retryable"]) == (
        "error",
        "worker_lost",
        True,
    )
    assert rendered.end.data["message"].startswith(f"{MOST_LOSSES} times")
    stored = await api.message_of(reply)
    assert (stored["status"], stored["content"], stored["error_code"]) == ("failed", "", "worker_lost")

    others = Api(client, survivor.base_url)
    answered = await read_to_the_end(client, others.stream_url(await others.start("Hello")))
    assert answered.end.name == "done"
    assert survivor.exit_status is None
    assert sorted(server.exit_status for server in servers if server is not survivor) == [70] * MOST_LOSSES
