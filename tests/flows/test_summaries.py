"""A conversation that outgrows its model's window, from outside: folded behind the scenes, and its owner has a say."""

import asyncio

import psycopg
import pytest
from api_client import Api
from reader import read_to_the_end

from chatsvc.api.openapi_examples import ANSWERS

WORDS = "the cat sat on the mat and saw a long grey rat "
PATIENCE_S = 60
WINDOW = 2048
FOLDED_AT = 0.6 * WINDOW
UNFOLDED = "verbatim", "question"


@pytest.fixture(scope="module")
def server(start_server):
    return start_server(f"scripted:?tokens=24&window={WINDOW}")


async def turn(api, conversation_id, content, **body):
    reply = await api.start(content, conversation_id, **body)
    end = (await read_to_the_end(api.client, api.stream_url(reply))).end
    assert end.name == "done"
    return reply


async def summaries(api, conversation_id, leaf=None):
    answer = await api.call("GET", f"/v1/conversations/{conversation_id}/summaries" + (f"?leaf={leaf}" if leaf else ""))
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


async def until(look):
    """What ``look`` finds, once it finds something."""
    async with asyncio.timeout(PATIENCE_S):
        while not (found := await look()):
            await asyncio.sleep(0.05)
        return found


async def edit(api, conversation_id, summary, text, version=None):
    path = f"/v1/conversations/{conversation_id}/summaries/{summary['through_message_id']}"
    return await api.call("PUT", path, json={"text": text, "version": version or summary["version"]})


async def folded(api, folds=1):
    """A conversation that was folded, and its summaries, newest first.

    Nothing is said while a fold is due: too much would have been said by its end, and another one be due at once.
    """
    conversation_id = await api.conversation()
    found = []
    async with asyncio.timeout(PATIENCE_S):
        while len(found) < folds:
            context = await context_of(api, await turn(api, conversation_id, WORDS * 12))
            behind = (context["summary"] or {}).get("id")
            while True:
                found = await summaries(api, conversation_id)
                done = next(iter(found), {"id": None})["id"] != behind
                if done or sum(context["parts"][part] for part in UNFOLDED) <= FOLDED_AT:
                    break
                await asyncio.sleep(0.05)
    return conversation_id, found


async def context_of(api, reply):
    answer = await api.call("GET", f"/v1/responses/{reply['response_id']}/context")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_conversation_outgrows_its_window_many_times_and_nothing_of_it_is_in_the_way(api):
    conversation_id, found = await folded(api, folds=3)
    messages = await api.messages(conversation_id)
    places = [list(messages).index(summary["through_message_id"]) for summary in found]
    assert places == sorted(places, reverse=True)
    assert all(message["status"] == "complete" for message in messages.values())
    context = await context_of(api, await turn(api, conversation_id, "What did we say?"))
    assert context["condensed"] is True
    assert context["left_out"] == 0
    assert context["summary"]["through_message_id"] in {summary["through_message_id"] for summary in found}
    me = (await api.call("GET", "/v1/me")).json()
    assert me["quota"]["open_replies"]["used"] == 0
    assert me["usage"]["prompt_tokens"] > sum(summary["tokens"] for summary in found)
    assert (await api.call("DELETE", f"/v1/conversations/{conversation_id}")).status_code == 204
    assert (await api.call("GET", f"/v1/conversations/{conversation_id}/summaries")).status_code == 404


async def test_an_edit_of_a_summary_is_what_the_next_prompt_has_and_what_siblings_share(api):
    conversation_id, [summary, *_] = await folded(api)
    answer = await edit(api, conversation_id, summary, "Facts\nThe cat is called Minka.")
    assert answer.status_code == 200, answer.text
    mine = answer.json()
    assert (mine["version"], mine["edited"], mine["text"]) == (2, True, "Facts\nThe cat is called Minka.")
    assert set(mine) == set(summary) == set(ANSWERS["editSummary"]) == set(ANSWERS["listSummaries"]["data"][0])
    assert (await summaries(api, conversation_id))[0] == mine
    reply = await turn(api, conversation_id, "And now?")
    assert (await context_of(api, reply))["summary"]["id"] == mine["id"]
    parent = (await api.messages(conversation_id))[reply["user_message_id"]]["parent_id"]
    sibling = await turn(api, conversation_id, "Or so?", parent_id=parent)
    assert (await context_of(api, sibling))["summary"]["id"] == mine["id"]
    # A branch that leaves before the fold has nothing of it.
    root = await turn(api, conversation_id, "Something else.", parent_id=None)
    assert (await context_of(api, root))["summary"] is None
    assert await summaries(api, conversation_id, root["message_id"]) == []


async def test_bad_edits_are_refused_with_what_is_wrong_and_change_nothing(api, client, server):
    conversation_id, [summary, *_] = await folded(api)
    assert (await edit(api, conversation_id, summary, "Mine.")).status_code == 200
    stale = await edit(api, conversation_id, summary, "Mine too.", version=1)
    assert (stale.status_code, stale.json()["code"], stale.json()["version"]) == (409, "summary_changed", 2)
    for text in ("", " \n"):
        empty = await edit(api, conversation_id, summary, text, version=2)
        assert (empty.status_code, empty.json()["field"]) == (422, "text")
    long = await edit(api, conversation_id, summary, WORDS * 100, version=2)
    assert (long.status_code, long.json()["code"], long.json()["limit"]) == (422, "summary_too_long", 256)
    assert long.json()["tokens"] > 256
    no_fold = {"through_message_id": next(iter(await api.messages(conversation_id)))}
    assert (await edit(api, conversation_id, no_fold, "Mine.", version=1)).status_code == 404
    other = Api(client, server.base_url)
    assert (await edit(other, conversation_id, summary, "Theirs.", version=2)).status_code == 404
    anonymous = Api(client, server.base_url, {"x-nobody": "1"})
    assert (await edit(anonymous, conversation_id, summary, "Theirs.", version=2)).status_code == 401
    assert [each["text"] for each in await summaries(api, conversation_id)][:1] == ["Mine."]


@pytest.mark.slow
async def test_kill_9_in_the_middle_of_a_fold_loses_nothing(start_server, client):
    server = start_server(
        "scripted:?tokens=60&window=2048&tokens_per_s=20", CHATSVC_LEASE_RENEW_S="0.5", CHATSVC_LEASE_TTL_S="3"
    )
    api = Api(client, server.base_url)
    conversation_id = await api.conversation()

    async def folds():
        async with await psycopg.AsyncConnection.connect(server.database_url) as connection:
            found = await connection.execute("SELECT status, attempt FROM runs WHERE kind = 'fold' ORDER BY created_at")
            return await found.fetchall()

    for number in range(4):
        await turn(api, conversation_id, f"{number}: {WORDS * 32}", max_tokens=2)
    await until(lambda: _streaming(folds))
    before = await api.messages(conversation_id)
    await asyncio.to_thread(server.kill)
    assert await folds() == [("streaming", 1)]
    await asyncio.to_thread(server.start)
    await until(lambda: summaries(api, conversation_id))
    assert await api.messages(conversation_id) == before
    (status, attempt), *_ = await folds()
    assert status == "complete"
    assert attempt > 1
    context = await context_of(api, await turn(api, conversation_id, "Go on.", max_tokens=2))
    assert context["condensed"] is True


async def _streaming(folds):
    return [status for status, _ in await folds()] == ["streaming"]
