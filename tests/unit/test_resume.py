"""Resuming: from any cursor, whatever has become of the log, a reader ends with the whole text and one end (L3, L7).

Over 400 lines: one state machine, every state and every way between them.
"""

import asyncio
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streaming import DONE, Client, FragileLog, Shelf, append, delta, parse, running, soon, text_of

from chatsvc.events import MAX_SEQ, Error, Snapshot, entry
from chatsvc.run import RunStatus
from chatsvc.streamlog.hub import Hub
from chatsvc.streamlog.resume import Resumer
from chatsvc.streamlog.writer import LogWriter

A = "resp_local_a"
AWKWARD = [
    "data: not a field\n\nid: 99\nevent: done\n",
    ": ping\n",
    "\r\n\r\n",
    "\u2028\u2029\u0085",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 e\u0301 漢字 \u202eabc",
    "\x00",
    '"\\ \t',
]


class World:
    """A log, a hub that reads it, a store, and the readers' side of it all. Ticks come when the test says so."""

    def __init__(self):
        self.log = FragileLog()
        self.hub = Hub(self.log)
        self.shelf = Shelf()
        self.resumer = Resumer(self.hub, self.shelf.source)
        self.shelf.running(A)
        self.followers = []

    def follow(self, cursor=0, client=None, response_id=A, *, ended=False):
        client = client or Client()
        client.following = asyncio.ensure_future(self.resumer.follow(response_id, cursor, client, ended=ended))
        self.followers.append(client.following)
        return client

    async def write(self, *seqs, attempt=1):
        await self.log.append([append(A, *(delta(seq, attempt=attempt) for seq in seqs))])

    async def end(self, seq):
        """The run ends as it should: first in the store, then in the log."""
        self.shelf.ended(A, "".join(f"<{number}>" for number in range(1, seq)), seq)
        await self.log.append([append(A, entry(DONE, attempt=1, seq=seq))])

    async def silence(self, ticks=4):
        """Time passes in which nothing comes."""
        for _ in range(ticks):
            await self.resumer.tick()
            for _ in range(20):
                await asyncio.sleep(0)


@pytest.fixture
async def world():
    world = World()
    await world.log.open(A, 1)
    async with running(world.hub.run()):
        yield world
        for following in world.followers:
            following.cancel()
        await asyncio.gather(*world.followers, return_exceptions=True)
        assert world.hub.subscribers == 0


def whole(last):
    return "".join(f"<{seq}>" for seq in range(1, last + 1))


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
        await asyncio.sleep(0.005)
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
    words = [chance.choice(["word ", "\n", "🙂", "data: ", "é"]) for _ in range(400)]

    async def speak():
        reply = await writer.open(A, 1)
        for word in words:
            reply.delta(word)
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


# The log has a hole ---------------------------------------------------------------------------------------------------


async def test_a_cursor_from_the_future_gets_a_snapshot_and_then_what_comes(world):
    await world.write(1, 2, 3)
    for cursor in (4, 99, MAX_SEQ):
        client = world.follow(cursor)
        await client.until(lambda client: client.frames)
        assert client.events == [(3, "snapshot", {"text": whole(3), "reason": "gap"})]
    await world.write(4)
    await client.until(lambda client: client.ids == [3, 4])
    assert client.text == whole(4)


async def test_a_trimmed_log_is_made_whole_from_the_checkpoint(world):
    await world.write(*range(1, 11))
    world.log.trim_before(A, 6)
    world.shelf.running(A, text=whole(7), text_seq=7)
    client = world.follow(2)
    await client.until(lambda client: client.frames)
    assert client.events == [(10, "snapshot", {"text": whole(10), "reason": "gap"})]
    await world.write(11)
    await client.until(lambda client: client.ids == [10, 11])


async def test_a_trimmed_log_ahead_of_the_checkpoint_waits_for_the_next_one_and_never_shows_a_hole(world):
    await world.write(*range(1, 11))
    world.log.trim_before(A, 9)
    world.shelf.running(A, text=whole(3), text_seq=3)
    client = world.follow(2)
    await world.silence()
    await world.write(11)
    await world.silence()
    assert client.frames == b""
    world.shelf.running(A, text=whole(9), text_seq=9)
    await world.silence()
    await client.until(lambda client: client.text == whole(11))
    assert client.ids == [11]


async def test_a_trimmed_log_that_nobody_checkpoints_is_served_from_the_store_once_ended(world):
    await world.write(*range(1, 11))
    world.log.trim_before(A, 9)
    client = world.follow()
    await world.silence()
    await world.end(11)
    await soon(client.following)
    assert [(seq, name) for seq, name, _ in client.events] == [(10, "snapshot"), (11, "done")]
    assert client.text == whole(10)


async def test_a_log_lost_in_mid_reply_is_a_pause_a_snapshot_and_then_live_again(world):
    async def holds(response_id, attempt):
        return True

    writer = LogWriter(world.log, world.hub, batch_ms=1, batch_tokens=1, holds=holds)
    elsewhere = Hub(world.log)
    remote = Resumer(elsewhere, world.shelf.source)
    async with running(writer.run(), elsewhere.run()):
        reply = await writer.open(A, 1)
        local, far = world.follow(), Client()
        far.following = asyncio.ensure_future(remote.follow(A, 0, far))
        for word in ("one ", "two "):
            reply.delta(word)
            assert await reply.flush(5)
        for client in (local, far):
            await client.until(lambda client: client.text == "one two ")
        world.log.lose_everything()
        late = world.follow(2)
        reply.delta("three ")
        assert await reply.flush(5)
        reply.delta("four")
        world.shelf.ended(A, reply.text, reply.seal())
        reply.event(DONE)
        await reply.close(600)
        await soon(asyncio.gather(local.following, far.following, late.following))
    assert local.frames == far.frames
    assert [name for _, name, _ in local.events] == ["delta", "delta", "snapshot", "delta", "done"]
    assert local.ids == sorted(set(local.ids))
    assert late.text == local.text == "one two three four"


async def test_a_lost_log_shows_the_checkpoint_to_who_has_less_and_takes_nothing_from_who_has_more(world):
    world.log.lose_everything()
    world.shelf.running(A, text=whole(5), text_seq=5)
    behind, ahead = world.follow(3), world.follow(8)
    await world.silence()
    assert behind.events == [(5, "snapshot", {"text": whole(5), "reason": "gap"})]
    assert ahead.frames == b""
    await world.log.append(
        [append(A, entry(Snapshot(text=whole(9), reason="log_lost"), attempt=1, seq=9), recreate=True)]
    )
    for client in (behind, ahead):
        await client.until(lambda client: client.text == whole(9))
        assert client.ids[-1] == 9


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


# Parts are away -------------------------------------------------------------------------------------------------------


async def test_a_reader_that_comes_while_the_log_is_away_is_kept_and_served_when_it_is_back(world):
    await world.write(1, 2)
    world.log.away = True
    client = world.follow()
    await world.silence()
    assert not client.following.done()
    world.log.away = False
    await world.silence()
    await client.until(lambda client: client.ids == [1, 2])


async def test_a_reader_is_served_from_the_store_when_the_log_stays_away(world):
    world.log.away = True
    client = world.follow()
    await world.silence()
    world.shelf.ended(A, "the text", 7)
    await world.silence()
    await soon(client.following)
    assert client.text == "the text"
    assert client.ids == [6, 7]


async def test_log_and_store_both_away_is_survived(world):
    world.log.away = world.shelf.away = True
    client = world.follow()
    await world.silence()
    assert not client.following.done()
    world.shelf.away = False
    world.shelf.ended(A, "the text", 7)
    await world.silence()
    await soon(client.following)
    assert client.text == "the text"


async def test_a_store_away_is_asked_again_for_a_hole(world):
    await world.write(*range(1, 5))
    world.log.trim_before(A, 3)
    world.shelf.running(A, text=whole(3), text_seq=3)
    world.shelf.away = True
    client = world.follow()
    await world.silence()
    assert client.frames == b""
    world.shelf.away = False
    await world.silence()
    await client.until(lambda client: client.text == whole(4))


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
    await asyncio.sleep(0.005)
    for seq in range(1, 50):
        await world.write(seq)
    await soon(slow.following)
    cursor = slow.ids[-1]
    await world.end(50)
    again = world.follow(cursor)
    await soon(again.following)
    assert slow.ids + again.ids == list(range(1, 51))
    assert world.hub.cut == 1


# Anything, anywhere ---------------------------------------------------------------------------------------------------


class Story:
    """A reply being written while its log suffers and its readers come and go."""

    def __init__(self):
        self.world = World()
        self.words = itertools.count(1)
        self.said = ""
        self.readers = []
        """Each reader, and what its client showed when it connected."""

    async def holds(self, response_id, attempt):
        return True

    async def ticks(self):
        while True:
            await asyncio.sleep(0.003)
            await self.world.resumer.tick()

    async def tell(self, acts):
        world = self.world
        await world.log.open(A, 1)
        writer = LogWriter(world.log, world.hub, batch_ms=1, batch_tokens=1, holds=self.holds)
        async with running(writer.run(), world.hub.run(), self.ticks()):
            self.reply = await writer.open(A, 1)
            for act in acts:
                await getattr(self, act)()
            world.log.away = False
            seq = self.reply.seal()
            world.shelf.ended(A, self.reply.text, seq)
            self.reply.event(DONE)
            await self.reply.close(600)
            await soon(asyncio.gather(*(client.following for client, _ in self.readers)))
        return seq

    async def say(self):
        word = f"word {next(self.words)} "
        self.reply.delta(word)
        self.said += word
        await asyncio.sleep(0)

    async def pause(self):
        await asyncio.sleep(0.003)

    async def lose(self):
        self.world.log.lose_everything()
        self.world.log.away = True

    async def lose_end(self):
        if log := self.world.log._logs.get(A):
            self.world.log.lose_after(A, max(0, log.top.seq - 2))
            self.world.log.away = True

    async def trim(self):
        if log := self.world.log._logs.get(A):
            self.world.log.trim_before(A, log.top.seq - 1)

    async def away(self):
        self.world.log.away = True

    async def back(self):
        self.world.log.away = False

    async def checkpoint(self):
        seq, text = self.reply.checkpoint()
        self.world.shelf.running(A, text=text, text_seq=seq)

    async def join(self):
        self.readers.append((self.world.follow(0), ""))

    async def join_from_the_future(self):
        self.readers.append((self.world.follow(self.reply.last_seq + 5), "another reply's text"))

    async def drop(self):
        """A connection breaks; the client comes back with its last id and what it shows."""
        if not self.readers or self.readers[0][0].following.done():
            return
        client, shown = self.readers.pop(0)
        client.close()
        await soon(client.following)
        if client.ids:
            self.readers.append((self.world.follow(client.ids[-1]), shows(shown, client)))
        else:
            self.readers.append((self.world.follow(0), ""))


def shows(shown, client):
    """What a client shows that showed something when it connected."""
    return text_of([(0, "snapshot", {"text": shown}), *client.events])


ACTS = ["say", "say", "say", "pause", "lose", "lose_end", "trim", "away", "back", "checkpoint", "join", "drop"]


@settings(max_examples=80, deadline=None)
@given(acts=st.lists(st.sampled_from([*ACTS, "join_from_the_future"]), min_size=1, max_size=40))
def test_whatever_happens_every_reader_ends_with_the_stored_text_and_rising_ids(acts):
    story = Story()
    seq = asyncio.run(story.tell(acts))
    assert story.reply.text == story.said
    for client, shown in story.readers:
        assert client.ids == sorted(set(client.ids))
        if client.ids:
            assert shows(shown, client) == story.reply.text
            assert client.events[-1][:2] == (seq, "done")
        else:
            # Only a cursor at or past the end is answered with nothing.
            assert shown == "another reply's text"
