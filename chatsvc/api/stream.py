"""``GET /v1/responses/{id}/stream``: whose reply it is, where the reader stands, and then the log's events, to the end.

Served on the bare ASGI interface: the framework would add work to each event and cannot notice a reader that left.

A native ``EventSource`` gives up for good on any status but 200. So what is permanent (unknown, foreign, malformed) is
a problem document, and what passes (Postgres away) is an empty stream with a ``retry``: the client comes again.
"""

from __future__ import annotations

from collections.abc import Collection
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qs

import structlog

from chatsvc.api.asgi import Receive, Scope, Send
from chatsvc.api.auth import Authenticator, caller_of
from chatsvc.api.conversations import plausible
from chatsvc.api.sse import HEADERS, Streams, retry_line
from chatsvc.api.stream_token import StreamTokens
from chatsvc.errors import InvalidCursor, NotAuthenticated, StoreUnavailable
from chatsvc.events import MAX_SEQ, Queued, passing_frame
from chatsvc.run import Run, RunStatus
from chatsvc.scheduler import Scheduler
from chatsvc.scheduler.ending import terminal_event_of
from chatsvc.store import Store
from chatsvc.streamlog.resume import StoredReply

_log = structlog.get_logger(__name__)

_MAX_CURSOR_DIGITS: Final = 40
"""Longer ones are no cursor of anybody's; everything up to here is at worst from the future."""


class StoreSource:
    """The store as readers of the log need it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def reply(self, response_id: str) -> StoredReply:
        """What is stored of a reply, partial text included. Raises ``NotFound`` and ``StoreUnavailable``."""
        stored = await self._store.runs.reply(response_id)
        return StoredReply(
            status=stored.run.status,
            text=stored.text,
            text_seq=stored.text_seq,
            terminal=terminal_event_of(stored.run),
            last_seq=stored.run.last_seq,
        )

    async def ended(self, response_ids: Collection[str]) -> Collection[str]:
        """Which of these have ended or are gone. Raises ``StoreUnavailable``."""
        return await self._store.runs.ended(response_ids)


class ResponseStream:
    """The route."""

    def __init__(
        self,
        *,
        store: Store,
        streams: Streams,
        scheduler: Scheduler,
        authenticator: Authenticator,
        tokens: StreamTokens,
    ) -> None:
        self._store = store
        self._streams = streams
        self._scheduler = scheduler
        self._authenticator = authenticator
        self._tokens = tokens

    async def __call__(self, response_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one reader. Raises ``ChatError`` before anything was sent."""
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        cursor = cursor_of(scope, query)
        try:
            run = await self._run_for_caller(plausible(response_id, "response"), scope, query)
        except StoreUnavailable as error:
            _log.warning("stream put off", run_id=response_id, reason=error.detail)
            await _put_off(send)
            return
        last_seq = run.last_seq if run.status.ended else self._seen_last(response_id)
        if last_seq is not None and cursor >= last_seq:
            await send({"type": "http.response.start", "status": HTTPStatus.NO_CONTENT, "headers": _NO_STORE})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        if self._streams.full:
            await _put_off(send)
            return
        stream = self._streams.open(scope, receive, send)
        if run.status is not RunStatus.QUEUED:
            await stream.run(response_id, cursor, ended=run.status.ended)
            return

        def tell(queued: Queued) -> None:
            stream.push_passing(passing_frame(queued))

        watch = self._scheduler.watch_position(run, tell)
        try:
            await stream.run(response_id, cursor)
        finally:
            watch.close()

    def _seen_last(self, response_id: str) -> int | None:
        """The number of the terminal event of a reply that is about to end here: who has seen it may be back first."""
        active = self._scheduler.active(response_id)
        return active.last_seq if active is not None else None

    async def _run_for_caller(self, response_id: str, scope: Scope, query: dict[str, list[str]]) -> Run:
        """The run, if the caller's token or identity opens it. Raises ``NotAuthenticated`` and ``NotFound``."""
        active = self._scheduler.active(response_id)
        running = active.run if active is not None else None
        token = query.get("token", [""])[-1]
        if token and self._tokens.is_good(response_id, token):
            return running or await self._store.runs.find(response_id)
        try:
            principal = caller_of(self._authenticator, scope)
        except NotAuthenticated as error:
            if token:
                raise NotAuthenticated(
                    "The token in this stream's address is not valid, or has expired. Read the conversation again for "
                    "a new address."
                ) from error
            raise
        if running is not None and running.user_id == principal.user_id:
            return running
        return await self._store.runs.get(principal.user_id, response_id)


async def _put_off(send: Send) -> None:
    """An empty stream: an ``EventSource`` comes back with the same cursor after ``retry``."""
    await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": HEADERS})
    await send({"type": "http.response.body", "body": retry_line(), "more_body": False})


_NO_STORE: Final = [(b"cache-control", b"no-store")]


def cursor_of(scope: Scope, query: dict[str, list[str]]) -> int:
    """The last seq the client has seen; 0 for none. The header wins: a reconnecting EventSource repeats the old query.

    Raises ``InvalidCursor`` for anything but ASCII digits.
    """
    # Blanks around a header's value are not part of it (RFC 9110, 5.5); in a query everything counts.
    values = [value.decode("latin-1").strip(" \t") for name, value in scope["headers"] if name == b"last-event-id"]
    text = (values or query.get("last_event_id") or [""])[-1]
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()) or len(text) > _MAX_CURSOR_DIGITS:
        raise InvalidCursor(
            f"A cursor is the id of the last event seen: up to {_MAX_CURSOR_DIGITS} decimal digits and nothing else.",
            field="last_event_id",
        )
    return min(int(text), MAX_SEQ)
