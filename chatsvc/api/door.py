"""The outermost layer: what is checked before any route, and what is added to every answer.

    base path ─▶ request id ─▶ is this browser allowed here? ─▶ another region's? ─▶ the stream route, or the framework

A browser carries the user's cookies and network position to every site it is told to, so a request that writes must
come from our own page (or from no browser at all), and a server without authentication answers to no foreign host
name (DNS rebinding). Both checks look at host names only, never at ports: a mapped port must not break them.
"""

from __future__ import annotations

import ipaddress
import re
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import structlog

from chatsvc.api.asgi import ASGIApp, Receive, Scope, Send
from chatsvc.api.errors import PROBLEM, problem_bytes, problem_headers
from chatsvc.errors import ChatError, InvalidInput, NotAllowed, NotFound

_log = structlog.get_logger(__name__)

_STREAM: Final = re.compile(r"/v1/responses/([^/]+)/stream")
_PROBES: Final = frozenset({"/healthz", "/readyz", "/metrics"})
_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_ADDED_HEADERS: Final = ((b"x-content-type-options", b"nosniff"),)


class StreamRoute(Protocol):
    """Answers ``GET /v1/responses/{id}/stream`` on the bare ASGI interface."""

    async def __call__(self, response_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one reader. Raises ``ChatError`` only before it has sent anything."""
        ...


class RegionRoute(Protocol):
    """Sees to requests of other regions, and for them."""

    def admit(self, path: str, scope: Scope) -> Scope:
        """The request with whom another region vouches for in it, if one passed it on. Raises ``NotAuthenticated``."""
        ...

    async def forward(self, path: str, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer from the region whose reply is meant; False when the request is to be answered here.

        Raises ``ChatError`` only before it has sent anything.
        """
        ...


class UnsupportedMediaType(InvalidInput):
    """A body that is not declared as JSON; browsers let foreign sites send the other types without asking."""

    code = "unsupported_media_type"
    title = "Send JSON"
    status = 415


class MethodNotAllowed(InvalidInput):
    """The stream is read with GET only."""

    code = "method_not_allowed"
    title = "This method is not allowed here"
    status = 405


class Door:
    """ASGI application around the framework's."""

    def __init__(
        self,
        app: ASGIApp,
        stream: StreamRoute,
        regions: RegionRoute | None = None,
        *,
        base_path: str,
        only_local_names: bool,
        leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        """``leaving``: whether callers had better come back over a new connection, which may find another process."""
        self._app = app
        self._stream = stream
        self._regions = regions
        self._base = base_path.rstrip("/")
        self._only_local_names = only_local_names
        self._leaving = leaving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's event."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                path = self._below_base(scope["path"])
                headers = dict(scope["headers"])
                self._check_host(headers)
                if scope["method"] not in _SAFE_METHODS:
                    _check_origin(headers)
                    _check_media_type(headers)
                match = _STREAM.fullmatch(path)
                if match and scope["method"] != "GET":
                    raise MethodNotAllowed("A stream is read with GET.")
                if self._regions is not None:
                    scope = self._regions.admit(path, scope)
                    if await self._regions.forward(path, scope, receive, send):
                        return
                if match:
                    await self._stream(match.group(1), scope, receive, send)
                    return
            except ChatError as error:
                await send_problem(send, error)
                return
            inner: dict[str, Any] = {**scope, "path": path, "raw_path": path.encode(), "root_path": self._base}
            added = [*_ADDED_HEADERS, (b"x-request-id", request_id.encode())]
            if self._leaving():
                added.append((b"connection", b"close"))
            await self._app(inner, receive, _adding_headers(send, added))

    def _below_base(self, path: str) -> str:
        if not self._base or path in _PROBES:
            return path
        if path == self._base or path.startswith(self._base + "/"):
            return path[len(self._base) :] or "/"
        raise NotFound(f"This server answers below {self._base}/ only.")

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        if not self._only_local_names:
            return
        name = _host_name("//" + headers.get(b"host", b"").decode("latin-1"))
        if name is None or name == "localhost" or name.endswith(".localhost") or _is_address(name):
            return
        raise NotAllowed(
            f"This server runs without authentication and does not answer to the name {name!r}. Use localhost or its "
            "address, set CHATSVC_AUTH, or allow it with CHATSVC_AUTH_ALLOW_PUBLIC_WITHOUT_AUTH=true."
        )


def _host_name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _check_origin(headers: dict[bytes, bytes]) -> None:
    site = headers.get(b"sec-fetch-site")
    if site in {b"same-origin", b"none"}:
        return
    origin = headers.get(b"origin")
    if site is None and origin is None:
        return  # not a browser
    if origin is not None:
        # Behind a proxy that rewrites Host the name the browser used is in X-Forwarded-Host; a foreign page can set
        # neither.
        own = {
            _host_name("//" + headers[name].decode("latin-1").split(",")[0].strip())
            for name in (b"host", b"x-forwarded-host")
            if name in headers
        }
        if _host_name(origin.decode("latin-1")) in own and site != b"cross-site":
            return
    raise NotAllowed("This request was made by a page of another site and is not taken.")


def _check_media_type(headers: dict[bytes, bytes]) -> None:
    if headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers:
        return
    media_type = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if media_type != b"application/json":
        raise UnsupportedMediaType("Send the body as JSON, with the header content-type: application/json.")


def _adding_headers(send: Send, added: Iterable[tuple[bytes, bytes]]) -> Send:
    async def adding(message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = list(message["headers"])
            present = {name.lower() for name, _ in headers}
            headers.extend(added)
            if b"cache-control" not in present:
                headers.append((b"cache-control", b"no-store"))
            message["headers"] = headers
        await send(message)

    return adding


async def send_problem(send: Send, error: ChatError) -> None:
    """An error as a problem document on the bare ASGI interface."""
    body = problem_bytes(error)
    headers = [
        (b"content-type", PROBLEM.encode()),
        (b"content-length", str(len(body)).encode()),
        *((name.encode(), value.encode()) for name, value in problem_headers(error).items()),
        *_ADDED_HEADERS,
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
