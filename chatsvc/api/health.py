"""Alive, able to serve, and in numbers.

``/healthz`` says that the process answers; nothing else may make it fail, or a database's trouble gets every replica
killed. ``/readyz`` says whether new work would be taken here; a load balancer sends readers elsewhere when it is not.
Of several models one is enough: or the trouble of one model's server, which all replicas ask, would take all of them
out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from litestar import Response, get
from litestar.handlers import HTTPRouteHandler
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from chatsvc.errors import Unavailable
from chatsvc.scheduler import Scheduler


class ReadyOut(msgspec.Struct, frozen=True):
    """``/readyz``. ``checks`` has "ok" or what is wrong, by part."""

    ready: bool
    checks: dict[str, str]


async def _checked(check: Callable[[], Awaitable[Any]]) -> str:
    try:
        await check()
    except Unavailable as error:
        return error.detail
    return "ok"


async def readiness(scheduler: Scheduler, parts: Mapping[str, Callable[[], Awaitable[Any]]]) -> ReadyOut:
    """Ask every part at the same time. Redis is asked but not needed: replies go on without it.

    Of the engines one is needed, where there are any.
    """
    answers = await asyncio.gather(*(_checked(check) for check in parts.values()))
    checks = dict(zip(parts, answers, strict=True))
    if scheduler.draining:
        checks["server"] = "shutting down"
    needed = [answer for name, answer in checks.items() if name != "redis"]
    engines = {
        f"engine {model}": "ok" if health.ready else (health.reason or "not ready")
        for model, health in scheduler.health().items()
    }
    serves = not engines or "ok" in engines.values()
    return ReadyOut(serves and all(answer == "ok" for answer in needed), checks | engines)


def health_routes(
    scheduler: Scheduler, registry: CollectorRegistry, parts: Mapping[str, Callable[[], Awaitable[Any]]]
) -> list[HTTPRouteHandler]:
    """The three routes."""

    @get("/healthz", operation_id="healthz", summary="Is the process alive", tags=("operation",), sync_to_thread=False)
    def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @get("/readyz", operation_id="readyz", summary="Would new work be taken here", tags=("operation",))
    async def readyz() -> Response[ReadyOut]:
        ready = await readiness(scheduler, parts)
        return Response(ready, status_code=200 if ready.ready else 503, headers={"cache-control": "no-store"})

    @get(
        "/metrics",
        operation_id="metrics",
        summary="Prometheus metrics",
        tags=("operation",),
        media_type="text/plain",
        sync_to_thread=False,
    )
    def metrics() -> Response[bytes]:
        # The framework adds the charset to every text.
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST.partition("; charset")[0])

    return [healthz, readyz, metrics]
