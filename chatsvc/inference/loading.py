"""How engines with a model start: loaded in a thread, and warm before anyone waits for them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from contextlib import aclosing
from typing import TypeVar

from chatsvc.conversation import Role
from chatsvc.inference.base import Engine
from chatsvc.prompt import ChatMessage, Sampling

T = TypeVar("T")


async def load_in_thread(
    load: Callable[[], T], close: Callable[[T], None], hurry: Callable[[], None] = lambda: None
) -> T:
    """What ``load`` returns, loaded in a thread.

    A thread cannot be interrupted. When cancelled meanwhile: ``hurry`` it to its end if there is a way, wait for it,
    ``close`` what it brought, then go.
    """
    loading = asyncio.create_task(asyncio.to_thread(_load_for_good, load))
    try:
        return await asyncio.shield(loading)
    except asyncio.CancelledError:
        hurry()
        await asyncio.wait([loading])
        if not loading.cancelled() and loading.exception() is None:
            await asyncio.to_thread(close, loading.result())
        raise


def _load_for_good(load: Callable[[], T]) -> T:
    loaded = load()
    # The libraries of a model are a million objects that stay. Left in the collector's sight, each of its full rounds
    # would stop everything for some 400 ms (E9).
    gc.collect()
    gc.freeze()
    return loaded


def forget_loaded() -> None:
    """After a close: let the collector find what ``load_in_thread`` took out of its sight."""
    gc.unfreeze()
    gc.collect()


async def warm_up(engine: Engine) -> None:
    """Generate a few tokens: the first steps choose and load kernels, and show that the model works at all."""
    prompt = await engine.render([ChatMessage(Role.USER, "Hello")])
    async with aclosing(engine.generate(prompt, Sampling(max_tokens=4), "warm-up")) as chunks:
        async for _ in chunks:
            pass
