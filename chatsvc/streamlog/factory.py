"""From ``CHATSVC_REDIS_URL`` to a stream log."""

from __future__ import annotations

from chatsvc.redis_url import RedisKind, RedisUrl
from chatsvc.streamlog.base import StreamLog
from chatsvc.streamlog.redis import PARTITIONS, RedisLog
from chatsvc.streamlog.redis_cluster import ClusterLog
from chatsvc.streamlog.redis_sentinel import Sentinels
from chatsvc.streamlog.redis_wire import Address


def create_log(url: str, *, timeout_s: float, partitions: int = PARTITIONS) -> StreamLog:
    """A log that connects when it is first used. Raises ``ValueError`` for a URL that ``redis_url`` does not take."""
    parsed = RedisUrl.parse(url)
    servers = [Address.from_url(server) for server in parsed.servers]
    if parsed.kind is RedisKind.CLUSTER:
        return ClusterLog(servers, timeout_s=timeout_s, partitions=partitions)
    if parsed.kind is RedisKind.SENTINEL:
        sentinels = [Address.from_url(sentinel) for sentinel in parsed.sentinels]
        found = Sentinels(sentinels, parsed.master, servers[0], patience_s=timeout_s / (len(sentinels) + 1))
        return RedisLog(found.locate, timeout_s=timeout_s, partitions=partitions)
    return RedisLog(servers[0].locate, timeout_s=timeout_s, partitions=partitions)
