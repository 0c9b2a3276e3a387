"""What happened, as the clients, the faults, the store and the log tell it. Records only; ``checker`` judges them.

Times are seconds of one monotonic clock, that of the suite; what the database dates is told by the wall clock of the
same machine.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

TERMINAL = ("done", "error")


@dataclass
class Seen:
    """An event as it arrived. ``connection`` counts the connections of its reading from 0."""

    at: float
    connection: int
    id: int | None
    name: str
    data: dict[str, Any]


@dataclass
class Connection:
    """A GET of the stream: the cursor that was sent and the replica it went to."""

    at: float
    cursor: int
    replica: int


@dataclass
class Reading:
    """One device's way through one reply. A device that loses its cursor begins a new reading."""

    device: str
    connections: list[Connection] = field(default_factory=list)
    events: list[Seen] = field(default_factory=list)
    gave_up: str | None = None
    """Why no end was seen, where that is the server's fault."""
    left: bool = False
    """The device lost its state or its user deleted the conversation: no end is due."""

    @property
    def end(self) -> Seen | None:
        """The terminal event."""
        return next((event for event in self.events if event.name in TERMINAL), None)

    @property
    def text(self) -> str:
        """What is shown, by the rules: a snapshot replaces, a delta is put behind."""
        text = ""
        for event in self.events:
            if event.name == "snapshot":
                text = event.data["text"]
            elif event.name == "delta":
                text += event.data["text"]
        return text


@dataclass
class Stop:
    """A user's stop, from the request to its answer."""

    asked: float
    answered: float
    status: str


@dataclass
class Reply:
    """A reply that got its 202."""

    response_id: str
    message_id: str
    user_message_id: str
    conversation_id: str
    user_id: str
    client_msg_id: str
    model: str
    content: str | None
    """What the user wrote; None where a message was answered again."""
    posted: float
    max_tokens: int | None = None
    answers: list[str] = field(default_factory=list)
    """The response id of every 202 that this ``client_msg_id`` got."""
    readings: list[Reading] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    deleted: bool = False

    @property
    def over(self) -> float:
        """When the last device saw its end; the moment of the POST while none has."""
        return max((reading.end.at for reading in self.readings if reading.end), default=self.posted)


def now() -> float:
    """The suite's clock."""
    return time.monotonic()


def wall_ahead() -> float:
    """Seconds that the wall clock is ahead of ``now``: the closest of a few looks, since one may be paused within."""
    looks = []
    for _ in range(5):
        before, wall, after = now(), time.time(), now()
        looks.append((after - before, wall - (before + after) / 2))
    return min(looks)[1]


@dataclass
class Trouble:
    """A fault that happened, until all was well again. ``victims`` are the runs its process held; None: not known."""

    name: str
    at: float
    until: float
    target: str = ""
    victims: list[str] | None = None
    wall_ahead_s: float = field(default_factory=wall_ahead)
    """As it was then: the wall clock may be set during a run."""


@dataclass
class LogEntry:
    """An entry of a reply's log."""

    attempt: int
    seq: int
    event: str
    data: dict[str, Any]


@dataclass
class Saying:
    """What the engine says to a prompt, undisturbed. ``kept`` is the text of the reply that this one goes on with."""

    kept: str
    rest: str
    tokens: int
    finish_reason: str


@dataclass
class Evidence:
    """What store, log and API say once everything has settled."""

    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    messages: dict[str, dict[str, Any]] = field(default_factory=dict)
    conversations: dict[str, dict[str, Any]] = field(default_factory=dict)
    logs: dict[str, list[LogEntry]] = field(default_factory=dict)
    replays: dict[str, Reading] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    """Status by ``GET /v1/responses/{id}``."""
    sayings: dict[str, Saying] = field(default_factory=dict)


@dataclass
class History:
    """The whole run."""

    replies: dict[str, Reply] = field(default_factory=dict)
    troubles: list[Trouble] = field(default_factory=list)
    surprises: list[str] = field(default_factory=list)
    """What clients and the warden met and nothing of this kind may meet."""
    evidence: Evidence = field(default_factory=Evidence)
    deleted_conversations: dict[str, float] = field(default_factory=dict)
    """When the DELETE was answered."""
    replicas: int = 3
    post_retries: Counter[str] = field(default_factory=Counter)
    """By what the try had come to."""
    post_duplicates: int = 0
    settled_after_s: float = 0.0

    def log_lost(self, begin: float, end: float = float("inf")) -> bool:
        """Whether Redis came back empty in that time."""
        return any(
            trouble.target == "empty" and trouble.at <= end and trouble.until >= begin for trouble in self.troubles
        )

    def overlaps(self, begin: float, end: float, *names: str) -> bool:
        """Whether a fault whose name begins with one of these was on in that time."""
        return any(
            trouble.name.startswith(names) and trouble.at <= end and trouble.until >= begin for trouble in self.troubles
        )
