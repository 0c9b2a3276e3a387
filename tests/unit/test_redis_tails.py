"""S7 over several servers: what is away or quiet holds up nobody, and nothing is heard twice."""

import asyncio
from itertools import pairwise

import pytest
from streaming import FragileLog, append, delta, soon, until

from chatsvc.errors import LogUnavailable
from chatsvc.streamlog import redis_tails
from chatsvc.streamlog.base import Position
from chatsvc.streamlog.redis_tails import Tails

A, B = "0 a", "1 b"
START = Position(0, 0)


class Part(FragileLog):
    """A log that counts its tails, and cannot be tailed while it is away."""

    def __init__(self):
        super().__init__()
        self.tailed = []
        self.tailed_at = []

    async def tail(self, following, timeout_s):
        self.tailed.append(dict(following))
        self.tailed_at.append(asyncio.get_running_loop().time())
        self._check()
        return await super().tail(following, timeout_s)


@pytest.fixture
def parts():
    return [Part(), Part()]


@pytest.fixture
async def tails(parts):
    for response_id, part in zip((A, B), parts, strict=True):
        await part.open(response_id, 1)
    tails = Tails(parts, lambda response_id: int(response_id[0]))
    yield tails
    await tails.aclose()


async def say(part, response_id, *seqs):
    await part.append([append(response_id, *(delta(seq) for seq in seqs))])


async def test_a_part_that_is_away_is_not_told_while_another_can_be_heard(tails, parts):
    parts[1].away = True
    for seq in range(1, 20):
        await say(parts[0], A, seq)
        heard = await soon(tails.hear({A: Position(1, seq - 1), B: START}, 5))
        assert {key: [entry.seq for entry in entries] for key, entries in heard.items()} == {A: [seq]}
    parts[1].away = False
    await say(parts[1], B, 1)
    heard = await soon(tails.hear({A: Position(1, 19), B: START}, 5))
    assert [entry.seq for entry in heard[B]] == [1]


async def test_when_all_parts_are_away_that_is_said(tails, parts):
    for part in parts:
        part.away = True
    with pytest.raises(LogUnavailable):
        await soon(tails.hear({A: START, B: START}, 5))


async def test_an_away_part_is_tried_ever_less_often(tails, parts):
    parts[1].away = True
    hearing = asyncio.create_task(tails.hear({A: START, B: START}, 60))
    await until(lambda: len(parts[1].tailed_at) == 5)
    tails.wake()
    assert await soon(hearing) == {}
    waits = [later - earlier for earlier, later in pairwise(parts[1].tailed_at)]
    assert [wait >= least for wait, least in zip(waits, (0.049, 0.099, 0.199, 0.499), strict=True)] == [True] * 4


async def test_an_away_part_is_tried_again_however_many_replies_begin_meanwhile(tails, parts):
    parts[1].away = True
    following = {A: START}
    for number in range(200):
        following[f"1 b{number}"] = START
        assert await tails.hear(following, 0.01) == {}
        if len(parts[1].tailed) == 3:
            break
    assert len(parts[1].tailed) == 3
    newest = f"1 b{number + 1}"
    parts[1].away = False
    await parts[1].open(newest, 1)
    await say(parts[1], newest, 1)
    heard = await soon(tails.hear(following | {newest: START}, 5))
    assert [entry.seq for entry in heard[newest]] == [1]


async def test_a_quiet_part_is_asked_once_however_much_is_heard_from_another(tails, parts):
    for seq in range(1, 30):
        await say(parts[0], A, seq)
        await soon(tails.hear({A: Position(1, seq - 1), B: START}, 5))
    assert len(parts[1].tailed) == 1
    await say(parts[1], B, 1, 2)
    assert [entry.seq for entry in (await soon(tails.hear({B: START}, 5)))[B]] == [1, 2]


async def test_what_was_heard_from_another_place_than_the_caller_follows_from_is_heard_again(tails, parts):
    assert await tails.hear({A: START}, 0.01) == {}
    await say(parts[0], A, 1, 2, 3)
    await soon(asyncio.wait([tails._reads[0].task]))
    heard = await soon(tails.hear({A: Position(1, 2)}, 5))
    assert [entry.seq for entry in heard[A]] == [3]


async def test_a_log_that_is_followed_from_now_on_is_heard_at_once(tails, parts, monkeypatch):
    monkeypatch.setattr(redis_tails, "_READ_S", 3600.0)  # else a read asks anew by itself
    other = "0 other"
    await parts[0].open(other, 1)
    first = asyncio.create_task(tails.hear({A: START}, 30))
    while not parts[0].tailed:
        await asyncio.sleep(0)
    tails.wake()
    assert await soon(first) == {}
    await say(parts[0], other, 1)
    assert list(await soon(tails.hear({A: START, other: START}, 30))) == [other]
