"""Puts the routes together into one ASGI application."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any, TypeVar

from litestar import Litestar, Request
from litestar.di import Provide
from litestar.types import ControllerRouterHandler

from chatsvc.api.asgi import ASGIApp
from chatsvc.api.auth import Authenticator, caller_of, create_authenticator
from chatsvc.api.conversations import ConversationController, MessageController
from chatsvc.api.door import Door
from chatsvc.api.errors import HANDLERS
from chatsvc.api.health import health_routes
from chatsvc.api.memories import MemoryController
from chatsvc.api.metrics import create_registry
from chatsvc.api.models import ModelController
from chatsvc.api.openapi import complete, openapi_config
from chatsvc.api.page import load_assets, page_routes
from chatsvc.api.regions import create_regions
from chatsvc.api.responses import MeController, ResponseController
from chatsvc.api.sse import Streams
from chatsvc.api.stream import ResponseStream
from chatsvc.api.stream_token import StreamTokens
from chatsvc.api.summaries import SummaryController
from chatsvc.clock import Clock
from chatsvc.config import AuthMode, Config
from chatsvc.limits import Principal
from chatsvc.scheduler import Scheduler
from chatsvc.store import Store
from chatsvc.streamlog.base import StreamLog
from chatsvc.streamlog.hub import Hub

T = TypeVar("T")


async def create_api(
    *,
    config: Config,
    store: Store,
    log: StreamLog,
    hub: Hub,
    scheduler: Scheduler,
    clock: Clock,
    streams: Streams,
    web_dist: Path,
) -> ASGIApp:
    """The whole HTTP side. Raises ``StoreUnavailable``."""
    authenticator = create_authenticator(config.auth)
    base_path = config.server.base_path
    tokens = StreamTokens(
        await store.secrets.get_or_create("stream_token"),
        clock,
        ttl_s=config.stream.token_ttl_s,
        base_path=base_path,
    )
    regions = create_regions(config, clock=clock, store=store, streams=streams, authenticator=authenticator)
    registry = create_registry(scheduler, hub, streams, None if regions is None else regions.requests)
    handlers: list[ControllerRouterHandler] = [
        *health_routes(scheduler, registry, {"postgres": store.ping, "redis": log.ping})
    ]
    if "api" in config.roles:
        handlers += [
            ConversationController,
            SummaryController,
            MessageController,
            ResponseController,
            MeController,
            MemoryController,
            ModelController,
        ]
        handlers += page_routes(load_assets(web_dist, base_path))
    framework = Litestar(
        handlers,
        dependencies={
            "principal": Provide(_principal(authenticator), sync_to_thread=False),
            "store": _provide(store),
            "scheduler": _provide(scheduler),
            "tokens": _provide(tokens),
            "config": _provide(config),
            "clock": _provide(clock),
        },
        exception_handlers=HANDLERS,
        request_max_body_size=config.server.max_body_bytes,
        openapi_config=openapi_config(),
        logging_config=None,
    )
    complete(framework, base_path)
    stream = ResponseStream(
        store=store, streams=streams, scheduler=scheduler, authenticator=authenticator, tokens=tokens
    )
    return Door(
        framework,
        stream,
        regions,
        base_path=base_path,
        leaving=lambda: scheduler.draining,
        only_local_names=config.auth.mode is AuthMode.NONE
        and not config.auth.allow_public_without_auth
        and _is_loopback(config.server.host),
    )


def _provide(value: T) -> Provide:
    def give() -> T:
        return value

    give.__annotations__["return"] = type(value)
    return Provide(give, sync_to_thread=False)


def _principal(authenticator: Authenticator) -> Any:
    def principal(request: Request[Any, Any, Any]) -> Principal:
        return caller_of(authenticator, request.scope)

    return principal


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
