"""Readers that read nothing, little, or vanish: they are cut and come back; others and memory are unharmed.

Over the real server and real sockets. Where the clock matters the heartbeat is made short.
"""

import asyncio
import functools
import re
import resource
import subprocess
import time

import pytest
from api_client import Api
from raw_reader import RawReader, figures, settled
from reader import Rendered, read, read_to_the_end

TOKENS = 120_000
HEARTBEAT_S = 2.0
BUFFER_BYTES = 256 * 1024
"""What a stream may hold back, plus one append."""
TINY = 2048


@pytest.fixture(scope="module")
def server(start_server):
    """Says 150 KB a second, 1 MB in all."""
    return start_server(f"scripted:?tokens_per_s=16000&tokens={TOKENS}&window=1000000&slots=64&text=+someword+another1")


@pytest.fixture(scope="module")
def quiet_server(start_server):
    """A model that is silent for long, and a short heartbeat."""
    return start_server(
        "scripted:?first_token_ms=600000&tokens=1&slots=64",
        CHATSVC_STREAM_HEARTBEAT_S=str(HEARTBEAT_S),
        CHATSVC_SERVER_GRACE_S="0",
    )


async def eavesdrop(client, server, seen):
    """Note the figures until cancelled."""
    while True:
        seen.append(await figures(client, server))
        await asyncio.sleep(0.1)


async def pace_of(client, url):
    """Read a reply to its end: what was rendered, and the pauses between its pieces in seconds."""
    rendered, pauses, last = Rendered(), [], time.monotonic()

    def note(_):
        nonlocal last
        now = time.monotonic()
        pauses.append(now - last)
        last = now
        return False

    await read(client, url, rendered, cut=note)
    return rendered, sorted(pauses)


async def never(reader):
    """Read nothing until the server has given up."""


async def a_byte_a_second(reader):
    while await reader.read(1):
        await asyncio.sleep(1)


@pytest.mark.alone
@pytest.mark.parametrize("habit", [never, a_byte_a_second])
async def test_a_reader_that_stays_behind_is_cut_costs_little_and_resumes_with_the_whole_text(
    server, client, api, habit
):
    """A zero window, or nearly: 20 such readers on a reply of 1 MB, beside readers that are quick."""
    before = await figures(client, server)
    reply = await api.start(max_tokens=TOKENS)
    other = await api.start(max_tokens=TOKENS)
    stuck = [await RawReader.connect(server.port, receive_buffer=TINY) for _ in range(20)]
    for reader in stuck:
        await reader.ask(reply["stream_url"])
    habits = [asyncio.create_task(habit(reader)) for reader in stuck]
    seen = []
    listening = asyncio.create_task(eavesdrop(client, server, seen))
    (beside, pauses), (apart, pauses_apart) = await asyncio.gather(
        pace_of(client, api.stream_url(reply)), pace_of(client, api.stream_url(other))
    )
    # All are gone: cut over their bound, or by the kernel for taking nothing.
    after = await settled(client, server, lambda now: now["chatsvc_streams_open"] == 0)
    for task in (listening, *habits):
        task.cancel()
    await asyncio.gather(listening, *habits, return_exceptions=True)

    stored = (await api.message_of(reply))["content"]
    assert len(stored) > 1_000_000
    assert beside.text == stored
    assert apart.text == (await api.message_of(other))["content"]
    assert beside.snapshots == apart.snapshots == 0
    for of_one in (pauses, pauses_apart):
        # Whoever waits for others does so all the time; a machine may stand still now and then.
        assert of_one[int(len(of_one) * 0.95)] < 0.5, of_one[-10:]
    most_held = max(now["chatsvc_stream_buffered_bytes"] for now in seen)
    assert 0 < most_held < len(stuck) * (BUFFER_BYTES + 32 * 1024)
    assert after["chatsvc_streams_cut_total"] - before["chatsvc_streams_cut_total"] == len(stuck)
    # Both replies' texts are in there too, while they run.
    grown = max(now["process_resident_memory_bytes"] for now in seen) - before["process_resident_memory_bytes"]
    assert grown < len(stuck) * BUFFER_BYTES + 40 * 2**20

    for reader in stuck:
        await reader.to_the_end()
        reader.close()
    partial = await stuck[0].rendered()
    assert partial.end is None
    await read(client, api.stream_url(reply), partial)
    assert partial.text == stored


@pytest.mark.alone
async def test_a_reader_that_takes_nothing_of_a_replay_is_let_go(start_server, client):
    """All is written at once, so no bound is passed later on: the kernel says that its window stays shut."""
    server = start_server(
        "scripted:?tokens=100000&window=1000000&text=+someword+another1", CHATSVC_STREAM_HEARTBEAT_S=str(HEARTBEAT_S)
    )
    api = Api(client, server.base_url)
    reply = await api.start(max_tokens=100_000)
    whole = await read_to_the_end(client, api.stream_url(reply))
    stuck = await RawReader.connect(server.port, receive_buffer=TINY)
    await stuck.ask(reply["stream_url"])
    await settled(client, server, lambda now: now["chatsvc_stream_buffered_bytes"] > BUFFER_BYTES)
    asked = time.monotonic()
    await settled(client, server, lambda now: now["chatsvc_stream_buffered_bytes"] == 0)
    assert time.monotonic() - asked < 2 * HEARTBEAT_S
    await stuck.to_the_end()
    partial = await stuck.rendered()
    assert partial.end is None
    stuck.close()
    assert (await read(client, api.stream_url(reply), partial)).text == whole.text


async def idle_reader(api, server):
    """A reader whose reply says nothing yet."""
    reply = await api.start()
    reader = await RawReader.connect(server.port)
    await reader.ask(reply["stream_url"])
    await reader.until(b"event: start")
    await settled(api.client, server, lambda now: now["chatsvc_streams_open"] == 1)
    return reader


@pytest.mark.alone
async def test_a_peer_that_vanishes_without_a_word_is_noticed_within_two_heartbeats(quiet_server, client):
    """Half-open: no FIN, no RST, no acknowledgement; only what is written to it can tell."""
    reader = await idle_reader(Api(client, quiet_server.base_url), quiet_server)
    await reader.until(b": ping\n")
    reader.vanish()
    vanished = time.monotonic()
    await settled(client, quiet_server, lambda now: now["chatsvc_streams_open"] == 0)
    assert time.monotonic() - vanished < 2 * HEARTBEAT_S + 1
    reader.close()


@pytest.mark.alone
@pytest.mark.parametrize("leave", [RawReader.close, RawReader.reset])
async def test_a_peer_that_says_goodbye_on_a_silent_stream_is_noticed_within_two_heartbeats(
    quiet_server, client, leave
):
    reader = await idle_reader(Api(client, quiet_server.base_url), quiet_server)
    left = time.monotonic()
    leave(reader)
    await settled(client, quiet_server, lambda now: now["chatsvc_streams_open"] == 0)
    assert time.monotonic() - left < 2 * HEARTBEAT_S


async def test_fifty_readers_at_fifty_places_of_one_reply_see_the_same_events(start_server, client):
    server = start_server("scripted:?tokens_per_s=100&tokens=3000")
    api = Api(client, server.base_url)
    reply = await api.start()
    first = asyncio.create_task(read_to_the_end(client, api.stream_url(reply)))
    begun = await read(client, api.stream_url(reply), cut=lambda seen: seen.last_id >= 52)
    assert begun.end is None
    reading = [
        asyncio.create_task(read(client, api.stream_url(reply), Rendered(last_id=cursor))) for cursor in range(50)
    ]
    await settled(client, server, lambda now: now["chatsvc_streams_open"] == 51)
    await api.call("POST", f"/v1/responses/{reply['response_id']}/stop")
    others = await asyncio.gather(*reading)
    whole = [event for event in (await first).events if event.id is not None]
    assert [event.id for event in whole] == list(range(1, len(whole) + 1))
    for cursor, rendered in enumerate(others):
        assert [event for event in rendered.events if event.id is not None] == whole[cursor:]


async def test_a_server_with_few_file_descriptors_says_so_and_goes_on_serving(start_server, client, monkeypatch):
    """Streams are put off first, so that everything else still finds a connection; then connections are refused."""

    def few():
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, 600))

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", functools.partial(subprocess.Popen, preexec_fn=few))
        server = start_server("scripted:?first_token_ms=600000&tokens=1", CHATSVC_SERVER_GRACE_S="0")
    api = Api(client, server.base_url)
    reply = await api.start()
    readers = []
    while not readers or b"event: start" in readers[-1].seen:
        readers.append(await RawReader.connect(server.port))
        await readers[-1].ask(reply["stream_url"])
        while not re.search(rb"event: start\n|\r\n0\r\n\r\n$", readers[-1].seen):
            assert await readers[-1].read()
    # A whole, empty stream: an EventSource comes back by itself, here or at another replica.
    assert readers[-1].status == 200
    assert re.search(rb"\r\nretry: \d{4}\n\r\n0\r\n\r\n$", readers[-1].seen)
    assert 200 < len(readers) < 600 - 250
    assert (await api.state(reply))["status"] == "streaming"

    idle = [await RawReader.connect(server.port) for _ in range(100)]
    assert await idle[-1].read() == b""
    assert "out of file descriptors" in server.log()
    assert (await api.state(reply))["status"] == "streaming"
    for reader in (*readers, *idle):
        reader.close()
    await settled(client, server, lambda now: now["chatsvc_streams_open"] == 0 and now["process_open_fds"] < 200)
    assert (await client.get(f"{server.base_url}/readyz")).status_code == 200
