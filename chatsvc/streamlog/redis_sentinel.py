"""Where the master is, as Sentinel says: asked anew for every connection, so that a fail-over is followed.

Nothing is remembered between two questions but which Sentinel answered last. What a Sentinel says is checked with the
server itself (``Address.must_be_master``): for a moment it may still name the one that has just been replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import hiredis
import msgspec

from chatsvc.errors import LogUnavailable
from chatsvc.streamlog.redis_wire import Address, dial, pack


class Sentinels:
    """Knows some Sentinels of one master. ``patience_s`` is how long one of them may take."""

    def __init__(self, sentinels: Sequence[Address], name: str, server: Address, *, patience_s: float) -> None:
        self._sentinels = list(sentinels)
        self._name = name
        self._server = msgspec.structs.replace(server, must_be_master=True)
        self._patience_s = patience_s

    async def locate(self, news: str) -> Address:
        """The master's address. Raises ``LogUnavailable`` when no Sentinel names one."""
        why = ""
        for sentinel in tuple(self._sentinels):
            try:
                async with asyncio.timeout(self._patience_s):
                    host, port = await self._ask(sentinel)
            except (OSError, LogUnavailable) as error:
                # A Sentinel that does not answer is asked last next time.
                self._sentinels.remove(sentinel)
                self._sentinels.append(sentinel)
                why = f"{sentinel.host}:{sentinel.port}: {error or 'no answer'}"
                continue
            return self._server.at(host, port)
        raise LogUnavailable(f"no Sentinel names a master ({why})")

    async def _ask(self, sentinel: Address) -> tuple[str, int]:
        wire = await dial(sentinel)
        try:
            (found,) = await wire.call(pack(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._name.encode()), 1)
        finally:
            wire.abort()
        if isinstance(found, hiredis.ReplyError):
            raise LogUnavailable(str(found))
        if found is None:
            raise LogUnavailable(f'it knows no master named "{self._name}"')
        host, port = found
        return host.decode(), int(port)
