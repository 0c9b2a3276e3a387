"""Postgres, the system of record. ``Store`` is the door of this room; one method is one transaction.

    pool.py           connections, limits, errors     schema.py    the migrations
    rehearsal.py      new connections, ready for use
    records.py        what goes in and out            submit.py    starting a run: every check, then every row
    conversations.py  trees and lists                 runs.py      a run's life; its SQL in run_statements.py
    summaries.py      folds: queued and committed     views.py     a branch from its summary on
    allowances.py     what users have left            workers.py   leases
    recall.py         the index of old passages
    signals.py        news between processes

Nobody else in chatsvc writes SQL.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from chatsvc.limits import ServiceCost
from chatsvc.store.allowances import Allowances
from chatsvc.store.conversations import Conversations
from chatsvc.store.deleted import DeletedRuns
from chatsvc.store.memories import Memories
from chatsvc.store.pool import Database
from chatsvc.store.recall import NewChunk, RecallBranch, RecallDue, RecallIndex, StoredChunk, StoredPassage
from chatsvc.store.records import (
    Beat,
    ConversationPatch,
    Deleted,
    NewConversation,
    NewFold,
    NewReply,
    Page,
    Regeneration,
    SettledReply,
    Signal,
    Submission,
    Submitted,
)
from chatsvc.store.rehearsal import rehearse
from chatsvc.store.runs import Runs
from chatsvc.store.schema import Schema, look, migrate
from chatsvc.store.secrets import Secrets
from chatsvc.store.signals import Signals
from chatsvc.store.submit import Moved
from chatsvc.store.summaries import Committed, Summaries
from chatsvc.store.users import Users
from chatsvc.store.workers import Workers

__all__ = [
    "Beat",
    "Committed",
    "ConversationPatch",
    "Deleted",
    "Moved",
    "NewChunk",
    "NewConversation",
    "NewFold",
    "NewReply",
    "Page",
    "RecallBranch",
    "RecallDue",
    "RecallIndex",
    "Regeneration",
    "Schema",
    "SettledReply",
    "Signal",
    "Store",
    "StoredChunk",
    "StoredPassage",
    "Submission",
    "Submitted",
    "look",
    "migrate",
    "open_store",
]


class Store:
    """One part for each kind of thing; all but the leases share the connections of ``database``."""

    def __init__(self, database: Database, leases: Database, signals: Signals, cost: ServiceCost) -> None:
        self._database = database
        self.users = Users(database)
        self.allowances = Allowances(database, cost)
        self.conversations = Conversations(database)
        self.runs = Runs(database, cost)
        self.summaries = Summaries(database, cost)
        self.recall = RecallIndex(database)
        self.deleted_runs = DeletedRuns(database)
        self.memories = Memories(database)
        self.workers = Workers(leases)
        self.secrets = Secrets(database)
        self.signals = signals

    async def ping(self) -> None:
        """Return when Postgres answers and is not known to have no room. Raises ``StoreUnavailable``."""
        await self._database.ping()


WARM_CONNECTIONS: Final = 4
LEASE_TIMEOUT_S: Final = 2.0
"""A heartbeat that got no answer for so long is better sent again, over another connection."""


@asynccontextmanager
async def open_store(
    url: str, *, pool_size: int, timeout_s: float, wait_s: float = 30.0, cost: ServiceCost | None = None
) -> AsyncIterator[Store]:
    """Connect to a migrated database, waiting up to ``wait_s`` seconds for the server to come up.

    Every command takes about ``timeout_s`` at most, and raises ``StoreUnavailable`` when it cannot be done. Leases have
    a connection of their own beside the ``pool_size`` others: no load on those may cost a worker its runs.
    """
    database = Database(url, size=pool_size, timeout_s=timeout_s, prepare=rehearse)
    leases = Database(url, size=1, timeout_s=min(timeout_s, LEASE_TIMEOUT_S))
    try:
        await database.wait(wait_s)
        await asyncio.gather(database.warm(WARM_CONNECTIONS), leases.warm(1))
        yield Store(database, leases, Signals(url, timeout_s=timeout_s), cost or ServiceCost())
    finally:
        await leases.close()
        await database.close()
