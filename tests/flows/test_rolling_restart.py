"""Every replica is restarted in turn while people talk: nothing is lost, and nobody sees more than a reconnect."""

import asyncio
import itertools

import httpx
import pytest
from balancer import PatientClient, balancing
from reader import Rendered

REPLICAS = 3
TOKENS_PER_S = 40
SHORT, LONG = 20, 360
EVERY_S = 0.2
LONG_EVERY = 2
"""One reply in so many is a long one."""


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_rolling_restart_under_load_costs_no_reply_and_shows_no_error(start_server):
    engine = f"scripted:?tokens_per_s={TOKENS_PER_S}&tokens={LONG}&slots=64"
    env = {"CHATSVC_SERVER_GRACE_S": "40", "CHATSVC_SERVER_LEAVE_S": "4"}
    servers = [start_server(engine, **env)]
    servers += [start_server(engine, beside=servers[0], **env) for _ in range(REPLICAS - 1)]
    talks = []

    async def talk(user, tokens):
        reply = await user.ask(max_tokens=tokens)
        return reply, await user.follow(reply, Rendered())

    async def load(client, balancer):
        for number in itertools.count(1):
            user = PatientClient(client, balancer)
            tokens = SHORT if number % LONG_EVERY else LONG
            talks.append((user, asyncio.create_task(talk(user, tokens))))
            await asyncio.sleep(EVERY_S)

    limits = httpx.Limits(max_connections=300, max_keepalive_connections=20)
    async with httpx.AsyncClient(timeout=30, limits=limits) as client, balancing(servers, client) as balancer:
        for server in servers:
            await balancer.until_ready(server)
        loading = asyncio.create_task(load(client, balancer))
        for server in servers:
            # Replies are under way everywhere.
            await asyncio.sleep(2)
            assert await asyncio.to_thread(server.stop, 50) == 0
            await asyncio.to_thread(server.start)
            await balancer.until_ready(server)
        loading.cancel()
        async with asyncio.timeout(40):
            read = [(user, *await task) for user, task in talks]
        for user, reply, rendered in read:
            stored = await user.stored(reply)
            assert stored["status"] == "complete"
            assert rendered.text == stored["content"] != ""
            assert rendered.end.name == "done"
            ids = [event.id for event in rendered.events if event.id is not None]
            assert ids == list(range(1, len(ids) + 1))
    repeats = sum(user.repeats for user, _, _ in read)
    reconnects = sum(user.reconnects for user, _, _ in read)
    print(f"{len(read)} replies, {reconnects} reconnects, {repeats} calls made again")
    assert reconnects > 0, "nobody was sent elsewhere: nothing was tested"
    assert len(read) > 30
