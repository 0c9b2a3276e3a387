"""Postgres restarted, away, frozen, locked, or out of connections: POST is refused for now, replies go on (L4, L5, L6).

Two replicas share each Postgres here, so that a lease wrongly called expired shows as a ``worker_lost``.
"""

import asyncio
import contextlib
import signal

import psycopg
import pytest
from api_client import Api
from postgres_server import FAST, IMMEDIATE, PostgresServer
from reader import Rendered, read
from server import ServerProcess

LONG_ENGINE = "scripted:?tokens_per_s=20&tokens=900&slots=64"
ROOM = {"CHATSVC_TIERS_FREE_MAX_OPEN_REPLIES": "100"}
LEASE_S = 6.0
"""How long a worker's lease lasts without being renewed."""
LONG_ENOUGH_S = LEASE_S + 4
"""Longer than any lease lasts: had a worker's been called expired, its runs would be gone by then."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def postgres(data_dir):
    with PostgresServer(data_dir, fsync="off", full_page_writes="off") as server:
        yield server


@pytest.fixture
def start_replica(redis_server, tmp_path):
    """Start servers on one Postgres, without waiting long for its end in the test's own."""
    with contextlib.ExitStack() as stack:

        def start(postgres, number=1, engine=LONG_ENGINE, **env):
            process = ServerProcess(
                tmp_path / f"replica-{number}",
                {
                    "CHATSVC_AUTH": "proxy",
                    "CHATSVC_DATABASE_TIMEOUT_S": "2",
                    "CHATSVC_SERVER_GRACE_S": "0",
                    **ROOM,
                    **env,
                },
                engine=engine,
                database_url=postgres.url,
                redis_url=redis_server,
            )
            stack.callback(process.kill_if_running)
            return process.start()

        yield start


@pytest.fixture
def replicas(postgres, start_replica):
    return [start_replica(postgres, number) for number in (1, 2)]


class Watched:
    """A reply and a reader that stays with it, coming back whenever it is sent away."""

    def __init__(self, client, api, reply):
        self.api, self.reply, self.seen = api, reply, Rendered()
        self.task = asyncio.create_task(self._read(client))

    async def _read(self, client):
        while self.seen.end is None:
            await read(client, self.api.stream_url(self.reply), self.seen)
            await asyncio.sleep(0.1)
        return self.seen

    async def more(self, characters=20):
        """Wait until so much more text has come."""
        length = len(self.seen.text)
        while len(self.seen.text) < length + characters:
            assert not self.task.done(), self.seen.end
            await asyncio.sleep(0.05)

    async def ended(self):
        """The end, and that log and store agree on the text."""
        seen = await self.task
        stored = await self.api.message_of(self.reply)
        assert stored["content"] == seen.text
        return seen.end, stored["status"]


@pytest.fixture
async def watched(client):
    """Start replies, each with a reader; the readers end with the test."""
    watches = []

    async def watched(api, tokens):
        watches.append(Watched(client, api, await api.start(max_tokens=tokens)))
        await watches[-1].more()
        return watches[-1]

    yield watched
    for watch in watches:
        watch.task.cancel()
    await asyncio.gather(*(watch.task for watch in watches), return_exceptions=True)


@pytest.fixture
def apis(client, replicas):
    """Both replicas as one user sees them."""
    first = Api(client, replicas[0].base_url)
    return [first, Api(client, replicas[1].base_url, first.headers)]


async def refused(api, conversation_id):
    """What a POST is told: to come again, in a form that programs understand."""
    answer = await api.send(conversation_id)
    if answer.status_code == 202:
        return None
    problem = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.status_code, problem["status"], problem["retryable"]) == (503, 503, True)
    assert problem["retry_after"] > 0
    assert int(answer.headers["retry-after"]) >= 1
    return problem


async def until_taken(api, conversation_id):
    async with asyncio.timeout(60):
        while await refused(api, conversation_id):
            await asyncio.sleep(0.1)


async def stop_works(api, watch):
    answer = await api.call("POST", f"/v1/responses/{watch.reply['response_id']}/stop")
    assert answer.status_code == 202
    async with asyncio.timeout(60):
        end, status = await watch.ended()
    assert (end.data["finish_reason"], status) == ("stopped", "stopped")


@pytest.mark.parametrize("how", [FAST, IMMEDIATE], ids=["fast", "immediate"])
async def test_a_restart_of_postgres_costs_no_running_reply_anything(postgres, apis, watched, how):
    finishing = [await watched(api, 60) for api in apis for _ in range(2)]
    going_on = [await watched(api, 900) for api in apis]
    postgres.stop(how)
    postgres.start()
    async with asyncio.timeout(60):
        ends = [await watch.ended() for watch in finishing]
    assert all((end.data.get("finish_reason"), status) == ("length", "complete") for end, status in ends)
    await asyncio.sleep(LONG_ENOUGH_S)
    for watch in going_on:
        await watch.more()
    await stop_works(apis[1], going_on[0])
    await stop_works(apis[0], going_on[1])


async def test_while_postgres_is_away_replies_go_on_and_their_ends_wait_for_it(postgres, apis, watched):
    conversation_id = await apis[0].conversation()
    going_on = [await watched(api, 900) for api in apis]
    finishing = [await watched(api, 120) for api in apis]
    postgres.stop()
    async with asyncio.timeout(60):
        for api in apis:
            problem = await refused(api, conversation_id)
            assert problem["code"] == "store_unavailable"
            ready = await api.call("GET", "/readyz")
            assert ready.status_code == 503
            assert ready.json()["checks"]["postgres"] != "ok"
            assert (await api.call("GET", "/healthz")).status_code == 200
    lasting = asyncio.create_task(asyncio.sleep(20))  # three leases long
    for watch in going_on:
        await watch.more(200)
    await lasting
    assert not any(watch.task.done() for watch in finishing + going_on)
    written = [len(watch.seen.text) for watch in finishing]
    postgres.start()
    async with asyncio.timeout(60):
        ends = [await watch.ended() for watch in finishing]
    assert all((end.data.get("finish_reason"), status) == ("length", "complete") for end, status in ends)
    # All text had been shown before; what waited was the end alone.
    assert [len(watch.seen.text) for watch in finishing] == written
    await until_taken(apis[0], conversation_id)
    await asyncio.sleep(LONG_ENOUGH_S)
    await stop_works(apis[1], going_on[0])
    await stop_works(apis[0], going_on[1])


async def test_when_postgres_comes_back_a_worker_that_is_late_has_the_time_of_a_lease_to_renew_its_own(
    postgres, start_replica, client, watched
):
    late = start_replica(postgres, 1)
    watch = await watched(Api(client, late.base_url), 900)
    other = start_replica(postgres, 2)
    postgres.stop()
    late.signal(signal.SIGSTOP)
    try:
        # Its lease has run out by every clock.
        await asyncio.sleep(LEASE_S + 6)
        postgres.start()
        await asyncio.sleep(LEASE_S / 2)
    finally:
        late.signal(signal.SIGCONT)
    await asyncio.sleep(LONG_ENOUGH_S)
    await watch.more()
    await stop_works(Api(client, other.base_url, watch.api.headers), watch)


@pytest.mark.parametrize("seconds", [4.5, 9])
async def test_a_postgres_that_stands_still_for_a_while_costs_no_worker_its_runs(postgres, apis, watched, seconds):
    watches = [await watched(api, 900) for api in apis]
    with postgres.frozen():
        await asyncio.sleep(seconds)
    await asyncio.sleep(LONG_ENOUGH_S)
    for watch in watches:
        await watch.more()
        await stop_works(watch.api, watch)


async def leases(url):
    async with await psycopg.AsyncConnection.connect(url) as connection:
        rows = await connection.execute("SELECT id, expires_at > clock_timestamp() FROM workers")
        return await rows.fetchall()


async def test_requests_that_take_every_connection_cost_no_worker_its_lease(postgres, apis, watched):
    watches = [await watched(api, 900) for api in apis]
    conversations = [await api.conversation() for api in apis]

    async def storm(api, conversation_id):
        statuses = set()
        while not over.is_set():
            statuses.add((await api.call("GET", f"/v1/conversations/{conversation_id}")).status_code)
        return statuses

    over = asyncio.Event()
    async with await psycopg.AsyncConnection.connect(postgres.url) as locking:
        await locking.execute("LOCK TABLE users, conversations, messages, runs")
        storms = [
            asyncio.create_task(storm(api, conversation_id))
            for api, conversation_id in zip(apis, conversations, strict=True)
            for _ in range(20)
        ]
        for _ in range(round(2 * LEASE_S)):
            await asyncio.sleep(1)
            assert [fresh for _, fresh in await leases(postgres.url)] == [True, True]
        assert all(len(watch.seen.text) > 100 for watch in watches)
    over.set()
    statuses = await asyncio.gather(*storms)
    assert set.union(*statuses) <= {200, 503}
    assert 503 in set.union(*statuses)
    await asyncio.sleep(LONG_ENOUGH_S)
    for watch in watches:
        await watch.more()
        await stop_works(watch.api, watch)


async def hog(url):
    """Every connection that the server still makes."""
    held = []
    with contextlib.suppress(psycopg.OperationalError):
        while True:
            held.append(await psycopg.AsyncConnection.connect(url, autocommit=True))
    return held


async def test_where_others_hold_every_connection_a_message_is_refused_and_replies_wait_with_their_end(
    data_dir, start_replica, client, watched
):
    settings = {"max_connections": "12", "superuser_reserved_connections": "0"}
    with PostgresServer(data_dir, fsync="off", **settings) as postgres:
        api = Api(client, start_replica(postgres).base_url)
        conversations = [await api.conversation() for _ in range(20)]
        going_on, finishing = await watched(api, 900), await watched(api, 160)
        held = await hog(postgres.url)
        # Those that the server has it keeps, and gets by with them.
        assert await refused(api, conversations.pop()) is None
        # What it loses now it does not get back, unless it is quicker than we.
        cut = "SELECT pg_terminate_backend(pid, 2000) FROM pg_stat_activity WHERE application_name = 'chatsvc'"
        problem = {"detail": ""}
        while not ("too many" in problem["detail"] or "connection slots" in problem["detail"]):
            await held[0].execute(cut)
            held += await hog(postgres.url)
            problem = await refused(api, conversations.pop()) or problem
        assert problem["code"] == "store_unavailable"
        await going_on.more(100)
        assert not finishing.task.done()
        for connection in held:
            await connection.close()
        async with asyncio.timeout(60):
            end, status = await finishing.ended()
        assert (end.data["finish_reason"], status) == ("length", "complete")
        await until_taken(api, await api.conversation())
        await stop_works(api, going_on)
