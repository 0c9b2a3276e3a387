"""Connections that are torn at any moment leave nothing behind: no task, descriptor, memory, Redis client."""

import asyncio

import pytest
import redis
from api_client import Api
from raw_reader import RawReader, figures, settled

AT_ONCE = 60
WARM_UP = 400
USER = "X-Forwarded-User: torn"


@pytest.fixture(scope="module")
def server(start_server):
    return start_server("scripted:?tokens_per_s=20&tokens=20000&window=100000&slots=64", CHATSVC_SERVER_GRACE_S="0")


async def before_a_request(reader, path, random):
    await asyncio.sleep(random.choice([0, random.uniform(0, 0.02)]))


async def within_the_headers(reader, path, random):
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n".encode()
    await reader.send(request[: random.randrange(1, len(request))])
    await asyncio.sleep(random.uniform(0, 0.01))


async def within_a_body(reader, path, random):
    head = "POST /v1/conversations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    await reader.send(f"{head}{USER}\r\nContent-Length: 500\r\n\r\n{{".encode())
    await asyncio.sleep(random.uniform(0, 0.01))


async def before_the_answer(reader, path, random):
    await reader.ask(random.choice([path, "/v1/conversations", "/v1/me", "/readyz"]), USER)
    await asyncio.sleep(random.choice([0, random.uniform(0, 0.01)]))


async def within_the_stream(reader, path, random):
    await reader.ask(path, f"Last-Event-ID: {random.randrange(100)}" if random.random() < 0.5 else "X-None: 1")
    for _ in range(random.randint(1, 3)):
        if not await reader.read():
            raise AssertionError(f"ended: {reader.seen!r}")


WAYS = (before_a_request, within_the_headers, within_a_body, before_the_answer, within_the_stream)


async def tear(server, paths, count, random):
    """Open and reset so many connections, many at a time."""
    numbers = iter(range(count))

    async def some():
        for _ in numbers:
            reader = await RawReader.connect(server.port)
            try:
                await random.choice(WAYS)(reader, random.choice(paths), random)
            finally:
                reader.reset()

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))


@pytest.mark.parametrize("closes", [1_500, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_thousands_of_abrupt_closes_leave_nothing_behind(server, client, redis_server, seeded, closes):
    users = [Api(client, server.base_url) for _ in range(8)]
    replies = [await user.start(max_tokens=20_000) for user in users]
    paths = [reply["stream_url"] for reply in replies]

    def clients_of_redis():
        with redis.Redis.from_url(redis_server) as asking:
            return len(asking.client_list())

    def quiet(now):
        return now["chatsvc_streams_open"] == 0 and now["chatsvc_stream_buffered_bytes"] == 0

    await tear(server, paths, WARM_UP, seeded)
    before = await settled(client, server, quiet)
    before_redis = clients_of_redis()
    await tear(server, paths, closes, seeded)
    # A few of the pool's connections to Postgres may have come or gone.
    after = await settled(
        client,
        server,
        lambda now: (
            quiet(now)
            and now["chatsvc_tasks"] <= before["chatsvc_tasks"] + 5
            and now["process_open_fds"] <= before["process_open_fds"] + 10
        ),
    )
    print({name: (before[name], after[name]) for name in after if name.startswith("process_") or "tasks" in name})
    assert clients_of_redis() <= before_redis
    assert after["process_resident_memory_bytes"] - before["process_resident_memory_bytes"] < 20 * 2**20
    assert after["chatsvc_streams_cut_total"] == before["chatsvc_streams_cut_total"]
    assert after["chatsvc_runs_active"] == before["chatsvc_runs_active"]
    assert "Traceback" not in server.log(), server.log()[server.log().index("Traceback") - 500 :][:6000]
    for user, reply in zip(users, replies, strict=True):
        assert (await user.state(reply))["status"] == "streaming"
        await user.call("POST", f"/v1/responses/{reply['response_id']}/stop")
    assert (await figures(client, server))["chatsvc_runs_abandoned_total"] == 0
