"""What happens in a reply, and the one encoding of it (L3).

An event is encoded to JSON once, when its entry is made; the log stores these bytes, every reader on every replica
gets these bytes. ``Entry`` is an event at its place in the log. ``frame`` is the wire form of the stream.

Line separators that common SSE clients split on (U+2028, U+2029, U+0085) never appear raw; NUL becomes U+FFFD before
log and store, so that both hold the same text (``clean_text``).
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar, Final

import msgspec

from chatsvc.limits import TierName, Usage
from chatsvc.prompt import PromptParts

MAX_SEQ: Final = 2**53 - 1
"""Cursors beyond this are treated as being from the future; the page's JavaScript counts exactly up to here."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the union. ``name`` is the SSE event name; ``terminal`` ends the log; ``passing`` is never logged."""

    name: ClassVar[str] = ""
    terminal: ClassVar[bool] = False
    passing: ClassVar[bool] = False


class Queued(Event, frozen=True, kw_only=True):
    """Position in the queue (1 = next) and expected wait in seconds, None when unknown. Passing: no id, not logged."""

    name = "queued"
    passing = True
    position: int
    eta_s: float | None
    tier: TierName


class Start(Event, frozen=True, kw_only=True):
    """A worker has begun. First event of every log.

    ``model`` is the one that was asked for, ``served_model`` the one that answers; ``degraded`` is what was given up
    because there was too little: ``model``, ``max_tokens``, ``history``.
    """

    name = "start"
    response_id: str
    message_id: str
    model: str
    created_at: datetime
    served_model: str = ""
    degraded: tuple[str, ...] = ()


class Context(Event, frozen=True, kw_only=True):
    """What the prompt was made of, in tokens."""

    name = "context"
    condensed: bool
    """A summary stands for the messages up to and including ``summary_through``."""
    summary_through: str | None
    retrieved: tuple[str, ...]
    """Messages that were quoted for this question."""
    prompt_tokens: int
    cached_tokens: int | None
    window: int
    left_out: int = 0
    """Turns that the model was not shown, not even in a summary."""
    parts: PromptParts = PromptParts()


class Delta(Event, frozen=True, kw_only=True, gc=False):
    """More text."""

    name = "delta"
    text: str


class ToolCall(Event, frozen=True, kw_only=True):
    """The model asks for a tool."""

    name = "tool_call"
    id: str
    tool: str
    arguments: str


class ToolResult(Event, frozen=True, kw_only=True):
    """What the tool said."""

    name = "tool_result"
    id: str
    content: str


class Image(Event, frozen=True, kw_only=True):
    """An image part."""

    name = "image"
    id: str
    media_type: str
    url: str


class Snapshot(Event, frozen=True, kw_only=True):
    """The whole text so far: replace what is shown, go on from this id (L7)."""

    name = "snapshot"
    text: str
    reason: str


class Done(Event, frozen=True, kw_only=True):
    """The reply ended with its text kept: ``finish_reason`` is stop, length, stopped or tool_calls.

    ``error_code`` is there only when the service stopped it by itself, and says why: ``abandoned``.
    """

    name = "done"
    terminal = True
    message_id: str
    finish_reason: str
    usage: Usage
    error_code: str | msgspec.UnsetType = msgspec.UNSET


class Error(Event, frozen=True, kw_only=True):
    """The reply failed. What was shown before it is kept."""

    name = "error"
    terminal = True
    code: str
    message: str
    retryable: bool


EVENT_TYPES: Final[dict[str, type[Event]]] = {
    cls.name: cls for cls in (Queued, Start, Context, Delta, ToolCall, ToolResult, Image, Snapshot, Done, Error)
}
TERMINAL_NAMES: Final = frozenset(name for name, cls in EVENT_TYPES.items() if cls.terminal)

_encoder: Final = msgspec.json.Encoder()
_ESCAPES: Final = (
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)


class Entry(msgspec.Struct, frozen=True, gc=False):
    """An event at its place in the log: ``data`` is the event's JSON, encoded once."""

    attempt: int
    seq: int
    event: str
    data: bytes

    @property
    def terminal(self) -> bool:
        """True when nothing can follow in this log."""
        return self.event in TERMINAL_NAMES

    def frame(self) -> bytes:
        """The entry as one SSE event, ``id:`` included."""
        return b"id: %d\nevent: %b\ndata: %b\n\n" % (self.seq, self.event.encode(), self.data)

    def decode(self) -> Event:
        """The event itself. Raises ``msgspec.DecodeError`` when the bytes are not such an event."""
        return msgspec.json.decode(self.data, type=EVENT_TYPES[self.event])


def encode(event: Event) -> bytes:
    """JSON of an event's data on one line, with the separators of the module's docstring escaped."""
    return escape_separators(_encoder.encode(event))


def encode_data(data: Any) -> bytes:
    """Like ``encode``, for data that is no event of the union."""
    return escape_separators(_encoder.encode(data))


def escape_separators(data: bytes) -> bytes:
    """Replace the raw line separators inside JSON strings by their escapes. UTF-8 makes a plain replace safe."""
    if data.isascii():
        return data
    for raw, escaped in _ESCAPES:
        if raw in data:
            data = data.replace(raw, escaped)
    return data


def entry(event: Event, *, attempt: int, seq: int) -> Entry:
    """Encode an event into its entry."""
    return Entry(attempt, seq, event.name, encode(event))


def passing_frame(event: Event) -> bytes:
    """A passing event as one SSE event without an id, so that it never moves a client's cursor."""
    return b"event: %b\ndata: %b\n\n" % (event.name.encode(), encode(event))


def clean_text(text: str) -> str:
    """Text that both Postgres and JSON can hold: NUL and lone surrogates become U+FFFD."""
    if "\x00" in text:
        text = text.replace("\x00", "\ufffd")
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        # By way of UTF-16 a split pair becomes its character again, and only what is truly alone is replaced.
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
