"""Several replicas on one Postgres and one Redis: turns go where their prefix is, and nobody waits for the dead."""

import asyncio
import re
import time
import uuid

import pytest
from api_client import Api
from log_server import LogServer
from reader import read_to_the_end

SLOW = "scripted:?tokens_per_s=20&tokens=40&slots=2&window=100000"
LONG = "scripted:?tokens_per_s=20&tokens=600&slots=2&window=100000"
ROOM = {"CHATSVC_TIERS_FREE_MAX_OPEN_REPLIES": "1000", "CHATSVC_DEGRADATION_ENABLED": "false"}


def metric(text, name, **labels):
    wanted = ",".join(f'{label}="{value}"' for label, value in labels.items())
    found = re.search(rf"^{re.escape(name + ('{' + wanted + '}' if wanted else ''))} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


async def ask(client, server, name, **labels):
    return metric((await client.get(f"{server.base_url}/metrics")).text, name, **labels)


async def until(condition, patience_s=60):
    async with asyncio.timeout(patience_s):
        while not await condition():
            await asyncio.sleep(0.05)


async def know_each_other(client, servers):
    for server in servers:
        await until(lambda server=server: known(client, server, len(servers) - 1))


async def known(client, server, count):
    return await ask(client, server, "chatsvc_replicas_known") == count


def user(client, server, name=None):
    return Api(client, server.base_url, {"x-forwarded-user": name or uuid.uuid4().hex})


async def cached_share(api, reply):
    usage = (await api.state(reply))["usage"]
    return usage["cached_tokens"] / usage["prompt_tokens"]


async def turn(client, api, conversation_id, text, **body):
    reply = await api.start(text, conversation_id, **body)
    await read_to_the_end(client, api.stream_url(reply))
    return reply


@pytest.fixture(scope="module")
def pair(start_server):
    engine = "scripted:?tokens_per_s=2000&tokens=40&slots=8&window=100000"
    one = start_server(engine, **ROOM)
    return one, start_server(engine, beside=one, **ROOM)


async def test_a_conversations_turns_are_served_where_its_prefix_is_from_whichever_replica_they_are_posted(
    pair, client
):
    await know_each_other(client, pair)
    name = uuid.uuid4().hex
    apis = [user(client, server, name) for server in pair]
    cached = sent = 0
    before = await sent_home(client, pair)
    async with asyncio.timeout(120):
        while sent < 10:
            conversation = await apis[0].conversation()
            for number in range(4):
                reply = await turn(client, apis[number % 2], conversation, "words " * 100)
                cached += number > 0 and await cached_share(apis[0], reply) > 0.5
            sent = await sent_home(client, pair) - before
    assert cached >= sent


async def sent_home(client, servers):
    """How many turns went to where their conversation is at home: of those sent there, all but those that went astray.

    Where a part of the service stands still the others do not wait for it: a run is taken from its home, or nobody is
    told in time where that is.
    """
    sent = [await ask(client, one, "chatsvc_runs_routed_total", by="home") for one in servers]
    taken = [
        await ask(client, one, "chatsvc_runs_came_total", how=how) for one in servers for how in ("stolen", "left")
    ]
    untold = [
        await ask(client, one, "chatsvc_runs_heard_total", by=by) for one in servers for by in ("notification", "sweep")
    ]
    return sum(sent) - sum(taken) - sum(untold)


async def test_what_was_posted_to_one_replica_and_is_at_home_on_another_begins_without_waiting_for_a_sweep(
    pair, client
):
    await know_each_other(client, pair)
    name = uuid.uuid4().hex
    apis = [user(client, server, name) for server in pair]
    before = sum([await heard(client, server) for server in pair])
    waits = []
    for _ in range(10):
        reply = await turn(client, apis[0], None, "hello")
        for api in apis:
            reply = await turn(client, api, reply["conversation_id"], "again")
            state = await api.state(reply)
            waits.append(seconds(state["started_at"]) - seconds(state["created_at"]))
    # A notification that is lost is made up for after half a second, and by the sweep after five.
    assert sorted(waits)[len(waits) // 2] < 0.4
    # One of the two was not at home where it was posted: its home was told by the poster, before anybody else told it.
    assert sum([await heard(client, server) for server in pair]) >= before + 10


def seconds(text):
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()


@pytest.mark.slow
async def test_when_the_home_of_waiting_runs_is_killed_another_replica_serves_them_soon(start_server, client):
    home = start_server(LONG, **ROOM)
    api = user(client, home)
    conversations = [(await turn(client, api, None, "Hello.", max_tokens=2))["conversation_id"] for _ in range(3)]
    other = start_server(LONG, beside=home, **ROOM)
    await know_each_other(client, (home, other))
    # All places of both are taken, and three turns wait that are at home here.
    running = [await api.start("Go on.") for _ in range(4)]
    await until(lambda: have_begun(client, (home, other), 4))
    before = await heard(client, other)
    waiting = [await api.start("And now?", conversation, max_tokens=2) for conversation in conversations]
    assert [(await api.state(reply))["status"] for reply in waiting] == ["queued"] * 3
    # The other one was told of them all, by who posted them, and has them in its line.
    await until(lambda: has_heard(client, other, before + 3))
    home.kill()
    killed = time.time()
    there = user(client, other, api.headers["x-forwarded-user"])
    # Had it places before it has noticed, it would take them as from one that is crowded.
    await until(lambda: known(client, other, 0))
    for reply in running:
        await there.call("POST", f"/v1/responses/{reply['response_id']}/stop")
    for reply in waiting:
        await until(lambda reply=reply: has_ended(there, reply), 60)
        state = await there.state(reply)
        assert state["status"] == "complete"
        assert 0 < seconds(state["started_at"]) - killed < 8
    # They waited for the dead one, and did not have to be taken from anybody.
    assert await ask(client, other, "chatsvc_runs_came_total", how="left") == 3


async def heard(client, server):
    """Of how many runs that waited a server was told by their poster."""
    return await ask(client, server, "chatsvc_runs_heard_total", by="poster")


async def has_heard(client, server, count):
    return await heard(client, server) == count


async def have_begun(client, servers, count):
    return sum([await begun(client, server) for server in servers]) == count


async def has_ended(api, reply):
    return (await api.state(reply))["status"] in {"complete", "failed", "stopped"}


@pytest.mark.slow
async def test_an_idle_replica_takes_over_what_would_wait_longer_at_home(start_server, client):
    home = start_server(LONG, **ROOM)
    other = start_server(LONG, beside=home, **ROOM)
    await know_each_other(client, (home, other))
    api = user(client, home)
    at_home, elsewhere = [], []
    while len(at_home) < 3 or len(elsewhere) < 2:
        before = await begun(client, other)
        conversation = (await turn(client, api, None, "Hello.", max_tokens=2))["conversation_id"]
        (elsewhere if await begun(client, other) > before else at_home).append(conversation)
    # Both places at home are taken for half a minute, those of the other one for four seconds; one more turn comes.
    long = [await api.start("More.", conversation, max_tokens=600) for conversation in at_home[:2]]
    for conversation in elsewhere[:2]:
        await api.start("More.", conversation, max_tokens=80)
    reply = await api.start("Once more.", at_home[2], max_tokens=2)
    assert reply["status"] == "queued"
    await read_to_the_end(client, api.stream_url(reply))
    assert await ask(client, other, "chatsvc_runs_came_total", how="stolen") == 1
    for each in long:
        assert (await api.state(each))["status"] == "streaming"
        await api.call("POST", f"/v1/responses/{each['response_id']}/stop")


async def begun(client, server):
    """How many of all runs of this test have come to a server."""
    return sum([await ask(client, server, "chatsvc_runs_came_total", how=how) for how in ("home", "stolen", "left")])


@pytest.mark.slow
async def test_with_redis_away_all_that_waits_is_served(start_server, client, tmp_path):
    with LogServer(tmp_path) as redis:
        env = {**ROOM, "CHATSVC_REDIS_URL": redis.url}
        one = start_server(SLOW, **env)
        other = start_server(SLOW, beside=one, **env)
        await know_each_other(client, (one, other))
        api = user(client, one)
        replies = [await api.start() for _ in range(12)]
        redis.kill()
        for reply in replies:
            await until(lambda reply=reply: has_ended(api, reply), 60)
            assert (await api.state(reply))["status"] == "complete"
        redis.start()
        await know_each_other(client, (one, other))
        reply = await api.start()
        await until(lambda: has_ended(api, reply))


@pytest.mark.slow
async def test_places_and_times_are_over_all_that_wait_and_told_by_a_process_without_engines_too(start_server, client):
    one = start_server(LONG, **ROOM)
    other = start_server(LONG, beside=one, **ROOM)
    door = start_server(LONG, beside=one, CHATSVC_ROLES="api", **ROOM)
    await know_each_other(client, (one, other, door))
    apis = [user(client, server) for server in (one, other, door) for _ in range(6)]
    replies = [await api.start() for api in apis]

    async def told():
        """All that wait have a place of their own and a time, as far as the door knows."""
        places = []
        for api, reply in zip(apis, replies, strict=True):
            state = await Api(client, door.base_url, api.headers).state(reply)
            if state["status"] == "queued":
                places.append((state["queue_position"], state["eta_s"]))
        assert len(places) > 5, "too few wait to tell anything from"
        known = all(place is not None and eta_s is not None for place, eta_s in places)
        return known and sorted(place for place, _ in places) == list(range(1, len(places) + 1))

    await until(told)
    for api, reply in reversed(list(zip(apis, replies, strict=True))):
        await api.call("POST", f"/v1/responses/{reply['response_id']}/stop")
