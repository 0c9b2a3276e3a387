"""Conversations as a tree: edits, regenerations, branches, lists, deletion."""

import asyncio

import psycopg
import pytest
import redis
from api_client import Api
from reader import read, read_to_the_end


@pytest.fixture(scope="module")
def server(start_server):
    return start_server("scripted:?tokens_per_s=400&tokens=12&slots=16")


async def answered(api, *args, **kwargs):
    reply = await api.start(*args, **kwargs)
    await read_to_the_end(api.client, api.stream_url(reply))
    return reply


async def conversation_of(api, reply):
    return (await api.call("GET", f"/v1/conversations/{reply['conversation_id']}")).json()


async def branch(api, reply, leaf=None):
    query = f"?leaf={leaf}" if leaf else ""
    path = f"/v1/conversations/{reply['conversation_id']}/messages{query}"
    return [message["id"] for message in (await api.call("GET", path)).json()["data"]]


async def test_an_edit_is_a_sibling_and_becomes_the_head(api):
    first = await answered(api, "Cats?")
    edit = await answered(api, "Dogs?", conversation_id=first["conversation_id"], parent_id=None)
    conversation = await conversation_of(api, first)
    parents = {message["id"]: message["parent_id"] for message in conversation["messages"]}
    assert parents[first["user_message_id"]] is parents[edit["user_message_id"]] is None
    assert conversation["head_message_id"] == edit["message_id"]
    assert await branch(api, first) == [edit["message_id"], edit["user_message_id"]]
    assert await branch(api, first, first["message_id"]) == [first["message_id"], first["user_message_id"]]


async def test_regenerating_adds_a_sibling_reply(api):
    first = await answered(api, "Cats?")
    for message_id in (first["user_message_id"], first["message_id"]):
        answer = await api.call("POST", f"/v1/messages/{message_id}/responses", json={"client_msg_id": message_id})
        assert answer.status_code == 202
        assert answer.json()["user_message_id"] == first["user_message_id"]
        await read_to_the_end(api.client, api.base + answer.json()["stream_url"])
    messages = (await conversation_of(api, first))["messages"]
    replies = [message for message in messages if message["role"] == "assistant"]
    assert len(replies) == 3
    assert {message["parent_id"] for message in replies} == {first["user_message_id"]}
    assert sum(message["role"] == "user" for message in messages) == 1


async def test_the_chosen_branch_is_remembered_and_the_next_message_goes_there(api):
    first = await answered(api, "Cats?")
    await answered(api, "Dogs?", conversation_id=first["conversation_id"], parent_id=None)
    path = f"/v1/conversations/{first['conversation_id']}"
    answer = await api.call("PATCH", path, json={"head_message_id": first["message_id"]})
    assert answer.json()["head_message_id"] == first["message_id"]
    following = await answered(api, "More.", conversation_id=first["conversation_id"])
    messages = await api.messages(first["conversation_id"])
    assert messages[following["user_message_id"]]["parent_id"] == first["message_id"]


async def test_concurrent_messages_from_one_head_are_both_kept(api):
    first = await answered(api, "Cats?")
    both = await asyncio.gather(
        *(
            api.start(text, conversation_id=first["conversation_id"], parent_id=first["message_id"])
            for text in ("One device.", "Another device.")
        )
    )
    for reply in both:
        await read_to_the_end(api.client, api.stream_url(reply))
    messages = await api.messages(first["conversation_id"])
    assert all(messages[reply["user_message_id"]]["parent_id"] == first["message_id"] for reply in both)


async def test_the_prompt_holds_the_branch_and_nothing_of_another(api):
    first = await answered(api, "Cats?")
    second = await answered(api, "And?", conversation_id=first["conversation_id"])
    edit = await answered(api, "Dogs?", conversation_id=first["conversation_id"], parent_id=None)
    used = [(await api.state(reply))["usage"]["prompt_tokens"] for reply in (first, second, edit)]
    assert used[1] > used[0] + 5
    assert used[2] == used[0]
    cached = (await api.state(second))["usage"]["cached_tokens"]
    assert 0 <= cached <= used[1]


async def test_a_conversation_is_named_after_its_first_message_unless_it_has_a_name(api):
    reply = await answered(api, "How do I keep a sourdough starter alive while I am away for three whole weeks?")
    title = (await conversation_of(api, reply))["title"]
    assert title.startswith("How do I keep a sourdough")
    assert title.endswith("…")
    assert len(title) <= 61
    named = await api.conversation(title="Bread")
    await answered(api, "Flour?", conversation_id=named)
    assert (await api.call("GET", f"/v1/conversations/{named}")).json()["title"] == "Bread"


async def test_lists_are_paged_newest_activity_first_without_temporary_ones(api):
    made = [await api.conversation(title=f"Number {number}") for number in range(7)]
    await api.conversation(temporary=True)
    await answered(api, "Wake up.", conversation_id=made[0])
    seen, cursor = [], None
    while True:
        page = (
            await api.call("GET", "/v1/conversations", params={"limit": 3} | ({"cursor": cursor} if cursor else {}))
        ).json()
        seen += [conversation["id"] for conversation in page["data"]]
        assert len(page["data"]) <= 3
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == [made[0], *reversed(made[1:])]


async def test_a_branch_is_paged_newest_first(api):
    reply = await answered(api, "0")
    for number in range(1, 5):
        reply = await answered(api, str(number), conversation_id=reply["conversation_id"])
    path = f"/v1/conversations/{reply['conversation_id']}/messages"
    seen, cursor = [], None
    while True:
        page = (await api.call("GET", path, params={"limit": 4} | ({"cursor": cursor} if cursor else {}))).json()
        seen += page["data"]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert [message["content"] for message in seen if message["role"] == "user"] == ["4", "3", "2", "1", "0"]
    assert [message["parent_id"] for message in seen] == [message["id"] for message in seen[1:]] + [None]


async def test_titles_pins_and_system_prompts_can_be_changed_one_by_one(api):
    conversation_id = await api.conversation(title="A", system_prompt="Be brief.")
    path = f"/v1/conversations/{conversation_id}"
    assert (await api.call("PATCH", path, json={"pinned": True})).json()["pinned"] is True
    changed = (await api.call("PATCH", path, json={"title": "B"})).json()
    assert (changed["title"], changed["pinned"], changed["system_prompt"]) == ("B", True, "Be brief.")
    assert (await api.call("PATCH", path, json={"system_prompt": None})).json()["system_prompt"] is None


async def test_a_system_prompt_is_part_of_the_prompt(api):
    plain = await answered(api, "Hi.", conversation_id=await api.conversation())
    told = await answered(
        api, "Hi.", conversation_id=await api.conversation(system_prompt="Answer like a pirate, please.")
    )
    used = [(await api.state(reply))["usage"]["prompt_tokens"] for reply in (plain, told)]
    assert used[1] > used[0] + 5


async def test_a_deleted_conversation_leaves_nothing_and_stops_its_running_reply(start_server, client, redis_server):

    server = start_server("scripted:?tokens_per_s=20&tokens=400")
    api = Api(client, server.base_url)
    reply = await api.start("A secret word: xyzzy.")
    await read(client, api.stream_url(reply), cut=lambda seen: len(seen.text) > 10)
    reader = asyncio.create_task(read(client, api.stream_url(reply)))
    answer = await api.call("DELETE", f"/v1/conversations/{reply['conversation_id']}")
    assert (answer.status_code, answer.content) == (204, b"")
    async with asyncio.timeout(60):
        await reader
    assert (await api.call("GET", f"/v1/responses/{reply['response_id']}")).status_code == 404
    assert (await client.get(api.stream_url(reply))).status_code == 404
    async with asyncio.timeout(60):
        while "chatsvc_runs_active 0.0" not in (await api.call("GET", "/metrics")).text:
            await asyncio.sleep(0.02)
    with redis.Redis.from_url(redis_server) as log:
        left = [key.decode() for key in log.scan_iter(f"*{reply['response_id']}*")]
    # Readers are noted now and then: a note that was on its way is a bare name too, and goes with that below.
    assert [key for key in left if not key.startswith("read:")] == []
    with psycopg.connect(server.database_url) as connection:
        tables = connection.execute(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"
        ).fetchall()
        left = {
            table: connection.execute(
                f"SELECT count(*) FROM {table} t WHERE t::text ~ %s", ["xyzzy|conv_|msg_|resp_"]
            ).fetchone()
            for (table,) in tables
        }
    # The bare name of the response, for a minute, so that its log is removed whoever dies.
    assert {table for table, (count,) in left.items() if count} <= {"deleted_runs"}


async def stopped_in_the_middle(api):
    while True:
        reply = await api.start("A long story, please.")
        await read(api.client, api.stream_url(reply), cut=lambda seen: len(seen.text) > 30)
        await api.call("POST", f"/v1/responses/{reply['response_id']}/stop")
        # On a machine that stands still for a while a reply comes to its end before it is stopped.
        if (await read_to_the_end(api.client, api.stream_url(reply))).end.data["finish_reason"] == "stopped":
            return reply


async def test_a_stopped_reply_is_continued_where_it_broke_off(start_server, client):
    api = Api(client, start_server("scripted:?tokens_per_s=60&tokens=60").base_url)
    whole = await answered(api, "A long story, please.")
    expected = (await api.message_of(whole))["content"]
    broken = await stopped_in_the_middle(api)
    kept = (await api.message_of(broken))["content"]
    assert expected.startswith(kept)
    body = {"client_msg_id": "go-on", "continue": True}
    answer = await api.call("POST", f"/v1/messages/{broken['message_id']}/responses", json=body)
    assert answer.status_code == 202, answer.text
    continued = {**answer.json(), "conversation_id": broken["conversation_id"]}
    rendered = await read_to_the_end(client, api.stream_url(continued))
    stored = await api.message_of(continued)
    assert rendered.text == stored["content"] == expected
    assert stored["status"] == "complete"
    assert stored["parent_id"] == broken["user_message_id"]
    assert (await api.message_of(broken))["content"] == kept
    used = [(await api.state(reply))["usage"]["output_tokens"] for reply in (broken, continued, whole)]
    # Only the rest was generated. A token that was stopped on its way may have been counted and not kept.
    assert used[2] <= used[0] + used[1] <= used[2] + 2
    again = await api.call("POST", f"/v1/messages/{broken['message_id']}/responses", json=body)
    assert again.json()["response_id"] == continued["response_id"]
    other = await api.call("POST", f"/v1/messages/{broken['message_id']}/responses", json={"client_msg_id": "go-on"})
    assert other.status_code == 409


async def test_a_reply_that_reached_its_limit_is_continued_and_a_complete_one_is_not(api):
    short = await answered(api, "A long story, please.", max_tokens=5)
    assert (await api.message_of(short))["finish_reason"] == "length"
    body = {"client_msg_id": "more", "continue": True}
    answer = await api.call("POST", f"/v1/messages/{short['message_id']}/responses", json=body)
    assert answer.status_code == 202
    await read_to_the_end(api.client, api.base + answer.json()["stream_url"])
    refused = await api.call(
        "POST",
        f"/v1/messages/{answer.json()['message_id']}/responses",
        json={"client_msg_id": "even-more", "continue": True},
    )
    assert (refused.status_code, refused.json()["code"]) == (422, "cannot_continue")
    refused = await api.call(
        "POST",
        f"/v1/messages/{short['user_message_id']}/responses",
        json={"client_msg_id": "of-a-question", "continue": True},
    )
    assert (refused.status_code, refused.json()["code"]) == (422, "cannot_continue")
