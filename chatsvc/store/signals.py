"""News between processes, by Postgres' LISTEN and NOTIFY: sent with the transaction that makes them true.

A signal is a hint that saves waiting. It may be lost while a listener reconnects, so nothing rests on it: after every
connect the caller is told to read again what it would have heard of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec
import psycopg

from chatsvc.store.pool import connect
from chatsvc.store.records import Signal

NOTIFY: Final = """
    SELECT pg_notify('chatsvc',
        json_build_object('kind', %(kind)s::text, 'response_id', %(response_id)s::text, 'model', %(model)s::text)::text)
"""
NOTIFY_QUEUED: Final = """
    pg_notify('chatsvc', json_build_object('kind', 'queued', 'response_id', run.id, 'model', run.model,
        'waiting', json_build_object('id', run.id, 'user_id', run.user_id, 'tier', run.tier, 'model', run.model,
            'prompt_tokens', run.expected_prompt_tokens, 'max_tokens', run.max_tokens, 'kind', run.kind,
            'conversation_id', run.conversation_id,
            'age_s', greatest(0, extract(epoch FROM now() - run.created_at))))::text)
"""
"""Part of a statement that has such a row as ``run``."""
NOTIFY_PREFIX: Final = """
    pg_notify('chatsvc', json_build_object('kind', 'prefix', 'user_id', changed.user_id,
        'conversation_id', changed.conversation_id)::text)
"""
"""Part of a statement that has a row with these columns as ``changed``."""
PREFIX_CHANGED: Final = """
    SELECT pg_notify('chatsvc', json_build_object('kind', 'prefix', 'user_id', %(user_id)s::text,
        'conversation_id', %(conversation_id)s::text)::text)
"""
_FIRST_DELAY_S: Final = 0.05
_LONGEST_DELAY_S: Final = 1.0
_PROBE_S: Final = 10.0
"""A silent connection is asked for a sign of life this often."""


class Signals:
    """The listening side."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s

    async def listen(self, handler: Callable[[Signal], None], on_connect: Callable[[], None]) -> None:
        """Give every signal to ``handler`` until cancelled, over a connection of its own.

        ``on_connect`` is called once the connection listens, at first and again after it was lost and re-made.
        """
        delay = _FIRST_DELAY_S
        while True:
            with suppress(psycopg.Error, TimeoutError):  # away: said by every other command; here it is waited out
                async with asyncio.timeout(self._timeout_s + 1):
                    connection = await connect(self._url, timeout_s=self._timeout_s)
                async with connection:
                    await connection.execute("LISTEN chatsvc")
                    delay = _FIRST_DELAY_S
                    on_connect()
                    while True:
                        async for notify in connection.notifies(timeout=_PROBE_S):
                            _deliver(notify.payload, handler)
                        async with asyncio.timeout(self._timeout_s + 1):
                            await connection.execute("SELECT 1")
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LONGEST_DELAY_S)


def _deliver(payload: str, handler: Callable[[Signal], None]) -> None:
    try:
        signal = msgspec.json.decode(payload, type=Signal)
    except msgspec.DecodeError:
        # Somebody else's words on our channel; nothing rests on a signal.
        return
    if signal.response_id or signal.conversation_id:
        handler(signal)  # else it is about nothing, and not ours
