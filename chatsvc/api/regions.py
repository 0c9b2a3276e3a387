"""Replies of other regions: what names one of them is asked of its home region and passed on.

    GET  /v1/responses/{id}          ┐
    GET  /v1/responses/{id}/context  │
    GET  /v1/responses/{id}/stream   ├─ id names a peer ─▶ who calls? ─▶ ask there, signed ─▶ pass the answer on
    POST /v1/responses/{id}/stop     ┘                                     └─ unreachable ─▶ ended in our store? ─▶ here

A request that a region passed on is never passed on again. What is temporary is no HTTP error on a stream, since a
native ``EventSource`` would give up for good: an unreachable region is an ``error`` event, retryable and without an id,
and a stream that breaks is ended without one, so that the client comes back with its cursor.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qs

import structlog

from chatsvc.api.asgi import Receive, Scope, Send
from chatsvc.api.auth import VOUCHED, Authenticator, caller_of
from chatsvc.api.region_client import Answer, RegionClient
from chatsvc.api.region_peer import EVENT_STREAM, Peer, RegionUnreachable, failed
from chatsvc.api.region_relay import ClientGone, StreamRequest, relay, unless
from chatsvc.api.region_trust import RegionTrust
from chatsvc.api.sse import HEADERS, Streams, retry_line
from chatsvc.api.stream import cursor_of
from chatsvc.clock import Clock
from chatsvc.config import Config
from chatsvc.errors import ChatError, NotAuthenticated, NotFound, StoreUnavailable
from chatsvc.events import Error, passing_frame
from chatsvc.ids import region_of
from chatsvc.limits import Principal
from chatsvc.store import Store

_log = structlog.get_logger(__name__)

_METHODS: Final = {"": "GET", "/stream": "GET", "/stop": "POST", "/context": "GET"}
_ROUTE: Final = re.compile(rf"/v1/responses/([^/]+)({'|'.join(_METHODS)})")
_SILENT_HEARTBEATS: Final = 2
_PASSED_ON_HEADERS: Final[tuple[bytes, ...]] = (b"content-type", b"retry-after")
_HOP: Final = "chatsvc.region"
"""Key in a request's scope: the region that passed it on."""


class LoopDetected(ChatError):
    """A region was asked for another region's reply by a third one, or by itself."""

    code = "loop_detected"
    title = "The regions pass this request around in a circle"
    status = 508


class Regions:
    """See the module's docstring. ``requests`` counts by region and outcome:

    ``passed`` the home region answered · ``unreachable`` it did not · ``stored`` it did not, and our store had the end
    · ``moved`` a stream broke and went on from another replica · ``lost`` a stream broke and the client was let go.
    """

    def __init__(
        self,
        peers: Mapping[str, Peer],
        *,
        own: str,
        trust: RegionTrust,
        store: Store,
        streams: Streams,
        authenticator: Authenticator,
        idle_s: float,
    ) -> None:
        self._peers = peers
        self._own = own
        self._trust = trust
        self._store = store
        self._streams = streams
        self._authenticator = authenticator
        self._idle_s = idle_s
        self.requests: Counter[tuple[str, str]] = Counter()

    def admit(self, path: str, scope: Scope) -> Scope:
        """The request with whom another region vouches for in it, if one passed it on. Raises ``RegionRefused``."""
        query = scope["query_string"].decode("latin-1")
        hop = self._trust.check(scope["method"], f"{path}?{query}" if query else path, scope["headers"])
        return scope if hop is None else {**scope, VOUCHED: hop.principal, _HOP: hop.region}

    async def forward(self, path: str, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer from the region whose reply is meant; False when the request is to be answered here.

        Raises ``ChatError`` before it has sent anything.
        """
        match = _ROUTE.fullmatch(path)
        if match is None or scope["method"] != _METHODS[match.group(2)]:
            return False
        response_id = match.group(1)
        peer = self._peers.get(region_of(response_id) or "")
        if peer is None:
            return False
        if _HOP in scope:
            raise LoopDetected(
                f"The region {scope[_HOP]!r} asked the region {self._own!r} for a reply of the region {peer.name!r}. "
                "Look at the addresses in [regions]."
            )
        streaming = match.group(2) == "/stream"
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True) if streaming else {}
        token = query.get("token", [""])[-1]
        principal = self._caller(scope, token)
        try:
            if streaming:
                request = StreamRequest(peer, path, token, principal)
                await self._stream(request, cursor_of(scope, query), scope, receive, send)
            else:
                asking = peer.ask(scope["method"], path, principal)
                await self._pass_on(peer, asking, receive, send)
        except ClientGone:
            pass
        except RegionUnreachable as error:
            if principal is not None and await self._ended_here(principal, response_id):
                self.count(peer, "stored")
                return False
            self.count(peer, "unreachable")
            if not streaming:
                raise
            await _tell(error, send)
        return True

    def count(self, peer: Peer, outcome: str) -> None:
        """One more request for that region with this outcome."""
        self.requests[peer.name, outcome] += 1

    def _caller(self, scope: Scope, token: str) -> Principal | None:
        """Who calls; None when only the home region can tell, by its token. Raises ``NotAuthenticated``."""
        try:
            return caller_of(self._authenticator, scope)
        except NotAuthenticated:
            if token:
                return None
            raise

    async def _pass_on(
        self, peer: Peer, asking: AbstractAsyncContextManager[tuple[Answer, bytes]], receive: Receive, send: Send
    ) -> None:
        async with AsyncExitStack() as stack:
            answer, body = await unless(_disconnect(receive), stack.enter_async_context(asking))
        self.count(peer, "passed")
        await _send_answer(send, answer, body)

    async def _stream(self, request: StreamRequest, cursor: int, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as stack:
            asking = stack.enter_async_context(request.ask(cursor))
            answer, body = await unless(_disconnect(receive), asking)
            if failed(answer):
                raise RegionUnreachable(f"The region {request.peer.name!r} cannot serve this reply now.")
            self.count(request.peer, "passed")
            if answer.media_type != EVENT_STREAM:
                await _send_answer(send, answer, body)
                return
            stream = self._streams.open(scope, receive, send)
            await stream.relay(
                lambda: relay(
                    request,
                    answer,
                    stream.pipe,
                    stack,
                    cursor=cursor,
                    idle_s=self._idle_s,
                    note=partial(self.count, request.peer),
                )
            )

    async def _ended_here(self, principal: Principal, response_id: str) -> bool:
        """Whether our own store has the reply, ended: it was replicated."""
        try:
            return (await self._store.runs.get(principal.user_id, response_id)).status.ended
        except (NotFound, StoreUnavailable):
            return False


def create_regions(
    config: Config, *, clock: Clock, store: Store, streams: Streams, authenticator: Authenticator
) -> Regions | None:
    """The configured regions; None when this service has one region only, or this process answers no one."""
    if not config.regions.secret or "api" not in config.roles:
        return None
    trust = RegionTrust(config.regions.secret, clock, region=config.region)
    client = RegionClient()
    peers = {
        name: Peer(name, peer.replicas, client=client, trust=trust, monotonic=clock.monotonic)
        for name, peer in config.peers.items()
    }
    return Regions(
        peers,
        own=config.region,
        trust=trust,
        store=store,
        streams=streams,
        authenticator=authenticator,
        idle_s=_SILENT_HEARTBEATS * config.stream.heartbeat_s,
    )


async def _disconnect(receive: Receive) -> None:
    """Return when the client has left. A body that nobody asked for is let pass."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_answer(send: Send, answer: Answer, body: bytes) -> None:
    headers = [(name, answer.headers[name]) for name in _PASSED_ON_HEADERS if name in answer.headers]
    headers += [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
    if answer.status != HTTPStatus.NO_CONTENT:
        headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _tell(error: RegionUnreachable, send: Send) -> None:
    """A stream that says so and ends. The event has no id, so that the client's cursor stays where it is."""
    event = Error(code=error.code, message=error.detail, retryable=error.retryable)
    await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": list(HEADERS)})
    await send({"type": "http.response.body", "body": retry_line() + passing_frame(event), "more_body": False})
