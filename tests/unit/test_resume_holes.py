"""Resuming where the log has a hole, is lost or away: no reader is shown the hole or left in silence (L3, L7)."""

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resume_world import A, World, open_world, whole
from streaming import DONE, Client, append, running, soon, text_of

from chatsvc.events import MAX_SEQ, Snapshot, entry
from chatsvc.streamlog.hub import Hub
from chatsvc.streamlog.resume import Resumer
from chatsvc.streamlog.writer import LogWriter


@pytest.fixture
async def world():
    async with open_world() as world:
        yield world


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
