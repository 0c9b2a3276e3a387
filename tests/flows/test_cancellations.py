"""Thousands of requests given up at random moments: nobody ever sees another's bytes (L10)."""

import asyncio
import json
import re
import time

import pytest
from api_client import Api
from raw_reader import RawReader, dechunked
from reader import read_to_the_end

USERS = 8
AT_ONCE_EACH = 4
PATIENCE_S = 60.0
MARK = re.compile(rb"secret(\d\d)")
EVENT = re.compile(rb"id: (\d+)\nevent: (\w+)\ndata: (.*)\n\n")


@pytest.fixture(scope="module")
def server(start_server):
    return start_server("scripted:?tokens_per_s=60&tokens=60&slots=128")


class User:
    """Somebody whose every text carries their mark, and who checks every byte they are sent."""

    def __init__(self, number, server, client, random):
        self.mark = f"secret{number:02d}"
        self.api = Api(client, server.base_url)
        self.header = f"X-Forwarded-User: {self.api.headers['x-forwarded-user']}"
        self.port = server.port
        self.random = random
        self.replies = []
        self.events = {}
        """Every event seen of a reply, by its id: it never differs."""
        self.usual_s = 0.01
        """How long a request takes that is not a stream."""
        self.given_up = 0
        self.whole = 0

    def content(self):
        return f"{self.mark} asks {self.random.randrange(10**6)}"

    async def begin(self):
        self.follow(await self.api.start(self.content()))

    def follow(self, reply):
        self.replies.append(reply)
        self.events.setdefault(reply["response_id"], {})

    async def request(self):
        """One request of any kind, given up at any moment or read to its end."""
        reply = self.random.choice(self.replies[-4:])
        reader = await RawReader.connect(self.port)
        kind = self.random.choice((self.stream, self.stream, self.conversation, self.conversations, self.post))
        asking = asyncio.create_task(kind(reader, reply))
        began = time.monotonic()
        to_the_end = self.random.random() < 0.15
        # Moments that lie within what a request takes here and now, whatever else this machine does.
        patience = PATIENCE_S if to_the_end else self.random.uniform(0, 1.5 * self.usual_s)
        done, _ = await asyncio.wait({asking}, timeout=patience)
        self.given_up += not done
        self.whole += bool(done)
        if done and kind != self.stream:
            self.usual_s += (time.monotonic() - began - self.usual_s) / 10
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        if self.random.random() < 0.7:
            reader.reset()
        else:
            reader.close()
        self.check(reader.seen, reply)
        if done:
            asking.result()

    async def stream(self, reader, reply):
        cursor = self.random.choice((0, 0, self.random.randrange(30)))
        await reader.ask(reply["stream_url"], "Connection: close", f"Last-Event-ID: {cursor}")
        await reader.to_the_end()
        assert reader.status in {200, 204}, reader.seen

    async def conversation(self, reader, reply):
        await reader.ask(f"/v1/conversations/{reply['conversation_id']}", self.header, "Connection: close")
        await reader.to_the_end()
        assert reader.status == 200, reader.seen

    async def conversations(self, reader, reply):
        await reader.ask("/v1/conversations", self.header, "Connection: close")
        await reader.to_the_end()
        assert reader.status == 200, reader.seen

    async def post(self, reader, reply):
        body = json.dumps({"content": self.content(), "client_msg_id": f"{self.mark}-{self.random.random()}"})
        path = f"/v1/conversations/{reply['conversation_id']}/messages"
        await reader.send(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{self.header}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        await reader.to_the_end()
        # Often the last reply is still running, or there are as many as one may have; and where this machine stands
        # still, the other requests may have changed the conversation again whenever this one was to be written.
        assert reader.status in {202, 409, 429} or b"changing too fast" in reader.seen, reader.seen
        if reader.status == 202:
            self.follow(
                {**json.loads(reader.seen.partition(b"\r\n\r\n")[2]), "conversation_id": reply["conversation_id"]}
            )

    def check(self, seen, reply):
        """Nothing of another's, and of a reply's events nothing that differs from what was seen before."""
        assert set(MARK.findall(seen)) <= {self.mark[-2:].encode()}, seen
        head, _, body = seen.partition(b"\r\n\r\n")
        if b"text/event-stream" not in head:
            return
        known = self.events[reply["response_id"]]
        for seq, *event in EVENT.findall(dechunked(body)):
            if event[0] == b"snapshot":
                continue  # the answer to a cursor that was ahead
            assert known.setdefault(int(seq), event) == event


@pytest.mark.parametrize("requests", [800, pytest.param(4_000, marks=pytest.mark.slow)])
async def test_thousands_of_random_cancellations_show_nobody_anothers_bytes(server, client, seeded, requests):
    users = [User(number, server, client, seeded) for number in range(USERS)]
    numbers = iter(range(requests))

    async def busy(user):
        for _ in numbers:
            await user.request()

    for user in users:
        await user.begin()
        await user.begin()
    async with asyncio.TaskGroup() as group:
        for user in users:
            for _ in range(AT_ONCE_EACH):
                group.create_task(busy(user))
    given_up, whole = sum(user.given_up for user in users), sum(user.whole for user in users)
    replies = sum(len(user.replies) for user in users)
    print(f"{given_up} given up, {whole} read to their end, {replies} replies")
    assert given_up > requests / 3
    assert whole > requests / 10
    for user in users:
        for reply in user.replies:
            rendered = await read_to_the_end(client, user.api.stream_url(reply))
            assert user.mark in rendered.text
            assert rendered.text == (await user.api.message_of(reply))["content"]
            for seq, (name, _) in user.events[reply["response_id"]].items():
                assert next(event for event in rendered.events if event.id == seq).name == name.decode()
    assert "Traceback" not in server.log()
