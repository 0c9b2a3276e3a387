"""The schema: made by any number of processes at once, whole or not at all."""

import psycopg

from chatsvc.store import migrate


async def test_migrating_twice_changes_nothing(postgres_url):
    await migrate(postgres_url)
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT count(*) FROM runs").fetchone() == (0,)
