"""Databases for tests. Copying one costs a fifth of a second of a CPU, emptying one that was used hardly anything."""

import contextlib
import re
from uuid import uuid4

import psycopg

AT_MOST = 50
"""How often a database is used again: what was deleted takes up room until it is vacuumed."""
_KEPT = "alembic_version"
# Whatever a test may do to a database beside changing rows, and what the planner was told of rows that were there. One
# that differs in this from the template is given up.
_SHAPE = """
    SELECT md5(string_agg(line, E'\n' ORDER BY line)) FROM (
        SELECT 'relation ' || relname || relkind::text || (reltuples > 0)
        FROM pg_class WHERE relnamespace = 'public'::regnamespace
        UNION ALL
        SELECT 'column ' || attrelid::regclass || attname || format_type(atttypid, atttypmod) || attnotnull || atthasdef
        FROM pg_attribute JOIN pg_class c ON c.oid = attrelid
        WHERE c.relnamespace = 'public'::regnamespace AND attnum > 0
        UNION ALL
        SELECT 'constraint ' || conrelid::regclass || conname || pg_get_constraintdef(oid)
        FROM pg_constraint WHERE connamespace = 'public'::regnamespace AND conrelid <> 0
        UNION ALL
        SELECT 'trigger ' || tgrelid::regclass || tgname || tgenabled::text FROM pg_trigger WHERE NOT tgisinternal
        UNION ALL
        SELECT 'function ' || proname || coalesce(prosrc, '') FROM pg_proc WHERE pronamespace = 'public'::regnamespace
        UNION ALL
        SELECT 'setting ' || setrole || setting FROM pg_db_role_setting, unnest(setconfig) AS setting
        WHERE setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
        UNION ALL
        SELECT 'schema ' || nspname FROM pg_namespace WHERE nspname !~ '^pg_'
    ) AS lines (line)
"""
_TABLES = f"SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <> '{_KEPT}'"
_ALONE = """
    SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
"""


def in_database(url, name):
    """The same server's URL with another database."""
    return re.sub(r"/[^/?]*\?", f"/{name}?", url, count=1)


def new_database(server, template):
    """A copy of a template, gone when the test is."""
    url = _create(server, template)
    yield url
    _drop(server, url)


def _create(server, template):
    name = f"test_{uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    return in_database(server, name)


def _drop(server, url):
    name = re.search(r"/(test_\w+)\?", url)[1]
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


class Databases:
    """Databases with a template's schema and no rows. One that comes back is emptied and lent again."""

    def __init__(self, server, template):
        self._server = server
        self._template = template
        self._free = []
        self._uses = {}
        with psycopg.connect(in_database(server, template)) as connection:
            self._shape = connection.execute(_SHAPE).fetchone()
            tables = [name for (name,) in connection.execute(_TABLES)]
            full = [name for name in tables if connection.execute(f"SELECT EXISTS (TABLE {name})").fetchone()[0]]
            assert not full, f"a new database has rows in {full}, which would be lost here"

    @contextlib.contextmanager
    def one(self):
        """The URL of a database without rows."""
        url = self._free.pop() if self._free else _create(self._server, self._template)
        self._uses[url] = self._uses.get(url, 0) + 1
        yield url
        if self._uses[url] < AT_MOST and self._emptied(url):
            self._free.append(url)
        else:
            _drop(self._server, url)

    def _emptied(self, url):
        """False when it is not as it was, but for its rows."""
        with psycopg.connect(url, options="-c default_transaction_read_only=off") as connection:
            # Readers that a test left, and transactions that it did not end.
            connection.execute(_ALONE)
            if connection.execute(_SHAPE).fetchone() != self._shape:
                return False
            connection.execute("SET LOCAL session_replication_role = replica")  # neither triggers nor foreign keys
            for (name,) in connection.execute(_TABLES).fetchall():
                connection.execute(f"DELETE FROM {name}")
        return True
