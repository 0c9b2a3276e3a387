"""Configuration: one TOML file and environment variables become frozen structs; all errors are reported at once.

The structs here are the documentation of every key: name, meaning, unit, range, default; ``docs/configuration.md`` is
made from them. ``config_load`` fills them (the environment wins over the file), ``config_rules`` holds what no single
key can say, ``config_show`` prints them.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from chatsvc.limits import ServiceCost, Tier, TierName

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class AuthMode(StrEnum):
    """Who vouches for a caller."""

    NONE = "none"
    PROXY = "proxy"


class StreamConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[stream]``: how replies are written to and read from the stream log."""

    batch_ms: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 50
    """Longest time a token waits before it is appended, in milliseconds."""
    batch_tokens: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 16
    """As many tokens are appended without waiting."""
    heartbeat_s: Seconds = 15.0
    """A ``: ping`` line on a stream that was silent for so many seconds."""
    log_ttl_s: Seconds = 600.0
    """A log lives this many seconds after its reply has ended; then the stored message is served."""
    buffer_events: Count = 1024
    """Events a slow client may lag behind before it is cut (it resumes by its cursor)."""
    token_ttl_s: Seconds = 3600.0
    """How many seconds the token in a ``stream_url`` is good."""


class LeaseConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[lease]``: how fast a dead worker is noticed."""

    renew_s: Seconds = 2.0
    """A worker says so often, in seconds, that it is alive."""
    ttl_s: Seconds = 6.0
    """A worker that was silent for so many seconds has lost its replies. At least twice ``renew_s``."""
    checkpoint_s: Seconds = 10.0
    """The text of a running reply is saved every so many seconds."""


class AuthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[auth]``: who vouches for a caller. See "Behind a proxy" in the README."""

    mode: AuthMode = AuthMode.NONE
    """``none``: everybody is the one local user. ``proxy``: a reverse proxy names the user in a header."""
    user_header: str = "X-Forwarded-User"
    """With ``mode = "proxy"``: the header that names the user."""
    tier_header: str = "X-Forwarded-Tier"
    """With ``mode = "proxy"``: the header that names the user's tier; a request without it is served as ``free``."""
    trusted_proxies: tuple[str, ...] = ("127.0.0.0/8", "::1/128")
    """Networks whose TCP connections may carry the headers above."""
    allow_public_without_auth: bool = False
    """With ``mode = "none"``: bind an address other than loopback all the same."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[server]``: the socket and its limits."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8080
    """TCP port to listen on; 0 takes any free one."""
    base_path: str = "/"
    """Path under which a reverse proxy serves this; starts and ends with a slash."""
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1024)] = 1_048_576
    """Largest request body, in bytes."""
    max_content_chars: Count = 200_000
    """Longest text of one message, in characters."""
    grace_s: Annotated[float, msgspec.Meta(ge=0)] = 60.0
    """After SIGTERM running replies have so many seconds to finish."""
    leave_s: Annotated[float, msgspec.Meta(ge=0)] = 20.0
    """After SIGTERM readers of replies that run in other processes leave over so many seconds; 0: all at the end."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[models.<name>]``: a model served under that name."""

    engine: str
    """An engine URL: ``vllm:…``, ``transformers:…``, ``openai:…``, ``scripted:…`` or ``auto``."""
    slots: Count | None = None
    """Replies that run at the same time; not set: what the engine says."""
    window: Count | None = None
    """Context window in tokens; not set: the model's own."""
    default: bool = False
    """The model of a conversation that names none. With one model only it is that one."""
    degrade_to: str = ""
    """Name of the smaller model that answers instead when there is too little of this one; empty: none does."""


class DegradationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[degradation]``: what is given up when there is too little. See docs/scheduling.md."""

    enabled: bool = True
    """``false``: nothing ever is. With ``[auth] mode = "none"`` there is one user, and nothing is given up either."""
    interval_s: Annotated[float, msgspec.Meta(ge=0.1, le=3600)] = 10.0
    """Runs must have waited too long for so many seconds without a break before the next thing is given up."""
    recover_s: Annotated[float, msgspec.Meta(ge=0.1, le=86_400)] = 60.0
    """Waits must have been well below their targets for so many seconds before one thing is given back."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 1024
    """Where replies are kept short: their longest, in tokens."""
    history_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    """Where prompts are kept short: the share of the budget for a conversation's history that is left."""
    queue_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.25
    """Where queues are kept short: the share of ``max_queued`` that is left."""


class DatabaseConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[database]``: where Postgres and Redis are."""

    url: str = ""
    """``postgresql://…`` of an outside Postgres; empty: an embedded one in the data directory."""
    redis_url: str = ""
    """``redis://…``, ``rediss://…`` or ``unix://…`` of an outside Redis or Valkey; empty: an embedded Valkey.

    ``redis+sentinel://[user:password@]host:26379,host:26379/<master's name>[/<db>]`` finds the master through Sentinels
    (``?sentinel_username=…&sentinel_password=…`` if these ask for their own), ``redis+cluster://host:6379,host:6379`` a
    Cluster through some of its nodes; ``rediss+sentinel://`` and ``rediss+cluster://`` are the same with TLS.
    """
    pool_size: Count = 10
    """Most pooled connections to Postgres of one process. Two more are for its lease and for notifications."""
    timeout_s: Seconds = 5.0
    """A command on Postgres or Redis that takes longer, in seconds, is given up."""


class RegionsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[regions]``: what all regions of one service share. See docs/regions.md."""

    secret: str = ""
    """What regions prove themselves to each other by: the same text in each, at least 32 characters."""


class PeerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[regions.<name>]``: another region, which is asked for the replies that run there."""

    url: str = ""
    """``http://…`` or ``https://…``, base path included: that region's load balancer, or its only replica."""
    urls: tuple[str, ...] = ()
    """Or the addresses of several replicas, tried in turn; then without ``url``."""

    @property
    def replicas(self) -> tuple[str, ...]:
        """The addresses, in whichever way they were given."""
        return self.urls or ((self.url,) if self.url else ())


class LogConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[log]``: what is written to standard error."""

    format: Literal["", "console", "json"] = ""
    """``console`` or ``json``; empty: console on a terminal, else json."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important lines that are written."""


DEFAULT_TIERS = (
    Tier(
        name=TierName.FREE,
        weight=1,
        max_open_replies=3,
        abandon_after_s=120,
        budget=1_000_000,
        max_queued=200,
        queue_target_s=10,
        deadline_s=60,
    ),
    Tier(
        name=TierName.PLUS,
        weight=4,
        max_open_replies=3,
        budget=10_000_000,
        max_queued=500,
        queue_target_s=5,
        deadline_s=120,
    ),
    Tier(name=TierName.PRO, weight=16, max_open_replies=3, queue_target_s=3, deadline_s=300),
)

UNNAMED_MODEL = "default"
"""Key in ``Config.models`` of the one model that ``CHATSVC_ENGINE`` gave; ``app`` finds the name to serve it under."""


class ContextConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[context]``: conversations that outgrow the model's window. See docs/context.md."""

    fold_at: Annotated[float, msgspec.Meta(gt=0, le=0.9)] = 0.6
    """When what is not folded yet passes this share of the window, the oldest turns are folded into a summary."""
    fold_step_tokens: Annotated[int, msgspec.Meta(ge=256)] = 20_000
    """Most tokens that are folded, or left out of a prompt, in one step; at most a third of the window."""
    summary_tokens: Annotated[int, msgspec.Meta(ge=64)] = 1500
    """Longest summary, in tokens; at most an eighth of the window."""
    fold_rest_s: Annotated[float, msgspec.Meta(ge=0)] = 600.0
    """When a summary could not be made, the same turns are not tried again for so many seconds. Where its drafts were
    refused, that is a sixteenth of it after the first time, a quarter after the second."""
    warm: bool = True
    """Whether an engine that has nothing else to do reads what the next prompt begins with, where that is new to it:
    after a reply for which old turns were recalled, a fold, or a change of a summary, a pin or the system prompt."""
    recall_tokens: Annotated[int, msgspec.Meta(ge=0)] = 1000
    """Most tokens of old turns that are quoted for a new question; 0: none."""
    recall_turns: Annotated[int, msgspec.Meta(ge=1, le=200)] = 32
    """Most passages that are quoted for a new question, however short they are."""
    embedder: str = "auto"
    """What tells how close old turns are to a question in meaning. ``minilm``: the packaged all-MiniLM-L6-v2;
    ``transformers:<model>`` or ``vllm:<model>``: an embedding model, by name or directory; ``none``: words alone
    decide; ``auto``: MiniLM where it is installed, else none."""
    memory_tokens: Annotated[int, msgspec.Meta(ge=0)] = 1000
    """Most tokens of a user's memories in a prompt, at most an eighth of the window; 0: none are shown."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The whole configuration, checked."""

    data_dir: Path
    """Where everything embedded keeps its files. Default: the user's data directory; ``/data`` in the image."""
    region: str = "local"
    """Name of this region; it becomes part of every response id. 1–32 of ``a-z``, ``0-9`` and ``-``."""
    roles: frozenset[str] = frozenset({"api", "worker"})
    """What this process does: ``api`` answers HTTP requests, ``worker`` runs models."""
    server: ServerConfig = ServerConfig()
    auth: AuthConfig = AuthConfig()
    database: DatabaseConfig = DatabaseConfig()
    stream: StreamConfig = StreamConfig()
    lease: LeaseConfig = LeaseConfig()
    log: LogConfig = LogConfig()
    service: ServiceCost = ServiceCost()
    degradation: DegradationConfig = DegradationConfig()
    regions: RegionsConfig = RegionsConfig()
    peers: dict[str, PeerConfig] = {}
    """The other regions by name; in the file these are the tables ``[regions.<name>]``."""
    models: dict[str, ModelConfig]
    tiers: dict[TierName, Tier] = msgspec.field(default_factory=lambda: {tier.name: tier for tier in DEFAULT_TIERS})
    context: ContextConfig = ContextConfig()

    @property
    def recalls(self) -> bool:
        """Whether this process quotes old turns, and so has use for an embedder."""
        return "worker" in self.roles and self.context.recall_tokens > 0
