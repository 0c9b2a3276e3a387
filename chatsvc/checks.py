"""``python -m chatsvc check``: says what is configured, tries each part, and says what to do about what is wrong.

A check is a coroutine that returns one sentence, or raises what went wrong. ``checks_of`` lists them all; each model
has one of its own. A fault is said once: what could not be tried for it is skipped. Nothing is left running, and
nothing but the data directory's own files is written.
"""

from __future__ import annotations

import asyncio
import errno
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, TextIO

import chatsvc
from chatsvc.config import UNNAMED_MODEL, Config, ModelConfig
from chatsvc.config_show import effective
from chatsvc.embedded import Progress, embedded_postgres, embedded_redis, lock_data_dir
from chatsvc.errors import ChatError, ConfigError, EngineUnavailable
from chatsvc.inference.embedder import create_embedder
from chatsvc.inference.factory import create_engine, default_model_name
from chatsvc.store import Schema, look
from chatsvc.streamlog.factory import create_log

PAGE: Final = Path(chatsvc.__file__).parent / "web" / "dist" / "index.html"
_LOW_DISK_BYTES: Final = 1_000_000_000
_ADVICE: Final = {
    "Postgres": "Is it running, and is CHATSVC_DATABASE_URL right?",
    "Redis": "Is it running, and is CHATSVC_REDIS_URL right?",
    "model": "Is its engine's URL right, and is the server there running?",
}
"""By the first word of a part's name."""
_QUICK_ENGINES: Final = ("openai", "scripted")
"""Engines that start at once. The others load a model, which a check does not wait for."""


class _NotTried(Exception):
    """A part that could not be tried for a fault that another check has said."""


async def check(config: Config, out: TextIO) -> bool:
    """Print the effective configuration and one line for each part. Returns whether all of them are well."""
    print(effective(config), file=out)
    well = True
    for part, attempt in checks_of(config):
        try:
            verdict, sentences = "OK  ", [await attempt(config)]
        except _NotTried as error:
            verdict, sentences, well = "SKIP", [f"not tried: {error}"], False
        except ConfigError as error:
            verdict, sentences, well = "FAIL", error.problems, False
        except (ChatError, OSError) as error:
            advice = _ADVICE.get(part.partition(" ")[0])
            fault = str(error) if str(error).endswith((".", "?")) else f"{error}."
            verdict, sentences, well = "FAIL", [f"{fault} {advice}" if advice else str(error)], False
        for sentence in sentences:
            print(f"{verdict}  {part:<15} {sentence}", file=out, flush=True)
    return well


async def _data_dir(config: Config) -> str:
    with lock_data_dir(config.data_dir), tempfile.TemporaryFile(dir=config.data_dir) as file:
        file.write(b"x" * 4096)
    free = shutil.disk_usage(config.data_dir).free
    if free < _LOW_DISK_BYTES:
        raise OSError(f"{config.data_dir} has {free // 1_000_000} MB left: make room, or set CHATSVC_DATA_DIR")
    return f"{config.data_dir} can be written, {free // 1_000_000_000} GB are free"


async def _port(config: Config) -> str:
    host, port = config.server.host, config.server.port
    addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as listener:
            # As the server does: connections of an earlier process that are still closing do not count.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(address)
                listener.listen(1)
            except OSError as error:
                raise OSError(f"{host}:{port}: {_BIND_FAULTS.get(error.errno or 0, error.strerror)}") from None
    return f"{host}:{port} is free"


_BIND_FAULTS: Final = {
    errno.EADDRINUSE: "another program listens there: stop it, or set CHATSVC_PORT",
    errno.EACCES: "this user may not listen there: ports below 1024 need rights, set CHATSVC_PORT",
    errno.EADDRNOTAVAIL: "this machine has no such address: set CHATSVC_HOST",
}


async def _page(config: Config) -> str:
    if "api" not in config.roles:
        return "not served by this process"
    if not PAGE.is_file():
        raise OSError(f"{PAGE} is missing: run `make web`, or install the wheel, which contains it")
    return "is built"


async def _postgres(config: Config) -> str:
    async with _outside_or_embedded(config.database.url, config, embedded_postgres) as url:
        schema = await look(url, timeout_s=config.database.timeout_s)
    return f"{'answers' if config.database.url else 'embedded: starts and answers'}{_SCHEMAS[schema]}"


_SCHEMAS: Final = {
    Schema.NONE: ", and has no tables of chatsvc yet: the next start makes them, or `python -m chatsvc migrate`",
    Schema.OLDER: ", with an older schema: the next start brings it up to date, or `python -m chatsvc migrate`",
    Schema.NEWEST: "",
}


async def _redis(config: Config) -> str:
    async with _outside_or_embedded(config.database.redis_url, config, embedded_redis) as url:
        log = create_log(url, timeout_s=config.database.timeout_s)
        try:
            await log.ping(everywhere=True)
        finally:
            await log.aclose()
    return "answers" if config.database.redis_url else "embedded: starts and answers"


async def _no_model(_: Config) -> str:
    return "not run by this process"


async def _model(model: ModelConfig, name: str, config: Config) -> str:
    engine = create_engine(model.engine, name=name, data_dir=config.data_dir, window=model.window, slots=model.slots)
    if model.engine.partition(":")[0] not in _QUICK_ENGINES:
        return f"{model.engine} is loaded at start"
    try:
        await engine.start(lambda _: None)
        health = await engine.health()
    finally:
        await engine.aclose()
    if not health.ready:
        raise EngineUnavailable(health.reason or "it is not ready")
    return "answers"


async def _recall(config: Config) -> str:
    if not config.recalls:
        return "not done by this process"
    embedder = create_embedder(config.context.embedder)
    if embedder is None:
        return "by words alone"
    await embedder.aclose()
    return f"by words, and by the embedding model {embedder.name}, which is loaded when it is needed"


_Embedded = Callable[[Path, Progress], AbstractAsyncContextManager[str]]


@asynccontextmanager
async def _outside_or_embedded(url: str, config: Config, embedded: _Embedded) -> AsyncIterator[str]:
    async with AsyncExitStack() as stack:
        if not url:
            try:
                stack.enter_context(lock_data_dir(config.data_dir))
            except ConfigError as error:
                raise _NotTried("its files are in the data directory") from error
            url = await stack.enter_async_context(embedded(config.data_dir, lambda _: None))
        yield url


_Check = Callable[[Config], Awaitable[str]]


def checks_of(config: Config) -> Iterator[tuple[str, _Check]]:
    """All checks of a process that is configured so, with the names of the parts."""
    yield "data directory", _data_dir
    yield "address", _port
    yield "page", _page
    yield "Postgres", _postgres
    yield "Redis", _redis
    if "worker" not in config.roles:
        yield "models", _no_model
    else:
        for key, model in config.models.items():
            name = default_model_name(model.engine) if key == UNNAMED_MODEL else key
            yield f"model {name}", partial(_model, model, name)
    yield "recall", _recall
