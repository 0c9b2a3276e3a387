"""L1 and L13 when the log is in trouble: who goes on after a break, and how often a log is tried that takes nothing."""

import asyncio
from itertools import pairwise

import pytest
from streaming import DONE, FragileLog, running, soon

from chatsvc.streamlog.base import LogRefuses
from chatsvc.streamlog.writer import LogWriter

A, B = "resp_local_a", "resp_local_b"


class FullLog(FragileLog):
    """Answers, and takes nothing while it is ``full``. Replies whose names end alike are in one shard."""

    full = False

    def __init__(self):
        super().__init__()
        self.refused_at = []

    def shard(self, response_id):
        return response_id[-1]

    async def append(self, batch):
        if self.full:
            self.refused_at.append(asyncio.get_running_loop().time())
            raise LogRefuses("no room")
        return await super().append(batch)


class HangingLog(FullLog):
    """Appends to ``A`` hang until ``freed``."""

    def __init__(self):
        super().__init__()
        self.hangs = asyncio.Event()
        self.freed = asyncio.Event()

    async def append(self, batch):
        if any(item.response_id == A for item in batch):
            self.hangs.set()
            await self.freed.wait()
        return await super().append(batch)


class Leases:
    """Says who holds a lease, and counts how often it was asked."""

    def __init__(self):
        self.lost = set()
        self.asked = 0

    async def holds(self, response_id, attempt):
        self.asked += 1
        return response_id not in self.lost


@pytest.fixture
def leases():
    return Leases()


def writer_on(log, leases):
    return LogWriter(log, None, batch_ms=1, batch_tokens=4, holds=leases.holds)


async def test_l13_a_log_that_takes_nothing_is_tried_ever_less_often_and_has_it_all_when_it_does_again(leases):
    log = FullLog()
    writer = writer_on(log, leases)
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        log.full = True
        async with asyncio.timeout(60):
            while len(log.refused_at) < 6:
                reply.delta("more ")
                await asyncio.sleep(0.005)
        log.full = False
        assert await reply.flush(5)
    texts = [entry.decode().text for entry in (await log.read(A, 0)).entries]
    assert "".join(texts) == reply.text
    # It is looked at and tried at once when it refuses for the first time.
    waits = [later - earlier for earlier, later in pairwise(log.refused_at)]
    assert [wait >= least for wait, least in zip(waits[1:], (0.019, 0.049, 0.099, 0.199), strict=True)] == [True] * 4
    # The connection was whole all the time.
    assert leases.asked == 0


async def test_l1_after_a_break_only_who_holds_the_lease_goes_on(leases):
    log = FullLog()
    writer = writer_on(log, leases)
    async with running(writer.run()):
        held, lost = await writer.open(A, 1), await writer.open(B, 1)
        for reply in (held, lost):
            reply.delta("before ")
            assert await reply.flush(5)
        leases.lost.add(B)
        log.away = True
        for reply in (held, lost):
            reply.delta("after")
        await log.appends(4)
        log.away = False
        assert await held.flush(5)
        assert not await lost.flush(5)
    assert lost.fenced
    assert [len((await log.read(name, 0)).entries) for name in (A, B)] == [2, 1]


async def test_l4_the_end_of_a_reply_that_the_store_has_ended_needs_no_lease_any_more(leases):
    log = FullLog()
    writer = writer_on(log, leases)
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        reply.delta("text")
        assert await reply.flush(5)
        reply.seal()
        leases.lost.add(A)
        log.swallow_answers = 1
        reply.event(DONE)
        assert await reply.flush(5)
    assert (await log.read(A, 0)).entries[-1].terminal


async def test_a_shard_that_hangs_holds_up_no_other(leases):
    log = HangingLog()
    writer = writer_on(log, leases)
    async with running(writer.run()):
        stuck, well = await writer.open(A, 1), await writer.open(B, 1)
        stuck.delta("text")
        await soon(log.hangs.wait())
        for _ in range(20):
            well.delta("text")
            assert await well.flush(60)
        log.freed.set()
        assert await soon(stuck.flush(5))
