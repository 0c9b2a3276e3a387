"""Two processes' worth of writer, hub and readers on the same logs, without the rest of the service."""

from __future__ import annotations

import asyncio

from streaming import DONE, Client, Shelf, soon

from chatsvc.streamlog.factory import create_log
from chatsvc.streamlog.hub import Hub
from chatsvc.streamlog.resume import Resumer
from chatsvc.streamlog.writer import LogWriter


class TwoProcesses:
    """The process that writes, with readers of its own, and another process with readers."""

    def __init__(self, url, *, timeout_s=1):
        self.shelf = Shelf()
        self.logs = [create_log(url, timeout_s=timeout_s) for _ in range(2)]
        self.hubs = [Hub(log) for log in self.logs]
        self.resumers = [Resumer(hub, self.shelf.source, tick_s=0.1) for hub in self.hubs]
        self.writer = LogWriter(self.logs[0], self.hubs[0], batch_ms=5, batch_tokens=4, holds=self.holds)
        self.lost_leases = set()
        self.clients = []

    async def holds(self, response_id, attempt):
        return (response_id, attempt) not in self.lost_leases

    async def begin(self, response_id, attempt=1):
        self.shelf.running(response_id)
        return await self.writer.open(response_id, attempt)

    def read(self, place, response_id, cursor=0):
        """A reader in the writer's process (0) or in the other one (1)."""
        client = Client()
        client.following = asyncio.ensure_future(self.resumers[place].follow(response_id, cursor, client))
        self.clients.append(client)
        return client

    async def end(self, reply):
        """Finish the reply as a runner does. Returns the number of its last event."""
        seq = reply.seal()
        self.shelf.ended(reply.response_id, reply.text, seq)
        reply.event(DONE)
        await reply.close(600)
        return seq

    async def all_served(self):
        await soon(asyncio.gather(*(client.following for client in self.clients)))

    def loops(self):
        return [part.run() for part in (self.writer, *self.hubs, *self.resumers)]

    async def aclose(self):
        for log in self.logs:
            await log.aclose()


async def say(reply, first, last, *, flush_s=10):
    """Numbers as text, and wait until the log has them."""
    for number in range(first, last):
        reply.delta(f"{number} ")
    assert await reply.flush(flush_s)


def said(last):
    return "".join(f"{number} " for number in range(last))
