"""Resuming: from any cursor a reader gets the rest and one end, also of a run that has ended without its log (L3)."""

import asyncio
import random

import pytest
from resume_world import A, open_world, whole
from streaming import DONE, Client, append, delta, parse, running, soon, text_of

from chatsvc.events import Error
from chatsvc.run import RunStatus
from chatsvc.streamlog.writer import LogWriter

AWKWARD = [
    "data: not a field\n\nid: 99\nevent: done\n",
    ": ping\n",
    "\r\n\r\n",
    "\u2028\u2029\u0085",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 e\u0301 漢字 \u202eabc",
    "\x00",
    '"\\ \t',
]


@pytest.fixture
async def world():
    async with open_world() as world:
        yield world


# The log serves -------------------------------------------------------------------------------------------------------


async def test_every_cursor_gets_the_rest_and_nothing_else(world):
    await world.write(*range(1, 11))
    await world.end(11)
    complete = world.follow(0)
    await soon(complete.following)
    for cursor in range(11):
        client = world.follow(cursor)
        await soon(client.following)
        assert client.events == complete.events[cursor:]


async def test_a_reader_without_a_cursor_in_mid_reply_gets_the_whole_text(world):
    await world.write(1, 2, 3)
    client = world.follow()
    await client.until(lambda client: client.ids == [1, 2, 3])
    await world.write(4)
    await world.end(5)
    await soon(client.following)
    assert client.text == whole(4)
    assert client.ids == [1, 2, 3, 4, 5]


async def test_a_cursor_at_the_end_of_an_ended_reply_ends_in_silence(world):
    await world.write(1, 2)
    await world.end(3)
    client = world.follow(3)
    await world.silence()
    await soon(client.following)
    assert client.frames == b""


async def test_two_empty_connections_before_the_first_event_lose_nothing(world):
    for _ in range(2):
        client = world.follow()
        await world.live(1)
        client.close()
        await soon(client.following)
        assert client.frames == b""
    client = world.follow()
    await world.write(1)
    await world.end(2)
    await soon(client.following)
    assert client.text == "<1>"


async def test_two_resumes_at_once_from_one_cursor_get_the_same(world):
    await world.write(1, 2, 3)
    one, other = world.follow(1), world.follow(1)
    await world.write(4, 5)
    await world.end(6)
    await soon(asyncio.gather(one.following, other.following))
    assert one.frames == other.frames
    assert one.ids == [2, 3, 4, 5, 6]


async def test_text_that_looks_like_the_protocol_survives_and_stays_inside_one_event(world):
    writer = LogWriter(world.log, world.hub, batch_ms=1, batch_tokens=1, holds=None)
    async with running(writer.run()):
        client = world.follow()
        reply = await writer.open(A, 1)
        for text in AWKWARD:
            reply.delta(text)
            assert await reply.flush(5)
        reply.event(DONE)
        await reply.close(600)
        await soon(client.following)
    assert client.text == "".join(AWKWARD).replace("\x00", "\ufffd") == reply.text
    assert client.ids == list(range(1, len(AWKWARD) + 2))
    for raw in ("\u2028", "\u2029", "\u0085", "\r"):
        assert raw.encode() not in client.frames
    # Clients that split on anything Python calls a line end see the same events.
    assert all(line.count(": ") for line in client.frames.decode().splitlines() if line)


async def test_a_reply_with_twenty_dropped_connections_comes_out_whole(world):
    chance = random.Random(7)
    writer = LogWriter(world.log, world.hub, batch_ms=1, batch_tokens=3, holds=None)
    words, enough = [], asyncio.Event()

    async def speak():
        reply = await writer.open(A, 1)
        while len(words) < 400 or not enough.is_set():
            words.append(chance.choice(["word ", "\n", "🙂", "data: ", "é"]))
            reply.delta(words[-1])
            await asyncio.sleep(0.001)
        seq = reply.seal()
        world.shelf.ended(A, reply.text, seq)
        reply.event(DONE)
        await reply.close(600)

    async def listen():
        seen, cursor, drops = [], 0, 0
        while not seen or seen[-1][1] != "done":
            client = world.follow(cursor)
            if drops < 20:
                drops += 1
                target = chance.randint(0, 6)
                await client.until(lambda client: len(client.events) >= target or client.following.done())  # noqa: B023
                client.close()
            if drops == 20:
                enough.set()
            await soon(client.following)
            seen += client.events
            cursor = max([cursor, *client.ids])
        return seen, drops

    async with running(writer.run()):
        (seen, drops), _ = await soon(asyncio.gather(listen(), speak()))
    assert drops == 20
    assert text_of(seen) == "".join(words)
    ids = [seq for seq, _, _ in seen]
    assert ids == list(range(1, len(ids) + 1))


async def test_a_second_turn_of_the_conversation_does_not_reach_the_first_ones_reader(world):
    second = "resp_local_second"
    world.shelf.running(second)
    await world.log.open(second, 1)
    one, other = world.follow(), world.follow(response_id=second)
    await world.write(1)
    await world.log.append([append(second, delta(1, "second"))])
    await world.end(2)
    await soon(one.following)
    await other.until(lambda client: client.ids == [1])
    assert (one.text, other.text) == ("<1>", "second")


# The run has ended, the log does not say so ---------------------------------------------------------------------------


async def test_a_lost_terminal_append_does_not_leave_a_reader_hanging(world):
    client = world.follow()
    await world.write(1, 2)
    await client.until(lambda client: client.ids == [1, 2])
    world.shelf.ended(A, whole(2), 3)
    await world.silence()
    await soon(client.following)
    assert client.ids == [1, 2, 3]
    assert client.events[-1][1] == "done"


async def test_a_reader_that_has_less_than_the_store_gets_the_stored_text_first(world):
    client = world.follow()
    await world.write(1)
    await client.until(lambda client: client.ids == [1])
    world.shelf.ended(A, "all of it", 9)
    await world.silence()
    await soon(client.following)
    assert client.events[1:] == [
        (8, "snapshot", {"text": "all of it", "reason": "stored"}),
        (9, "done", parse(client.frames)[-1][2]),
    ]


async def test_an_expired_log_is_served_from_the_store_for_every_cursor(world):
    world.log.lose_everything()
    world.shelf.ended(A, whole(4), 5)
    for cursor, names in ((0, ["snapshot", "done"]), (2, ["snapshot", "done"]), (4, ["done"]), (5, []), (77, [])):
        client = world.follow(cursor)
        await world.silence()
        await soon(client.following)
        assert [name for _, name, _ in client.events] == names
        assert client.ids == [4, 5][2 - len(names) :]


async def test_whoever_asks_for_an_ended_reply_whose_log_is_gone_does_not_wait(world):
    world.log.lose_everything()
    world.shelf.ended(A, whole(4), 5)
    client = world.follow(ended=True)
    await soon(client.following)
    assert [name for _, name, _ in client.events] == ["snapshot", "done"]


async def test_an_ended_reply_whose_log_came_back_with_less_is_never_shown_shorter(world):
    await world.write(1, 2, 3)
    world.shelf.ended(A, whole(5), 6)
    client = world.follow(4, ended=True)
    await soon(client.following)
    assert [name for _, name, _ in client.events] == ["snapshot", "done"]
    assert client.text == whole(5)


async def test_a_log_that_lacks_its_end_for_a_moment_is_waited_for_though_the_run_has_ended(world):
    await world.write(1, 2, 3)
    world.shelf.ended(A, whole(4), 5)
    client = world.follow(ended=True)
    await client.until(lambda client: client.ids == [1, 2, 3])
    await world.write(4)
    await world.end(5)
    await soon(client.following)
    assert client.ids == [1, 2, 3, 4, 5]


async def test_a_run_that_failed_before_it_began_is_one_error(world):
    world.log.lose_everything()
    world.shelf.ended(A, "", 1, terminal=Error(code="x", message="y", retryable=True), status=RunStatus.FAILED)
    client = world.follow()
    await world.silence()
    await soon(client.following)
    assert [(seq, name) for seq, name, _ in client.events] == [(1, "error")]


async def test_the_log_is_looked_at_once_more_before_the_store_answers_for_it(world):
    """The tail was late, the terminal entry is there: the reader gets the log's own events, not a snapshot."""
    client = world.follow()
    await world.write(1)
    await client.until(lambda client: client.ids == [1])
    world.hub.hold(A)  # nobody tells this hub what comes now
    await world.write(2)
    await world.end(3)
    await world.silence()
    await soon(client.following)
    assert [name for _, name, _ in client.events] == ["delta", "delta", "done"]
    world.hub.release(A)


async def test_a_deleted_reply_ends_its_readers_without_an_end_event(world):
    client = world.follow()
    await world.write(1)
    await client.until(lambda client: client.ids == [1])
    await world.log.delete([A])
    del world.shelf.replies[A]
    await world.silence()
    await soon(client.following)
    assert client.ids == [1]


# Cost and care --------------------------------------------------------------------------------------------------------


async def test_silence_costs_one_question_for_all_readers_and_none_while_events_come(world):
    clients = [world.follow() for _ in range(50)]
    await world.write(1)
    for client in clients:
        await client.until(lambda client: client.ids == [1])
    await world.resumer.tick()
    assert world.shelf.asked == 0
    await world.silence(ticks=6)
    assert 1 <= world.shelf.asked <= 4
    assert world.shelf.looked_up == 0


async def test_a_reader_that_closes_is_let_go_at_once_in_every_state(world):
    for prepare in ("live", "hole", "away"):
        world.log.away = False
        world.log.lose_everything()
        cursor = 5 if prepare == "hole" else 0
        world.log.away = prepare == "away"
        client = world.follow(cursor)
        await world.silence()
        assert not client.following.done()
        client.close()
        await soon(client.following)
    assert world.hub.subscribers == 0


async def test_a_cut_reader_ends_without_an_error_and_resumes(world):
    slow = world.follow(client=Client(room=40))
    await world.live(1)
    for seq in range(1, 50):
        await world.write(seq)
    await soon(slow.following)
    cursor = slow.ids[-1]
    await world.end(50)
    again = world.follow(cursor)
    await soon(again.following)
    assert slow.ids + again.ids == list(range(1, 51))
    assert world.hub.cut == 1
