"""The design most services begin with: one blocking XREAD a client, redis-py, Litestar's ServerSentEvent.

One XADD an event, as it comes; every client has a connection of its own to Redis, for as long as it reads.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import uvloop
from control import Driver, leave, obey, serve
from drive import event_text
from litestar import Litestar, get
from litestar.response import ServerSentEvent, ServerSentEventMessage
from redis.asyncio import BlockingConnectionPool, Redis


class Server:
    """Reads and writes with redis-py as its documentation shows it."""

    def __init__(self, redis_url: str) -> None:
        self.readers = Redis.from_url(redis_url, max_connections=20_000, socket_timeout=None)
        self.writers = Redis(connection_pool=BlockingConnectionPool.from_url(redis_url, max_connections=50))
        self.driver = Driver()
        self.count = 0

    async def events(self, key: str) -> AsyncIterator[ServerSentEventMessage]:
        last = "0-0"
        while True:
            for _, entries in await self.readers.xread({key: last}, block=15_000) or ():
                for entry_id, fields in entries:
                    last = entry_id
                    yield ServerSentEventMessage(data=fields[b"d"].decode(), event="delta", id=entry_id.decode())

    def app(self) -> Litestar:
        @get("/{key:str}")
        async def stream(key: str) -> ServerSentEvent:
            return ServerSentEvent(self.events(key))

        return Litestar([stream])

    async def write(self, number: int, rate: float) -> None:
        """One reply's events, evenly spaced."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(number % 997 / 997 / rate)
        due = loop.time()
        while True:
            await self.writers.xadd(f"resp_bench_{number:032x}", {"e": "delta", "d": f'{{"text":"{event_text()}"}}'})
            due = max(due + 1 / rate, loop.time() - 1 / rate)
            await asyncio.sleep(max(0.0, due - loop.time()))

    async def open(self, count: int, port: int) -> None:  # same call for every design
        self.count = count
        # A stream's headers only go out with its first event.
        for number in range(count):
            await self.writers.xadd(f"resp_bench_{number:032x}", {"e": "start", "d": "{}"})

    async def go(self, rate: float) -> None:
        self.driver.start(*(self.write(number, rate) for number in range(self.count)))


async def main(redis_url: str, port: int) -> None:
    server = Server(redis_url)
    await serve(server.app(), port)
    await obey(open=server.open, go=server.go)
    leave()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2])))
