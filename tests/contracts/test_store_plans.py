"""What is asked often is served by an index: no plan reads a whole table of a hundred thousand rows."""

import json
from datetime import timedelta

import psycopg
import pytest

from chatsvc.store import allowances, conversations, submit, summaries, views
from chatsvc.store import run_statements as sql

FILL = """
INSERT INTO users (id, tier) SELECT 'user-' || n, 'free' FROM generate_series(1, 200) n;
INSERT INTO conversations (id, user_id, updated_at, temporary)
    SELECT 'conv_' || n, 'user-' || n % 200 + 1, now() - n * interval '1 s', n % 50 = 0
    FROM generate_series(1, 20000) n;
INSERT INTO messages (id, user_id, conversation_id, parent_id, role, content, status, response_id, created_at)
    SELECT 'msg_' || n, 'user-' || (n % 20000 + 1) % 200 + 1, 'conv_' || n % 20000 + 1,
        CASE WHEN n > 20000 THEN 'msg_' || n - 20000 END, 'assistant', 'x', 'complete', 'resp_' || n,
        now() + n * interval '1 s'
    FROM generate_series(1, 100000) n;
INSERT INTO runs (id, user_id, conversation_id, user_message_id, message_id, client_msg_id, request_hash, model, tier,
        status, owner, created_at, ended_at)
    SELECT 'resp_' || n, 'user-' || (n % 20000 + 1) % 200 + 1, 'conv_' || n % 20000 + 1, 'msg_' || n, 'msg_' || n,
        'c-' || n, '', 'small', 'free', CASE WHEN n % 1000 = 0 THEN 'queued' WHEN n % 1000 = 1 THEN 'streaming'
        ELSE 'complete' END, 'worker-' || n % 7, now() + n * interval '1 s',
        CASE WHEN n % 1000 > 1 THEN now() END
    FROM generate_series(1, 100000) n;
INSERT INTO usage SELECT 'user-' || n % 200 + 1, now() - n / 200 * interval '5 min', 1, 1, 1, 1, 1
    FROM generate_series(1, 100000) n;
INSERT INTO summaries (id, user_id, conversation_id, through_message_id, version, text, tokens, created_at)
    SELECT 'sum_' || n, 'user-' || (n % 20000 + 1) % 200 + 1, 'conv_' || n % 20000 + 1, 'msg_' || n, 1, 'x', 1,
        now() + n * interval '1 s'
    FROM generate_series(1, 20000) n;
INSERT INTO memories (id, user_id, text)
    SELECT 'mem_' || n, 'user-' || n % 200 + 1, 'x' FROM generate_series(1, 10000) n;
INSERT INTO workers SELECT 'worker-' || n, '{}', 1, now(), now() + interval '1 h' FROM generate_series(0, 6) n;
"""
# Values that occur, by the names that the statements use.
PARAMS = {
    "user_id": "user-7", "id": "resp_77", "limit": 30, "at": "2026-01-01T00:00:00Z", "after": "conv_9",
    "tier": "free", "window": timedelta(hours=3), "max_queued": 100, "cost_prompt": 1, "cost_cached": 0.1,
    "cost_output": 3, "leaf": "msg_99999", "at_head": False,
    "ids": ["resp_1000", "resp_2000"], "owner": "worker-1", "attempt": 0, "client_msg_id": "c-7", "model": "small",
    "since": "2026-01-01T00:00:00Z", "older_than": "1 hour", "last_seq": 1, "text": "t", "status": "complete",
    "finish_reason": "stop", "error_code": None, "error_message": None, "prompt_tokens": 1, "cached_tokens": 0,
    "output_tokens": 1, "attempts": [0, 0], "seqs": [1, 1], "texts": ["", ""], "prompts": [0, 0], "cached": [0, 0],
    "outputs": [0, 0], "conversation_id": "conv_77", "parent_id": "msg_77", "user_message_id": "msg_77",
    "leaf_may_be_folded": True, "context": None, "pinned": True, "most": 50,
    "kind": "fold", "through_message_id": "msg_99999", "base_id": None, "rest_s": 600.0, "max_tokens": 100,
}  # fmt: skip
STATEMENTS = {
    "list": conversations._LIST,
    "list after a cursor": conversations._LIST_AFTER,
    "get": conversations.GET_CONVERSATION,
    "tree": conversations._MESSAGES,
    "branch": conversations._BRANCH,
    "turn": conversations.TURN,
    "view": views.VIEW,
    "context of a reply": sql.CONTEXT,
    "own message": conversations._OWN_MESSAGE,
    "pin": conversations._PIN,
    "runs of a conversation": conversations._LOCK_RUNS,
    "sweep": conversations._SWEEP,
    "known": submit.KNOWN,
    "keep": submit.KEEP,
    "parent": submit._PARENT,
    "open": allowances._OPEN,
    "standing": allowances._STANDING,
    "steps": allowances._STEPS,
    "usage": allowances._USED,
    "run": sql.GET,
    "run, whosoever": sql.FIND,
    "reply": sql.REPLY,
    "not ended": sql.NOT_ENDED,
    "queued": sql.QUEUED,
    "still queued": sql.STILL_QUEUED,
    "positions": sql.POSITIONS,
    "claim": sql.CLAIM,
    "checkpoint": sql.CHECKPOINT,
    "finish": sql.FINISH,
    "request stop": sql.REQUEST_STOP,
    "held": sql.HELD,
    "take over": sql.TAKE_OVER,
    "queue a fold": summaries._QUEUE,
}


@pytest.fixture(scope="module")
def full(postgres_server, migrated_template):
    """A connection to a database with much in it."""
    name = "plans"
    with psycopg.connect(postgres_server, autocommit=True) as server:
        server.execute(f"DROP DATABASE IF EXISTS {name}")
        server.execute(f"CREATE DATABASE {name} TEMPLATE {migrated_template}")
    with psycopg.connect(postgres_server.replace("/postgres?", f"/{name}?"), autocommit=True) as connection:
        connection.execute("SET session_replication_role = replica")  # no foreign keys while filling
        connection.execute(FILL)
        connection.execute("SET session_replication_role = origin")
        connection.execute("VACUUM ANALYZE")
        yield connection


def plan_of(connection, statement):
    """The one plan that the service's connections use for a statement, whatever the values."""
    with connection.transaction(force_rollback=True):
        connection.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        connection.execute(statement, PARAMS, prepare=True)
        name, values = connection.execute(
            "SELECT name, array_length(parameter_types, 1) FROM pg_prepared_statements"
            " ORDER BY prepare_time DESC LIMIT 1",
            prepare=False,
        ).fetchone()
        arguments = f"({', '.join(['NULL'] * values)})" if values else ""
        (plans,) = connection.execute(f"EXPLAIN (FORMAT JSON) EXECUTE {name} {arguments}", prepare=False).fetchone()
    return plans[0]["Plan"]


def nodes(plan):
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


@pytest.mark.slow
@pytest.mark.parametrize("name", STATEMENTS)
def test_a_statement_reads_no_whole_table(full, name):
    plan = plan_of(full, STATEMENTS[name])
    small = {"workers", "users"}
    whole = [
        node["Relation Name"]
        for node in nodes(plan)
        if node["Node Type"] == "Seq Scan" and node["Relation Name"] not in small
    ]
    assert whole == [], json.dumps(plan, indent=1)


@pytest.mark.slow
def test_a_page_of_the_list_is_read_in_order_without_sorting(full):
    kinds = [(node["Node Type"], node.get("Index Name")) for node in nodes(plan_of(full, conversations._LIST_AFTER))]
    assert ("Index Scan", "conversations_by_activity") in kinds
    assert not any("Sort" in kind for kind, _ in kinds)


@pytest.mark.slow
def test_a_checkpoint_stays_within_its_page(full):
    """An update of text and counts touches no index (HOT), as long as the page has room."""
    ids = [f"resp_{n * 1000 + 1}" for n in range(20)]
    before = full.execute("SELECT id, attempt FROM runs WHERE id = ANY(%s)", [ids]).fetchall()
    for seq in range(5):
        full.execute(
            sql.CHECKPOINT,
            {
                "ids": ids, "attempts": [attempt for _, attempt in before], "seqs": [seq] * 20,
                "texts": ["some text " * seq] * 20, "prompts": [1] * 20, "cached": [0] * 20, "outputs": [seq] * 20,
            },
        )  # fmt: skip
    full.execute("SELECT pg_stat_force_next_flush()")
    for table in ("runs", "messages"):
        updated, hot = full.execute(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = %s", [table]
        ).fetchone()
        assert updated >= 100
        assert hot / updated > 0.9, (table, hot, updated)
