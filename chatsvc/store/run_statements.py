"""The SQL of ``runs.py`` and ``workers.py``. Each constant is one statement and one transaction.

Those that move a run read alike: the first part finds and changes the run, and what follows depends on its rows, so
that it is done for the winner of a race only. Locks are had in the order run, message, conversation, usage.
"""

from __future__ import annotations

from typing import Any, Final

from psycopg.types.numeric import Int8

from chatsvc.events import clean_text
from chatsvc.run import Outcome
from chatsvc.store.allowances import LEDGER
from chatsvc.store.pool import int4
from chatsvc.store.records import statement
from chatsvc.store.signals import NOTIFY_QUEUED

GET: Final = statement("""
    SELECT {run:r} FROM runs r WHERE r.id = %(id)s AND r.user_id = %(user_id)s AND r.kind = 'reply'
""")

FIND: Final = statement("SELECT {run:r} FROM runs r WHERE r.id = %(id)s AND r.kind = 'reply'")

REPLY: Final = statement("""
    SELECT {run:r}, coalesce(m.content, '') AS content FROM runs r LEFT JOIN messages m ON m.id = r.message_id
    WHERE r.id = %(id)s
""")

HELD_S: Final = """
    SELECT extract(epoch FROM clock_timestamp() - coalesce(started_at, created_at))::float8 AS held_s
    FROM runs WHERE id = %(id)s
"""

OPEN: Final = statement("""
    SELECT {run:r} FROM runs r
    WHERE r.user_id = %(user_id)s AND r.status IN ('queued', 'streaming') AND r.kind = 'reply'
    ORDER BY r.created_at, r.id
""")

UNSERVED: Final = statement("""
    SELECT {run:r} FROM runs r
    WHERE r.status = 'queued' AND r.created_at < clock_timestamp() - make_interval(secs => %(patience_s)s)
        AND EXISTS (SELECT 1 FROM workers w WHERE w.expires_at > clock_timestamp() AND w.capacity > 0)
        AND NOT EXISTS (
            SELECT 1 FROM workers w WHERE w.expires_at > clock_timestamp() AND 'model:' || r.model = ANY(w.roles)
        )
    ORDER BY r.created_at, r.id LIMIT 100
""")

CONTEXT: Final = "SELECT context FROM runs WHERE id = %(id)s AND user_id = %(user_id)s AND kind = 'reply'"

NOT_ENDED: Final = "SELECT id FROM runs WHERE id = ANY(%(ids)s) AND status IN ('queued', 'streaming')"

QUEUED: Final = statement("""
    SELECT {run:r}, greatest(0, extract(epoch FROM now() - r.created_at))::float8 AS age_s
    FROM runs r WHERE r.status = 'queued' ORDER BY r.created_at, r.id LIMIT %(limit)s
""")

STILL_QUEUED: Final = "SELECT id FROM runs WHERE id = ANY(%(ids)s) AND status = 'queued'"

POSITIONS: Final = """
    SELECT id, row_number() OVER (PARTITION BY model ORDER BY created_at, id) AS position
    FROM runs WHERE status = 'queued' AND kind = 'reply'
"""

HOLDS: Final = "SELECT 1 FROM runs WHERE id = %(id)s AND attempt = %(attempt)s AND status = 'streaming'"

# Rows are locked in the order of their ids, so that two batches that overlap wait for each other and never in a ring.
CLAIM: Final = statement("""
    WITH due AS (
        SELECT id FROM runs WHERE id = ANY(%(ids)s) AND status = 'queued' AND NOT stop_requested
        ORDER BY id FOR UPDATE
    ), claimed AS (
        UPDATE runs r
        SET status = 'streaming', attempt = r.attempt + 1, owner = %(owner)s, started_at = clock_timestamp()
        FROM due WHERE r.id = due.id
        RETURNING {run:r}
    ), message AS (
        UPDATE messages SET status = 'streaming' FROM claimed WHERE messages.id = claimed.message_id
    )
    SELECT * FROM claimed
""")

CHECKPOINT: Final = """
    WITH batch AS (
        SELECT * FROM unnest(%(ids)s::text[], %(attempts)s::int[], %(seqs)s::bigint[], %(texts)s::text[],
            %(prompts)s::int[], %(cached)s::int[], %(outputs)s::int[])
            AS b (id, attempt, seq, content, prompt_tokens, cached_tokens, output_tokens)
    ), held AS (
        SELECT r.id FROM runs r JOIN batch b ON b.id = r.id AND b.attempt = r.attempt
        WHERE r.status = 'streaming' ORDER BY r.id FOR UPDATE OF r
    ), saved AS (
        UPDATE runs r SET last_seq = b.seq, has_text = b.content <> '', prompt_tokens = b.prompt_tokens,
            cached_tokens = b.cached_tokens, output_tokens = b.output_tokens
        FROM held JOIN batch b USING (id) WHERE r.id = held.id
        RETURNING r.id, r.message_id, b.content
    ), message AS (
        UPDATE messages SET content = saved.content FROM saved WHERE messages.id = saved.message_id
    )
    SELECT id FROM saved
"""

_ENDED: Final = statement(
    """
    RETURNING {run:r}
    ), message AS (
        UPDATE messages SET content = %(text)s, status = ended.status, finish_reason = ended.finish_reason,
            error_code = ended.error_code,
            -- Text that was gone on with was counted with the message it stands in.
            tokens = ended.output_tokens + CASE WHEN ended.continues_message_id IS NULL THEN 0
                ELSE (SELECT k.tokens FROM messages k WHERE k.id = ended.continues_message_id) END
        FROM ended WHERE messages.id = ended.message_id
    ), conversation AS (
        UPDATE conversations SET updated_at = greatest(updated_at, ended.ended_at)
        FROM ended WHERE conversations.id = ended.conversation_id AND ended.kind = 'reply'
        RETURNING 1
    ), cost AS (
        -- Locks are had in the order run, conversation, ledger: asked for how many it changed, that part is done first.
        SELECT user_id, date_bin('5 minutes', ended_at, 'epoch') AS at, (kind = 'reply')::int AS replies,
            prompt_tokens, cached_tokens, output_tokens, kind,
            %(cost_prompt)s * greatest(prompt_tokens - cached_tokens, 0) + %(cost_cached)s * cached_tokens
                + %(cost_output)s * output_tokens AS units
        FROM ended WHERE (SELECT count(*) FROM conversation) >= 0
    ), ledger AS (
    """,
    LEDGER,
    ")",
)
_END: Final = """
    WITH ended AS (
        UPDATE runs r SET status = %(status)s, last_seq = %(last_seq)s, finish_reason = %(finish_reason)s,
            error_code = %(error_code)s, error_message = %(error_message)s, prompt_tokens = %(prompt_tokens)s,
            cached_tokens = %(cached_tokens)s, output_tokens = %(output_tokens)s, ended_at = clock_timestamp()
"""

# The second EXISTS: this very end was written before, and the answer to that was lost.
FINISH: Final = statement(
    _END,
    ", context = coalesce(%(context)s::jsonb, r.context)",
    "WHERE r.id = %(id)s AND r.attempt = %(attempt)s AND r.status = 'streaming'",
    _ENDED,
    """
    SELECT EXISTS (SELECT 1 FROM ended) OR EXISTS (
        SELECT 1 FROM runs WHERE id = %(id)s AND attempt = %(attempt)s AND status = %(status)s
            AND last_seq = %(last_seq)s AND ended_at IS NOT NULL
    ) AS won
    """,
)

FINISH_QUEUED: Final = statement(
    _END,
    ", attempt = r.attempt + 1 WHERE r.id = %(id)s AND r.status = 'queued'",
    _ENDED,
    "SELECT * FROM ended",
)

REQUEUE: Final = statement(
    """
    WITH run AS (
        UPDATE runs r SET status = 'queued', owner = NULL, started_at = NULL,
            last_seq = greatest(r.last_seq, %(last_seq)s), losses = r.losses + %(lost)s::boolean::int
        WHERE r.id = %(id)s AND r.attempt = %(attempt)s AND r.status = 'streaming' AND NOT r.stop_requested
            AND NOT r.has_text
        RETURNING {run:r}
    ), message AS (
        UPDATE messages SET status = 'queued' FROM run WHERE messages.id = run.message_id
    ), told AS (
        SELECT
    """,
    NOTIFY_QUEUED,
    """
        FROM run
    )
    SELECT (SELECT count(*) FROM told) > 0 OR EXISTS (
        SELECT 1 FROM runs WHERE id = %(id)s AND attempt = %(attempt)s AND status = 'queued'
    ) AS won
    """,
)

REQUEST_STOP: Final = statement("""
    WITH asked AS (
        UPDATE runs r SET
            stop_requested = true,
            status = CASE r.status WHEN 'queued' THEN 'stopped' ELSE r.status END,
            attempt = CASE r.status WHEN 'queued' THEN r.attempt + 1 ELSE r.attempt END,
            -- Text that was to be gone on with is shown before the end, as one event.
            last_seq = CASE r.status WHEN 'queued' THEN r.last_seq + 1 + (
                SELECT (m.content <> '')::int FROM messages m WHERE m.id = r.message_id
            ) ELSE r.last_seq END,
            finish_reason = CASE r.status WHEN 'queued' THEN 'stopped' ELSE r.finish_reason END,
            ended_at = CASE r.status WHEN 'queued' THEN clock_timestamp() ELSE r.ended_at END
        WHERE r.id = %(id)s AND r.user_id = %(user_id)s AND r.status IN ('queued', 'streaming') AND r.kind = 'reply'
        RETURNING {run:r}
    ), message AS (
        UPDATE messages SET status = 'stopped', finish_reason = 'stopped',
            tokens = CASE WHEN asked.continues_message_id IS NULL THEN 0
                ELSE (SELECT k.tokens FROM messages k WHERE k.id = asked.continues_message_id) END
        FROM asked WHERE messages.id = asked.message_id AND asked.status = 'stopped'
    ), conversation AS (
        UPDATE conversations SET updated_at = greatest(updated_at, asked.ended_at)
        FROM asked WHERE conversations.id = asked.conversation_id AND asked.status = 'stopped'
    )
    SELECT asked.*, pg_notify('chatsvc',
        json_build_object('kind', 'stop', 'response_id', asked.id, 'model', asked.model)::text)
    FROM asked
""")

HEARTBEAT: Final = """
    WITH before AS (SELECT expires_at FROM workers WHERE id = %(id)s)
    INSERT INTO workers (id, roles, capacity, expires_at)
    VALUES (%(id)s, %(roles)s, %(capacity)s, clock_timestamp() + make_interval(secs => %(ttl_s)s))
    ON CONFLICT (id) DO UPDATE
    SET roles = excluded.roles, capacity = excluded.capacity, expires_at = excluded.expires_at
    RETURNING extract(epoch FROM clock_timestamp() - (SELECT expires_at FROM before))::float8 + %(ttl_s)s AS gap_s
"""

HELD: Final = "SELECT id, attempt, stop_requested FROM runs WHERE owner = %(id)s AND status = 'streaming' ORDER BY id"

OTHERS: Final = """
    SELECT 1 FROM workers WHERE id <> %(id)s AND %(role)s = ANY(roles) AND expires_at > clock_timestamp() LIMIT 1
"""

SERVICE_ID: Final = """
    SELECT (SELECT system_identifier FROM pg_control_system()) || '/' || oid || '/' || datname AS name
    FROM pg_database WHERE datname = current_database()
"""

LEAVE: Final = "DELETE FROM workers WHERE id = %(id)s"

FORGET_WORKERS: Final = """
    DELETE FROM workers WHERE id IN (
        SELECT id FROM workers WHERE expires_at < clock_timestamp() - interval '1 hour' FOR UPDATE SKIP LOCKED
    )
"""

# Who judges has a lease of his own, by the same clock: one who slept since his last beat judges nobody.
# A worker that is gone is no row, and a lock cannot be had on no row: while this waits, another may give the run a new
# owner, and the join would not be made anew. The attempt that was seen tells.
TAKE_OVER: Final = statement("""
    WITH orphan AS MATERIALIZED (
        SELECT r.id, r.attempt FROM runs r LEFT JOIN workers w ON w.id = r.owner AND w.expires_at > clock_timestamp()
        WHERE r.status = 'streaming' AND w.id IS NULL
            AND EXISTS (SELECT 1 FROM workers me WHERE me.id = %(id)s AND me.expires_at > clock_timestamp())
    ), lost AS (
        SELECT r.id FROM runs r JOIN orphan o ON o.id = r.id AND o.attempt = r.attempt
        WHERE r.status = 'streaming' ORDER BY r.id LIMIT %(limit)s FOR UPDATE OF r SKIP LOCKED
    )
    UPDATE runs r SET owner = %(id)s, attempt = r.attempt + 1 FROM lost WHERE r.id = lost.id
    RETURNING {run:r}
""")


def end_params(run_id: str, outcome: Outcome) -> dict[str, Any]:
    """How a run ended, as ``FINISH`` and ``FINISH_QUEUED`` take it; what tokens cost comes beside it."""
    return {
        "id": run_id,
        "status": outcome.status,
        "text": clean_text(outcome.text),
        "last_seq": Int8(outcome.last_seq),
        "finish_reason": outcome.finish_reason,
        "error_code": outcome.error_code,
        "error_message": None if outcome.error_message is None else clean_text(outcome.error_message),
        "prompt_tokens": int4(outcome.usage.prompt_tokens),
        "cached_tokens": int4(outcome.usage.cached_tokens),
        "output_tokens": int4(outcome.usage.output_tokens),
    }
