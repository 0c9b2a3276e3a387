"""Readers whose tasks are cancelled at random moments, on one shared connection: the others get their own (L10, L3)."""

import asyncio
import random

import pytest
from streaming import Client, Shelf, append, delta, parse, running, soon

from chatsvc.streamlog.factory import create_log
from chatsvc.streamlog.hub import Hub
from chatsvc.streamlog.resume import Resumer

USERS = 6
READERS = 10_000
AT_ONCE = 60
STAYING = 30


@pytest.fixture
async def logs(redis_url):
    """The log as its writer sees it, and as another process does that serves readers."""
    pair = create_log(redis_url, timeout_s=5), create_log(redis_url, timeout_s=5)
    yield pair
    for log in pair:
        await log.aclose()


def check(response_id, cursor, client):
    """A run of the reply's own events right behind the cursor."""
    for place, (seq, name, data) in enumerate(parse(client.frames)):
        if name != "snapshot":
            assert (seq, data["text"]) == (cursor + 1 + place, f"{response_id} says {cursor + 1 + place}")


async def test_thousands_of_readers_cancelled_at_random_moments_see_only_what_is_theirs(logs):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    writer, log = logs
    hub, shelf = Hub(log), Shelf()
    resumer = Resumer(hub, shelf.source)
    replies = [f"resp_local_{number}" for number in range(USERS)]
    written = dict.fromkeys(replies, 0)
    for response_id in replies:
        await writer.open(response_id, 1)
        shelf.running(response_id)

    async def write():
        while True:
            for response_id in replies:
                seq = written[response_id] + 1
                await writer.append([append(response_id, delta(seq, f"{response_id} says {seq}"))])
                written[response_id] = seq
            await asyncio.sleep(0.005)

    async def one(number):
        response_id = replies[number % USERS]
        cursor, client = chance.randrange(written[response_id] + 1), Client()
        reading = asyncio.create_task(resumer.follow(response_id, cursor, client))
        await asyncio.sleep(chance.choice((0, chance.uniform(0, 0.002), chance.uniform(0, 0.03))))
        if chance.random() < 0.3:
            client.close()
            await reading
        else:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        check(response_id, cursor, client)
        return bool(client.frames)

    async def many(numbers):
        return sum([await one(number) for number in numbers])

    async with running(hub.run(), resumer.run(), write()):
        stayed = [(replies[number % USERS], Client()) for number in range(STAYING)]
        staying = [asyncio.create_task(resumer.follow(response_id, 0, client)) for response_id, client in stayed]
        numbers = iter(range(READERS))
        fed = sum(await asyncio.gather(*(many(numbers) for _ in range(AT_ONCE))))
        reached = dict(written)
        for response_id, client in stayed:
            await soon(client.until(lambda client, last=reached[response_id]: client.ids and client.ids[-1] >= last))
            check(response_id, 0, client)
            assert client.ids == list(range(1, len(client.ids) + 1))
            client.close()
        await soon(asyncio.gather(*staying))
    print(f"{fed} of {READERS} had been given something")
    assert READERS / 10 < fed < READERS
    assert hub.subscribers == 0
