"""Slow loads in a thread: they cannot be interrupted, so whoever stops waiting closes what they brought."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def load_in_thread(load: Callable[[], T], close: Callable[[T], None]) -> T:
    """What ``load`` returns, loaded in a thread. When cancelled meanwhile: wait for it, ``close`` it, then go."""
    loading = asyncio.create_task(asyncio.to_thread(load))
    try:
        return await asyncio.shield(loading)
    except asyncio.CancelledError:
        await asyncio.wait([loading])
        if not loading.cancelled() and loading.exception() is None:
            await asyncio.to_thread(close, loading.result())
        raise
