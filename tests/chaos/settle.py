"""After the faults: what the store, the log and the API say, read once everything has come to rest."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import psycopg
import redis
from psycopg.rows import dict_row
from reader import events_of

from chaos.device import Screen
from chaos.history import Connection, Evidence, History, LogEntry, Reading, Reply, now, wall_ahead
from chaos.sayings import say_all
from chaos.servers import Servers

SETTLE_S = 60.0
CLOCKS_AGREE_S = 0.01
AT_ONCE = 24

# What no row may be like, whatever happened to it.
INVARIANTS = {
    "a run and its message differ": """
        SELECT r.id, r.status, m.status AS of_message FROM runs r JOIN messages m ON m.id = r.message_id
        WHERE (r.status, r.finish_reason, r.error_code) IS DISTINCT FROM (m.status, m.finish_reason, m.error_code)
           OR m.response_id IS DISTINCT FROM r.id OR m.parent_id IS DISTINCT FROM r.user_message_id
           OR m.conversation_id <> r.conversation_id OR m.user_id <> r.user_id""",
    "an answer has not exactly one run": """
        SELECT m.id FROM messages m LEFT JOIN runs r ON r.message_id = m.id WHERE m.role = 'assistant'
        GROUP BY m.id HAVING count(r.id) <> 1""",
    "a message stands below one of its own role": """
        SELECT m.id FROM messages m JOIN messages p ON p.id = m.parent_id
        WHERE m.role = p.role OR m.created_at <= p.created_at""",
    "a conversation with messages has no head": """
        SELECT c.id FROM conversations c
        WHERE c.head_message_id IS NULL AND EXISTS (SELECT 1 FROM messages m WHERE m.conversation_id = c.id)""",
    "a run ended before it began": "SELECT id FROM runs WHERE ended_at < created_at OR ended_at < started_at",
    "an ended run has a strange end": """
        SELECT id, status, finish_reason, error_code FROM runs
        WHERE (status = 'failed') <> (error_code IS NOT NULL AND error_code <> 'abandoned')
           OR (error_code = 'abandoned' AND status <> 'stopped')
           OR (status = 'stopped') <> (coalesce(finish_reason, '') = 'stopped')
           OR (status = 'complete') <> (coalesce(finish_reason, '') IN ('stop', 'length', 'tool_calls'))
           OR (status IN ('complete', 'stopped', 'failed') AND last_seq < 1 AND kind = 'reply')
           OR (status IN ('complete', 'stopped', 'failed')) <> (ended_at IS NOT NULL)""",
    "a fold is complete and left no summary": """
        SELECT r.id FROM runs r WHERE r.kind = 'fold' AND r.status = 'complete' AND NOT EXISTS (
            SELECT 1 FROM summaries s
            WHERE s.conversation_id = r.conversation_id AND s.through_message_id = r.fold_through_id)""",
    "a summary goes on from one of another branch": """
        WITH RECURSIVE up (summary, previous, message) AS (
            SELECT s.id, s.previous_id, s.through_message_id FROM summaries s WHERE s.previous_id IS NOT NULL
            UNION ALL
            SELECT up.summary, up.previous, m.parent_id FROM up JOIN messages m ON m.id = up.message
            WHERE m.parent_id IS NOT NULL
        )
        SELECT s.id FROM summaries s WHERE s.previous_id IS NOT NULL AND NOT EXISTS (
            SELECT 1 FROM up JOIN summaries p ON p.id = up.previous AND p.through_message_id = up.message
            WHERE up.summary = s.id)""",
}


async def settle(servers: Servers, history: History) -> None:
    """Wait until no run is open, for a bounded time, then read everything into the history's evidence."""
    began = now()
    while now() - began < SETTLE_S and await asyncio.to_thread(_open_runs, servers.database.url):
        await asyncio.sleep(0.25)
    history.settled_after_s = now() - began
    # Whoever wrote the last end may still be giving its log a time to live, and a presence note its mark.
    await asyncio.sleep(3)
    evidence = history.evidence
    await asyncio.to_thread(_read_rows, servers.database.url, evidence, history.surprises)
    _note_unknown(history)
    await _ask_api(servers, history)
    evidence.logs = await asyncio.to_thread(read_logs, servers.log.server.url)
    evidence.sayings = await say_all(history)


def _open_runs(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT count(*) FROM runs WHERE status IN ('queued', 'streaming')").fetchone()
        assert row is not None
        return int(row[0])


def _read_rows(url: str, evidence: Evidence, surprises: list[str]) -> None:
    with psycopg.connect(url, row_factory=dict_row) as connection:

        def by_id(query: str) -> dict[str, dict[str, Any]]:
            return {row["id"]: row for row in connection.execute(query).fetchall()}

        evidence.runs = by_id("SELECT r.*, m.content FROM runs r JOIN messages m ON m.id = r.message_id")
        evidence.messages = by_id("SELECT * FROM messages")
        evidence.conversations = by_id("SELECT * FROM conversations")
        before = now()
        [clock] = connection.execute("SELECT extract(epoch FROM clock_timestamp())::float8 AS at").fetchall()
        # How long replies took to be marked is read from the database's dates.
        if not before - CLOCKS_AGREE_S <= clock["at"] - wall_ahead() <= now() + CLOCKS_AGREE_S:
            surprises.append(f"the database's clock says {clock['at']}, this machine's {now() + wall_ahead()}")
        for what, query in INVARIANTS.items():
            rows = connection.execute(query).fetchall()
            surprises += [f"row: {what}: {row}" for row in rows[:10]]


def _note_unknown(history: History) -> None:
    """Runs that no POST has brought to light: a request that the client knows nothing of, or made twice."""
    known = {(reply.user_id, reply.client_msg_id) for reply in history.replies.values()}
    for run in history.evidence.runs.values():
        if run["id"] not in history.replies:
            asked = "again" if (run["user_id"], run["client_msg_id"]) in known else "by nobody"
            history.surprises.append(f"run {run['id']} was asked for {asked}")


async def _ask_api(servers: Servers, history: History) -> None:
    """Status and a fresh replay of every reply, straight from the replicas in turn."""
    places = asyncio.Semaphore(AT_ONCE)
    limits = httpx.Limits(max_connections=2 * AT_ONCE)
    async with httpx.AsyncClient(timeout=30, limits=limits) as http:

        async def ask(number: int, reply: Reply) -> None:
            async with places:
                replica = servers.replicas[number % len(servers.replicas)]
                base = f"{replica.server.base_url}/v1/responses/{reply.response_id}"
                headers = {"x-forwarded-user": reply.user_id}
                state = await http.get(base, headers=headers)
                history.evidence.states[reply.response_id] = (
                    state.json()["status"] if state.is_success else str(state.status_code)
                )
                run = history.evidence.runs.get(reply.response_id)
                if run is not None and run["ended_at"] is not None:
                    history.evidence.replays[reply.response_id] = await _replay(http, base, headers, replica.number)

        replies = [reply for reply in history.replies.values() if not reply.deleted]
        await asyncio.gather(*(ask(number, reply) for number, reply in enumerate(replies)))


async def _replay(http: httpx.AsyncClient, base: str, headers: dict[str, str], replica: int) -> Reading:
    reading = Reading("fresh replay", [Connection(now(), 0, replica)])
    screen = Screen(reading)
    async with http.stream("GET", f"{base}/stream", headers=headers) as answer:
        if answer.status_code != httpx.codes.OK:
            reading.gave_up = f"the fresh replay was answered {answer.status_code}"
            return reading
        async for event in events_of(answer.aiter_raw()):
            screen.take(event)
    return reading


def read_logs(url: str) -> dict[str, list[LogEntry]]:
    """All logs in Redis, fence marks left out; a log of marks alone is empty and is there."""
    logs = {}
    with redis.Redis.from_url(url) as client:
        for key in client.scan_iter("resp:*", count=1000):
            entries = []
            for raw_id, fields in client.xrange(key):
                attempt, seq = map(int, raw_id.split(b"-"))
                ((event, data),) = fields.items()
                if seq:
                    entries.append(LogEntry(attempt, seq, event.decode(), json.loads(data)))
            logs[key.decode().partition("}:")[2]] = entries
    return logs
