"""What replicas say to each other: records only, encoded as MessagePack.

A field that a newer version has and an older one does not know is passed over, and one that is missing has its default,
so versions may be mixed while a deployment goes on.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from chatsvc.run import WaitingRun


class End(StrEnum):
    """How a run ended at a replica, as far as shares are concerned."""

    COMPLETE = "complete"
    CUT = "cut"
    """Stopped or failed: it costs what it got, and its length says nothing."""
    REFUND = "refund"
    """Nothing of it was shown: it costs nothing."""


class Held(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A run that a replica has under way, and all that it has received so far: said again, it changes nothing."""

    run: WaitingRun
    read: bool = False
    """Its prompt has been read, of so many tokens, so many of them from the prefix cache."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    end: End | None = None
    lost: bool = False
    """Others had taken it over before it ended here: it may wait again by now, which only Postgres knows."""


class Posted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run that waits, and where it is to be served."""

    run: WaitingRun
    home: str = ""
    cached_tokens: int = 0
    """Tokens of its prompt that are likely to be cached there."""


class Places(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a replica can do for one model now."""

    slots: int = 0
    """0: its engine is not ready."""
    speed: float = 0.0
    """Service delivered in a second while full; 0: not known."""
    window: int = 0
    """Most tokens of prompt and reply together; 0: not known."""
    reply_tokens: int = 0
    """Most tokens of a reply when a request names none."""
    sequences: float = 0.0
    """The share of ``slots`` that replies have."""
    tokens: float = 0.0
    """The share of the KV cache that is kept for them; 0: not known."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """What a model takes where it is served."""

    tokens: int
    """Prompt and reply together."""
    reply_tokens: int
    """The longest reply when a request names none."""


class News(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One saying of one replica."""

    replica: str
    models: dict[str, Places] = {}
    """Always there, so that every saying is a sign of life."""
    leaving: bool = False
    """It takes nothing more."""
    whole: bool = False
    """``held`` is all that it has under way, not only what has changed."""
    held: list[Held] = []
    posted: list[Posted] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(News)


def encode(news: News) -> bytes:
    """As bytes."""
    return _encoder.encode(news)


def decode(raw: bytes) -> News:
    """Raises ``msgspec.DecodeError`` (``ValidationError`` among them) for what is no news."""
    return _decoder.decode(raw)
