"""Several replicas behind one door, as a load balancer makes it: any of those whose ``/readyz`` says yes."""

import asyncio
import contextlib
import random
import re
import uuid
from contextlib import asynccontextmanager

import httpx
from reader import read

CHECK_S = 0.2
PATIENCE_S = 30.0
_RETRY = re.compile(rb"^retry: (\d+)$", re.MULTILINE)


class Balancer:
    """Asks every replica how it is, and hands out those that are ready. Use as ``async with balancing(…)``."""

    def __init__(self, servers, client):
        self._servers = list(servers)
        self._client = client
        self._ready = {}
        self._changed = asyncio.Event()

    async def pick(self):
        """The base address of a replica, drawn: turns would fall in step with the calls. Waits while there is none."""
        while not (ready := [server for server in self._servers if self._ready.get(server)]):
            self._changed.clear()
            await self._changed.wait()
        return random.choice(ready).base_url

    async def until_ready(self, server):
        """Return when this replica may be drawn again."""
        while not self._ready.get(server):
            self._changed.clear()
            await self._changed.wait()

    async def watch(self, server):
        """Keep asking one replica."""
        while True:
            ready = False
            with contextlib.suppress(httpx.TransportError):
                ready = (await self._client.get(f"{server.base_url}/readyz", timeout=5)).status_code == httpx.codes.OK
            self._ready[server] = ready
            self._changed.set()
            await asyncio.sleep(CHECK_S)


@asynccontextmanager
async def balancing(servers, client):
    """A balancer that keeps asking for the length of a block."""
    balancer = Balancer(servers, client)
    tasks = [asyncio.create_task(balancer.watch(server)) for server in servers]
    try:
        yield balancer
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class PatientClient:
    """A user's client: repeats what may be repeated, follows streams as an EventSource does, and notes all trouble."""

    def __init__(self, client, balancer):
        self._client = client
        self._balancer = balancer
        self.user = {"x-forwarded-user": f"user-{uuid.uuid4().hex}"}
        self.repeats = 0
        """Calls that were refused for a moment and made again."""
        self.reconnects = 0

    async def call(self, method, path, **kwargs):
        """The answer; a refused connection and a 503 that says that it passes are tried again, nothing else is."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    answer = await self._client.request(
                        method, await self._balancer.pick() + path, headers=self.user, **kwargs
                    )
                except httpx.ConnectError:
                    pause_s = 0.2
                else:
                    if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                        assert answer.is_success, (path, answer.status_code, answer.text)
                        return answer.json()
                    assert answer.json()["retryable"], answer.text
                    pause_s = answer.json()["retry_after"] / 4
                self.repeats += 1
                await asyncio.sleep(pause_s)

    async def ask(self, **body):
        """Begin a reply in a new conversation; a repeated call has the same ``client_msg_id``."""
        conversation = await self.call("POST", "/v1/conversations", json={})
        body = {"content": "Tell me a story.", "client_msg_id": uuid.uuid4().hex, **body}
        reply = await self.call("POST", f"/v1/conversations/{conversation['id']}/messages", json=body)
        return {**reply, "conversation_id": conversation["id"]}

    async def follow(self, reply, rendered):
        """Read to the end, over as many connections as it takes, ``retry`` milliseconds apart."""
        while rendered.end is None:
            retry_ms = 1000
            try:
                source = _Retrying(self._client)
                await read(source, await self._balancer.pick() + reply["stream_url"], rendered)
                retry_ms = source.retry_ms
            except httpx.ConnectError:
                rendered.connections -= 1
            if rendered.end is None:
                self.reconnects += 1
                await asyncio.sleep(retry_ms / 1000)
        return rendered

    async def stored(self, reply):
        """The reply's message in the store."""
        conversation = await self.call("GET", f"/v1/conversations/{reply['conversation_id']}")
        [message] = [message for message in conversation["messages"] if message["id"] == reply["message_id"]]
        return message


class _Retrying:
    """An HTTP client for one stream that remembers the stream's ``retry`` line."""

    def __init__(self, client):
        self._client = client
        self.retry_ms = None

    @asynccontextmanager
    async def stream(self, *args, **kwargs):
        async with self._client.stream(*args, **kwargs) as answer:
            raw = answer.aiter_raw

            async def noting():
                async for chunk in raw():
                    if self.retry_ms is None and (found := _RETRY.search(chunk)):
                        self.retry_ms = int(found[1])
                    yield chunk

            answer.aiter_raw = noting
            yield answer
