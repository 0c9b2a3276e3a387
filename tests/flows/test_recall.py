"""Old turns come back when a new question needs them, from outside: quoted, told, of this branch only."""

import asyncio

import pytest
from api_client import Api
from reader import read_to_the_end

WORDS = "the cat sat on the mat and saw a long grey rat "
FACT = "My dentist is called Quillfeather and her practice is in Lisbon."
QUESTION = "What was the name of my dentist in Lisbon?"
PATIENCE_S = 60


@pytest.fixture(scope="module")
def server(start_server):
    return start_server("scripted:?tokens=24&window=2048")


async def turn(api: Api, conversation_id, content, **body):
    reply = await api.start(content, conversation_id, **body)
    seen = await read_to_the_end(api.client, api.stream_url(reply))
    assert seen.end.name == "done"
    return reply, seen


async def context_of(api: Api, reply):
    answer = await api.call("GET", f"/v1/responses/{reply['response_id']}/context")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_folded_turn_is_quoted_for_the_question_that_needs_it_and_no_siblings_turn(api):
    conversation_id = await api.conversation()
    root, _ = await turn(api, conversation_id, "Hello")
    sibling, _ = await turn(api, conversation_id, FACT.replace("Quillfeather", "Abernathy"))
    told, _ = await turn(api, conversation_id, FACT, parent_id=root["message_id"])
    async with asyncio.timeout(PATIENCE_S):
        condensed = False
        while not condensed:
            reply, seen = await turn(api, conversation_id, WORDS * 12)
            condensed = seen.of("context")[0].data["condensed"]
        retrieved: list[str] = []
        while told["user_message_id"] not in retrieved:
            # Indexed behind the replies: a moment later at most.
            reply, seen = await turn(api, conversation_id, QUESTION)
            retrieved = seen.of("context")[0].data["retrieved"]
    assert sibling["user_message_id"] not in retrieved
    context = await context_of(api, reply)
    assert [id_ for old in context["recalled"] for id_ in old["message_ids"]] == retrieved
    assert 0 < context["parts"]["recalled"] <= 1100
    assert all(0 < old["score"] <= 1 and old["tokens"] > 0 for old in context["recalled"])
    # What is quoted is no part of the conversation.
    assert (await api.messages(conversation_id))[reply["user_message_id"]]["content"] == QUESTION
    _, seen = await turn(api, conversation_id, QUESTION, parent_id=sibling["message_id"])
    assert seen.of("context")[0].data["retrieved"] == []  # nothing of that branch is folded
