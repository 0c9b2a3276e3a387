"""Configuration: one TOML file and environment variables become frozen structs; all errors are reported at once.

The structs here are the documentation of every key: name, meaning, unit, default. The environment wins over the file.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec

from chatsvc.limits import Tier, TierName


class AuthMode(StrEnum):
    """Who vouches for a caller."""

    NONE = "none"
    PROXY = "proxy"


class StreamConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[stream]``: how replies are written to and read from the stream log."""

    batch_ms: int = 50
    """Longest time a token waits before it is appended."""
    batch_tokens: int = 16
    """As many tokens are appended without waiting."""
    heartbeat_s: float = 15.0
    """A ``: ping`` line on a stream that was silent for so long."""
    log_ttl_s: float = 600.0
    """A log lives this long after its reply has ended; then the stored message is served."""
    buffer_events: int = 1024
    """Events a slow client may lag behind before it is cut (it resumes by its cursor)."""
    token_ttl_s: float = 3600.0
    """How long the token in a ``stream_url`` is good."""


class LeaseConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[lease]``: how fast a dead worker is noticed."""

    renew_s: float = 2.0
    ttl_s: float = 6.0
    checkpoint_s: float = 10.0
    """The text of a running reply is saved this often."""


class AuthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[auth]``: see the README's "Behind a proxy"."""

    mode: AuthMode = AuthMode.NONE
    """Default: one local user."""
    user_header: str = "X-Forwarded-User"
    tier_header: str = "X-Forwarded-Tier"
    trusted_proxies: tuple[str, ...] = ("127.0.0.0/8", "::1/128")
    """Networks whose TCP connections may carry the headers above."""
    allow_public_without_auth: bool = False
    """With ``mode = none``: bind an address other than loopback all the same."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[server]``: the socket and its limits."""

    host: str = "127.0.0.1"
    port: int = 8080
    base_path: str = "/"
    """Path under which a reverse proxy serves this; starts and ends with a slash."""
    max_body_bytes: int = 1_048_576
    max_content_chars: int = 200_000
    """Longest text of one message, in characters."""
    grace_s: float = 60.0
    """After SIGTERM running replies have this long to finish."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[models.<name>]``: a model served under that name."""

    engine: str
    """An engine URL: ``vllm:…``, ``transformers:…``, ``openai:…``, ``scripted:…`` or ``auto``."""
    slots: int | None = None
    """Replies that run at the same time; None: what the engine says."""
    window: int | None = None
    """Context window in tokens; None: the model's own."""
    default: bool = False


class DatabaseConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[database]`` and ``[redis]`` in one: where the shared parts are; empty means embedded."""

    url: str = ""
    redis_url: str = ""
    pool_size: int = 10
    timeout_s: float = 5.0
    """A command on Postgres or Redis that takes longer is given up."""


class LogConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[log]``."""

    format: str = ""
    """``console`` or ``json``; empty: console on a terminal, else json."""
    level: str = "info"


DEFAULT_TIERS = (
    Tier(name=TierName.FREE, weight=1, max_open_replies=3),
    Tier(name=TierName.PLUS, weight=4, max_open_replies=3),
    Tier(name=TierName.PRO, weight=16, max_open_replies=3),
)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The whole configuration, checked."""

    data_dir: Path
    region: str = "local"
    roles: frozenset[str] = frozenset({"api", "worker"})
    server: ServerConfig = ServerConfig()
    auth: AuthConfig = AuthConfig()
    database: DatabaseConfig = DatabaseConfig()
    stream: StreamConfig = StreamConfig()
    lease: LeaseConfig = LeaseConfig()
    log: LogConfig = LogConfig()
    models: dict[str, ModelConfig]
    tiers: dict[TierName, Tier] = msgspec.field(default_factory=lambda: {tier.name: tier for tier in DEFAULT_TIERS})
