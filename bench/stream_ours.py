"""The server under test: log writer, stream log, hub and SSE wire, driven at the log writer."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Collection
from typing import Any

import uvloop
from control import Driver, leave, obey, serve
from drive import event_text, paced

from chatsvc.api.direct import StreamingProtocol
from chatsvc.api.sse import Streams
from chatsvc.run import RunStatus
from chatsvc.streamlog.factory import create_log
from chatsvc.streamlog.hub import Hub
from chatsvc.streamlog.resume import Resumer, StoredReply
from chatsvc.streamlog.writer import LogWriter, ReplyWriter

STREAMING = StoredReply(status=RunStatus.STREAMING, text="", text_seq=0, terminal=None, last_seq=0)


class Store:
    """A store in which every reply runs for ever."""

    async def reply(self, _: str) -> StoredReply:
        return STREAMING

    async def ended(self, _: Collection[str]) -> Collection[str]:
        return ()

    async def holds(self, _: str, __: int) -> bool:
        return True


class Server:
    """The parts of chatsvc between a delta and a socket, wired as ``app`` does."""

    def __init__(self, redis_url: str) -> None:
        store = Store()
        log = create_log(redis_url, timeout_s=5)
        self.hub = Hub(log)
        self.writer = LogWriter(log, self.hub, batch_ms=50, batch_tokens=16, holds=store.holds)
        self.resumer = Resumer(self.hub, store)
        self.streams = Streams(self.resumer, heartbeat_s=15, buffer_events=1024)
        self.replies: list[ReplyWriter] = []
        self.driver = Driver()

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        await self.streams.open(scope, receive, send).run(scope["path"][1:], 0)

    async def open(self, count: int, port: int) -> None:  # same call for every design
        self.replies = [await self.writer.open(f"resp_bench_{number:032x}", 1) for number in range(count)]

    async def go(self, rate: float) -> None:
        def one(number: int) -> None:
            self.replies[number].delta(event_text(), 4)

        self.driver.start(paced(one, len(self.replies), rate))


async def main(redis_url: str, port: int, relay: bool) -> None:
    server = Server(redis_url)
    parts = (server.writer, server.hub, server.resumer, server.streams)
    loops = [asyncio.create_task(part.run()) for part in parts]
    await serve(server.app, port, http="httptools" if relay else StreamingProtocol)
    await obey(open=server.open, go=server.go)
    assert not any(loop.done() for loop in loops)
    leave()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("redis_url")
    parser.add_argument("port", type=int)
    parser.add_argument("--relay", action="store_true", help="through plain ASGI instead of the lent transport")
    options = parser.parse_args()
    uvloop.run(main(options.redis_url, options.port, options.relay))
