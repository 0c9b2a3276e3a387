"""The composition root: opens every part in order, hands each what it needs, and closes them in reverse.

    socket ─▶ data directory ─▶ what models are to be run ─▶ Postgres, Redis ─▶ migrations ─▶ store ─▶
    log, hub, writer ─▶ engines ─▶ scheduler ─▶ API

What is wrong with the first three is said at once, all of it, before anything is started.

Shutting down: new work is refused and ``/readyz`` says so; running replies finish within the grace time, and what
cannot finish ends honestly; meanwhile readers of other replies are sent to other processes a few at a time, where there
are any. Then everybody is let go and everything closes. A second signal cuts the grace time short.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog
import uvicorn

from chatsvc.api.application import create_api
from chatsvc.api.asgi import ASGIApp
from chatsvc.api.departure import Departure
from chatsvc.api.direct import Places, StreamingProtocol
from chatsvc.api.listener import bound, most_connections
from chatsvc.api.sse import Streams
from chatsvc.api.stream import StoreSource
from chatsvc.clock import SystemClock
from chatsvc.config import UNNAMED_MODEL, Config
from chatsvc.embedded import embedded_postgres, embedded_redis, lock_data_dir
from chatsvc.errors import ConfigError, LogUnavailable
from chatsvc.inference.embedder import create_embedder
from chatsvc.inference.factory import create_engine, default_model_name
from chatsvc.inference.supervised import SupervisedEngine
from chatsvc.logs import tell
from chatsvc.scheduler import Scheduler
from chatsvc.scheduler.shared_state import RedisState
from chatsvc.store import migrate, open_store
from chatsvc.streamlog.base import StreamLog
from chatsvc.streamlog.factory import create_log
from chatsvc.streamlog.hub import Hub
from chatsvc.streamlog.presence import Presence
from chatsvc.streamlog.resume import Resumer
from chatsvc.streamlog.writer import LogWriter

_log = structlog.get_logger(__name__)

WEB_DIST: Final = Path(__file__).parent / "web" / "dist"
BACKLOG: Final = 4096
COLLECT_EVERY: Final = 10_000
"""More objects were made than went away: time to look which of them are garbage. Python's own 700 is for scripts."""
CLOSING_S: Final = 3
"""Streams and requests that are still open have this long to end once the drain is over."""


class _Signals:
    """The first SIGTERM or SIGINT asks to shut down, the next one to hurry."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()

    def _on_signal(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Listen for the length of a block."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


async def serve(config: Config) -> int:
    """Run the service until SIGTERM or SIGINT. Returns the process's exit code.

    Raises ``ConfigError`` and other ``ChatError`` with a plain sentence when a part cannot be opened.
    """
    signals = _Signals()
    with signals.installed():
        async with AsyncExitStack() as stack:
            opening = asyncio.create_task(_open(stack, config), name="open all parts")
            if not await _unless(signals.stop, opening):
                _log.info("stopped while starting")
                return 0
            scheduler, server, streams = opening.result()
            await signals.stop.wait()
            await _shut_down(config, scheduler, server, streams, signals.hurry)
    _log.info("stopped")
    return 0


async def _unless(event: asyncio.Event, task: asyncio.Task[_Opened]) -> bool:
    """Wait for a task; when the event comes first, cancel it. True when the task finished. Raises what it raised."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
            return True
        return False
    finally:
        for other in (task, waiting):
            other.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)


async def _open(stack: AsyncExitStack, config: Config) -> _Opened:
    """Open everything onto the stack, in order; returns what the shutdown needs."""
    problems: list[str] = []
    with _noting(problems):
        listener = stack.enter_context(
            bound(config.server.host, config.server.port, heartbeat_s=config.stream.heartbeat_s)
        )
    with _noting(problems):
        stack.enter_context(lock_data_dir(config.data_dir))
    config, default_model = _named(config)
    engines = _engines(config, problems) if "worker" in config.roles else {}
    with _noting(problems):
        embedder = create_embedder(config.context.embedder) if config.recalls else None
    if problems:
        raise ConfigError(problems)
    places = Places(most_connections())
    database_url = config.database.url or await stack.enter_async_context(embedded_postgres(config.data_dir, _progress))
    redis_url = config.database.redis_url or await stack.enter_async_context(embedded_redis(config.data_dir, _progress))
    await migrate(database_url)
    store = await stack.enter_async_context(
        open_store(
            database_url,
            pool_size=config.database.pool_size,
            timeout_s=config.database.timeout_s,
            cost=config.service,
        )
    )
    log = create_log(redis_url, timeout_s=config.database.timeout_s)
    stack.push_async_callback(log.aclose)
    await _warn_without_redis(log)
    hub = Hub(log)
    writer = LogWriter(
        log, hub, batch_ms=config.stream.batch_ms, batch_tokens=config.stream.batch_tokens, holds=store.runs.holds
    )
    stack.push_async_callback(writer.aclose)
    await stack.enter_async_context(_running(hub.run(), "hub"))
    await stack.enter_async_context(_running(writer.run(), "log writer"))
    scope = await store.workers.service_id()
    shared = RedisState(redis_url, scope=scope, timeout_s=config.database.timeout_s)
    if embedder is not None:
        stack.push_async_callback(embedder.aclose)
    await _start(stack, engines)
    clock = SystemClock()
    scheduler = Scheduler(
        store=store,
        log=log,
        writer=writer,
        engines=engines,
        default_model=default_model,
        config=config,
        clock=clock,
        shared=shared,
        embedder=embedder,
    )
    stack.push_async_callback(scheduler.aclose)
    await scheduler.look_at_engines()
    await stack.enter_async_context(_running(scheduler.run(), "scheduler"))
    resumer = Resumer(hub, StoreSource(store))
    streams = Streams(
        resumer,
        heartbeat_s=config.stream.heartbeat_s,
        buffer_events=config.stream.buffer_events,
        most=places.for_streams,
    )
    await stack.enter_async_context(_running(resumer.run(), "resumer"))
    await stack.enter_async_context(_running(streams.run(), "heartbeats"))
    await stack.enter_async_context(_running(Presence(hub).run(), "presence"))
    api = await create_api(
        config=config,
        store=store,
        log=log,
        hub=hub,
        scheduler=scheduler,
        clock=clock,
        streams=streams,
        web_dist=WEB_DIST,
    )
    _keep_for_good()
    server = await stack.enter_async_context(_serving(api, listener, places))
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{port}{config.server.base_path}"
    _log.info("ready", address=address, models=sorted(config.models), worker=scheduler.dispatcher.worker_id)
    if "api" in config.roles:
        tell(f"chatsvc is at {address} (Ctrl-C ends it)", config.log, sys.stderr)
    return scheduler, server, streams


def _keep_for_good() -> None:
    """Take all that was opened out of the garbage collector's sight, and have it look less often.

    What is open now stays; each full round over it would stop every stream for some 100 ms. A request makes a few
    thousand objects, nearly all of which go by themselves.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, 10, 10)


_Opened = tuple[Scheduler, uvicorn.Server, Streams]


async def _shut_down(
    config: Config, scheduler: Scheduler, server: uvicorn.Server, streams: Streams, hurry: asyncio.Event
) -> None:
    running, grace_s = scheduler.dispatcher.active_count, config.server.grace_s
    _log.info("shutting down", grace_s=grace_s, running=running, hint="a second SIGTERM or SIGINT ends it at once")
    if running:
        replies = f"{running} {'reply' if running == 1 else 'replies'}"
        tell(f"Waiting up to {grace_s:g} s for {replies}; press Ctrl-C again to end now.", config.log, sys.stderr)
    draining = asyncio.create_task(_drain(config, scheduler, streams), name="drain")
    hurrying = asyncio.create_task(hurry.wait(), name="wait for a second signal")
    await asyncio.wait({draining, hurrying}, return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    if not draining.done():
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        await scheduler.drain(0)
    streams.close()
    server.should_exit = True


async def _drain(config: Config, scheduler: Scheduler, streams: Streams) -> None:
    """Running replies finish; meanwhile other readers leave, if there is anywhere to go."""
    finishing = asyncio.create_task(scheduler.drain(config.server.grace_s), name="finish replies")
    try:
        if "api" in config.roles and await scheduler.others_serve():
            await Departure(
                streams, scheduler.runs_here, round_s=config.server.leave_s, most_s=config.server.grace_s
            ).run(finishing.done)
        await finishing
    finally:
        finishing.cancel()
        await asyncio.gather(finishing, return_exceptions=True)


async def _warn_without_redis(log: StreamLog) -> None:
    """Say it once when Redis does not answer; the start goes on, since it may come later."""
    try:
        await log.ping()
    except LogUnavailable as error:
        _log.warning(
            "Redis does not answer: new messages are refused until it does (503 log_unavailable). Is it running, and is"
            " CHATSVC_REDIS_URL right? It is tried again by itself; /readyz says how it is under checks.redis",
            reason=error.detail,
        )


async def _start(stack: AsyncExitStack, engines: Mapping[str, SupervisedEngine]) -> None:
    """Start them one after the other. Those whose server does not answer are warned of: they may come later."""
    away = []
    for name, engine in engines.items():
        stack.push_async_callback(engine.aclose)
        if not await engine.start_or_wait(_progress):
            away.append(name)
        await stack.enter_async_context(_running(engine.run(), f"supervisor of {name}"))
    if away:
        _log.warning(
            f"{'No model' if len(away) == len(engines) else 'Not every model'} can be used yet: messages to those whose"
            " server does not answer are refused until it does (503 engine_unavailable). Are the servers running, and"
            " are the engines' URLs right? They are tried again by themselves; /readyz says how they are",
            models=away,
        )


def _progress(line: str) -> None:
    _log.info(line)


def _named(config: Config) -> tuple[Config, str]:
    """The configuration with every model under the name it is served by, and the default one's name."""
    models = {
        default_model_name(model.engine) if name == UNNAMED_MODEL else name: model
        for name, model in config.models.items()
    }
    default = next((name for name, model in models.items() if model.default), next(iter(models)))
    return msgspec.structs.replace(config, models=models), default


def _engines(config: Config, problems: list[str]) -> Mapping[str, SupervisedEngine]:
    """The engines, not started yet, so that they hold nothing; notes what is wrong with them."""
    engines: dict[str, SupervisedEngine] = {}
    for name, model in config.models.items():
        make = partial(
            create_engine, model.engine, name=name, data_dir=config.data_dir, window=model.window, slots=model.slots
        )
        with _noting(problems):
            make()
        engines[name] = SupervisedEngine(make, model=name)
    return engines


@contextmanager
def _noting(problems: list[str]) -> Iterator[None]:
    """Note what is wrong with the configuration, and go on."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


@asynccontextmanager
async def _running(loop: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Run a part's loop for the length of a block."""
    task = asyncio.create_task(loop, name=name)
    task.add_done_callback(_die_with)
    try:
        yield
    finally:
        task.remove_done_callback(_die_with)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _die_with(task: asyncio.Task[None]) -> None:
    """A loop that ends by itself leaves the service half alive: better to shut down and be restarted."""
    _log.error("a part of the server ended", part=task.get_name(), exc_info=task.exception())
    signal.raise_signal(signal.SIGTERM)


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: the order of shutting down is ours."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def _serving(api: ASGIApp, listener: socket.socket, places: Places) -> AsyncIterator[uvicorn.Server]:
    server = _Server(
        uvicorn.Config(
            api,
            http=partial(StreamingProtocol, places=places),  # type: ignore[arg-type]  # called like a class
            ws="none",
            lifespan="off",
            interface="asgi3",
            access_log=False,  # addresses of streams carry tokens
            log_config=None,
            server_header=False,
            proxy_headers=False,  # the TCP peer decides whom to believe, so nobody may rewrite it
            backlog=BACKLOG,
            timeout_graceful_shutdown=CLOSING_S,
        )
    )
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        while not server.started and not task.done():  # noqa: ASYNC110  # the library has a flag and no event
            await asyncio.sleep(0.01)
        if task.done():
            await task
        yield server
    finally:
        server.should_exit = True
        await task
