"""Users, as the authenticator vouches for them: nobody signs up here."""

from __future__ import annotations

from datetime import datetime
from typing import Final

import msgspec

from chatsvc.limits import Principal, Usage
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
_USED: Final = """
    SELECT coalesce(sum(prompt_tokens), 0)::bigint AS prompt_tokens,
        coalesce(sum(cached_tokens), 0)::bigint AS cached_tokens,
        coalesce(sum(output_tokens), 0)::bigint AS output_tokens
    FROM runs WHERE user_id = %(user_id)s AND created_at >= %(since)s
"""


class Users:
    """The table of users."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def usage(self, user_id: str, since: datetime) -> Usage:
        """Tokens of the user's runs that were made since then, whatever their end."""
        rows = await self._db.query(_USED, {"user_id": user_id, "since": since})
        return Usage(**rows[0])

    async def touch(self, principal: Principal) -> None:
        """Note that the user was here, and in which tier."""
        await self._db.query(_SEEN, msgspec.structs.asdict(principal))
