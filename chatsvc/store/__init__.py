"""Postgres, the system of record. ``Store`` is the door of this room; one method is one transaction.

    pool.py           connections, limits, errors     schema.py    the migrations
    records.py        what goes in and out            submit.py    starting a run: every check, then every row
    conversations.py  trees and lists                 runs.py      a run's life; its SQL in run_statements.py
    workers.py        leases                          signals.py   news between processes

Nobody else in chatsvc writes SQL.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from chatsvc.store.conversations import Conversations
from chatsvc.store.pool import Database
from chatsvc.store.records import (
    Beat,
    ConversationPatch,
    Deleted,
    NewConversation,
    Page,
    Regeneration,
    SettledReply,
    Signal,
    Submission,
    Submitted,
)
from chatsvc.store.runs import Runs
from chatsvc.store.schema import migrate
from chatsvc.store.secrets import Secrets
from chatsvc.store.signals import Signals
from chatsvc.store.users import Users
from chatsvc.store.workers import Workers

__all__ = [
    "Beat",
    "ConversationPatch",
    "Deleted",
    "NewConversation",
    "Page",
    "Regeneration",
    "SettledReply",
    "Signal",
    "Store",
    "Submission",
    "Submitted",
    "migrate",
    "open_store",
]


class Store:
    """One part for each kind of thing; all share the connections of ``database``."""

    def __init__(self, database: Database, signals: Signals) -> None:
        self._database = database
        self.users = Users(database)
        self.conversations = Conversations(database)
        self.runs = Runs(database)
        self.workers = Workers(database)
        self.secrets = Secrets(database)
        self.signals = signals

    async def ping(self) -> None:
        """Return when Postgres answers. Raises ``StoreUnavailable``."""
        await self._database.query("SELECT 1")


@asynccontextmanager
async def open_store(url: str, *, pool_size: int, timeout_s: float, wait_s: float = 30.0) -> AsyncIterator[Store]:
    """Connect to a migrated database, waiting up to ``wait_s`` seconds for the server to come up.

    Every command takes about ``timeout_s`` at most, and raises ``StoreUnavailable`` when it cannot be done.
    """
    database = Database(url, size=pool_size, timeout_s=timeout_s)
    try:
        await database.wait(wait_s)
        yield Store(database, Signals(url, timeout_s=timeout_s))
    finally:
        await database.close()
