"""A log, a hub that reads it, a store, and readers that come, go and come back."""

import asyncio
from contextlib import asynccontextmanager

from streaming import DONE, Client, FragileLog, Shelf, append, delta, running, until

from chatsvc.events import entry
from chatsvc.streamlog.hub import Hub
from chatsvc.streamlog.resume import Resumer

A = "resp_local_a"


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

    async def live(self, count):
        """So many readers have all that there is, and wait for what comes."""

        await until(lambda: sum(one.live for one in self.hub.subscriptions(A)) >= count)

    async def silence(self, ticks=4):
        """Time passes in which nothing comes."""
        for _ in range(ticks):
            await self.resumer.tick()
            for _ in range(20):
                await asyncio.sleep(0)


@asynccontextmanager
async def open_world():
    """A world with the first attempt's log in it; nobody may be left reading at its end."""
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
