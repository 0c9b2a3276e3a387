"""The command line: plain sentences and honest exit codes."""

import socket
import subprocess
import sys

import pytest

from chatsvc import __version__, app
from chatsvc.__main__ import BAD_CONFIG, DONE, FAILED, main
from chatsvc.errors import ConfigError, StoreUnavailable


@pytest.fixture(autouse=True)
def own_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("CHATSVC_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr("chatsvc.__main__.configure_logging", lambda *_: None)


def serving(monkeypatch, outcome):
    """Let ``serve`` note the configuration and end like that."""
    seen = []

    async def serve(config):
        seen.append(config)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(app, "serve", serve)
    return seen


@pytest.mark.parametrize("arguments", [[], ["serve"]])
def test_serve_is_the_command_when_none_is_given(monkeypatch, arguments):
    seen = serving(monkeypatch, DONE)
    assert main(arguments) == DONE
    assert len(seen) == 1


def test_flags_win_over_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("CHATSVC_PORT", "1000")
    seen = serving(monkeypatch, DONE)
    main(["--port", "2000", "--host", "::1", "--data-dir", str(tmp_path / "other")])
    (config,) = seen
    assert (config.server.port, config.server.host, config.data_dir) == (2000, "::1", tmp_path / "other")


def test_a_flag_before_or_after_the_command_means_the_same(monkeypatch):
    seen = serving(monkeypatch, DONE)
    main(["--port", "2000", "serve"])
    main(["serve", "--port", "2000"])
    assert seen[0] == seen[1]


def test_the_exit_code_of_serve_is_handed_on(monkeypatch):
    serving(monkeypatch, 7)
    assert main([]) == 7


def test_a_bad_configuration_ends_with_2_and_every_problem_on_a_line(monkeypatch, capsys):
    monkeypatch.setenv("CHATSVC_PROT", "1")
    assert main(["--port", "x"]) == BAD_CONFIG
    error = capsys.readouterr().err
    assert "CHATSVC_PORT" in error
    assert "CHATSVC_PROT" in error
    assert "Traceback" not in error


def test_a_fault_of_the_configuration_that_shows_later_is_said_the_same_way(monkeypatch, capsys):
    serving(monkeypatch, ConfigError(["cannot listen on 127.0.0.1:80"]))
    assert main([]) == BAD_CONFIG
    assert "cannot listen on 127.0.0.1:80" in capsys.readouterr().err


def test_all_that_can_be_told_is_told_at_once_and_before_any_server_is_started(monkeypatch, capsys, tmp_path):
    started = []
    monkeypatch.setattr(app, "embedded_postgres", lambda *_: started.append("Postgres"))
    monkeypatch.setattr(app, "embedded_redis", lambda *_: started.append("Valkey"))
    (tmp_path / "data").touch()
    config = tmp_path / "chatsvc.toml"
    config.write_text("""
        [models.one]
        default = true
        engine = "scripted:?tokns=1&sloots=2"
        [models.two]
        engine = "transformers:/no/such/model"
        [context]
        embedder = "transformers:/no/such/embedder"
    """)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--config", str(config), "--port", str(port)]) == BAD_CONFIG
    error = capsys.readouterr().err
    for fault in (f":{port}", "data cannot be used: it", "'tokns'", "'sloots'", "/no/such/model", "/no/such/embedder"):
        assert error.count(fault) == 1, fault
    assert started == []
    assert "Traceback" not in error


def test_a_part_that_is_away_ends_with_1_and_a_plain_sentence(monkeypatch, capsys):
    serving(monkeypatch, StoreUnavailable("no route to db"))
    assert main([]) == FAILED
    error = capsys.readouterr().err
    assert "no route to db" in error
    assert "Traceback" not in error


def test_a_bug_is_not_dressed_up(monkeypatch):
    serving(monkeypatch, RuntimeError("bug"))
    with pytest.raises(RuntimeError):
        main([])


@pytest.mark.parametrize("arguments", [["sevre"], ["--prot", "1"], ["serve", "check"], ["--po", "1"]])
def test_a_mistyped_command_line_ends_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == BAD_CONFIG
    assert "usage: python -m chatsvc" in capsys.readouterr().err


def test_help_tells_commands_flags_examples_and_exit_codes(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == DONE
    text = capsys.readouterr().out
    for part in ("serve", "migrate", "check", "--config", "--port", "--data-dir", "examples:", "exit codes:"):
        assert part in text


def test_the_module_runs_as_a_program_and_help_needs_no_heavy_import():
    code = (
        "import runpy, sys; sys.argv = ['chatsvc', '--version']\n"
        "try: runpy.run_module('chatsvc', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'litestar', 'psycopg', 'redis', 'uvicorn', 'torch', 'transformers', 'alembic'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == f"chatsvc {__version__}"
