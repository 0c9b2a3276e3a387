"""From ``CHATSVC_REDIS_URL`` to a stream log, and to where other keys of one hash tag are."""

from __future__ import annotations

from functools import partial
from typing import Final

from chatsvc.redis_url import RedisKind, RedisUrl
from chatsvc.streamlog.base import StreamLog
from chatsvc.streamlog.redis import PARTITIONS, RedisLog
from chatsvc.streamlog.redis_cluster import ClusterLog, SlotMap
from chatsvc.streamlog.redis_sentinel import Sentinels
from chatsvc.streamlog.redis_wire import Address, Locate

HASH_TAG: Final = "{p00}"
"""The tag of keys that ``locate_keys`` is about: in a Cluster they all are where the first partition of the log is."""


def create_log(url: str, *, timeout_s: float, partitions: int = PARTITIONS) -> StreamLog:
    """A log that connects when it is first used. Raises ``ValueError`` for a URL that ``redis_url`` does not take."""
    parsed = RedisUrl.parse(url)
    if parsed.kind is RedisKind.CLUSTER:
        return ClusterLog(_servers(parsed), timeout_s=timeout_s, partitions=partitions)
    return RedisLog(_locate(parsed, timeout_s), timeout_s=timeout_s, partitions=partitions)


def locate_keys(url: str, *, timeout_s: float) -> Locate:
    """Where keys with ``HASH_TAG`` are. Raises ``ValueError`` for a URL that ``redis_url`` does not take."""
    parsed = RedisUrl.parse(url)
    if parsed.kind is RedisKind.CLUSTER:
        return partial(SlotMap(_servers(parsed), partitions=1, patience_s=timeout_s / 5).locate, 0)
    return _locate(parsed, timeout_s)


def _servers(parsed: RedisUrl) -> list[Address]:
    return [Address.from_url(server) for server in parsed.servers]


def _locate(parsed: RedisUrl, timeout_s: float) -> Locate:
    server = _servers(parsed)[0]
    if parsed.kind is RedisKind.SERVER:
        return server.locate
    sentinels = [Address.from_url(sentinel) for sentinel in parsed.sentinels]
    return Sentinels(sentinels, parsed.master, server, patience_s=timeout_s / (len(sentinels) + 1)).locate
