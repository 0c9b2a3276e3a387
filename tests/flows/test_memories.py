"""What users want to be known in all their conversations, from outside."""

import asyncio

import pytest
from api_client import Api
from reader import read_to_the_end

WORDS = "the cat sat on the mat and saw a long grey rat "
FACT = "I live in Lisbon and I am allergic to peanuts."


@pytest.fixture(scope="module")
def server(start_server):
    return start_server("scripted:?tokens=24&window=2048")


async def add(api, text, status=201):
    answer = await api.call("POST", "/v1/me/memories", json={"text": text})
    assert answer.status_code == status, answer.text
    return answer.json()


async def turn(api, conversation_id, content="Hello."):
    """The context of a whole turn."""
    reply = await api.start(content, conversation_id)
    assert (await read_to_the_end(api.client, api.stream_url(reply))).end.name == "done"
    return (await api.call("GET", f"/v1/responses/{reply['response_id']}/context")).json()


async def on(api, *, on=True):
    answer = await api.call("PATCH", "/v1/me", json={"memory": on})
    assert (answer.status_code, answer.json()["memory"]) == (200, on)


async def test_a_memory_is_listed_reworded_and_deleted(api):
    assert (await api.call("GET", "/v1/me")).json()["memory"] is False
    memory = await add(api, FACT)
    path = f"/v1/me/memories/{memory['id']}"
    assert (await api.call("GET", "/v1/me/memories")).json() == {"data": [memory]}
    changed = (await api.call("PATCH", path, json={"text": "I live\nin Porto."})).json()
    assert (changed["id"], changed["text"]) == (memory["id"], "I live in Porto.")
    assert changed["updated_at"] > memory["updated_at"]
    assert (await api.call("DELETE", path)).status_code == 204
    assert (await api.call("DELETE", path)).status_code == 404
    assert (await api.call("GET", "/v1/me/memories")).json() == {"data": []}


@pytest.mark.parametrize("text", ["", " \n", "x" * 501, None, 7])
async def test_what_is_no_memory_is_refused(api, text):
    assert (await add(api, text, 400))["field"] == "text"


async def test_too_many_are_refused_with_the_numbers(api):
    for number in range(8):
        await add(api, f"{number}" + "x" * 499)
    problem = await add(api, "one more", 422)
    assert (problem["code"], problem["characters"], problem["characters_limit"]) == ("memory_full", 4008, 4000)


async def test_the_prompt_has_it_when_memory_is_on_and_only_then(api):
    await add(api, FACT)
    assert (await turn(api, await api.conversation()))["parts"]["memory"] == 0
    await on(api)
    conversation_id = await api.conversation()
    assert (await turn(api, conversation_id))["parts"]["memory"] > 5
    await on(api, on=False)
    assert (await turn(api, conversation_id))["parts"]["memory"] == 0


async def test_what_is_added_leaves_running_conversations_as_they_are_until_they_are_folded_L11(api):
    await on(api)
    await add(api, FACT)
    conversation_id = await api.conversation()
    before = (await turn(api, conversation_id))["parts"]["memory"]
    await add(api, "I have a cat called Minka.")
    after = await turn(api, conversation_id)
    assert after["parts"]["memory"] == before
    # All but the new turn was in the cache: the beginning is what it was.
    assert after["cached_tokens"] > before
    context = after
    async with asyncio.timeout(60):
        while not context["condensed"]:  # folded behind the replies
            context = await turn(api, conversation_id, WORDS * 12)
            await asyncio.sleep(0.05)
    assert context["parts"]["memory"] > before


async def test_however_much_there_is_a_small_window_keeps_room_for_the_conversation(api):
    await on(api)
    for number in range(8):
        await add(api, f"{number} " + "a word or two " * 30)
    context = await turn(api, await api.conversation())
    assert 0 < context["parts"]["memory"] <= 2048 // 8


async def test_only_its_owner_reaches_a_memory(api, client, server):
    memory = await add(api, FACT)
    other = Api(client, server.base_url)
    path = f"/v1/me/memories/{memory['id']}"
    for method, body in (("PATCH", {"text": "mine"}), ("DELETE", None)):
        assert (await other.call(method, path, json=body)).status_code == 404
        assert (await client.request(method, api.base + path, json=body)).status_code == 401
    assert (await other.call("GET", "/v1/me/memories")).json() == {"data": []}
    assert (await api.call("GET", "/v1/me/memories")).json() == {"data": [memory]}
