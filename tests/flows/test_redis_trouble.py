"""Redis fails over, loses a node, is slow, or full: what users see, and that nothing of their text is lost (L4, L7)."""

import asyncio
import os
import subprocess
import sys
import time

import pytest
import redis
from api_client import Api
from log_server import LogServer
from reader import Rendered, read, read_to_the_end
from redis_groups import Cluster, SentinelGroup
from slow_proxy import SlowProxy

from chatsvc.streamlog.redis import PARTITIONS, partition

TALE = "scripted:?tokens_per_s=20&tokens=2000&slots=64"
"""Longer than any test."""
SHORT = "scripted:?tokens_per_s=20&tokens=160&slots=64"
QUICK = {"CHATSVC_DATABASE_TIMEOUT_S": "2", "CHATSVC_SERVER_GRACE_S": "1"}
AWAY_S = float(os.environ.get("CHATSVC_TEST_REDIS_AWAY_S", "5"))
"""How long Redis is away; 60 in a thorough run."""
MANY = {"CHATSVC_TIERS_FREE_MAX_OPEN_REPLIES": "100"}


async def until(condition, what, patience_s=60.0):
    """Wait until a coroutine function says so."""
    async with asyncio.timeout(patience_s):
        while not await condition():
            await asyncio.sleep(0.05)
    return what


async def more_text(rendered, than, patience_s=60.0):
    """Wait until a reader that goes on by itself shows more."""

    async def grown():
        return len(rendered.text) > than

    await until(grown, "more text", patience_s)


async def timed(awaitable):
    began = time.monotonic()
    return await awaitable, time.monotonic() - began


async def ended(api, reply, status, patience_s=60.0):
    async def has():
        return (await api.state(reply))["status"] == status

    await until(has, status, patience_s)


async def new_reply_is_live(client, api):
    """A reply begun now is shown as it is written, and can be stopped."""
    reply = await api.start()
    rendered = Rendered()
    reading = asyncio.create_task(read(client, api.stream_url(reply), rendered))
    await more_text(rendered, 20)
    assert (await api.call("POST", f"/v1/responses/{reply['response_id']}/stop")).status_code == 202
    async with asyncio.timeout(30):
        await reading
    assert rendered.end.data["finish_reason"] == "stopped"
    assert rendered.snapshots == 0
    assert rendered.text == (await api.message_of(reply))["content"]


def checked(server):
    """What ``python -m chatsvc check`` says with a server's settings, beside it."""
    env = server.environment | {"CHATSVC_DATA_DIR": str(server.data_dir.parent / "check"), "CHATSVC_PORT": "0"}
    command = [sys.executable, "-m", "chatsvc", "check"]
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=60)
    return [line for line in done.stdout.splitlines() if " Redis " in line]


# Fail-over ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_master_killed_under_sentinel_is_a_pause_for_every_reader_and_then_live_text(
    start_server, client, tmp_path
):
    with SentinelGroup(tmp_path) as group:
        servers = [start_server(TALE, CHATSVC_REDIS_URL=group.url, **QUICK)]
        servers.append(start_server(TALE, beside=servers[0], CHATSVC_REDIS_URL=group.url, CHATSVC_ROLES="api", **QUICK))
        assert [line[:4] for line in checked(servers[0])] == ["OK  "]
        api = Api(client, servers[0].base_url)
        elsewhere = Api(client, servers[1].base_url, api.headers)
        reply, to_stop = await api.start(), await api.start()
        seen = [Rendered(), Rendered()]
        reading = [
            asyncio.create_task(read(client, one.stream_url(reply), rendered))
            for one, rendered in zip((api, elsewhere), seen, strict=True)
        ]
        for rendered in seen:
            await more_text(rendered, 40)
        old = group.master
        old.kill()
        # Stopping does not wait for the fail-over.
        answer, took_s = await timed(elsewhere.call("POST", f"/v1/responses/{to_stop['response_id']}/stop"))
        assert (answer.status_code, took_s < 2) == (202, True)
        await ended(api, to_stop, "stopped")
        await asyncio.to_thread(group.fail_over, old)
        lengths = [len(rendered.text) for rendered in seen]
        for rendered, length in zip(seen, lengths, strict=True):
            await more_text(rendered, length + 40)
        assert not any(task.done() for task in reading)
        assert (await elsewhere.call("POST", f"/v1/responses/{reply['response_id']}/stop")).status_code == 202
        async with asyncio.timeout(30):
            await asyncio.gather(*reading)
        stored = await api.message_of(reply)
        assert stored["status"] == "stopped"
        assert seen[0].text == seen[1].text == stored["content"]
        for one in (api, elsewhere):
            await new_reply_is_live(client, one)
        # The old master is a replica when it comes back, and nobody's log is on it.
        old.start()
        await new_reply_is_live(client, api)
        for server in servers:
            server.stop_if_running()


@pytest.mark.slow
async def test_a_lost_node_of_a_cluster_is_noticed_by_the_replies_on_it_only(start_server, client, tmp_path):
    with Cluster(tmp_path) as cluster:
        server = start_server(SHORT, CHATSVC_REDIS_URL=cluster.url, **QUICK, **MANY)
        assert [line[:4] for line in checked(server)] == ["OK  "]
        api = Api(client, server.base_url)
        lost = cluster.masters[2]

        def is_on_it(reply):
            number = partition(reply["response_id"], PARTITIONS)
            return cluster.holder(f"{{p{number:02d}}}") is lost

        replies = []
        while sum(map(is_on_it, replies)) < 2 or len(replies) - sum(map(is_on_it, replies)) < 3:
            replies.append(await api.start())
        away = [reply for reply in replies if is_on_it(reply)]
        stop_me, *others_away = away
        well = [reply for reply in replies if not is_on_it(reply)]
        seen = {reply["response_id"]: Rendered() for reply in replies}
        longest_s = dict.fromkeys(seen, 0.0)

        async def watch(reply):
            last = time.monotonic()

            def note(_):
                nonlocal last
                now = time.monotonic()
                longest_s[reply["response_id"]] = max(longest_s[reply["response_id"]], now - last)
                last = now
                return False

            await read(client, api.stream_url(reply), seen[reply["response_id"]], cut=note)

        reading = [asyncio.create_task(watch(reply)) for reply in replies]
        for rendered in seen.values():
            await more_text(rendered, 10)
        lost.kill()
        answer, took_s = await timed(api.call("POST", f"/v1/responses/{stop_me['response_id']}/stop"))
        assert (answer.status_code, took_s < 2) == (202, True)
        await ended(api, stop_me, "stopped")
        answer, took_s = await timed(api.send(await api.conversation()))
        assert (answer.status_code, took_s < 3) == (202, True)
        async with asyncio.timeout(60):
            await asyncio.gather(*reading)
        for reply in replies:
            rendered, stored = seen[reply["response_id"]], await api.message_of(reply)
            assert rendered.text == stored["content"]
            assert rendered.end.data["finish_reason"] == ("stopped" if reply is stop_me else "stop")
        assert [seen[reply["response_id"]].snapshots for reply in well] == [0] * len(well)
        # Those on the lost node show nothing more until their end.
        assert max(longest_s[reply["response_id"]] for reply in well) < 3
        assert all(seen[reply["response_id"]].snapshots for reply in others_away)
        server.stop_if_running()


@pytest.mark.slow
async def test_a_replica_takes_over_in_a_cluster_in_mid_reply(start_server, client, tmp_path):
    with Cluster(tmp_path, replicas=1) as cluster:
        server = start_server(TALE, CHATSVC_REDIS_URL=cluster.url, **QUICK, **MANY)
        api = Api(client, server.base_url)
        reply = await api.start()
        tag = f"{{p{partition(reply['response_id'], PARTITIONS):02d}}}"
        rendered = Rendered()
        reading = asyncio.create_task(read(client, api.stream_url(reply), rendered))
        await more_text(rendered, 40)
        cluster.holder(tag).kill()
        length = len(rendered.text)
        fresh = Rendered()
        async with asyncio.timeout(60):
            await read(client, api.stream_url(reply), fresh, cut=lambda seen: len(seen.text) > length + 40)
        await more_text(rendered, length + 40)
        await api.call("POST", f"/v1/responses/{reply['response_id']}/stop")
        async with asyncio.timeout(30):
            await reading
            await read(client, api.stream_url(reply), fresh)
        stored = await api.message_of(reply)
        assert (stored["status"], rendered.text, fresh.text) == ("stopped", stored["content"], stored["content"])
        server.stop_if_running()


@pytest.mark.slow
def test_check_says_what_is_wrong_with_a_sentinel_or_a_cluster(start_server, tmp_path):
    with SentinelGroup(tmp_path) as group:
        server = start_server(SHORT, CHATSVC_REDIS_URL=group.url)
        server.environment["CHATSVC_REDIS_URL"] = group.url.replace("/main", "/other")
        (line,) = checked(server)
        assert line.startswith("FAIL")
        assert 'no master named "other"' in line
        assert "CHATSVC_REDIS_URL" in line
        server.stop_if_running()
    with Cluster(tmp_path) as cluster:
        server.environment["CHATSVC_REDIS_URL"] = cluster.url
        cluster.masters[2].kill()
        (line,) = checked(server)
        assert line.startswith("FAIL")
        assert "not reachable" in line


# Slow -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def log_server(tmp_path):
    with LogServer(tmp_path) as server:
        yield server


@pytest.mark.slow
async def test_a_redis_that_takes_a_second_for_everything_slows_nothing_but_the_live_text(
    start_server, client, log_server
):
    async with SlowProxy(log_server.port).running() as proxy:
        server = start_server(SHORT, CHATSVC_REDIS_URL=proxy.url, **MANY)
        other = start_server(SHORT, beside=server, CHATSVC_REDIS_URL=proxy.url, CHATSVC_ROLES="api", **MANY)
        api = Api(client, server.base_url)
        elsewhere = Api(client, other.base_url, api.headers)
        running, to_stop = await api.start(), await api.start()
        seen = [Rendered() for _ in range(4)]
        reading = [
            asyncio.create_task(read(client, one.stream_url(running), rendered))
            for one, rendered in zip((api, elsewhere), seen, strict=False)
        ]
        for rendered in seen[:2]:
            await more_text(rendered, 20)
        proxy.delay_s = 1.0
        answer, took_s = await timed(api.send(await api.conversation()))
        # One look at whether Redis is there; a connection that has to be made first costs another second or two.
        assert (answer.status_code, took_s < 5) == (202, True)
        begun = answer.json() | {"conversation_id": running["conversation_id"]}
        for one, rendered in zip((api, elsewhere), seen[2:], strict=True):
            reading.append(asyncio.create_task(read(client, one.stream_url(begun), rendered)))
        for one, method, path in (
            (elsewhere, "POST", f"/v1/responses/{to_stop['response_id']}/stop"),
            (api, "GET", f"/v1/conversations/{running['conversation_id']}"),
            (api, "GET", "/v1/conversations"),
            (api, "GET", f"/v1/responses/{running['response_id']}"),
        ):
            # What waits for Redis takes a second every time; a busy machine does not.
            tries = [await timed(one.call(method, path)) for _ in range(3)]
            assert {answer.status_code for answer, _ in tries} <= {200, 202}
            assert min(took_s for _, took_s in tries) < 0.9, path
        await ended(api, to_stop, "stopped")
        async with asyncio.timeout(60):
            await asyncio.gather(*reading)
        stored = (await api.message_of(running))["content"]
        assert [rendered.text for rendered in seen[:2]] == [stored, stored]
        assert seen[2].text == seen[3].text != ""
        assert {rendered.end.name for rendered in seen} == {"done"}
        # Where the machine is slow too, a reader may hear of the end from the store first: that is no gap.
        assert {event.data["reason"] for rendered in seen for event in rendered.of("snapshot")} <= {"stored"}


@pytest.mark.slow
async def test_a_redis_slower_than_the_timeout_is_as_good_as_away_and_used_again_once_it_is_quick(
    start_server, client, log_server
):
    async with SlowProxy(log_server.port).running() as proxy:
        server = start_server(SHORT, CHATSVC_REDIS_URL=proxy.url, CHATSVC_DATABASE_TIMEOUT_S="1", **MANY)
        api = Api(client, server.base_url)
        reply = await api.start()
        rendered = Rendered()
        reading = asyncio.create_task(read(client, api.stream_url(reply), rendered))
        await more_text(rendered, 20)
        proxy.delay_s = 3.0
        conversation_id = await api.conversation()
        answer, took_s = await timed(api.send(conversation_id))
        assert (answer.status_code, answer.json()["code"], took_s < 4) == (503, "log_unavailable", True)
        await ended(api, reply, "complete")
        async with asyncio.timeout(30):
            await reading
        assert rendered.text == (await api.message_of(reply))["content"]
        proxy.delay_s = 0.0

        async def taken():
            return (await api.send(conversation_id)).status_code == 202

        await until(taken, "a message is taken")
        await new_reply_is_live(client, api)


# Out of memory --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_redis_without_memory_costs_the_live_text_until_there_is_room_again(start_server, client, log_server):
    server = start_server(TALE, CHATSVC_REDIS_URL=log_server.url, **QUICK)
    short = start_server(SHORT, CHATSVC_REDIS_URL=log_server.url, **QUICK)
    admin = redis.Redis(port=log_server.port)
    api, brief = Api(client, server.base_url), Api(client, short.base_url)
    tale, ending = await api.start(), await brief.start()
    seen = [Rendered(), Rendered()]
    reading = [
        asyncio.create_task(read(client, one.stream_url(reply), rendered))
        for one, reply, rendered in ((api, tale, seen[0]), (brief, ending, seen[1]))
    ]
    for rendered in seen:
        await more_text(rendered, 20)
    admin.config_set("maxmemory", "1")
    began = time.monotonic()
    to_stop = await api.start()  # it is not shown, and is written all the same
    assert (await api.call("POST", f"/v1/responses/{to_stop['response_id']}/stop")).status_code == 202
    await ended(api, to_stop, "stopped")
    await ended(brief, ending, "complete")
    async with asyncio.timeout(30):
        await reading[1]
    stored = (await brief.message_of(ending))["content"]
    assert seen[1].text == stored != ""
    full_s = time.monotonic() - began
    refused = admin.info("errorstats")["errorstat_OOM"]["count"]
    # Three writers, each trying again ever less often, and the marks of two processes' readers.
    assert refused < 40 + 5 * full_s, (refused, full_s)
    length = len(seen[0].text)
    admin.config_set("maxmemory", "0")
    await more_text(seen[0], length + 100)
    assert (await api.call("POST", f"/v1/responses/{tale['response_id']}/stop")).status_code == 202
    async with asyncio.timeout(30):
        await reading[0]
    assert seen[0].text == (await api.message_of(tale))["content"]
    assert seen[0].snapshots == 0
    again = await read_to_the_end(client, api.stream_url(tale))
    assert again.text == seen[0].text
    await new_reply_is_live(client, api)


# Away, and back ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False], ids=["with its data", "empty"])
async def test_a_redis_that_comes_back_after_a_while_is_live_again_and_stops_were_heard_all_along(
    start_server, client, tmp_path, kept
):
    arguments = ("--save", "", "--appendonly", "yes", "--appendfsync", "always") if kept else ()
    with LogServer(tmp_path, *arguments) as log:
        server = start_server(TALE, CHATSVC_REDIS_URL=log.url, **QUICK)
        other = start_server(TALE, beside=server, CHATSVC_REDIS_URL=log.url, CHATSVC_ROLES="api", **QUICK)
        api = Api(client, server.base_url)
        elsewhere = Api(client, other.base_url, api.headers)
        reply, to_stop = await api.start(), await api.start()
        seen = [Rendered(), Rendered()]
        reading = [
            asyncio.create_task(read(client, one.stream_url(reply), rendered))
            for one, rendered in zip((api, elsewhere), seen, strict=True)
        ]
        for rendered in seen:
            await more_text(rendered, 40)
        log.kill()
        await asyncio.sleep(AWAY_S)
        assert (await elsewhere.call("POST", f"/v1/responses/{to_stop['response_id']}/stop")).status_code == 202
        await ended(api, to_stop, "stopped")
        lengths = [len(rendered.text) for rendered in seen]
        log.start()
        for rendered, length in zip(seen, lengths, strict=True):
            await more_text(rendered, length + 40)
        assert not any(task.done() for task in reading)
        assert [rendered.snapshots for rendered in seen] == ([0, 0] if kept else [1, 1])
        assert (await elsewhere.call("POST", f"/v1/responses/{reply['response_id']}/stop")).status_code == 202
        async with asyncio.timeout(30):
            await asyncio.gather(*reading)
        stored = await api.message_of(reply)
        assert (stored["status"], seen[0].text, seen[1].text) == ("stopped", stored["content"], stored["content"])
        for one in (api, elsewhere):
            await new_reply_is_live(client, one)
        for one in (server, other):
            one.stop_if_running()
