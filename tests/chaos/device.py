"""One device reading one reply: through any replica, cut and resumed, by the rules that every client has to follow."""

from __future__ import annotations

import asyncio
import random
from typing import Protocol

import httpx
from reader import Event, events_of

from chaos.history import TERMINAL, Connection, History, Reading, Reply, Seen, now
from chaos.servers import HEARTBEAT_S, Servers

SILENT_S = 3 * HEARTBEAT_S
END_WITHIN_S = 150.0
"""No reply here takes that long, whatever happens."""


class Owner(Protocol):
    """Who the device belongs to, as far as it needs to know."""

    servers: Servers
    history: History
    headers: dict[str, str]
    http: httpx.AsyncClient
    draw: random.Random


class Device:
    """A screen. Its cursor and its text may be lost at any cut: then it reads from the start."""

    def __init__(self, owner: Owner, name: str) -> None:
        self.owner = owner
        self.name = name
        self.draw = owner.draw


class Screen:
    """The rules: what is not above the last id is dropped, a snapshot replaces, and the cursor follows."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.cursor = 0

    def take(self, event: Event) -> bool:
        """Note the event; True at the end."""
        if event.name == "comment":
            return False
        connection = len(self.reading.connections) - 1
        self.reading.events.append(Seen(now(), connection, event.id, event.name, event.data))
        if event.id is not None and (event.name == "snapshot" or event.id > self.cursor):
            self.cursor = event.id
        return event.name in TERMINAL


async def follow(device: Device, reply: Reply) -> None:
    """Read until the end has been seen. What goes wrong is noted in the history, never raised."""
    draw, history = device.draw, device.owner.history
    began = now()
    reading = Reading(device.name)
    reply.readings.append(reading)
    screen = Screen(reading)
    while True:
        verdict = await _connect(device, reply, screen)
        if verdict == "end":
            return
        if verdict == "gone":
            reading.left = reply.deleted
            if not reply.deleted:
                history.surprises.append(f"the stream of {reply.response_id} is 404 though nobody deleted it")
            return
        if verdict == "over" and not reply.deleted:
            reading.gave_up = f"204 for cursor {screen.cursor}, and no end was seen"
            return
        if now() - began > END_WITHIN_S:
            reading.gave_up = f"no end after {END_WITHIN_S:g} s, cursor {screen.cursor}"
            return
        # Most come back sooner than ``retry`` says, so that many cuts fit into one reply.
        await asyncio.sleep(draw.choice((0.0, draw.uniform(0.02, 0.3), draw.uniform(0.1, 1.0))))
        if screen.cursor and draw.random() < 0.04:
            reading.left = True
            reading = Reading(device.name)
            reply.readings.append(reading)
            screen = Screen(reading)


async def _connect(device: Device, reply: Reply, screen: Screen) -> str:
    """One connection. ``end``: the end was seen; ``over``: 204; ``gone``: 404; ``cut``: come again."""
    owner = device.owner
    replica = device.draw.choice(owner.servers.replicas)
    url = f"http://127.0.0.1:{replica.proxy.port}/v1/responses/{reply.response_id}/stream"
    headers = owner.headers | ({"last-event-id": str(screen.cursor)} if screen.cursor else {})
    screen.reading.connections.append(Connection(now(), screen.cursor, replica.number))
    try:
        async with owner.http.stream("GET", url, headers=headers, timeout=SILENT_S) as answer:
            if answer.status_code == httpx.codes.NO_CONTENT:
                return "over"
            if answer.status_code == httpx.codes.NOT_FOUND:
                return "gone"
            if answer.status_code != httpx.codes.OK:
                text = (await answer.aread())[:200].decode(errors="replace")
                owner.history.surprises.append(f"GET stream: {answer.status_code} {text}")
                return "cut"
            async for event in events_of(answer.aiter_raw()):
                if screen.take(event):
                    return "end"
    except (httpx.TransportError, httpx.StreamError):
        return "cut"
    return "cut"
