"""Serves the page: files built by esbuild, read once at start, with the base path put in at run time.

Every file but ``index.html`` has a hash in its name, so it may be kept for ever; ``index.html`` is asked for each time.
"""

from __future__ import annotations

import hashlib
import mimetypes
from html import escape
from pathlib import Path
from typing import Any, Final

import msgspec
from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler

from chatsvc.errors import NotFound

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS: Final = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
NOT_BUILT: Final = (
    "<!doctype html><title>chatsvc</title><p>The page has not been built: run <code>make web</code> and restart. "
    'The API works; see <a href="schema">its description</a>.'
)


class Asset(msgspec.Struct, frozen=True):
    """One file of the page."""

    body: bytes
    media_type: str
    etag: str


def load_assets(dist: Path, base_path: str) -> dict[str, Asset]:
    """All files below ``dist`` by their relative path, or a note in place of ``index.html`` when it was not built."""
    files = {path.relative_to(dist).as_posix(): path.read_bytes() for path in dist.rglob("*") if path.is_file()}
    index = files.get("index.html", NOT_BUILT.encode())
    files["index.html"] = index.replace(b'<base href="/">', f'<base href="{escape(base_path)}">'.encode())
    return {name: _asset(name, body) for name, body in files.items()}


def _asset(name: str, body: bytes) -> Asset:
    media_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return Asset(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def page_routes(assets: dict[str, Asset]) -> list[HTTPRouteHandler]:
    """``/`` and ``/c/<id>`` give the page, ``/assets/…`` its files."""

    def serve(request: Request[Any, Any, Any], name: str) -> Response[bytes]:
        asset = assets.get(name)
        if asset is None:
            raise NotFound("There is no such file.")
        kept = "no-cache" if name == "index.html" else "public, max-age=31536000, immutable"
        headers = {"etag": asset.etag, "cache-control": kept, **PAGE_HEADERS}
        if request.headers.get("if-none-match") == asset.etag:
            return Response(b"", status_code=304, headers=headers)
        return Response(asset.body, headers=headers, media_type=asset.media_type)

    @get(["/", "/c/{conversation_id:str}"], include_in_schema=False, sync_to_thread=False)
    def index(request: Request[Any, Any, Any]) -> Response[bytes]:
        return serve(request, "index.html")

    @get("/assets/{name:path}", include_in_schema=False, sync_to_thread=False)
    def asset(request: Request[Any, Any, Any], name: str) -> Response[bytes]:
        return serve(request, f"assets/{str(name).lstrip('/')}")

    return [index, asset]
