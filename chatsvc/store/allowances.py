"""What a user has left: open replies at once, and a budget of service within a window of time.

    used = what ended runs cost, in steps of five minutes, while their step lies in the window
         + what open runs are expected to cost

Both are rows that the end of a run writes in the statement that ends it, whatever the end. So nothing has to be given
back after a crash, and replicas cannot differ: who submits holds the user's lock and reads the same rows.
"""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from chatsvc.errors import QueueFull, QuotaExceeded, TooManyReplies
from chatsvc.limits import Allowance, ServiceCost, Shortage, Tier, Usage
from chatsvc.run import RunKind
from chatsvc.store.pool import Connection, Database, Row, fetch, int4
from chatsvc.store.records import statement

_STEP: Final = timedelta(minutes=5)
_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
KEPT_DAYS: Final = 32
"""A little longer than the longest window."""

# Needs user_id, tier_name, budget, window, max_queued. A step counts from its first moment until its last is out of the
# window. Of the line no more is counted than matters.
STANDING: Final = """
    standing AS MATERIALIZED (
        SELECT
            (SELECT count(*) FROM runs
                WHERE user_id = %(user_id)s AND status IN ('queued', 'streaming') AND kind = 'reply') AS open_used,
            (SELECT coalesce(sum(charged), 0) FROM runs
                WHERE user_id = %(user_id)s AND status IN ('queued', 'streaming')) AS expected,
            spent.units, spent.oldest,
            (SELECT count(*) FROM (
                SELECT 1 FROM runs WHERE status = 'queued' AND tier = %(tier)s AND kind = 'reply' LIMIT %(max_queued)s
            ) AS line) AS waiting
        FROM (
            SELECT coalesce(sum(units), 0) AS units, min(at) AS oldest FROM usage
            WHERE user_id = %(user_id)s AND at > clock_timestamp() - %(window)s - interval '5 minutes'
        ) AS spent
    )
"""
# What ``Tier.shortage`` says, in one statement with the writing.
MAY: Final = """
    standing.open_used < %(max_open)s
    AND (%(budget)s = 0 OR standing.units + standing.expected + %(charge)s <= %(budget)s
        OR standing.units + standing.expected = 0)
    AND (%(owner)s::text IS NOT NULL OR standing.waiting < %(max_queued)s)
"""
_STANDING: Final = statement("WITH", STANDING, "SELECT * FROM standing")
_OPEN: Final = """
    SELECT id FROM runs WHERE user_id = %(user_id)s AND status IN ('queued', 'streaming') AND kind = 'reply'
    ORDER BY created_at, id
"""
_STEPS: Final = """
    SELECT at + interval '5 minutes' + %(window)s AS free_at, units FROM usage
    WHERE user_id = %(user_id)s AND at > clock_timestamp() - %(window)s - interval '5 minutes' ORDER BY at
"""
_USED: Final = """
    SELECT coalesce(sum(prompt_tokens), 0)::bigint AS prompt_tokens,
        coalesce(sum(cached_tokens), 0)::bigint AS cached_tokens,
        coalesce(sum(output_tokens), 0)::bigint AS output_tokens
    FROM (
        SELECT prompt_tokens, cached_tokens, output_tokens FROM usage
        WHERE user_id = %(user_id)s AND at > %(since)s::timestamptz - interval '5 minutes'
        UNION ALL
        SELECT prompt_tokens, cached_tokens, output_tokens FROM runs
        WHERE user_id = %(user_id)s AND status IN ('queued', 'streaming')
    ) AS parts
"""
LEDGER: Final = """
    INSERT INTO usage AS u
        (user_id, at, replies, prompt_tokens, cached_tokens, output_tokens, units, background_units)
    SELECT user_id, at, replies, prompt_tokens, cached_tokens, output_tokens,
        CASE kind WHEN 'reply' THEN units ELSE 0 END, CASE kind WHEN 'reply' THEN 0 ELSE units END
    FROM cost
    ON CONFLICT (user_id, at) DO UPDATE SET replies = u.replies + excluded.replies,
        prompt_tokens = u.prompt_tokens + excluded.prompt_tokens,
        cached_tokens = u.cached_tokens + excluded.cached_tokens,
        output_tokens = u.output_tokens + excluded.output_tokens, units = u.units + excluded.units,
        background_units = u.background_units + excluded.background_units
"""
"""Part of a statement that has what was used as ``cost``. What the service does of its own accord is noted as what it
cost and takes nothing off a budget: nobody asked for it, and it must not be what refuses the next message."""
_BILL: Final = statement(
    """
    WITH cost AS (
        SELECT id AS user_id, date_bin('5 minutes', clock_timestamp(), 'epoch') AS at,
            (%(kind)s::text = 'reply')::int AS replies, %(prompt_tokens)s::int AS prompt_tokens,
            %(cached_tokens)s::int AS cached_tokens, %(output_tokens)s::int AS output_tokens, %(kind)s::text AS kind,
            %(units)s::float8 AS units
        FROM users WHERE id = %(user_id)s
    )
    """,
    LEDGER,
)
_FORGET: Final = """
    DELETE FROM usage WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM usage WHERE at < clock_timestamp() - make_interval(days => %(days)s) LIMIT %(limit)s
    )) RETURNING 1
"""
_FORGET_AT_ONCE: Final = 5_000


class Allowances:
    """The ledger."""

    def __init__(self, database: Database, cost: ServiceCost) -> None:
        self._db = database
        self._cost = cost

    async def usage(self, user_id: str, since: datetime) -> Usage:
        """Tokens of the user's replies since then, whatever their end and whatever became of their conversations.

        Counted in steps of five minutes by the time of their end; those that run count with what they have so far.
        """
        rows = await self._db.query(_USED, {"user_id": user_id, "since": since})
        return Usage(**rows[0])

    async def allowance(self, user_id: str, tier: Tier) -> Allowance:
        """What the user has left now."""
        params = tier_params(tier) | {"user_id": user_id, "tier": tier.name}
        return allowance_of((await self._db.query(_STANDING, params))[0], tier)

    async def bill(self, user_id: str, usage: Usage, kind: RunKind = RunKind.REPLY) -> None:
        """Note what was used by a run whose rows are gone, or beside one."""
        cost = self._cost
        units = cost.of_prompt(usage.prompt_tokens, usage.cached_tokens) + cost.of_output(usage.output_tokens)
        params = {"user_id": user_id, "units": units, "kind": kind, **msgspec.structs.asdict(usage)}
        await self._db.query(_BILL, params)

    async def forget(self) -> None:
        """Remove what lies in no window any more."""
        while len(await self._db.query(_FORGET, {"days": KEPT_DAYS, "limit": _FORGET_AT_ONCE})) == _FORGET_AT_ONCE:
            pass


def tier_params(tier: Tier) -> dict[str, Any]:
    """The tier's limits by the names that the statements here use."""
    return {
        "max_open": int4(tier.max_open_replies),
        "budget": float(tier.budget),
        "window": _window(tier),
        "max_queued": int4(tier.max_queued),
    }


def allowance_of(row: Row, tier: Tier, *, charge: float = 0, opened: int = 0) -> Allowance:
    """A row of ``standing``, and what was begun since."""
    oldest = row["oldest"]
    return Allowance(
        open_limit=tier.max_open_replies,
        open_used=row["open_used"] + opened,
        budget=tier.budget,
        used=row["units"] + row["expected"] + charge,
        refills_at=oldest + _STEP + _window(tier) if oldest is not None and tier.budget else None,
    )


async def refuse(connection: Connection, params: dict[str, Any], tier: Tier) -> None:
    """Say what there is too little of, if it is that. Raises ``TooManyReplies``, ``QuotaExceeded``, ``QueueFull``."""
    [row] = await fetch(connection, _STANDING, params)
    allowance = allowance_of(row, tier)
    lacks = tier.shortage(
        open_used=row["open_used"],
        used=row["units"] + row["expected"],
        charge=params["charge"],
        waiting=row["waiting"],
        must_wait=params["owner"] is None,
    )
    if lacks is Shortage.PLACES:
        raise TooManyReplies(
            f"{row['open_used']} replies are open, and {params['max_open']} are allowed. Wait for one, or stop one.",
            allowance=allowance,
            open=[each["id"] for each in await fetch(connection, _OPEN, params)],
        )
    if lacks is Shortage.BUDGET:
        used, budget, charge = row["units"] + row["expected"], params["budget"], params["charge"]
        steps = [(each["free_at"], each["units"]) for each in await fetch(connection, _STEPS, params)]
        [now] = [each["now"] for each in await fetch(connection, "SELECT clock_timestamp() AS now")]
        at = covered_at(steps, expected=row["expected"], charge=charge, budget=budget)
        wait_s = None if at is None else max(1, math.ceil((at - now).total_seconds()))
        when = "once replies that run have ended" if wait_s is None else f"in {_spoken(wait_s)}"
        raise QuotaExceeded(
            f"This message costs about {charge:,.0f} units, and {max(0, budget - used):,.0f} of {budget:,.0f} are"
            f" left. There will be enough {when}; a shorter message may fit now.",
            retry_after=5 if wait_s is None else wait_s,
            allowance=allowance,
            limit=budget,
            used=math.ceil(used),
            left=max(0, math.floor(budget - used)),
            cost=math.ceil(charge),
            refills_at=at,
        )
    if lacks is Shortage.QUEUE:
        raise QueueFull(
            f"{params['max_queued']} replies of your tier are waiting, and no more may. Try again shortly.",
            waiting=row["waiting"],
        )


def covered_at(
    steps: list[tuple[datetime, float]], *, expected: float, charge: float, budget: float
) -> datetime | None:
    """When enough is free again, given what was used and when each part of it is; None when only open replies hold it.

    ``steps`` are in order of time.
    """
    used = expected + sum(units for _, units in steps)
    for free_at, units in steps:
        used -= units
        if used + charge <= budget or used <= expected == 0:
            return free_at
    return None


def _window(tier: Tier) -> timedelta:
    return timedelta(seconds=tier.budget_window_s)


def _spoken(seconds: float) -> str:
    """A time to wait in words, never less than it is."""
    if seconds < _MINUTE_S:
        return f"{seconds} seconds"
    if seconds < 2 * _HOUR_S:
        return f"{math.ceil(seconds / _MINUTE_S)} minutes"
    return f"{math.ceil(seconds / _HOUR_S)} hours"
