"""Databases for tests: copies of a template, gone when the test is."""

import re
from uuid import uuid4

import psycopg


def in_database(url, name):
    """The same server's URL with another database."""
    return re.sub(r"/[^/?]*\?", f"/{name}?", url, count=1)


def new_database(server, template):
    name = f"test_{uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        yield in_database(server, name)
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
