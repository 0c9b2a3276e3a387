"""Removes what is kept for a while only: temporary conversations that nobody uses any more, and old usage."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Final

import structlog

from chatsvc.errors import StoreUnavailable
from chatsvc.scheduler.forget import LogForgetter
from chatsvc.store import Store

_log = structlog.get_logger(__name__)

CLEAR_EVERY_S: Final = 600.0
TEMPORARY_KEPT: Final = timedelta(hours=24)
"""A temporary conversation is deleted when nothing has happened in it for so long."""


async def clear_now_and_then(store: Store, forgetter: LogForgetter) -> None:
    """Look until cancelled."""
    while True:
        try:
            await forgetter.forget(await store.conversations.sweep_temporary(TEMPORARY_KEPT))
        except StoreUnavailable as error:
            _log.warning("temporary conversations not cleared yet", reason=error.detail)
        try:
            await store.allowances.forget()
        except StoreUnavailable as error:
            _log.warning("old usage not cleared yet", reason=error.detail)
        await asyncio.sleep(CLEAR_EVERY_S)
