"""What broke streams elsewhere: first moments, next turns, trimmed logs, odd characters, idle clients (L2, L3, L7)."""

import asyncio
import json

import httpx
import openai
import psycopg
import pytest
import redis
from api_client import Api
from httpx_sse import aconnect_sse
from reader import Rendered, events_of, read, read_to_the_end
from tries import best_of

HEARTBEAT_S = 0.4
LINE_ENDS = "one\u2028two\u2029three\u0085four\x0bfive\x0csix\x1cseven"
MODELS = {
    # Half of the replies of `narrow` wait for a place, so that readers are there before the first append.
    "narrow": "scripted:?first_token_ms=50&tokens_per_s=200&tokens=20&slots=2",
    "one": "scripted:?tokens_per_s=20&tokens=1000&slots=1",
    "steady": "scripted:?tokens_per_s=20&tokens=400&slots=64",
    "quick": "scripted:?tokens_per_s=400&tokens=800&slots=64",
    "idle": f"scripted:?first_token_ms={5000 * HEARTBEAT_S}&tokens_per_s=0.5&tokens=2&slots=64",
    "line-ends": "scripted:?slots=64&text=" + "".join(f"%{byte:02X}" for byte in LINE_ENDS.encode()),
    "nul": "scripted:?slots=64&text=before%00after",
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "chatsvc.toml"
    path.write_text(
        "".join(
            f'[models.{name}]\nengine = "{url}"\ndefault = {str(name == "steady").lower()}\n'
            for name, url in MODELS.items()
        )
    )
    return path


@pytest.fixture(scope="module")
def server(start_server, config):
    return start_server(
        "",
        CHATSVC_CONFIG=str(config),
        CHATSVC_STREAM_HEARTBEAT_S=str(HEARTBEAT_S),
        CHATSVC_LEASE_CHECKPOINT_S="0.5",
    )


@pytest.fixture(scope="module")
def replica(start_server, server, config):
    return start_server("", beside=server, CHATSVC_CONFIG=str(config), CHATSVC_ROLES="api")


async def stop(api, reply):
    answer = await api.call("POST", f"/v1/responses/{reply['response_id']}/stop")
    assert answer.status_code == 202, answer.text


async def test_readers_that_attach_within_50_ms_of_the_first_append_miss_nothing(server, replica, client, seeded):
    """``start`` is appended about when the POST is answered, or when a place is free, and the text 50 ms later."""
    numbers = iter(range(80))

    async def attach(api, reply):
        await asyncio.sleep(seeded.uniform(0, 0.1))
        return await read(client, api.stream_url(reply))

    async def lane():
        here = Api(client, server.base_url)
        there = Api(client, replica.base_url, here.headers)
        for number in numbers:
            reply = await here.start(f"Story {number}", model="narrow")
            seen = await asyncio.gather(*(attach(api, reply) for api in (here, there) for _ in range(2)))
            stored = await here.message_of(reply)
            for one in seen:
                assert one.text == stored["content"] != ""
                assert [event.id for event in one.events if event.id] == list(range(1, one.last_id + 1))
                assert (one.snapshots, one.end.name) == (0, "done")

    await asyncio.gather(*(lane() for _ in range(4)))


async def test_the_next_turn_does_not_come_up_blank_for_a_reader_that_stays_open(server, client):
    """Turn after turn over one connection, while the first turn's stream is open elsewhere and not read yet."""
    api = Api(client, server.base_url)
    first = await api.start("One.", model="quick", max_tokens=40)
    async with client.stream("GET", api.stream_url(first)) as staying:
        async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=1)) as one_connection:
            same = Api(one_connection, server.base_url, api.headers)
            reply = first
            for number in range(3):
                rendered = await read_to_the_end(one_connection, same.stream_url(reply))
                assert rendered.text == (await same.message_of(reply))["content"] != ""
                assert rendered.of("start")[0].data["message_id"] == reply["message_id"]
                conversation_id = first["conversation_id"]
                reply = await same.start(
                    f"And {number}?", conversation_id=conversation_id, model="quick", max_tokens=40
                )
            await read_to_the_end(one_connection, same.stream_url(reply))
        body = await staying.aread()
    assert body.count(b"event: start\n") == body.count(b"event: done\n") == 1
    assert first["message_id"].encode() in body
    assert reply["message_id"].encode() not in body


async def test_a_cursor_older_than_a_trimmed_log_gets_a_snapshot_and_then_what_comes(server, client, redis_server):
    api = Api(client, server.base_url)
    reply = await api.start("A long one.", model="steady")
    begun = await read(client, api.stream_url(reply), cut=lambda seen: seen.last_id >= 4)
    cursor, text = begun.last_id, begun.text
    await read(client, api.stream_url(reply), begun, cut=lambda seen: seen.last_id >= 20)
    async with asyncio.timeout(60):  # the checkpoint stands for what is trimmed
        while not (await api.message_of(reply))["content"].startswith(begun.text):
            await asyncio.sleep(0.1)
    with redis.Redis.from_url(redis_server) as admin:
        [key] = [key for key in admin.scan_iter(f"*{reply['response_id']}*") if admin.type(key) == b"stream"]
        assert admin.xtrim(key, minid=f"1-{begun.last_id}", approximate=False) > 10
    late = await read(
        client, api.stream_url(reply), Rendered(text=text, last_id=cursor), cut=lambda seen: len(seen.of("delta")) > 2
    )
    assert late.events[0].name == "snapshot"
    await stop(api, reply)
    await read_to_the_end(client, api.stream_url(reply))
    assert (await api.message_of(reply))["content"].startswith(late.text)
    assert len(late.text) > len(begun.text)


async def test_a_connection_dropped_twice_before_the_first_id_still_gets_it_all(server, client):
    api = Api(client, server.base_url)
    before = await api.start("In the way.", model="one")
    reply = await api.start("Behind it.", model="one", max_tokens=5)
    for _ in range(2):
        seen = await read(client, api.stream_url(reply), cut=lambda seen: seen.events)
        assert (seen.last_id, [event.name for event in seen.events]) == (0, ["queued"])
    await stop(api, before)
    rendered = await read(client, api.stream_url(reply))
    assert rendered.text == (await api.message_of(reply))["content"] != ""


async def by_lines(client, url):
    """A client that takes everything for a line end that Python does, as many do."""
    events, fields = [], {}
    async with client.stream("GET", url) as answer:
        for line in (await answer.aread()).decode().splitlines():
            name, colon, value = line.partition(": ")
            if colon and name:
                fields[name] = value
            elif fields:
                events.append((fields.get("event"), json.loads(fields["data"]) if "data" in fields else None))
                fields = {}
    return events


async def by_httpx_sse(client, url):
    async with aconnect_sse(client, "GET", url) as source:
        return [(event.event, event.json()) async for event in source.aiter_sse()]


async def by_openai(client, url):
    """The client of the package ``openai`` itself, asked for a path of ours; it gives the data, not the names."""
    whole = httpx.URL(url)
    base = str(whole.copy_with(path="/", query=None))
    async with openai.AsyncOpenAI(base_url=base, api_key="none", http_client=client) as service:
        stream = await service.get(
            whole.raw_path.decode(), cast_to=object, stream=True, stream_cls=openai.AsyncStream[object]
        )
        return [(None, data) async for data in stream]


CLIENTS = {"lines": by_lines, "httpx-sse": by_httpx_sse, "openai": by_openai}


def text_of(events):
    return "".join(data["text"] for _, data in events if data and set(data) == {"text"})


@pytest.mark.parametrize("client_name", CLIENTS)
async def test_u2028_u2029_and_u0085_split_no_event_in_the_clients_people_use(server, client_name):
    async with httpx.AsyncClient(timeout=30) as client:
        api = Api(client, server.base_url)
        reply = await api.start("Odd line ends.", model="line-ends")
        events = await CLIENTS[client_name](client, api.stream_url(reply))
        async with httpx.AsyncClient(timeout=30) as another:
            again = Api(another, server.base_url, api.headers)
            assert text_of(events) == LINE_ENDS == (await again.message_of(reply))["content"]


@pytest.mark.parametrize("client_name", ["httpx-sse", "openai"])
async def test_idle_for_two_heartbeats_harms_no_client_also_right_after_an_id(server, client_name):
    """The first token comes five heartbeats after ``start``, which has an id; the second five more after that."""
    async with httpx.AsyncClient(timeout=30) as client:
        api = Api(client, server.base_url)
        reply = await api.start("Slowly.", model="idle")
        raw = asyncio.create_task(httpx.AsyncClient(timeout=30).get(api.stream_url(reply)))
        events = await CLIENTS[client_name](client, api.stream_url(reply))
    body = (await raw).content
    before, between, *_ = body.split(b"event: delta\n")
    assert min(before.count(b": ping\n"), between.count(b": ping\n")) >= 1
    assert (body.count(b"\nid: 1\n"), body.count(b"event: done\n")) == (1, 1)
    assert len(events) == body.count(b"\nid: ") + body.count(b"event: queued\n")
    whole = Rendered()
    async with httpx.AsyncClient(timeout=30) as client:
        await read(client, api.stream_url(reply), whole)
    assert text_of(events) == whole.text != ""


@pytest.mark.alone
async def test_with_gzip_accepted_the_first_token_comes_within_500_ms_of_the_models(server, client):
    """The model's: as the server's own stream shows it to a client that accepts no compression."""
    api = Api(client, server.base_url)

    async def first_token(reply, encoding):
        async with client.stream("GET", api.stream_url(reply), headers={"accept-encoding": encoding}) as answer:
            assert "content-encoding" not in answer.headers
            async for event in events_of(answer.aiter_bytes()):
                if event.name == "delta":
                    return asyncio.get_running_loop().time()
        raise AssertionError("no token came")

    async def late_s():
        reply = await api.start("Quickly.", model="steady")
        plain, gzip = await asyncio.gather(first_token(reply, "identity"), first_token(reply, "gzip, br"))
        await stop(api, reply)
        return gzip - plain

    assert await best_of(3, late_s, enough=0.5) < 0.5


async def test_a_nul_from_the_model_is_a_replacement_character_in_log_and_store_and_done_comes(server, client):
    api = Api(client, server.base_url)
    reply = await api.start("Say nothing.", model="nul")
    rendered = await read_to_the_end(client, api.stream_url(reply))
    assert (rendered.end.name, rendered.text) == ("done", "before\ufffdafter")
    stored = await api.message_of(reply)
    assert (stored["status"], stored["content"]) == ("complete", rendered.text)
    with psycopg.connect(server.database_url) as connection:
        [(content,)] = connection.execute("SELECT content FROM messages WHERE id = %s", [reply["message_id"]])
    assert content == rendered.text


async def test_bytes_on_the_wire_grow_linearly_with_the_text(server, client):
    """L13: four times the text is about four times the bytes, in a reply of one minute's length as in a short one."""
    api = Api(client, server.base_url)

    async def cost(tokens):
        reply = await api.start("Words.", model="quick", max_tokens=tokens)
        async with client.stream("GET", api.stream_url(reply)) as answer:
            wire = sum([len(chunk) async for chunk in answer.aiter_raw()])
        return wire, len((await api.message_of(reply))["content"].encode())

    (short, short_text), (long, long_text) = await asyncio.gather(cost(200), cost(800))
    assert long / short < 1.2 * long_text / short_text
    assert long < 10 * long_text
