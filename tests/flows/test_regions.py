"""Replies of one region are read and stopped through the other, also when their own region is away."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from datetime import UTC, datetime, timedelta

import httpx
import psycopg
import pytest
from api_client import Api
from reader import Rendered, read, read_to_the_end
from two_regions import SECRET, replicated_databases, two_regions

from chatsvc.api.region_trust import HEADER, RegionTrust
from chatsvc.clock import SystemClock
from chatsvc.ids import new_response_id
from chatsvc.limits import Principal, TierName

CUTS = 6


@pytest.fixture(scope="module")
def databases():
    with replicated_databases() as urls:
        yield urls


@pytest.fixture(scope="module")
def regions(databases, tmp_path_factory):
    with two_regions(databases, tmp_path_factory.mktemp) as servers:
        yield servers


@pytest.fixture
def home(client, regions):
    """A user in the region that writes the replies."""
    return Api(client, regions["eu"].base_url)


@pytest.fixture
def away(client, regions, home):
    """The same user in the other region."""
    return Api(client, regions["us"].base_url, home.headers)


@pytest.fixture
def home_can_be_killed(regions):
    yield regions["eu"]
    regions["eu"].stop_if_running()
    regions["eu"].start()


def signed(method, target, user="eve", *, secret=SECRET, clock=None):
    trust = RegionTrust(secret, clock or SystemClock(), region="asia")
    return {HEADER.decode(): trust.sign(method, target, Principal(user, TierName.FREE))}


async def until(condition, patience_s=60):
    """Ask another process until it says yes."""
    deadline = time.monotonic() + patience_s
    while not await condition():
        assert time.monotonic() < deadline, "it did not come to that"
        await asyncio.sleep(0.05)


async def metric(api, name, label=""):
    lines = (await api.client.get(f"{api.base}/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name) and label in line)


async def replicated(databases, reply):
    async def arrived():
        async with await psycopg.AsyncConnection.connect(databases["us"]) as connection:
            found = await connection.execute(
                "SELECT 1 FROM runs JOIN messages ON messages.id = message_id WHERE runs.id = %s",
                [reply["response_id"]],
            )
            return await found.fetchone() is not None

    await until(arrived)


async def with_cuts(client, url, random, **options):
    """Read, be cut at random events, come back: at least ``CUTS`` times, then to the end."""
    rendered, cuts = Rendered(), 0
    while rendered.end is None:
        at = len(rendered.events) + random.randint(1, 5)
        cut = (lambda seen, at=at: len(seen.events) >= at) if cuts < CUTS else None
        await read(client, url, rendered, cut=cut)
        cuts += rendered.end is None
    assert cuts >= CUTS
    return rendered


@pytest.mark.parametrize("shown", ["token", "identity"])
async def test_a_stream_through_the_other_region_with_cuts_is_what_was_stored(home, away, seeded, shown):
    reply = await home.start(max_tokens=120)
    url = away.stream_url(reply)
    if shown == "identity":
        away.client.headers.update(away.headers)
        url = url.partition("?")[0]
    rendered = await with_cuts(away.client, url, seeded)
    assert rendered.text == (await home.message_of(reply))["content"]
    assert rendered.end.name == "done"


async def test_retry_and_heartbeats_of_the_home_region_come_through_as_they_are(home, away, client):
    reply = await home.start(max_tokens=5)
    async with client.stream("GET", away.stream_url(reply), headers={"accept-encoding": "gzip"}) as answer:
        raw = b"".join([part async for part in answer.aiter_raw()])
        headers = answer.headers
    assert re.match(rb"retry: [12]\d{3}\n", raw)
    assert raw.count(b"retry:") == 1
    assert raw.count(b"\n: ping\n") >= 1
    assert headers["cache-control"] == "no-store, no-transform"
    assert headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in headers


async def test_a_reader_at_the_end_gets_204_and_a_malformed_cursor_400(home, away):
    reply = await home.start(max_tokens=3)
    seen = await read_to_the_end(away.client, away.stream_url(reply))
    at_the_end = await away.client.get(away.stream_url(reply), headers={"last-event-id": str(seen.last_id)})
    assert (at_the_end.status_code, at_the_end.content) == (204, b"")
    malformed = await away.client.get(away.stream_url(reply), headers={"last-event-id": "1x"})
    assert (malformed.status_code, malformed.json()["code"]) == (400, "invalid_cursor")


async def test_the_query_cursor_is_passed_on(home, away):
    reply = await home.start(max_tokens=5)
    await read_to_the_end(away.client, away.stream_url(reply))
    async with away.client.stream("GET", f"{away.stream_url(reply)}&last_event_id=4") as answer:
        raw = b"".join([part async for part in answer.aiter_raw()])
    assert re.findall(rb"^id: (\d+)", raw, re.MULTILINE)[0] == b"5"


async def test_stop_and_fetch_work_through_the_other_region(home, away):
    reply = await home.start()
    await read(away.client, away.stream_url(reply), cut=lambda seen: len(seen.text) > 20)
    stopped = await away.call("POST", f"/v1/responses/{reply['response_id']}/stop")
    assert stopped.status_code == 202
    rendered = await read_to_the_end(away.client, away.stream_url(reply))
    assert rendered.end.data["finish_reason"] == "stopped"
    fetched, own = await away.state(reply), await home.state(reply)
    assert fetched["status"] == own["status"] == "stopped"
    assert fetched["usage"] == own["usage"]
    context, own = [await api.call("GET", f"/v1/responses/{reply['response_id']}/context") for api in (away, home)]
    assert context.status_code == own.status_code == 200, (context.text, own.text)
    assert context.json() == own.json()
    again = await away.call("POST", f"/v1/responses/{reply['response_id']}/stop")
    assert (again.status_code, again.json()["status"]) == (202, "stopped")


async def test_another_user_sees_nothing_and_nobody_must_sign_in(home, away, client):
    reply = await home.start()
    path = f"/v1/responses/{reply['response_id']}"
    other, nobody = Api(client, away.base), Api(client, away.base, {"x-nobody": "1"})
    for method, route in (
        ("GET", path),
        ("GET", f"{path}/stream"),
        ("GET", f"{path}/context"),
        ("POST", f"{path}/stop"),
    ):
        assert (await other.call(method, route)).status_code == 404
        assert (await nobody.call(method, route)).status_code == 401
    expired = await nobody.call("GET", f"{path}/stream?token=AAAA")
    assert (expired.status_code, expired.json()["code"]) == (401, "not_authenticated")
    assert (await home.state(reply))["status"] != "stopped"


async def test_an_id_of_an_unknown_region_is_not_found(home):
    path = f"/v1/responses/{new_response_id('mars')}"
    for method, route in (("GET", path), ("GET", f"{path}/stream"), ("POST", f"{path}/stop")):
        assert (await home.call(method, route)).status_code == 404


async def test_the_home_region_believes_the_shared_secret_and_nothing_else(home, client):
    reply = await home.start()
    user = home.headers["x-forwarded-user"]
    path = f"/v1/responses/{reply['response_id']}"

    class Late:
        def now(self):
            return datetime.now(UTC) - timedelta(seconds=70)

    async def status(headers):
        answer = await client.get(home.base + path, headers=headers)
        return answer.status_code, answer.json().get("code")

    assert await status(signed("GET", path, user)) == (200, None)
    assert await status(signed("GET", path, "somebody else")) == (404, "not_found")
    for forged in (
        signed("GET", path, user, secret="0" * 64),
        signed("GET", path, user, clock=Late()),
        signed("POST", path, user),
        signed("GET", path + "/stream", user),
        {"x-chatsvc-region": "e30.AAAA"},
    ):
        # The right user in the usual header does not help.
        assert await status({**home.headers, **forged}) == (401, "region_refused")


async def test_a_client_cannot_say_that_it_is_a_region(home, away, client):
    reply = await home.start()
    path = f"/v1/responses/{reply['response_id']}"
    victim = home.headers["x-forwarded-user"]
    forged = {"x-forwarded-user": "eve", **signed("GET", path, victim, secret="0" * 64)}
    for base in (home.base, away.base):
        assert (await client.get(base + path, headers=forged)).status_code == 401
        assert (await client.get(f"{base}/v1/me", headers=forged)).status_code == 401


async def test_a_request_that_a_region_passed_on_is_not_passed_on_again(home, away, client):
    reply = await home.start()
    path = f"/v1/responses/{reply['response_id']}"
    for method, route in (("GET", path), ("GET", f"{path}/stream"), ("POST", f"{path}/stop")):
        headers = signed(method, route, home.headers["x-forwarded-user"])
        answer = await client.request(method, away.base + route, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (508, "loop_detected")


async def test_a_client_that_leaves_leaves_nothing_open_in_either_region(home, away):
    before = await metric(home, "chatsvc_streams_open")
    replies = await asyncio.gather(*(home.start() for _ in range(3)))
    readers = [
        asyncio.create_task(read(away.client, away.stream_url(reply), cut=lambda seen: len(seen.text) > 5))
        for reply in replies * 5
    ]
    await asyncio.gather(*readers)
    states = await asyncio.gather(*(home.state(reply) for reply in replies))
    assert {state["status"] for state in states} == {"streaming"}, "the replies ended too soon for this test"

    async def closed():
        return await metric(home, "chatsvc_streams_open") <= before

    await until(closed)
    await asyncio.gather(*(away.call("POST", f"/v1/responses/{reply['response_id']}/stop") for reply in replies))


async def test_a_reply_is_replicated_when_it_has_ended_and_not_before(home, away, databases):
    reply = await home.start(max_tokens=80)
    await read(home.client, home.stream_url(reply), cut=lambda seen: len(seen.text) > 40)
    async with await psycopg.AsyncConnection.connect(databases["us"]) as connection:
        found = await connection.execute("SELECT 1 FROM runs WHERE status IN ('queued', 'streaming')")
        assert await found.fetchone() is None
    await read_to_the_end(home.client, home.stream_url(reply))
    await replicated(databases, reply)
    assert await away.message_of(reply) == await home.message_of(reply)


async def test_a_replicated_conversation_can_be_gone_on_with_and_deleted_in_the_other_region(home, away, databases):
    reply = await home.start(max_tokens=3)
    await read_to_the_end(home.client, home.stream_url(reply))
    await replicated(databases, reply)
    second = await away.start("And then?", reply["conversation_id"], max_tokens=3)
    assert second["response_id"].startswith("resp_us_")
    # It is written there, so the first region asks for it.
    rendered = await read_to_the_end(home.client, home.stream_url(second))
    assert rendered.text == (await away.message_of(second))["content"]

    async def both_there():
        return len(await home.messages(reply["conversation_id"])) == 4

    await until(both_there)
    assert await home.messages(reply["conversation_id"]) == await away.messages(reply["conversation_id"])
    path = f"/v1/conversations/{reply['conversation_id']}"
    assert (await away.call("DELETE", path)).status_code == 204

    async def gone():
        async with await psycopg.AsyncConnection.connect(databases["eu"]) as connection:
            found = await connection.execute(
                "SELECT (SELECT count(*) FROM messages WHERE conversation_id = %(id)s)"
                " + (SELECT count(*) FROM runs WHERE conversation_id = %(id)s)"
                " + (SELECT count(*) FROM conversations WHERE id = %(id)s)",
                {"id": reply["conversation_id"]},
            )
            return await found.fetchone() == (0,)

    await until(gone)


async def test_a_server_that_shuts_down_lets_readers_of_another_region_go(home, away, regions):
    reply = await home.start()

    def stop_amid(seen):
        if len(seen.text) > 20 and not stopping:
            regions["us"].signal(signal.SIGTERM)
            stopping.append(seen.last_id)
        return False

    stopping = []
    seen = await read(away.client, away.stream_url(reply), cut=stop_amid)
    assert seen.end is None
    async with asyncio.timeout(30):
        while regions["us"].exit_status is None:
            await asyncio.sleep(0.02)
    assert regions["us"].exit_status == 0
    # It waited for nobody's end: the reply goes on where it is written.
    assert (await home.state(reply))["status"] == "streaming"
    regions["us"].start()
    await read(away.client, away.stream_url(reply), seen, cut=lambda seen: seen.last_id > stopping[0] + 5)
    await home.call("POST", f"/v1/responses/{reply['response_id']}/stop")
    await read(away.client, away.stream_url(reply), seen)
    assert seen.end.name == "done"
    assert seen.text == (await home.message_of(reply))["content"]


async def test_when_home_is_away_the_stored_message_is_served_once_it_was_replicated(
    home, away, databases, home_can_be_killed
):
    ended = await home.start(max_tokens=5)
    await read_to_the_end(home.client, home.stream_url(ended))
    await replicated(databases, ended)
    stored = await home.message_of(ended)
    running = await home.start()
    away.client.headers.update(away.headers)
    seen, killed = Rendered(), []

    def kill_amid(seen):
        if len(seen.text) > 20 and not killed:
            home_can_be_killed.kill()
            killed.append(len(seen.text))
        return False

    await read(away.client, away.stream_url(running), seen, cut=kill_amid)
    assert killed
    assert seen.end is None, "a broken connection is no end of a reply"
    last_id = seen.last_id

    await read(away.client, away.stream_url(running), seen)
    assert (seen.end.name, seen.end.id) == ("error", None)
    assert (seen.end.data["code"], seen.end.data["retryable"]) == ("region_unreachable", True)
    assert seen.last_id == last_id
    for method, route in (("GET", ""), ("GET", "/context"), ("POST", "/stop")):
        answer = await away.call(method, f"/v1/responses/{running['response_id']}{route}")
        assert (answer.status_code, answer.json()["code"]) == (503, "region_unreachable")
        assert answer.json()["retryable"]
        assert int(answer.headers["retry-after"]) >= 1

    served = await read(away.client, away.stream_url(ended))
    assert (served.text, served.end.name, served.snapshots) == (stored["content"], "done", 1)
    assert (await away.state(ended))["status"] == "complete"
    async with httpx.AsyncClient() as stranger:
        answer = await Api(stranger, away.base).call("GET", f"/v1/responses/{ended['response_id']}")
        # Whose a token is only its own region can tell.
        by_token = await read(stranger, away.stream_url(ended))
    assert answer.status_code == 503
    assert (by_token.text, by_token.end.data["code"]) == ("", "region_unreachable")

    # Back again, home sees to the reply whose worker died, and the other region shows it.
    home_can_be_killed.start()
    seen.end = None
    rendered = await read_to_the_end(away.client, away.stream_url(running), pause_s=0.2)
    assert rendered.end.name in {"error", "done"}
    assert rendered.end.data.get("code") != "region_unreachable"
    asked = "chatsvc_region_requests_total"
    assert await metric(away, asked, 'outcome="stored"') == 2
    assert await metric(away, asked, 'outcome="unreachable"') >= 4
    assert await metric(away, asked, 'outcome="passed"') >= 2


async def test_the_secret_is_in_no_log(regions):
    for server in regions.values():
        assert SECRET not in server.log()
