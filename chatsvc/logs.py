"""Logs: one format for everything in the process, and no secret ever in it.

structlog's lines and those of libraries that use stdlib logging (uvicorn, alembic, psycopg) pass through the same
processors to the same stream. What a line must not hold is taken out here, whoever wrote it: credentials by the name
of their key, credentials inside URLs and headers by their form, and the text of messages unless the line is at debug.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, MutableMapping
from typing import Any, Final, Protocol, TextIO

import structlog

MASK: Final = "***"

# Loggers that give themselves a handler on import, unless they find that they hand nothing on.
_SELF_WILLED: Final = ("ContinuousBatchingLogger",)
_FIRST_KEYS: Final = ("timestamp", "level", "logger", "message")
_SECRET_KEY: Final = re.compile(
    r"(?i)(^|[_-])(authorization|cookie|token|passw(or)?d|secret|api[_-]?key|credentials?)$"
)
_TEXT_KEYS: Final = frozenset({"content", "text", "prompt", "messages", "system_prompt"})
_SECRET_FORMS: Final = (
    # The password of a URL. Greedy up to the last @, since passwords with unescaped slashes are common.
    (re.compile(r"(://[^:@/\s'\"]*:)[^\s'\"]*@"), rf"\1{MASK}@"),
    (re.compile(r"(?i)(\b(?:[a-z_]*token|[a-z_]*password|passwd|secret|api[_-]?key)=)[^&#\s'\"]+"), rf"\1{MASK}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}"), rf"\1 {MASK}"),
)
# Loggers whose usual lines are noise here, or would show URLs with their tokens.
_LEAST_LEVEL: Final = {
    "uvicorn.access": logging.CRITICAL + 1,
    "uvicorn.error": logging.WARNING,
    "httpx": logging.WARNING,
    "httpcore": logging.WARNING,
    "asyncio": logging.WARNING,
    "alembic": logging.WARNING,
    "ContinuousBatchingLogger": logging.WARNING,
}


class LogSettings(Protocol):
    """The part of the configuration that is read here (``config.LogConfig``)."""

    @property
    def format(self) -> str:
        """``console``, ``json``, or empty to choose by the stream."""
        ...

    @property
    def level(self) -> str:
        """The least important level that is written."""
        ...


def mask_secrets(text: str) -> str:
    """The same text with passwords in URLs, ``token=`` and the like, and bearer credentials replaced by ``***``."""
    for form, replacement in _SECRET_FORMS:
        text = form.sub(replacement, text)
    return text


def configure_logging(settings: LogSettings, stream: TextIO) -> None:
    """Send all log lines of the process to ``stream``. May be called again; the last call holds.

    Lines carry what was bound with ``structlog.contextvars`` (run, conversation and request ids).
    """
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    form = settings.format or ("console" if stream.isatty() else "json")
    before: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.stdlib.ExtraAdder(),
        # A person at a terminal knows the date and thinks in local time.
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if form == "console" else "iso", utc=form != "console"),
        structlog.processors.StackInfoRenderer(),
    ]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=before,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                _without_escapes,
                redact,
                *_renderer(form, stream),
            ],
        )
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    for name in _SELF_WILLED:
        logging.getLogger(name).handlers[:] = [handler]
        logging.getLogger(name).propagate = False
    for name, least in _LEAST_LEVEL.items():
        logging.getLogger(name).setLevel(max(level, least))
    logging.captureWarnings(capture=True)
    structlog.configure(
        processors=[*before, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def tell(sentence: str, settings: LogSettings, stream: TextIO) -> None:
    """A plain sentence between the log lines for who sits at a terminal; nothing elsewhere or where lines are JSON."""
    if stream.isatty() and settings.format != "json":
        print(sentence, file=stream, flush=True)


def redact(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor: takes secrets out of a line, and message text out of lines above debug."""
    keep_text = event.get("level") == "debug"
    return {key: _clean(key, value, keep_text=keep_text) for key, value in event.items()}


def _clean(key: str, value: Any, *, keep_text: bool) -> Any:
    if _SECRET_KEY.search(key):
        return MASK
    if key.lower() in _TEXT_KEYS and not keep_text:
        return f"<{len(value)} characters>" if isinstance(value, str) else "<left out>"
    if isinstance(value, Mapping):
        return {str(k): _clean(str(k), v, keep_text=keep_text) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_clean("", item, keep_text=keep_text) for item in value]
    plain = value is None or isinstance(value, (int, float))
    return value if plain else mask_secrets(str(value))


def _without_escapes(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    event.pop("color_message", None)  # uvicorn's second copy of its message, for terminals
    return event


def _in_order(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """What every line has, first; the rest as it was given."""
    event["message"] = event.pop("event", "")
    return {key: event[key] for key in (*_FIRST_KEYS, *event) if key in event}


def _renderer(name: str, stream: TextIO) -> list[structlog.typing.Processor]:
    if name == "json":
        return [_in_order, structlog.processors.JSONRenderer(ensure_ascii=False, default=str)]
    # Plain tracebacks: the pretty ones print local variables, message text among them.
    return [
        structlog.dev.ConsoleRenderer(
            colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback, pad_event_to=0
        )
    ]
