"""Stand-ins for another region, which answer, break and fall silent as told, and for the client of its stream."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from chatsvc.api.region_client import RegionClient
from chatsvc.api.region_peer import Peer
from chatsvc.api.region_relay import StreamRequest, relay
from chatsvc.api.region_trust import RegionTrust
from chatsvc.clock import SystemClock
from chatsvc.streamlog.subscription import Overrun

PATH = "/v1/responses/resp_eu_0/stream"
JSON = b'{"status":"complete"}'
PATIENCE_S = 120.0
"""For what must come: also on a machine that stands for a while."""
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def answer(status, body, media_type="application/json"):
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {media_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def problem(status, code):
    return answer(status, msgspec.json.encode({"code": code}), "application/problem+json")


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def frame(seq, name="delta"):
    return b"id: %d\nevent: %b\ndata: {}\n\n" % (seq, name.encode())


class StandIn:
    """Answers every request with ``script``: bytes, then whatever else it awaits. Remembers requests."""

    def __init__(self, script):
        self.script = script
        self.requests = []
        self.left = asyncio.Event()
        """A client closed its connection."""

    @asynccontextmanager
    async def running(self):
        tasks = set()

        async def serve(reader, writer):
            tasks.add(asyncio.current_task())
            try:
                self.requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
                if callable(self.script):
                    await self.script(reader, writer)
                else:
                    writer.write(self.script)
                await writer.drain()
                await reader.read()
                self.left.set()
            except OSError:
                self.left.set()
            finally:
                writer.transport.abort()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def region(*scripts, first_byte_s=PATIENCE_S):
    """A peer whose replicas do as they are told, asked in the order given."""
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(StandIn(script).running()) for script in scripts]
        clock = SystemClock()
        peer = Peer(
            "eu",
            [replica.url for replica in replicas],
            client=RegionClient(connect_s=PATIENCE_S, first_byte_s=first_byte_s),
            trust=RegionTrust("s" * 32, clock, region="us"),
            monotonic=clock.monotonic,
        )
        peer._in_turn = lambda: list(peer._replicas)
        yield peer, replicas


class Pipe:
    """A client that takes as much as it is allowed to."""

    def __init__(self, room=1 << 30):
        self.frames = b""
        self.closed = False
        self.room = room
        self.news = asyncio.Event()
        self._callback = None

    def on_close(self, callback):
        self._callback = callback

    def write(self, frames):
        self.frames += frames
        self.news.set()
        return not self.closed

    async def drain(self):
        while len(self.frames) > self.room and not self.closed:
            await asyncio.sleep(3600)
        if self.closed:
            raise Overrun

    def close(self):
        self.closed = True
        self._callback()

    async def until(self, part):
        while part not in self.frames:
            self.news.clear()
            await self.news.wait()


async def follow(peer, pipe, *, cursor=0, idle_s=PATIENCE_S, once=None):
    """As ``Regions`` does, ``once`` there is something to pass on; what was noted."""
    noted = []
    request = StreamRequest(peer, PATH, "tok en", None)
    async with asyncio.timeout(PATIENCE_S), AsyncExitStack() as stack:
        first, _ = await stack.enter_async_context(request.ask(cursor))
        if once is not None:
            await once.wait()
        await relay(request, first, pipe, stack, cursor=cursor, idle_s=idle_s, note=noted.append)
    return noted


async def get(peer):
    async with asyncio.timeout(PATIENCE_S), peer.ask("GET", "/v1/responses/resp_eu_0", None) as (found, body):
        return found.status, body
