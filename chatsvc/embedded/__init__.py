"""Postgres and Valkey of our own, for when no URL is given, and the lock on the directory they live in."""

from chatsvc.embedded.datadir import lock_data_dir
from chatsvc.embedded.postgres import embedded_postgres
from chatsvc.embedded.process import Progress
from chatsvc.embedded.valkey import embedded_redis

__all__ = ["Progress", "embedded_postgres", "embedded_redis", "lock_data_dir"]
