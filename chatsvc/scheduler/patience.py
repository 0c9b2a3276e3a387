"""Waiting for Postgres: what runs is not lost because the database is away for a while (L4)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import structlog

from chatsvc.errors import StoreUnavailable

_log = structlog.get_logger(__name__)
T = TypeVar("T")

_RETRY_FIRST_S: Final = 0.1
_RETRY_MOST_S: Final = 2.0


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call on the store until Postgres answers."""
    wait_s = _RETRY_FIRST_S
    while True:
        try:
            return await call()
        except StoreUnavailable as error:
            _log.warning("waiting for the store", reason=error.detail, wait_s=wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, _RETRY_MOST_S)
