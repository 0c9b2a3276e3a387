"""The contract of a stream log, S1-S13, over every backend.

Over 400 lines: one contract, one suite, in the order of its guarantees.
"""

import asyncio
import ssl
import subprocess
import time
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
import redis
from redis_groups import Cluster, SentinelGroup
from server import free_port
from streaming import append, delta, running, soon

from chatsvc.errors import LogUnavailable
from chatsvc.events import MAX_SEQ, Entry
from chatsvc.streamlog.base import AppendResult, Fenced, Position
from chatsvc.streamlog.factory import create_log
from chatsvc.streamlog.memory import MemoryLog

OK, FENCED, LOST = AppendResult.OK, AppendResult.FENCED, AppendResult.LOST
A, B, C = "resp_local_a", "resp_local_b", "resp_local_c"


@pytest.fixture(scope="module")
def sentinel(tmp_path_factory):
    with SentinelGroup(tmp_path_factory.mktemp("sentinel")) as group:
        yield group


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster")) as group:
        yield group


@pytest.fixture
def sentinel_url(sentinel):
    sentinel.master.admin.flushall()
    return sentinel.url


@pytest.fixture
def cluster_url(cluster):
    cluster.flush()
    return cluster.url


@pytest.fixture(params=["memory", "redis", "sentinel", "cluster"])
def make_log(request):
    """A function that gives one more door to the same logs, as another process would have."""
    if request.param == "memory":
        log = MemoryLog()
        return lambda: log
    url = request.getfixturevalue(f"{request.param}_url")
    return lambda: create_log(url, timeout_s=5)


@pytest.fixture
async def log(make_log):
    log = make_log()
    yield log
    await log.aclose()


async def gone(log, response_id):
    """Wait until there is no such log."""
    while await log.position(response_id) is not None:
        await asyncio.sleep(0.01)


async def test_s1_an_older_attempt_is_refused_for_good_once_a_newer_one_has_opened(log):
    await log.open(A, 1)
    assert await log.append([append(A, delta(1))]) == [OK]
    assert await log.open(A, 2) == 1
    assert await log.append([append(A, delta(2))]) == [FENCED]
    assert await log.append([append(A, delta(2), delta(3))]) == [FENCED]
    assert await log.append([append(A, delta(2), recreate=True)]) == [FENCED]
    assert await log.append([append(A, delta(2, attempt=2))]) == [OK]
    assert await log.append([append(A, delta(99))]) == [FENCED]
    with pytest.raises(Fenced):
        await log.open(A, 1)
    assert [(entry.attempt, entry.seq) for entry in (await log.read(A, 0)).entries] == [(1, 1), (2, 2)]


async def test_s1_the_same_attempt_may_open_again_and_learns_what_is_there(log):
    assert await log.open(A, 1) == 0
    assert await log.open(A, 1) == 0
    await log.append([append(A, delta(1), delta(2))])
    assert await log.open(A, 1) == 2
    assert await log.append([append(A, delta(3))]) == [OK]


async def test_s1_the_last_event_is_found_behind_many_attempts_that_wrote_nothing(log):
    await log.open(A, 1)
    await log.append([append(A, delta(1), delta(2), delta(3))])
    for attempt in range(2, 30):
        assert await log.open(A, attempt) == 3
    page = await log.read(A, 0)
    assert (page.first, page.last, len(page.entries)) == (1, 3, 3)
    assert (await log.read(A, 3)).position == Position(29, 0)


async def test_s1_the_first_event_is_found_behind_many_attempts_that_wrote_nothing(log):
    for attempt in range(1, 30):
        await log.open(A, attempt)
    await log.append([append(A, delta(1, attempt=29))])
    page = await log.read(A, 0)
    assert (page.first, page.last) == (1, 1)
    assert [entry.seq for entry in (await log.read(A, 0, 1)).entries] == [1]


async def test_s2_an_append_that_does_not_rise_changes_nothing(log):
    await log.open(A, 1)
    await log.append([append(A, delta(5))])
    assert await log.append([append(A, delta(5, "other"))]) == [FENCED]
    assert await log.append([append(A, delta(4))]) == [FENCED]
    assert [entry.data for entry in (await log.read(A, 0)).entries] == [delta(5).data]


async def test_s3_a_log_that_is_not_there_is_lost_unless_it_may_be_started_anew(log):
    assert await log.append([append(A, delta(7))]) == [LOST]
    assert await log.append([append(A, delta(7), delta(8))]) == [LOST]
    assert await log.position(A) is None
    assert await log.append([append(A, delta(7), recreate=True)]) == [OK]
    assert await log.append([append(B, delta(7), delta(8), recreate=True)]) == [OK]
    assert (await log.read(A, 0)).first == 7
    assert await log.position(B) == Position(1, 8)


async def test_s4_a_batch_holds_the_entries_of_many_logs_with_a_result_for_each(log):
    for response_id in (A, B):
        await log.open(response_id, 1)
    await log.open(B, 2)
    batch = [append(A, delta(1)), append(B, delta(1)), append(C, delta(1)), append(A, delta(2), delta(3))]
    assert await log.append(batch) == [OK, FENCED, LOST, OK]


async def test_s5_an_append_of_several_entries_is_taken_whole_or_not_at_all(log):
    await log.open(A, 1)
    await log.append([append(A, delta(1), delta(2))])
    assert await log.append([append(A, delta(2), delta(3), delta(4))]) == [FENCED]
    assert await log.position(A) == Position(1, 2)
    assert await log.append([append(A, delta(3), delta(4))]) == [OK]
    assert await log.append([append(A, delta(4), delta(5), recreate=True)]) == [FENCED]
    assert await log.position(A) == Position(1, 4)


async def test_s6_entries_come_back_byte_for_byte_and_in_order(log):
    await log.open(A, 1)
    awkward = [b"", b"\r\n$5\r\n", bytes(range(256)), "data: x\n\nid: 9\n\n\u2028\U0001f469\u200d\U0001f469".encode()]
    entries = [Entry(1, seq, "delta", data) for seq, data in enumerate(awkward, 1)]
    for entry in entries:
        assert await log.append([append(A, entry)]) == [OK]
    assert list((await log.read(A, 0)).entries) == entries
    assert list((await log.tail({A: Position(0, 0)}, 1))[A]) == entries


async def test_s6_fence_marks_are_never_returned(log):
    await log.open(A, 1)
    await log.append([append(A, delta(1))])
    await log.open(A, 2)
    await log.append([append(A, delta(2, attempt=2))])
    assert [entry.seq for entry in (await log.read(A, 0)).entries] == [1, 2]
    assert [entry.seq for entry in (await log.tail({A: Position(1, 1)}, 1))[A]] == [2]


async def test_s6_a_page_ends_where_the_next_one_goes_on(log):
    await log.open(A, 1)
    await log.append([append(A, *(delta(seq) for seq in range(1, 11)))])
    await log.open(A, 2)
    await log.append([append(A, *(delta(seq, attempt=2) for seq in range(11, 21)))])
    seen, after = [], 0
    while page := (await log.read(A, after, 3)).entries:
        assert len(page) <= 3
        seen += [entry.seq for entry in page]
        after = seen[-1]
    assert seen == list(range(1, 21))
    page = await log.read(A, 4, 3)
    assert (page.position, page.first, page.last) == (Position(1, 7), 1, 20)


async def test_s6_the_last_event_is_the_newest_attempts_though_an_older_one_counted_further(log):
    await log.open(A, 1)
    await log.append([append(A, delta(8), delta(9))])
    await log.open(A, 2)
    await log.append([append(A, delta(1, attempt=2), delta(2, attempt=2), recreate=True)])
    for after, limit in ((8, 1), (8, 9), (0, 9), (0, 1)):
        assert (await log.read(A, after, limit)).last == 2


async def test_s6_a_cursor_beyond_everything_is_answered_with_what_there_is(log):
    await log.open(A, 1)
    await log.append([append(A, delta(1), delta(2))])
    for cursor in (2, 3, MAX_SEQ, 10**30):
        page = await log.read(A, cursor)
        assert (page.entries, page.first, page.last, page.position) == ((), 1, 2, Position(1, 2))
    missing = await log.read(B, 0)
    assert (missing.entries, missing.first, missing.last, missing.position) == ((), 0, 0, Position(0, 0))


async def test_s7_the_tail_returns_what_is_already_there(log):
    await log.open(A, 1)
    await log.open(B, 1)
    await log.append([append(A, delta(1), delta(2)), append(B, delta(1))])
    heard = await log.tail({A: Position(1, 1), B: Position(1, 1), C: Position(0, 0)}, 5)
    assert {key: [entry.seq for entry in entries] for key, entries in heard.items()} == {A: [2]}


async def test_s7_the_tail_returns_as_soon_as_something_is_appended(log, make_log):
    writer = make_log()
    tail = asyncio.create_task(log.tail({A: Position(0, 0), B: Position(0, 0)}, 30))
    await writer.open(B, 1)
    await writer.append([append(B, delta(1))])
    assert [entry.seq for entry in (await soon(tail))[B]] == [1]
    await writer.aclose()


async def test_s7_a_fence_mark_alone_does_not_end_the_wait(log, make_log):
    writer = make_log()
    await writer.open(A, 1)
    await writer.append([append(A, delta(1))])
    tail = asyncio.create_task(log.tail({A: Position(1, 1)}, 30))
    await writer.open(A, 2)
    await writer.append([append(A, delta(2, attempt=2))])
    assert [entry.seq for entry in (await soon(tail))[A]] == [2]
    await writer.aclose()


async def test_s7_wake_ends_the_wait_and_only_that(log):
    await log.open(A, 1)
    for _ in range(200):
        tail = asyncio.create_task(log.tail({A: Position(1, 0)}, 30))
        await asyncio.sleep(0)
        log.wake()
        assert await soon(tail) == {}
    await log.append([append(A, delta(1))])
    assert [entry.seq for entry in (await log.tail({A: Position(1, 0)}, 30))[A]] == [1]


async def test_s7_the_tail_returns_empty_handed_after_its_time(log):
    began = time.monotonic()
    assert await log.tail({A: Position(0, 0)}, 0.2) == {}
    assert await log.tail({}, 0.1) == {}
    assert time.monotonic() - began >= 0.28


async def test_s7_following_every_position_the_tail_gives_misses_nothing(log, make_log):
    writer, seen = make_log(), []
    await writer.open(A, 1)

    async def write():
        for seq in range(1, 301):
            assert await writer.append([append(A, delta(seq))]) == [OK]

    async def follow():
        position = Position(0, 0)
        while len(seen) < 300:
            for entry in (await log.tail({A: position}, 5)).get(A, ()):
                seen.append(entry.seq)
                position = Position(entry.attempt, entry.seq)

    await soon(asyncio.gather(write(), follow()))
    assert seen == list(range(1, 301))
    await writer.aclose()


async def test_s8_after_thousands_of_cancellations_everybody_still_gets_their_own(log):
    ids = [f"resp_local_{number}" for number in range(20)]
    for number, response_id in enumerate(ids):
        await log.open(response_id, 1)
        await log.append([append(response_id, delta(1, f"text of {number}"))])

    async def read(number):
        page = await log.read(ids[number], 0)
        assert page.entries[0].data == delta(1, f"text of {number}").data
        return 1

    tasks = []
    for turn in range(3000):
        task = asyncio.create_task(read(turn % 20))
        tasks.append(task)
        if turn % 3:
            # Cancelled at once, after it has been sent, or whenever the answer is half there.
            asyncio.get_running_loop().call_later((turn % 7) * 0.0003, task.cancel)
        if turn % 50 == 0:
            await asyncio.sleep(0)
    outcomes = await soon(asyncio.gather(*tasks, return_exceptions=True))
    assert {type(outcome) for outcome in outcomes} <= {int, asyncio.CancelledError}
    assert outcomes.count(1) >= 1000


async def test_s8_a_cancelled_tail_leaves_nothing_to_the_next_one(log):
    await log.open(A, 1)
    await log.append([append(A, delta(1))])
    for _ in range(20):
        tail = asyncio.create_task(log.tail({B: Position(0, 0)}, 30))
        await asyncio.sleep(0.002)
        tail.cancel()
        with pytest.raises(asyncio.CancelledError):
            await tail
        assert list(await log.tail({A: Position(0, 0)}, 5)) == [A]


async def test_s9_an_expired_log_is_gone_when_its_time_has_come_and_not_before(log):
    for response_id in (A, B):
        await log.open(response_id, 1)
        await log.append([append(response_id, delta(1))])
    await log.expire([A], 0.05)
    await log.expire([B], 60)
    await soon(gone(log, A))
    assert (await log.read(A, 0)).last == 0
    assert await log.append([append(A, delta(2))]) == [LOST]
    assert (await log.read(B, 0)).last == 1


async def test_s9_a_deleted_log_is_gone_at_once_and_is_not_begun_again_by_accident(log):
    await log.open(A, 1)
    await log.append([append(A, delta(1))])
    await log.delete([A, B])
    assert await log.position(A) is None
    assert await log.append([append(A, delta(2))]) == [LOST]
    await log.delete([])
    await log.expire([], 5)


async def test_s9_opening_again_takes_an_expiry_back(log):
    await log.open(A, 1)
    await log.expire([A], 0.2)
    await log.open(A, 2)
    await asyncio.sleep(0.3)
    assert await log.append([append(A, delta(1, attempt=2))]) == [OK]


async def test_ping_answers(log):
    await log.ping()


async def test_s10_an_unreachable_server_is_said_by_every_call():
    log = create_log(f"redis://127.0.0.1:{free_port()}", timeout_s=1)
    calls = (
        lambda: log.open(A, 1),
        lambda: log.append([append(A, delta(1))]),
        lambda: log.position(A),
        lambda: log.read(A, 0),
        lambda: log.tail({A: Position(0, 0)}, 30),
        lambda: log.expire([A], 1),
        lambda: log.delete([A]),
        log.ping,
    )
    for call in calls:
        with pytest.raises(LogUnavailable):
            await soon(call())
    await log.aclose()


async def test_s10_a_server_that_says_nothing_is_given_up_in_time_and_its_late_answer_reaches_nobody():
    """The server answers the first command only after its caller has given up, and the second one in time."""
    connections = []

    async def serve(reader, writer):
        connections.append(writer)
        await reader.read(1000)
        if len(connections) > 1:
            writer.write(b"+PONG\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    log = create_log(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=0.2)
    began = time.monotonic()
    with pytest.raises(LogUnavailable, match="did not answer"):
        await log.position(A)
    assert time.monotonic() - began < 20
    await log.ping()
    assert len(connections) == 2
    await log.aclose()
    server.close()
    await server.wait_closed()


async def test_s10_bytes_that_are_no_reply_end_the_connection():
    async def serve(reader, writer):
        await reader.read(1000)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    log = create_log(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=5)
    with pytest.raises(LogUnavailable):
        await soon(log.ping())
    await log.aclose()
    server.close()
    await server.wait_closed()


async def test_s10_the_first_append_after_a_broken_connection_tells_of_the_break(redis_url):
    log = create_log(redis_url, timeout_s=5)
    await log.open(A, 1)
    await log.append([append(A, delta(1))])
    with redis.Redis.from_url(redis_url) as admin:
        assert admin.client_kill_filter(_type="normal", skipme=True) >= 1
    await asyncio.sleep(0.05)
    with pytest.raises(LogUnavailable):
        await log.append([append(A, delta(2))])
    assert await log.position(A) == Position(1, 1)
    assert await log.append([append(A, delta(2))]) == [OK]
    await log.aclose()


async def test_s10_a_redis_that_refuses_to_write_is_as_good_as_away(redis_url):
    log = create_log(redis_url, timeout_s=5)
    await log.open(A, 1)
    with redis.Redis.from_url(redis_url) as admin:
        admin.config_set("maxmemory", "1")
        try:
            for batch in ([append(A, delta(1))], [append(A, delta(1), delta(2))]):
                with pytest.raises(LogUnavailable, match="OOM"):
                    await log.append(batch)
            with pytest.raises(LogUnavailable, match="OOM"):
                await log.open(B, 1)
        finally:
            admin.config_set("maxmemory", "0")
    assert await log.append([append(A, delta(1))]) == [OK]
    await log.aclose()


async def test_a_closed_log_stays_closed(redis_url):
    log = create_log(redis_url, timeout_s=5)
    await log.ping()
    log.wake()
    await log.aclose()
    await log.aclose()
    with pytest.raises(LogUnavailable):
        await log.ping()


async def test_a_running_log_does_not_stay_for_ever_though_nobody_ends_it(redis_url):
    log = create_log(redis_url, timeout_s=5)
    await log.open(A, 1)
    await log.append([append(B, delta(9), recreate=True)])
    with redis.Redis.from_url(redis_url) as admin:
        for key in admin.keys("resp:*"):
            assert 3600 < admin.ttl(key) <= 24 * 3600
    await log.aclose()


async def test_all_keys_of_one_response_carry_the_tag_of_its_partition(redis_url):
    log = create_log(redis_url, timeout_s=5, partitions=16)
    for number in range(200):
        await log.open(f"resp_local_{number}", 1)
    with redis.Redis.from_url(redis_url) as admin:
        tags = {key.split(b":")[1] for key in admin.keys("resp:*")}
    assert tags == {b"{p%02d}" % number for number in range(16)}
    await log.aclose()


async def test_a_password_and_a_database_in_the_url_are_used(redis_url):
    with redis.Redis.from_url(redis_url) as admin:
        admin.execute_command("ACL", "SETUSER", "writer", "on", ">s3cret", "~*", "&*", "+@all")
    place = redis_url.split("://", 1)[1]
    scheme = redis_url.split("://", 1)[0]
    if scheme == "unix":
        good = f"unix://writer:s3cret@{place.split('?')[0]}?db=3"
        bad = f"unix://writer:wrong@{place.split('?')[0]}?db=3"
    else:
        host = place.split("@")[-1].split("/")[0]
        good, bad = f"redis://writer:s3cret@{host}/3", f"redis://writer:wrong@{host}/3"
    log = create_log(good, timeout_s=5)
    await log.open(A, 1)
    await log.aclose()
    with redis.Redis.from_url(good) as client:
        assert len(client.keys("resp:*")) == 1
        client.flushdb()
    refused = create_log(bad, timeout_s=5)
    with pytest.raises(LogUnavailable, match="refuses"):
        await refused.ping()
    await refused.aclose()


@pytest.fixture
def certificate(tmp_path):
    """A certificate for 127.0.0.1 that nobody else trusts: (certificate, key)."""
    files = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", "/CN=redis", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-out", files[0], "-keyout", files[1]),
        ],
        check=True,
        capture_output=True,
    )
    return files


@pytest.fixture
def reached(redis_url, tmp_path, certificate):
    """The same server over a unix socket, TCP or TLS: a context that gives its URL and one that cannot be trusted."""

    @asynccontextmanager
    async def reached(scheme):
        async def pipe(reader, writer):
            while data := await reader.read(65536):
                writer.write(data)
            writer.close()

        relays = set()

        async def relay(reader, writer):
            relays.add(asyncio.current_task())
            there, back = await open_server(redis_url)
            await asyncio.gather(pipe(reader, back), pipe(there, writer))

        path = tmp_path / "socket"
        if scheme == "unix":
            server, url = await asyncio.start_unix_server(relay, path), f"unix://{path}"
        else:
            context = None
            if scheme == "rediss":
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(*certificate)
            server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
            url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        yield url
        server.close()
        await soon(asyncio.gather(*relays))

    return reached


async def open_server(url):
    parsed = urlsplit(url)
    if parsed.scheme == "unix":
        return await asyncio.open_unix_connection(parsed.path)
    return await asyncio.open_connection(parsed.hostname, parsed.port)


@pytest.mark.parametrize("scheme", ["unix", "redis", "rediss"])
async def test_a_server_is_reached_over_unix_sockets_tcp_and_tls(reached, certificate, scheme):
    async with reached(scheme) as url:
        log = create_log(url + (f"?ssl_ca_certs={certificate[0]}" if scheme == "rediss" else ""), timeout_s=5)
        await log.open(A, 1)
        assert await log.append([append(A, delta(1, "x" * 100_000))]) == [OK]
        assert (await log.read(A, 0)).entries[0] == delta(1, "x" * 100_000)
        assert list(await log.tail({A: Position(0, 0)}, 5)) == [A]
        await log.aclose()


async def test_a_server_whose_certificate_nobody_vouches_for_is_not_talked_to(reached):
    async with reached("rediss") as url:
        log = create_log(url, timeout_s=5)
        with pytest.raises(LogUnavailable, match="certificate"):
            await log.ping()
        await log.aclose()


async def test_redis_sees_three_connections_whatever_happens(redis_url):
    with redis.Redis.from_url(redis_url) as admin:
        before = {other["id"] for other in admin.client_list()}  # of others, or closing since an earlier test
    log = create_log(redis_url, timeout_s=5)
    async with running(log.tail({A: Position(0, 0)}, 30)):
        await asyncio.gather(*(log.open(f"resp_local_{number}", 1) for number in range(100)))
        await log.append([append(f"resp_local_{number}", delta(1)) for number in range(100)])
        await asyncio.gather(*(log.read(f"resp_local_{number}", 0) for number in range(100)))
        with redis.Redis.from_url(redis_url) as admin:
            own = {client["id"] for client in admin.client_list()} - before - {str(admin.client_id())}
        assert len(own) == 3
    await log.aclose()


async def test_a_cluster_sees_three_connections_per_partition_whatever_happens(cluster, cluster_url):
    log = create_log(cluster_url, timeout_s=5, partitions=4)
    names = [f"resp_local_{number}" for number in range(100)]
    before = sum(len(node.admin.client_list()) for node in cluster.masters)
    for _ in range(3):
        async with running(log.tail({name: Position(0, 0) for name in names}, 30)):
            await asyncio.gather(*(log.open(name, 1) for name in names))
            await log.append([append(name, delta(1)) for name in names])
            await asyncio.gather(*(log.read(name, 0) for name in names))
            assert sum(len(node.admin.client_list()) for node in cluster.masters) - before <= 3 * 4
        await log.delete(names)
    await log.aclose()


async def test_s11_a_note_of_readers_is_seen_by_every_process_and_grows_old(make_log):
    here, there = make_log(), make_log()
    assert await there.unread_s([A, B]) == [None, None]
    await here.note_read([A])
    first, never = await there.unread_s([A, B])
    assert 0 <= first < 5
    assert never is None
    async with asyncio.timeout(60):
        while (await there.unread_s([A]))[0] <= first:
            await asyncio.sleep(0.002)
    await there.delete([A])
    assert (await here.unread_s([])) == []
    await here.aclose()
    await there.aclose()


async def test_s12_the_time_without_a_loss_is_the_same_for_every_process_and_grows(make_log):
    here, there = make_log(), make_log()
    await here.open(A, 1)
    first = await there.unbroken_s(A)
    assert 0 <= first < 60
    async with asyncio.timeout(60):
        while await there.unbroken_s(A) <= first:
            await asyncio.sleep(0.002)
    await there.open(A, 2)
    assert await here.unbroken_s(A) > first
    await here.aclose()
    await there.aclose()


async def test_s13_the_oldest_attempt_is_that_of_the_first_mark_or_entry_whatever_came_later(log):
    assert (await log.read(A, 0)).oldest_attempt == 0
    for attempt in range(2, 12):
        await log.open(A, attempt)
        for after in (0, 5):
            assert (await log.read(A, after)).oldest_attempt == 2
    await log.append([append(A, *(delta(seq, attempt=11) for seq in range(1, 8)))])
    await log.open(A, 12)
    for after, limit in ((0, 1), (0, 9), (5, 1), (7, 9)):
        assert (await log.read(A, after, limit)).oldest_attempt == 2


async def test_s13_a_log_that_was_lost_does_not_speak_of_the_attempts_before_that(log):
    for response_id in (A, B):
        await log.open(response_id, 1)
        await log.append([append(response_id, delta(1))])
    await log.delete([A, B])
    assert (await log.read(A, 0)).oldest_attempt == 0
    await log.open(A, 3)
    await log.append([append(B, delta(2, attempt=2), delta(3, attempt=2), recreate=True)])
    assert [(await log.read(response_id, 0)).oldest_attempt for response_id in (A, B)] == [3, 2]
