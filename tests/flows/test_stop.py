"""Stop means stop, at every stage, once (L5, L9)."""

import asyncio
import re

import pytest
from api_client import Api
from reader import Rendered, read, read_to_the_end


@pytest.fixture(scope="module")
def server(start_server):
    # 40 tokens at 200 a second: a reply of 200 ms after 60 ms of prefill, so that random stops meet every stage.
    return start_server("scripted:?first_token_ms=60&tokens_per_s=200&tokens=40&slots=32")


@pytest.fixture(scope="module")
def replica(start_server, server):
    return start_server("scripted:?", beside=server, CHATSVC_ROLES="api")


@pytest.fixture(scope="module")
def one_at_a_time(start_server):
    """A server whose replies take half a minute, one after the other: stop what you have seen."""
    return start_server("scripted:?first_token_ms=100&tokens_per_s=20&tokens=600&slots=1")


async def engine_running(api):
    metrics = (await api.call("GET", "/metrics")).text
    return sum(
        float(value)
        for value in re.findall(r"^chatsvc_engine_(?:running|waiting)\{[^}]*\} (\S+)", metrics, re.MULTILINE)
    )


async def is_idle(api):
    """No sequence stays behind. How soon one is freed is told in test_stop_traps.py."""
    async with asyncio.timeout(60):
        while await engine_running(api):
            await asyncio.sleep(0.02)


async def stop(api, reply):
    answer = await api.call("POST", f"/v1/responses/{reply['response_id']}/stop")
    assert answer.status_code == 202, answer.text
    return answer.json()["status"]


async def one_end(api, reply):
    """Log and store tell the same one end; returns the status."""
    rendered = await read_to_the_end(api.client, api.stream_url(reply))
    stored = await api.message_of(reply)
    state = await api.state(reply)
    assert len(rendered.of("done")) + len(rendered.of("error")) == 1
    assert rendered.text == stored["content"]
    assert state["status"] == stored["status"]
    assert stored["status"] in {"complete", "stopped"}
    assert (rendered.end.data["finish_reason"] == "stopped") == (stored["status"] == "stopped")
    return stored["status"]


async def stops_at_random(api, seeded, count, *, stop_through=None):
    ends = []
    numbers = iter(range(count))

    async def lane():
        for number in numbers:
            reply = await api.start(f"Story {number}")
            # Half anywhere in the reply's life, half around its end.
            await asyncio.sleep(seeded.uniform(0, 0.3) if number % 2 else seeded.uniform(0.245, 0.275))
            await stop(stop_through or api, reply)
            ends.append(await one_end(api, reply))

    await asyncio.gather(*(lane() for _ in range(3)))
    await is_idle(api)
    return ends


async def test_random_stops_give_each_reply_one_end_in_log_and_store(api, seeded):
    ends = await stops_at_random(api, seeded, 100)
    assert len(ends) == 100
    assert set(ends) == {"complete", "stopped"}


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_300_random_stops_give_each_reply_one_end_in_log_and_store(api, seeded):
    ends = await stops_at_random(api, seeded, 300)
    assert len(ends) == 300
    assert set(ends) == {"complete", "stopped"}


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_1000_random_stops_give_each_reply_one_end_in_log_and_store(api, seeded):
    ends = await stops_at_random(api, seeded, 1000)
    assert len(ends) == 1000
    assert set(ends) == {"complete", "stopped"}


async def test_a_replica_that_does_not_run_the_reply_stops_it(api, replica, client, seeded):
    other = Api(client, replica.base_url, api.headers)
    ends = await stops_at_random(api, seeded, 30, stop_through=other)
    assert "stopped" in ends


async def test_stop_is_idempotent_and_never_an_error_after_the_end(api):
    reply = await api.start()
    await read_to_the_end(api.client, api.stream_url(reply))
    assert [await stop(api, reply) for _ in range(3)] == ["complete"] * 3


async def test_a_message_sent_right_after_a_stop_is_taken(api):
    reply = await api.start()
    await read(api.client, api.stream_url(reply), cut=lambda seen: seen.text)
    await stop(api, reply)
    answer = await api.send(reply["conversation_id"], "Something else.")
    assert answer.status_code == 202, answer.text
    again = {**answer.json(), "conversation_id": reply["conversation_id"]}
    assert await one_end(api, again) == "complete"
    messages = await api.messages(reply["conversation_id"])
    assert messages[again["user_message_id"]]["parent_id"] == reply["message_id"]


async def test_the_text_shown_before_a_stop_is_kept(one_at_a_time, client):
    api = Api(client, one_at_a_time.base_url)
    reply = await api.start()
    seen = await read(api.client, api.stream_url(reply), cut=lambda seen: len(seen.text) > 20)
    await stop(api, reply)
    assert await one_end(api, reply) == "stopped"
    assert (await api.message_of(reply))["content"].startswith(seen.text)


async def test_a_reply_stopped_in_the_queue_ends_at_once_and_never_runs(one_at_a_time, client):
    api = Api(client, one_at_a_time.base_url)
    running = await api.start()
    waiting = await api.start()
    state = await api.state(waiting)
    assert (state["status"], state["queue_position"]) == ("queued", 1)
    reader = asyncio.create_task(read_to_the_end(client, api.stream_url(waiting)))
    while not reader.done() and not (await api.state(waiting))["queue_position"]:
        await asyncio.sleep(0.01)
    assert await stop(api, waiting) == "stopped"
    rendered = await reader
    assert (rendered.end.data["finish_reason"], rendered.text) == ("stopped", "")
    assert (await api.state(waiting))["usage"]["prompt_tokens"] == 0
    await stop(api, running)
    assert await one_end(api, running) == "stopped"


async def test_the_queue_tells_position_while_waiting(one_at_a_time, client):
    api = Api(client, one_at_a_time.base_url)
    first = await api.start()
    second, third = await api.start(), await api.start(max_tokens=5)
    assert (second["queue_position"], third["queue_position"]) == (1, 2)
    waiting = (await api.call("GET", "/v1/me")).json()["quota"]["open_replies"]["waiting"]
    assert [(each["response_id"], each["queue_position"]) for each in waiting] == [
        (second["response_id"], 1),
        (third["response_id"], 2),
    ]
    rendered = Rendered()
    reading = asyncio.create_task(read(client, api.stream_url(third), rendered))

    def positions():
        return [event.data["position"] for event in rendered.of("queued")]

    for before, position in ((first, 2), (second, 1)):
        async with asyncio.timeout(60):
            while position not in positions():
                await asyncio.sleep(0.01)
        await stop(api, before)
    await reading
    assert list(dict.fromkeys(positions())) == [2, 1]
    assert all(event.id is None for event in rendered.of("queued"))
    assert rendered.end.name == "done"
    assert [await one_end(api, reply) for reply in (first, second, third)] == ["stopped", "stopped", "complete"]
