"""The hub: one reader or many, of logs written here or elsewhere, each gets every entry once and in order."""

import asyncio
import gc

import pytest
from streaming import DONE, Client, FragileLog, append, delta, running, soon

from chatsvc.errors import LogUnavailable
from chatsvc.events import entry
from chatsvc.streamlog import hub as hub_module
from chatsvc.streamlog.base import Position
from chatsvc.streamlog.hub import Hub
from chatsvc.streamlog.subscription import Level, Overrun

A, B = "resp_local_a", "resp_local_b"


@pytest.fixture
def log():
    return FragileLog()


@pytest.fixture
def hub(log):
    return Hub(log)


async def write(log, *seqs, response_id=A, attempt=1):
    await log.append([append(response_id, *(delta(seq, attempt=attempt) for seq in seqs))])


async def test_a_reader_gets_what_is_there_and_then_what_comes(hub, log):
    await log.open(A, 1)
    await write(log, 1, 2, 3)
    client = Client()
    async with running(hub.run()):
        with hub.subscribe(A, 0, client) as subscription:
            assert await subscription.replay() is Level.LIVE
            assert client.ids == [1, 2, 3]
            await write(log, 4)
            await write(log, 5, 6)
            await client.until(lambda client: client.ids == [1, 2, 3, 4, 5, 6])
    assert client.text == "<1><2><3><4><5><6>"


async def test_a_reader_that_comes_back_gets_what_it_has_not_seen(hub, log):
    await log.open(A, 1)
    await write(log, *range(1, 11))
    client = Client()
    with hub.subscribe(A, 7, client) as subscription:
        assert await subscription.replay() is Level.LIVE
    assert client.ids == [8, 9, 10]


async def test_a_log_that_does_not_exist_yet_can_be_waited_for(hub, log):
    client = Client()
    async with running(hub.run()):
        with hub.subscribe(A, 0, client) as subscription:
            assert await subscription.replay() is Level.LIVE
            await log.open(A, 1)
            await write(log, 1)
            await client.until(lambda client: client.ids == [1])


async def test_entries_told_by_the_writer_of_this_process_need_no_tail(hub, log):
    hub.hold(A)
    client = Client()
    with hub.subscribe(A, 0, client) as subscription:
        assert await subscription.replay() is Level.LIVE
        assert hub.followed == 0
        hub.deliver(A, [delta(1), delta(2)])
        assert client.ids == [1, 2]


async def test_a_log_is_tailed_from_where_its_writer_here_left_it(hub, log):
    await log.open(A, 1)
    hub.hold(A)
    client = Client()
    async with running(hub.run()):
        with hub.subscribe(A, 0, client) as subscription:
            await subscription.replay()
            await write(log, 1, 2)
            for _ in range(10):
                await asyncio.sleep(0)  # the tail has nothing to follow, and waits
            hub.deliver(A, [delta(1), delta(2)])
            hub.release(A)
            assert hub._following() == {A: Position(1, 2)}
            await log.open(A, 2)
            await write(log, 3, attempt=2)
            await client.until(lambda client: client.ids == [1, 2, 3])


async def test_a_log_held_by_two_writers_is_held_until_both_let_go(hub, log):
    hub.hold(A)
    hub.hold(A)
    with hub.subscribe(A, 0, Client()) as subscription:
        await subscription.replay()
        hub.release(A)
        assert hub.followed == 0
        hub.release(A)
        assert hub.followed == 1


async def test_an_entry_told_twice_is_handed_over_once(hub, log):
    await log.open(A, 1)
    client = Client()
    with hub.subscribe(A, 0, client) as subscription:
        await subscription.replay()
        hub.deliver(A, [delta(1)])
        hub.deliver(A, [delta(1), delta(2)])
        hub.deliver(A, [delta(2)])
    assert client.ids == [1, 2]


async def test_an_entry_that_skips_others_sends_the_reader_back_to_the_log(hub, log):
    await log.open(A, 1)
    client = Client()
    with hub.subscribe(A, 0, client) as subscription:
        await subscription.replay()
        await write(log, 1, 2, 3)
        hub.deliver(A, [delta(3)])
        assert client.ids == []
        assert not subscription.live
        await soon(subscription.wait())
        assert await subscription.replay() is Level.LIVE
    assert client.ids == [1, 2, 3]


async def test_an_entry_that_was_told_and_then_lost_does_not_keep_its_reader_reading(hub, log):
    await log.open(A, 1)
    await write(log, 1, 2)
    client = Client()
    with hub.subscribe(A, 0, client) as subscription:
        await subscription.replay()
        hub.deliver(A, [delta(9)])
        hub.deliver(A, [delta(10)])
        assert await soon(subscription.replay()) is Level.LIVE
    assert client.ids == [1, 2]


async def test_a_log_that_gets_its_first_reader_while_the_tail_waits_is_followed_at_once(hub, log, monkeypatch):
    monkeypatch.setattr(hub_module, "_TAIL_S", 3600.0)  # else the tail asks again by itself
    for response_id in (A, B):
        await log.open(response_id, 1)
    client, tail, tails = Client(), log.tail, asyncio.Event()

    async def noted(following, timeout_s):
        assert tails.is_set() or list(following) == [A]
        tails.set()
        return await tail(following, timeout_s)

    log.tail = noted
    async with running(hub.run()):
        with hub.subscribe(A, 0, Client()) as one, hub.subscribe(B, 0, client) as other:
            await one.replay()
            await soon(tails.wait())
            await other.replay()
            await write(log, 1, response_id=B)
            await client.until(lambda client: client.ids == [1])


async def test_what_is_appended_while_a_reader_replays_is_neither_missed_nor_repeated(hub, log):
    """The read has its answer, and before the reader has it more is appended and told: it reads again."""
    await log.open(A, 1)
    await write(log, 1, 2)
    read_now, reads = log.read, []

    async def slow_read(response_id, after, limit=10_000):
        page = await read_now(response_id, after, limit)
        reads.append(after)
        if len(reads) == 1:
            await write(log, 3, 4)
            hub.deliver(A, [delta(3), delta(4)])
        return page

    log.read = slow_read
    hub.hold(A)
    client = Client()
    with hub.subscribe(A, 0, client) as subscription:
        assert await subscription.replay() is Level.LIVE
        hub.deliver(A, [delta(5)])
    assert client.ids == [1, 2, 3, 4, 5]
    assert reads == [0, 2]


async def test_readers_that_attach_around_the_first_append_miss_nothing(hub, log):
    """Many readers, each at another moment before, during and after the first append, on both kinds of hub."""
    elsewhere = Hub(log)
    entries = [delta(seq) for seq in range(1, 6)]

    async def attach(hub, response_id, turns):
        client = Client()
        for _ in range(turns):
            await asyncio.sleep(0)
        with hub.subscribe(response_id, 0, client) as subscription:
            while not subscription.ended:
                await subscription.replay()
                if not subscription.ended:
                    await subscription.wait()
        return client

    async def tell(response_id):
        await log.open(response_id, 1)
        hub.hold(response_id)
        for item in (*entries, entry(DONE, attempt=1, seq=6)):
            await asyncio.sleep(0)
            await log.append([append(response_id, item)])
            await asyncio.sleep(0)
            hub.deliver(response_id, [item])
        hub.release(response_id)

    async with running(hub.run(), elsewhere.run()):
        for round_number in range(20):
            response_id = f"resp_local_{round_number}"
            readers = [attach(where, response_id, turns) for where in (hub, elsewhere) for turns in range(25)]
            *clients, _ = await soon(asyncio.gather(*readers, tell(response_id)))
            for client in clients:
                assert client.ids == [1, 2, 3, 4, 5, 6]


async def test_the_terminal_entry_ends_the_reader_live_and_from_the_log(hub, log):
    await log.open(A, 1)
    live, late = Client(), Client()
    done = entry(DONE, attempt=1, seq=2)
    with hub.subscribe(A, 0, live) as subscription:
        await subscription.replay()
        await write(log, 1)
        await log.append([append(A, done)])
        hub.deliver(A, [delta(1), done])
        assert subscription.ended
        await soon(subscription.wait())
        subscription.push_passing(b"event: queued\ndata: {}\n\n")
    with hub.subscribe(A, 0, late) as subscription:
        assert await subscription.replay() is Level.ENDED
    assert live.frames == late.frames
    assert live.ids == [1, 2]


async def test_a_log_longer_than_a_page_is_replayed_page_by_page_as_the_client_takes_it(hub, log):
    await log.open(A, 1)
    await write(log, *range(1, 3502))
    client = Client()
    with hub.subscribe(A, 0, client) as subscription:
        assert await subscription.replay() is Level.LIVE
    assert client.ids == list(range(1, 3502))
    assert client.drains == 4


@pytest.mark.parametrize("cursor", [5, 10**15])
async def test_a_cursor_that_the_log_cannot_lead_on_from_is_a_hole(hub, log, cursor):
    await log.open(A, 1)
    await write(log, 1, 2, 3)
    client = Client()
    with hub.subscribe(A, cursor, client) as subscription:
        assert await subscription.replay() is Level.HOLE
    assert client.frames == b""


async def test_a_trimmed_log_is_a_hole_for_who_needs_what_is_gone(hub, log):
    await log.open(A, 1)
    await write(log, *range(1, 11))
    log.trim_before(A, 6)
    for cursor, level in ((0, Level.HOLE), (4, Level.HOLE), (5, Level.LIVE), (10, Level.LIVE)):
        client = Client()
        with hub.subscribe(A, cursor, client) as subscription:
            assert await subscription.replay() is level
        assert client.ids == (list(range(cursor + 1, 11)) if level is Level.LIVE else [])


async def test_a_slow_reader_is_cut_and_the_others_go_on(hub, log):
    await log.open(A, 1)
    slow, quick = Client(room=100), Client()
    with hub.subscribe(A, 0, slow) as one, hub.subscribe(A, 0, quick) as other:
        await one.replay()
        await other.replay()
        for seq in range(1, 101):
            hub.deliver(A, [delta(seq)])
        assert one.cut
        assert not other.cut
        await soon(one.wait())
    assert len(slow.frames) < 200
    assert quick.ids == list(range(1, 101))
    assert hub.cut == 1


async def test_a_slow_reader_is_cut_while_replaying_too(hub, log):
    await log.open(A, 1)
    await write(log, *range(1, 3001))
    with hub.subscribe(A, 0, Client(room=10)) as subscription:
        with pytest.raises(Overrun):
            await subscription.replay()
        assert subscription.cut


async def test_passing_frames_are_handed_over_between_events_without_moving_the_cursor(hub, log):
    client = Client()
    with hub.subscribe(A, 0, client) as subscription:
        await subscription.replay()
        for one in hub.subscriptions(A):
            one.push_passing(b'event: queued\ndata: {"position":1}\n\n')
        hub.deliver(A, [delta(1)])
        assert subscription.cursor == 1
    assert [(seq, name) for seq, name, _ in client.events] == [(None, "queued"), (1, "delta")]
    assert list(hub.subscriptions(A)) == []


async def test_a_broken_tail_is_made_again_and_nothing_is_missed(hub, log):
    await log.open(A, 1)
    client = Client()
    tail_now, breaks = log.tail, []

    async def fragile_tail(following, timeout_s):
        if len(breaks) < 3:
            breaks.append(1)
            raise LogUnavailable("the connection broke")
        return await tail_now(following, timeout_s)

    log.tail = fragile_tail
    async with running(hub.run()):
        with hub.subscribe(A, 0, client) as subscription:
            await subscription.replay()
            await write(log, 1)
            await client.until(lambda client: client.ids == [1])
    assert len(breaks) == 3


async def test_five_hundred_readers_of_one_log_cost_one_tail_and_one_read_each(hub, log):
    await log.open(A, 1)
    reads, follows = [], []
    read_now, tail_now = log.read, log.tail

    async def counted_read(*arguments):
        reads.append(1)
        return await read_now(*arguments)

    async def counted_tail(following, timeout_s):
        follows.append(dict(following))
        return await tail_now(following, timeout_s)

    log.read, log.tail = counted_read, counted_tail
    clients = [Client() for _ in range(500)]
    async with running(hub.run()):
        subscriptions = [hub.subscribe(A, 0, client) for client in clients]
        for subscription in subscriptions:
            await subscription.replay()
        assert hub.subscribers == 500
        assert hub.followed == 1
        await write(log, 1)
        await clients[-1].until(lambda client: client.ids == [1])
        assert all(client.ids == [1] for client in clients)
        assert len(reads) == 500
        assert follows[0] == {A: Position(1, 0)}
        assert len(follows) <= 3
        assert hub.delivered == 500
        for subscription in subscriptions:
            subscription.close()
    assert hub.subscribers == 0


async def test_ten_thousand_readers_that_come_and_vanish_leave_nothing_behind(hub, log):
    await log.open(A, 1)
    await write(log, 1, 2)
    async with running(hub.run()):

        async def visit(number):
            with hub.subscribe(A if number % 2 else B, number % 3, Client()) as subscription:
                replay = asyncio.ensure_future(subscription.replay())
                if number % 5 == 0:
                    replay.cancel()
                await asyncio.wait([replay])
                if number % 7 == 0:
                    waiting = asyncio.ensure_future(subscription.wait())
                    await asyncio.sleep(0)
                    waiting.cancel()

        tasks_before = len(asyncio.all_tasks())
        for number in range(10_000):
            await visit(number)
        await asyncio.sleep(0)
        assert (hub.subscribers, hub.followed) == (0, 0)
        assert len(asyncio.all_tasks()) == tasks_before
        gc.collect()
        assert not [thing for thing in gc.get_objects() if type(thing).__name__ == "Subscription"]
