"""A stream log on one Redis: how the server is reached, what is made of one that is not well (S10), what it holds."""

import asyncio
import ssl
import subprocess
import time
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
import redis
from server import free_port
from streaming import append, delta, running, soon

from chatsvc.embedded import embedded_redis
from chatsvc.errors import LogUnavailable
from chatsvc.streamlog.base import AppendResult, Position
from chatsvc.streamlog.factory import create_log

A, B = "resp_local_a", "resp_local_b"
OK = AppendResult.OK


@pytest.fixture
async def own_url(data_dir):
    """URL of a Valkey that nobody else uses: its connections may be counted and cut, its settings changed.

    At the one of the session servers of other tests may still hang, and come back whenever they like.
    """
    async with embedded_redis(data_dir, lambda line: None) as url:
        yield url


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
    log = create_log(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=1)
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


async def test_s10_the_first_append_after_a_broken_connection_tells_of_the_break(own_url):
    log = create_log(own_url, timeout_s=5)
    await log.open(A, 1)
    await log.append([append(A, delta(1))])
    with redis.Redis.from_url(own_url) as admin:
        assert admin.client_kill_filter(_type="normal", skipme=True) >= 1
    async with asyncio.timeout(60):
        while not log._writes._wire.closed:  # known here too, so that a new one would be made without a word
            await asyncio.sleep(0.005)
    with pytest.raises(LogUnavailable):
        await log.append([append(A, delta(2))])
    assert await log.position(A) == Position(1, 1)
    assert await log.append([append(A, delta(2))]) == [OK]
    await log.aclose()


async def test_s10_a_redis_that_refuses_to_write_is_as_good_as_away(own_url):
    log = create_log(own_url, timeout_s=5)
    await log.open(A, 1)
    with redis.Redis.from_url(own_url) as admin:
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


async def test_redis_sees_three_connections_whatever_happens(own_url):
    log = create_log(own_url, timeout_s=5)
    async with running(log.tail({A: Position(0, 0)}, 30)):
        await asyncio.gather(*(log.open(f"resp_local_{number}", 1) for number in range(100)))
        await log.append([append(f"resp_local_{number}", delta(1)) for number in range(100)])
        await asyncio.gather(*(log.read(f"resp_local_{number}", 0) for number in range(100)))
        with redis.Redis.from_url(own_url, single_connection_client=True) as admin:
            asking = str(admin.client_id())
            seen = [client for client in admin.client_list() if client["id"] != asking]
        assert len(seen) == 3, seen
    await log.aclose()
