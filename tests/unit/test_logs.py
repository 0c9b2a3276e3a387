"""Logs: one format for ours and the libraries' lines, context on each, and nothing that must not be there."""

import io
import json
import logging

import msgspec
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from chatsvc.config import LogConfig
from chatsvc.logs import configure_logging, mask_secrets, redact


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def lines(restored_logging):
    stream = io.StringIO()
    configure_logging(LogConfig(), stream)
    return lambda: [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_of_ours_is_one_json_object_with_time_level_and_logger(lines):
    structlog.get_logger("chatsvc.api").info("reply.finished", tokens=3)
    (line,) = lines()
    assert list(line) == ["timestamp", "level", "logger", "message", "tokens"]
    assert line.pop("timestamp").endswith("Z")
    assert line == {"message": "reply.finished", "level": "info", "logger": "chatsvc.api", "tokens": 3}


def test_a_line_of_a_library_has_the_same_form(lines):
    logging.getLogger("uvicorn.error").warning("port %d", 80, extra={"host": "h", "color_message": "port"})
    (line,) = lines()
    line.pop("timestamp")
    assert line == {"message": "port 80", "level": "warning", "logger": "uvicorn.error", "host": "h"}


def test_bound_ids_are_on_every_line_of_the_context(lines):
    with structlog.contextvars.bound_contextvars(run_id="resp_1", conversation_id="conv_1", request_id="r"):
        structlog.get_logger().info("a")
        logging.getLogger("psycopg.pool").warning("b")
    structlog.get_logger().info("c")
    assert [line.get("run_id") for line in lines()] == ["resp_1", "resp_1", None]


def test_lines_below_the_level_are_not_written(restored_logging):
    stream = io.StringIO()
    configure_logging(LogConfig(level="warning"), stream)
    structlog.get_logger().info("a")
    logging.getLogger("alembic").info("b")
    structlog.get_logger().warning("c")
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["c"]


def test_the_access_log_is_off_because_urls_carry_tokens(lines):
    logging.getLogger("uvicorn.access").critical("GET /v1/responses/resp_1/stream?token=abc")
    assert lines() == []


def test_a_library_that_brings_its_own_handler_is_kept_to_our_form(lines):
    library = logging.getLogger("ContinuousBatchingLogger")
    if library.propagate:  # what the library does when it is imported
        library.addHandler(logging.StreamHandler())
        library.propagate = False
    library.info("cuda graphs")
    library.warning("out of blocks")
    assert [line["message"] for line in lines()] == ["out of blocks"]
    assert sum(type(handler) is logging.StreamHandler for handler in library.handlers) == 1


def test_a_terminal_gets_the_console_format_unless_told_otherwise(restored_logging):
    shown = {}
    for name, format_, stream in (
        ("terminal", "", Terminal()),
        ("pipe", "", io.StringIO()),
        ("json", "json", Terminal()),
        ("console", "console", io.StringIO()),
    ):
        configure_logging(LogConfig(format=format_), stream)
        structlog.get_logger().info("hello", part="x")
        shown[name] = stream.getvalue().startswith("{")
    assert shown == {"terminal": False, "pipe": True, "json": True, "console": False}


@pytest.mark.parametrize("format_", ["console", "json"])
def test_configuring_again_moves_all_lines_to_the_new_stream(restored_logging, format_):
    first, second = io.StringIO(), io.StringIO()
    configure_logging(LogConfig(format=format_), first)
    configure_logging(LogConfig(format=format_), second)
    structlog.get_logger().info("a")
    logging.getLogger("x").info("b")
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 2


@pytest.mark.parametrize("format_", ["console", "json"])
def test_a_traceback_is_written_without_secrets_and_without_local_variables(restored_logging, format_):
    stream = io.StringIO()
    configure_logging(LogConfig(format=format_), stream)
    text_of_a_message = "my " + "diary"
    try:
        raise ValueError("cannot connect to postgresql://u:hunter2@h/d")
    except ValueError:
        structlog.get_logger().exception("failed")
        logging.getLogger("x").exception("failed too")
    written = stream.getvalue()
    assert written.count("ValueError: cannot connect to postgresql://u:***@h/d") == 2
    assert "hunter2" not in written
    assert text_of_a_message not in written


@pytest.mark.parametrize(
    "key",
    ["authorization", "Authorization", "cookie", "set-cookie", "token", "stream_token", "password", "db_password",
     "secret", "api_key", "x-api-key", "OPENAI_API_KEY"],
)  # fmt: skip
def test_a_secret_is_masked_by_the_name_of_its_key_at_any_depth(lines, key):
    structlog.get_logger().info("x", **{key: "hunter2"}, headers={key: "hunter2"}, items=[{key: "hunter2"}])
    (line,) = lines()
    assert line[key] == "***"
    assert "hunter2" not in json.dumps(line)


@pytest.mark.parametrize("key", ["tokens", "prompt_tokens", "max_tokens", "keys", "tokens_per_s"])
def test_counts_of_tokens_are_no_secrets(lines, key):
    structlog.get_logger().info("x", **{key: 5})
    assert lines()[0][key] == 5


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (
            "GET /v1/responses/r/stream?token=abc&last_event_id=3",
            "GET /v1/responses/r/stream?token=***&last_event_id=3",
        ),
        ("redis://:pw@h:1/0", "redis://:***@h:1/0"),
        ("postgresql://u:p/w@h/d", "postgresql://u:***@h/d"),
        ("postgresql://u:p@w@h/d", "postgresql://u:***@h/d"),
        ("postgresql://u@h/d", "postgresql://u@h/d"),
        ("Authorization: Bearer abcdefgh.ijk", "Authorization: Bearer ***"),
        ("?access_token=abc#x", "?access_token=***#x"),
        ("200 tokens at http://127.0.0.1:8080/", "200 tokens at http://127.0.0.1:8080/"),
    ],
)
def test_a_secret_inside_text_is_masked_by_its_form(text, masked):
    assert mask_secrets(text) == masked


def test_message_text_is_left_out_above_debug_and_kept_at_debug(restored_logging):
    stream = io.StringIO()
    configure_logging(LogConfig(level="debug"), stream)
    log = structlog.get_logger()
    log.info("x", content="my diary", body={"prompt": ["my diary"]})
    log.debug("y", content="my diary")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first["content"] == "<8 characters>"
    assert "diary" not in json.dumps(first)
    assert second["content"] == "my diary"


def test_values_that_json_does_not_know_do_not_break_a_line(lines):
    structlog.get_logger().info("x", thing=object, error=ValueError("no token=abc"), inner=msgspec.UNSET, more={1, "b"})
    (line,) = lines()
    assert line["error"] == "no token=***"


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="@/:#?&'\"\\"), min_size=3).map(
    lambda text: "".join(text.split()) or "xyz"
))  # fmt: skip
def test_no_password_in_a_url_survives(password):
    event = redact(None, "info", {"level": "info", "url": f"postgresql://user:{password}@host/db"})
    assert event["url"] == "postgresql://user:***@host/db"
