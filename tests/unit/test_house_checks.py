"""``python -m chatsvc check``: one line a part, and what is wrong said so that one can mend it."""

import asyncio
import io
import re
import socket

import psycopg
import pytest
from structlog.testing import capture_logs

from chatsvc import checks
from chatsvc.checks import check
from chatsvc.config_load import load_config
from chatsvc.embedded import lock_data_dir


@pytest.fixture
def outcome(tmp_path, postgres_url, redis_url, monkeypatch):
    """Run a check with the given variables; returns whether all is well, the text, and the lines by part."""
    page = tmp_path / "index.html"
    page.touch()
    monkeypatch.setattr(checks, "PAGE", page)
    good = {
        "CHATSVC_DATA_DIR": str(tmp_path / "data"),
        "CHATSVC_DATABASE_URL": postgres_url,
        "CHATSVC_REDIS_URL": redis_url,
        "CHATSVC_ENGINE": "scripted:?tokens=1",
        "CHATSVC_PORT": "0",
    }

    async def run(models="", **variables):
        out, file = io.StringIO(), tmp_path / "chatsvc.toml"
        file.write_text(models)
        env = good | variables
        if models:
            del env["CHATSVC_ENGINE"]
        well = await check(load_config(file, env), out)
        return well, out.getvalue(), [line for line in out.getvalue().splitlines() if line[:4] in ("OK  ", "FAIL")]

    return run


async def test_with_every_part_in_place_all_is_well(outcome):
    well, text, lines = await outcome()
    assert well
    assert [line[:4] for line in lines] == ["OK  "] * 7
    assert 'engine = "scripted:?tokens=1"' in text


async def test_every_fault_is_found_in_one_go_and_says_what_to_do(outcome, tmp_path):
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        well, text, lines = await outcome(
            CHATSVC_DATA_DIR=str(tmp_path / "file"),
            CHATSVC_PORT=str(taken.getsockname()[1]),
            CHATSVC_DATABASE_URL="postgresql://u:hunter2@127.0.0.1:9/x",
            CHATSVC_REDIS_URL="redis://:hunter2@127.0.0.1:9",
            CHATSVC_ENGINE="scripted:?tokns=1",
            CHATSVC_DATABASE_TIMEOUT_S="0.5",
            CHATSVC_CONTEXT_EMBEDDER="transformers:/no/such/model",
        )
    assert not well
    assert [line[:4] for line in lines] == ["FAIL", "FAIL", "OK  ", "FAIL", "FAIL", "FAIL", "FAIL"]
    hints = ("set CHATSVC_PORT", "CHATSVC_DATABASE_URL", "CHATSVC_REDIS_URL", "tokns", "/no/such/model")
    for hint in (str(tmp_path / "file"), *hints):
        assert [line for line in lines if hint in line], hint
    assert all(re.search(r"[.?] Is it running, and is", line) for line in lines if "Is it running" in line), text
    assert "hunter2" not in text


async def test_a_data_directory_in_use_is_said_once_and_the_parts_in_it_are_not_tried(outcome, tmp_path):
    with lock_data_dir(tmp_path / "data"):
        well, text, lines = await outcome(CHATSVC_DATABASE_URL="", CHATSVC_REDIS_URL="")
    assert not well
    assert text.count("is in use by another chatsvc") == 1
    parts = {line[6:21].strip(): line for line in text.splitlines() if line.startswith(("FAIL", "SKIP"))}
    assert list(parts) == ["data directory", "Postgres", "Redis"]
    assert parts["data directory"].startswith("FAIL")
    for part in ("Postgres", "Redis"):
        assert parts[part].startswith("SKIP")
        assert parts[part].endswith("not tried: its files are in the data directory")
    assert [line[:4] for line in lines] == ["FAIL", "OK  ", "OK  ", "OK  ", "OK  "]


async def test_a_page_that_is_not_built_is_a_fault_of_api_processes_only(outcome, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "PAGE", tmp_path / "none.html")
    well, _, lines = await outcome()
    assert not well
    assert "make web" in lines[2]
    assert (await outcome(CHATSVC_ROLES="worker"))[0]


async def test_the_faults_of_all_models_are_said(outcome):
    _, _, lines = await outcome("""
        [models.one]
        default = true
        engine = "scripted:?tokns=1"
        [models.two]
        engine = "transformers:/no/such/model"
    """)
    said = [line for line in lines if line[6:].startswith("model ")]
    assert [line[:4] for line in said] == ["FAIL", "FAIL"]
    assert "tokns" in said[0]
    assert "/no/such/model" in said[1]


async def refuse(reader, writer):
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 401 Unauthorized\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
    await writer.drain()
    writer.close()


async def test_every_model_is_tried_whatever_is_wrong_with_those_before_it(outcome):
    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as refusing:
        port = refusing.sockets[0].getsockname()[1]
        well, text, lines = await outcome(f"""
            [models.away]
            engine = "openai:http://me:hunter2@127.0.0.1:9/v1#m"
            [models.odd]
            engine = "openai:http://127.0.0.1:99999/v1#m"
            [models.locked]
            engine = "openai:http://127.0.0.1:{port}/v1#m"
            [models.well]
            default = true
            engine = "scripted:?tokens=1"
            [models.gone]
            engine = "openai:http://127.0.0.1:9/v1#m"
        """)
    assert not well
    said = {line[6:].split()[1]: line for line in lines if line[6:].startswith("model ")}
    assert {name: line[:4].strip() for name, line in said.items()} == {
        "away": "FAIL",
        "odd": "FAIL",
        "locked": "FAIL",
        "well": "OK",
        "gone": "FAIL",
    }
    assert "127.0.0.1:9/v1 cannot be reached" in said["away"]
    assert said["gone"].endswith("Is its engine's URL right, and is the server there running?")
    assert "99999" in said["odd"]
    assert "set CHATSVC_OPENAI_API_KEY" in said["locked"]
    assert lines[-1].startswith("OK    recall")
    assert "hunter2" not in text


async def test_a_model_is_not_asked_of_a_process_that_runs_none(outcome):
    assert (
        await outcome(
            CHATSVC_ROLES="api", CHATSVC_ENGINE="scripted:?tokns=1", CHATSVC_CONTEXT_EMBEDDER="vllm:/no/such/model"
        )
    )[0]


async def test_an_empty_database_is_said_to_be_empty_and_nothing_else_is_said(outcome, empty_postgres_url):
    with capture_logs() as logged:
        well, _, lines = await outcome(CHATSVC_DATABASE_URL=empty_postgres_url)
    assert well
    assert lines[3].endswith(
        "answers, and has no tables of chatsvc yet: the next start makes them, or `python -m chatsvc migrate`"
    )
    assert logged == []
    with psycopg.connect(empty_postgres_url) as connection:
        assert connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone() == (0,)


@pytest.mark.parametrize(
    ("version", "verdict", "words"), [("0003", "OK  ", "older schema"), ("9999", "FAIL", "does not know")]
)
async def test_a_schema_of_another_version_is_told(outcome, postgres_url, version, verdict, words):
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        newest = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        connection.execute("UPDATE alembic_version SET version_num = %s", [version])
        try:
            _, _, lines = await outcome()
        finally:
            connection.execute("UPDATE alembic_version SET version_num = %s", newest)
    assert lines[3].startswith(verdict)
    assert words in lines[3]
