"""One engine, one place: what is done in the background keeps nobody waiting, and is done all the same."""

import asyncio

import pytest
from reader import read_to_the_end

WORDS = "the cat sat on the mat and saw a long grey rat "  # 12 tokens
PATIENCE_S = 60
FOLDS = 'chatsvc_folds_ended_total{model="scripted",status="complete"}'
RUNNING = 'chatsvc_engine_running{model="scripted"} 1.0'


@pytest.fixture(scope="module")
def server(start_server):
    # A summary takes six seconds, a reply of one token none.
    return start_server("scripted:?slots=1&tokens_per_s=10&tokens=60&window=1024")


async def turn(api, conversation_id, content):
    reply = await api.start(content, conversation_id, max_tokens=1)
    return await read_to_the_end(api.client, api.stream_url(reply))


async def folds_done(api):
    page = (await api.call("GET", "/metrics")).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(FOLDS))


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await asyncio.sleep(0.05)


async def test_a_message_is_answered_while_its_conversation_is_folded_and_the_fold_is_done_afterwards(api, server):
    conversation_id = await api.conversation()
    while "fold queued" not in server.log():
        await turn(api, conversation_id, WORDS * 8)

    async def folding():
        return RUNNING in (await api.call("GET", "/metrics")).text

    # It begins when nobody waits, and has the only place.
    await until(folding)
    seen = await turn(api, conversation_id, "And now?")
    assert (seen.end.name, await folds_done(api)) == ("done", 0)
    assert "give way" in server.log()

    async def done():
        return await folds_done(api) > 0

    await until(done)
    seen = await turn(api, conversation_id, "And then?")
    assert seen.of("context")[0].data["condensed"] is True
