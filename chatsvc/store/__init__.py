"""Postgres, the system of record."""

from chatsvc.store.migrate import migrate

__all__ = ["migrate"]
