"""Asking another region: which of its replicas is believed, and what of its answer is passed on."""

import asyncio

import pytest
from region_stand_ins import END, JSON, PATIENCE_S, StandIn, answer, chunk, get, problem, region

from chatsvc.api.region_client import ConnectionFailed, RegionClient
from chatsvc.api.region_peer import Peer, RegionUnreachable
from chatsvc.api.region_trust import RegionTrust
from chatsvc.clock import SystemClock

# --- one answer ---


@pytest.mark.parametrize(
    "bad",
    [
        problem(503, "store_unavailable"),
        answer(502, b"<h1>Bad gateway</h1>", "text/html"),
        answer(200, b"<h1>Sign in</h1>", "text/html"),
        answer(302, b"", "text/html"),
        problem(401, "region_refused"),
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{}",
        answer(200, b" " * (2 << 20)),
        b"",
    ],
    ids=["503", "gateway", "page", "redirect", "refused", "nonsense", "short", "too long", "silence"],
)
async def test_a_replica_that_gives_nothing_fit_to_pass_on_is_passed_over(bad):
    async def say(reader, writer):
        peer._client._first_byte_s = PATIENCE_S  # the one that answers has time for it
        writer.write(bad)
        await writer.drain()
        if bad:
            writer.close()

    async with region(say, answer(200, JSON), first_byte_s=PATIENCE_S if bad else 0.2) as (peer, replicas):
        assert await get(peer) == (200, JSON)
        assert [len(replica.requests) for replica in replicas] == [1, 1]


@pytest.mark.parametrize(
    ("good", "status"),
    [
        (answer(200, JSON), 200),
        (answer(202, JSON), 202),
        (problem(404, "not_found"), 404),
        (problem(401, "not_authenticated"), 401),
        (problem(508, "loop_detected"), 508),
        (b"HTTP/1.1 204 X\r\n\r\n", 204),
    ],
)
async def test_what_a_server_of_ours_says_is_passed_on_and_no_other_is_asked(good, status):
    async with region(good, answer(200, b"{}")) as (peer, replicas):
        assert (await get(peer))[0] == status
        assert replicas[1].requests == []


async def test_when_all_replicas_fail_their_own_words_are_passed_on_if_they_have_any():
    async with region(problem(503, "store_unavailable"), answer(502, b"", "text/html")) as (peer, _):
        assert await get(peer) == (503, b'{"code":"store_unavailable"}')
    async with region(answer(502, b"", "text/html")) as (peer, _):
        with pytest.raises(RegionUnreachable):
            await get(peer)


async def test_nobody_there_is_unreachable_at_once():
    async with region(b"") as (peer, _):
        pass
    with pytest.raises(RegionUnreachable):
        await get(peer)


async def test_replicas_that_failed_are_asked_last_for_a_while():
    clock = SystemClock()
    trust = RegionTrust("s" * 32, clock, region="us")
    now = [0.0]
    peer = Peer("eu", ["http://a", "http://b"], client=RegionClient(), trust=trust, monotonic=lambda: now[0])
    assert {tuple(peer._in_turn()) for _ in range(100)} == {("http://a", "http://b"), ("http://b", "http://a")}
    peer._note_failure("http://a", "because")
    assert {tuple(peer._in_turn()) for _ in range(100)} == {("http://b", "http://a")}
    now[0] = 6.0
    assert len({tuple(peer._in_turn()) for _ in range(100)}) == 2


async def test_that_a_replica_is_away_is_said_once_and_again_when_it_had_been_back(capsys):
    async with region(problem(503, "store_unavailable"), answer(200, JSON)) as (peer, (sick, _)):
        for _ in range(3):
            assert await get(peer) == (200, JSON)
        sick.script = answer(200, JSON)
        await get(peer)
        assert capsys.readouterr().out.count("a replica of another region failed") == 1
        sick.script = b"nonsense\r\n\r\n"
        for _ in range(2):
            await get(peer)
        assert len(sick.requests) == 6
        assert capsys.readouterr().out.count("a replica of another region failed") == 1


async def test_a_body_is_read_whatever_the_pieces_it_comes_in():
    whole = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    whole += chunk(JSON[:5]) + chunk(JSON[5:]) + END

    async def byte_by_byte(reader, writer):
        for at in range(len(whole)):
            writer.write(whole[at : at + 1])
            await asyncio.sleep(0)

    async with region(byte_by_byte) as (peer, _):
        assert await get(peer) == (200, JSON)


async def test_an_answer_that_never_begins_is_given_up():
    async def silent(reader, writer):
        await reader.read()

    async with StandIn(silent).running() as replica:
        client = RegionClient(connect_s=PATIENCE_S, first_byte_s=0.1)
        with pytest.raises(ConnectionFailed, match="nothing was answered"):
            async with asyncio.timeout(PATIENCE_S), client.open("GET", replica.url + "/", {}):
                pass


async def test_an_answer_whose_head_does_not_end_is_given_up():
    async def floods(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"x-more: y\r\n" * 1000)
            await writer.drain()

    async with StandIn(floods).running() as replica:
        client = RegionClient(connect_s=PATIENCE_S, first_byte_s=PATIENCE_S)
        with pytest.raises(ConnectionFailed, match="head does not end"):
            async with client.open("GET", replica.url + "/", {}):
                pass
