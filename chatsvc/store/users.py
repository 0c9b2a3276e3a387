"""Users, as the authenticator vouches for them: nobody signs up here."""

from __future__ import annotations

from typing import Final

import msgspec

from chatsvc.limits import Principal
from chatsvc.store.pool import Database

TOUCH: Final = """
    INSERT INTO users (id, tier) VALUES (%(user_id)s, %(tier)s)
    ON CONFLICT (id) DO UPDATE SET tier = excluded.tier WHERE users.tier <> excluded.tier
"""
"""Make the user's row, or bring its tier up to date. Either way the row is locked until the transaction ends."""
_SEEN: Final = """
    INSERT INTO users (id, tier) VALUES (%(user_id)s, %(tier)s)
    ON CONFLICT (id) DO UPDATE SET tier = excluded.tier, seen_at = now()
"""


class Users:
    """The table of users."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def touch(self, principal: Principal) -> None:
        """Note that the user was here, and in which tier."""
        await self._db.query(_SEEN, msgspec.structs.asdict(principal))
