"""One other region: its replicas, tried in turn until one of them gives an answer that can be passed on.

What can be passed on is what this service itself would say: JSON, a problem document, a stream of events, nothing with
204. A page of some machine in between, a server error, or a refusal of our signature means: try the next replica. All
three requests may be made twice without harm, so trying again is always right.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

import msgspec
import structlog

from chatsvc.api.errors import PROBLEM
from chatsvc.api.region_client import Answer, ConnectionFailed, RegionClient
from chatsvc.api.region_trust import HEADER, RegionRefused, RegionTrust
from chatsvc.errors import Unavailable
from chatsvc.limits import Principal

_log = structlog.get_logger(__name__)

EVENT_STREAM: Final = "text/event-stream"
_JSON: Final = "application/json"
_MAX_BODY_BYTES: Final = 1 << 20
_BODY_S: Final = 5.0
_REST_S: Final = 5.0
"""A replica that failed is tried last for so long."""


class RegionUnreachable(Unavailable):
    """No replica of the reply's home region can be asked."""

    code = "region_unreachable"
    title = "The region that this reply is written in is not reachable"


class _Problem(msgspec.Struct):
    code: str = ""


class Peer:
    """See the module's docstring."""

    def __init__(
        self,
        name: str,
        replicas: Sequence[str],
        *,
        client: RegionClient,
        trust: RegionTrust,
        monotonic: Callable[[], float],
    ) -> None:
        self.name = name
        self._replicas = [url.rstrip("/") for url in replicas]
        self._client = client
        self._trust = trust
        self._monotonic = monotonic
        self._failed_at: dict[str, float] = {}

    @asynccontextmanager
    async def ask(self, method: str, target: str, principal: Principal | None) -> AsyncIterator[tuple[Answer, bytes]]:
        """The region's answer and its whole body; of a stream of events the body is still to be read.

        ``target`` is the path below the base path, and the query. Raises ``RegionUnreachable``.
        """
        kept: tuple[Answer, bytes] | None = None
        for replica in self._in_turn():
            async with AsyncExitStack() as stack:
                try:
                    headers = {HEADER.decode(): self._trust.sign(method, target, principal)}
                    answer = await stack.enter_async_context(self._client.open(method, replica + target, headers))
                    body = b"" if answer.media_type == EVENT_STREAM else await _whole(answer)
                    _check(answer, body)
                except ConnectionFailed as error:
                    self._note_failure(replica, str(error))
                    continue
                if failed(answer):
                    kept = (answer, body)
                    self._note_failure(replica, f"it answered {answer.status}")
                    continue
                self._failed_at.pop(replica, None)
                yield answer, body
                return
        if kept is None:
            raise RegionUnreachable(f"The region {self.name!r}, where this reply is written, cannot be reached now.")
        yield kept

    def _in_turn(self) -> list[str]:
        """The replicas, those that failed just now last, else in any order, so that all get their share."""
        now = self._monotonic()
        shuffled = random.sample(self._replicas, len(self._replicas))
        return sorted(shuffled, key=lambda replica: now - self._failed_at.get(replica, now - _REST_S) < _REST_S)

    def _note_failure(self, replica: str, reason: str) -> None:
        if replica not in self._failed_at:  # the first of many
            _log.warning(
                "a replica of another region failed", region=self.name, replica=urlsplit(replica).netloc, reason=reason
            )
        self._failed_at[replica] = self._monotonic()


def failed(answer: Answer) -> bool:
    """Whether the server that answered could not do its work. A loop is nobody's outage: all replicas would say so."""
    return answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR and answer.status != HTTPStatus.LOOP_DETECTED


async def _whole(answer: Answer) -> bytes:
    return await answer.whole(_BODY_S, most=_MAX_BODY_BYTES)


def _check(answer: Answer, body: bytes) -> None:
    """Raises ``ConnectionFailed`` for what no server of ours meant for the caller."""
    expected = _EXPECTED.get(answer.status, {PROBLEM} if answer.status >= HTTPStatus.BAD_REQUEST else set())
    if answer.media_type not in expected:
        raise ConnectionFailed(f"it answered {answer.status} with {answer.media_type or 'no media type'}")
    if answer.status == HTTPStatus.UNAUTHORIZED and _code(body) == RegionRefused.code:
        raise ConnectionFailed("it refused our signature: are secret and clocks the same in both regions?")


def _code(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Problem).code
    except msgspec.DecodeError:
        return ""


_EXPECTED: Final[dict[int, set[str]]] = {
    HTTPStatus.OK: {_JSON, EVENT_STREAM},
    HTTPStatus.ACCEPTED: {_JSON},
    HTTPStatus.NO_CONTENT: {""},
}
