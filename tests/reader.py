"""A client that reads replies by the rules a browser follows, and can be cut anywhere.

The rules: drop what is not above the last id, except ``snapshot``, which replaces the text; after a cut go on from the
last id.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

_LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass
class Event:
    """One server-sent event, or a comment (``name`` is then ``comment``)."""

    name: str
    data: Any
    id: int | None


@dataclass
class Rendered:
    """What a user sees of a reply, and how it got there."""

    text: str = ""
    last_id: int = 0
    events: list[Event] = field(default_factory=list)
    end: Event | None = None
    connections: int = 0
    snapshots: int = 0

    def take(self, event: Event) -> None:
        """Render one event."""
        if event.name == "comment":
            return
        if event.id is not None:
            if event.name != "snapshot" and event.id <= self.last_id:
                raise AssertionError(f"event {event.id} came again after {self.last_id}")
            if event.name != "snapshot" and event.id != self.last_id + 1 and not self._may_jump():
                raise AssertionError(f"event {event.id} came after {self.last_id}: something is missing")
            self.last_id = event.id
        self.events.append(event)
        if event.name == "delta":
            self.text += event.data["text"]
        elif event.name == "snapshot":
            self.text = event.data["text"]
            self.snapshots += 1
        elif event.name in {"done", "error"}:
            self.end = event

    def _may_jump(self) -> bool:
        return bool(self.events) and self.events[-1].name == "snapshot"

    def of(self, name: str) -> list[Event]:
        """All events of one name."""
        return [event for event in self.events if event.name == name]


async def events_of(chunks: AsyncIterator[bytes]) -> AsyncIterator[Event]:
    """Parse a stream as the HTML standard says (§9.2.6), from any split of its bytes."""
    buffer = b""
    fields: dict[str, str] = {}
    data: list[str] = []
    async for chunk in chunks:
        buffer += chunk
        while match := _LINE_END.search(buffer):
            if match.group() == b"\r" and match.end() == len(buffer):
                break  # a line feed may follow
            line, buffer = buffer[: match.start()].decode("utf-8"), buffer[match.end() :]
            if not line:
                if data:
                    identity = fields.get("id")
                    yield Event(
                        fields.get("event", "message"), json.loads("\n".join(data)), int(identity) if identity else None
                    )
                fields, data = {}, []
            elif line.startswith(":"):
                yield Event("comment", line[1:].strip(), None)
            else:
                name, _, value = line.partition(":")
                value = value.removeprefix(" ")
                if name == "data":
                    data.append(value)
                else:
                    fields[name] = value


Cut = Callable[[Rendered], bool]


async def read(
    client: httpx.AsyncClient, url: str, rendered: Rendered | None = None, *, cut: Cut | None = None
) -> Rendered:
    """One connection: read until the end, or until ``cut`` says so after an event. 204 and 200 are expected."""
    rendered = rendered or Rendered()
    headers = {"last-event-id": str(rendered.last_id)} if rendered.last_id else {}
    rendered.connections += 1
    async with client.stream("GET", url, headers=headers) as answer:
        if answer.status_code == httpx.codes.NO_CONTENT:
            return rendered
        assert answer.status_code == httpx.codes.OK, (answer.status_code, await answer.aread())
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        async for event in events_of(answer.aiter_raw()):
            rendered.take(event)
            if rendered.end is not None or (cut is not None and cut(rendered)):
                break
    return rendered


async def read_to_the_end(
    client: httpx.AsyncClient, url: str, *, cut: Cut | None = None, most: int = 200, pause_s: float = 0
) -> Rendered:
    """Reconnect until the reply has ended."""
    rendered = Rendered()
    for _ in range(most):
        try:
            await read(client, url, rendered, cut=cut)
        except httpx.TransportError:
            await asyncio.sleep(0.05)
        if rendered.end is not None:
            return rendered
        await asyncio.sleep(pause_s)
    raise AssertionError(f"no end after {most} connections: {rendered.text[-80:]!r}")
