"""Who is let go, in which order and how fast, when a process goes down."""

import asyncio
import time

from chatsvc.api.departure import NOTICE_SHARE, Departure

ROUND_S = 0.8


class Reader:
    def __init__(self, streams, response_id="resp_elsewhere"):
        self._streams = streams
        self.response_id = response_id
        self.left_at = None
        streams.open.append(self)

    def let_go(self):
        self.left_at = asyncio.get_running_loop().time()
        self._streams.open.remove(self)
        self._streams.someone_left.set()


class Streams:
    def __init__(self):
        self.open = []
        self.someone_left = asyncio.Event()

    def without(self, stays):
        return [reader for reader in self.open if not stays(reader.response_id)]


def departure(streams, *, round_s=ROUND_S, most_s=10.0):
    return Departure(streams, lambda response_id: response_id == "resp_here", round_s=round_s, most_s=most_s)


async def test_readers_leave_evenly_and_in_the_order_in_which_they_came():
    streams = Streams()
    readers = [Reader(streams) for _ in range(100)]
    began = asyncio.get_running_loop().time()
    await departure(streams).run(lambda: True)
    moments = [reader.left_at - began for reader in readers]
    assert moments == sorted(moments)
    # Each has its place in the round, and goes no sooner than that: at most a tick (0.1 s), in which many go at once.
    notice, most_early = ROUND_S * NOTICE_SHARE, 0.12
    assert moments[0] >= notice
    for place, moment in enumerate(moments):
        assert moment >= notice + (ROUND_S - notice) * place / len(moments) - most_early


async def test_who_is_left_when_a_process_is_held_up_past_the_end_of_the_round_goes_at_once():
    streams = Streams()
    readers = [Reader(streams) for _ in range(20)]
    leaving = asyncio.create_task(departure(streams, round_s=0.4).run(lambda: True))
    await streams.someone_left.wait()
    time.sleep(0.5)  # noqa: ASYNC251 - the whole process stands
    await leaving
    assert all(reader.left_at is not None for reader in readers)


async def test_readers_of_replies_that_run_here_are_left_alone():
    streams = Streams()
    stays, leaves = Reader(streams, "resp_here"), Reader(streams)
    await departure(streams).run(lambda: True)
    assert (stays.left_at, leaves.left_at is None) == (None, False)


async def test_who_comes_back_is_at_the_end_of_the_line():
    streams = Streams()
    readers = [Reader(streams) for _ in range(20)]
    back = None
    leaving = asyncio.create_task(departure(streams).run(lambda: back is not None))
    await streams.someone_left.wait()
    back = Reader(streams)
    await leaving
    assert all(reader.left_at <= back.left_at for reader in readers)


async def test_it_is_over_as_soon_as_the_replies_are_and_nobody_is_left():
    streams = Streams()
    over, asked, rounds = False, 0, asyncio.Event()

    def is_over():
        nonlocal asked
        asked += 1
        if asked == 10:  # about four times a round
            rounds.set()
        return over

    leaving = asyncio.create_task(departure(streams, round_s=0.2).run(is_over))
    async with asyncio.timeout(30):
        await rounds.wait()
    assert not leaving.done()
    late = Reader(streams)
    over = True
    async with asyncio.timeout(30):
        await leaving
    assert late.left_at is not None


async def test_it_takes_no_longer_than_the_grace_time():
    streams = Streams()
    async with asyncio.timeout(30):
        await departure(streams, round_s=60, most_s=0.2).run(lambda: False)


async def test_a_round_of_no_length_sends_nobody_away():
    streams = Streams()
    reader = Reader(streams)
    await departure(streams, round_s=0).run(lambda: False)
    assert reader.left_at is None
