"""Errors on the wire: RFC 9457 problem documents, made in one place.

What the framework itself refuses (no such path, wrong type in a body) is first turned into our own errors, so that a
client sees one shape only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException

from chatsvc.api.ratelimit import ratelimit_headers
from chatsvc.errors import ChatError, NothingLeft
from chatsvc.limits import Allowance

_log = structlog.get_logger(__name__)

PROBLEM: Final = "application/problem+json"
_QUOTED: Final = re.compile(r"`([^`]+)`\s*$|field `([^`]+)`")

_CLIENT_LEFT: Final = "client disconnected prematurely"
"""How the framework words that the client left within its body. It calls that a fault of ours, which it is not."""

_NO_BODY: Final = "'data'"
"""How the framework words that there is no body at all."""

_SHOWN_PATH: Final = 200
"""Most characters of an unknown path that are said back."""

# Statuses that the framework raises by itself → (code, title).
_FRAMEWORK: Final[dict[int, tuple[str, str]]] = {
    400: ("invalid_input", "The request is not valid"),
    404: ("not_found", "Not found"),
    405: ("method_not_allowed", "This method is not allowed here"),
    413: ("payload_too_large", "The request body is too large"),
    415: ("unsupported_media_type", "Send JSON"),
}


def problem(error: ChatError) -> dict[str, Any]:
    """The members of a problem document, extension members last."""
    document: dict[str, Any] = {
        "type": f"urn:chatsvc:problem:{error.code}",
        "title": error.title,
        "status": error.status,
        "detail": error.detail,
        "code": error.code,
        "retryable": error.retryable,
    }
    if error.retry_after is not None:
        document["retry_after"] = error.retry_after
    document.update(error.extra)
    return document


def problem_headers(error: ChatError) -> dict[str, str]:
    """``retry-after`` in whole seconds (RFC 9110 §10.2.3), rounded up."""
    headers = {"cache-control": "no-store"}
    if isinstance(error, NothingLeft) and isinstance(error.allowance, Allowance):
        headers |= ratelimit_headers(error.allowance, datetime.now(UTC))
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    return headers


def problem_bytes(error: ChatError) -> bytes:
    """The document, encoded."""
    return msgspec.json.encode(problem(error))


def on_chat_error(request: Request[Any, Any, Any], error: ChatError) -> Response[bytes]:
    """An error of ours."""
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        _log.warning("request refused", path=request.url.path, code=error.code, detail=error.detail)
    return Response(
        content=problem_bytes(error), status_code=error.status, headers=problem_headers(error), media_type=PROBLEM
    )


def on_http_exception(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """An error of the framework's."""
    if error.detail == _CLIENT_LEFT:
        _log.info("client left within its request", path=request.url.path)
        return Response(content=b"", status_code=HTTPStatus.BAD_REQUEST)  # nobody reads it
    if error.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return on_unexpected(request, error)
    code, title = _FRAMEWORK.get(error.status_code, ("invalid_input", HTTPStatus(error.status_code).phrase))
    document: dict[str, Any] = {
        "type": f"urn:chatsvc:problem:{code}",
        "title": title,
        "status": error.status_code,
        "detail": _detail(request, error),
        "code": code,
        "retryable": False,
    }
    if isinstance(error, ValidationException):
        faults = [_fault(extra) for extra in error.extra or [] if isinstance(extra, dict)]
        document["errors"] = faults
        document["detail"] = "; ".join(f"{fault['field']}: {fault['message']}" for fault in faults) or error.detail
        if faults:
            document["field"] = faults[0]["field"]
    return Response(
        content=msgspec.json.encode(document),
        status_code=error.status_code,
        headers={"cache-control": "no-store", **(error.headers or {})},
        media_type=PROBLEM,
    )


def on_unexpected(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """A fault in this program. The traceback goes to the log, not to the caller."""
    _log.error("request failed unexpectedly", path=request.url.path, error_type=type(error).__name__, exc_info=error)
    return on_chat_error(request, ChatError("The request failed because of a fault in the server; it has been logged."))


def _detail(request: Request[Any, Any, Any], error: HTTPException) -> str:
    """What is wrong and what would be right, where the framework says no more than the status's name."""
    match error.status_code:
        case HTTPStatus.NOT_FOUND:
            base = request.scope.get("root_path", "")
            path = f"{base}{request.scope['path']}"[:_SHOWN_PATH]
            return f"There is nothing at {path}. All paths are listed at {base}/schema."
        case HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = sorted((error.headers or {}).get("allow", "").split(", "))
            return f"{request.method} is not allowed here; allowed: {', '.join(allowed)}."
        case HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            return (
                f"The body may have at most {request.app.request_max_body_size:,} bytes. Send less, or have"
                " CHATSVC_SERVER_MAX_BODY_BYTES raised."
            )
    return error.detail


def _fault(extra: dict[str, Any]) -> dict[str, str]:
    """Which field of a body or query is wrong, and how. For missing and unknown fields the name is in the message."""
    message = str(extra.get("message", ""))
    field = str(extra.get("key", ""))
    if message == _NO_BODY:
        return {"field": "body", "message": "is missing; send a JSON object with content-type: application/json"}
    if field in {"data", ""} and (found := _QUOTED.search(message)) and "field" in message:
        field = found.group(2) or found.group(1)
    return {"field": "body" if field == "data" else field, "message": message}


HANDLERS: Final[dict[int | type[Exception], Callable[[Request[Any, Any, Any], Any], Response[Any]]]] = {
    ChatError: on_chat_error,
    HTTPException: on_http_exception,
    Exception: on_unexpected,
}
