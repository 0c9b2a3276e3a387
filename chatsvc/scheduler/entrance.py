"""A request's way to the rows of its run: its turn, another try when what it stood on has changed, and the disk.

Nobody is told that a message was taken in before it is on the disk. Other replicas may hear of it sooner (ADR 11).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from chatsvc.errors import ConversationBusy, StoreUnavailable
from chatsvc.scheduler.turnstile import Turnstile
from chatsvc.store import Moved, Submitted
from chatsvc.store.runs import Runs

STOPPING_WAIT_S: Final = 1.0
"""A message sent right after a stop waits so long for that reply's end."""
STOPPING_POLL_S: Final = 0.02
MOST_MOVES: Final = 3
"""Fewer changes while a message is taken in are tried again, however long its locks were waited for."""


class Entrance:
    """Of one process."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._turnstile = Turnstile()

    async def enter(self, submit: Callable[[], Awaitable[Submitted]]) -> Submitted:
        """Submit, and return once the run is kept. Raises what ``submit`` does but ``Moved``, and ``StoreUnavailable``:

        then the run may have been written all the same, and asking again with the same id tells.
        """
        submitted = await self._submit(submit)
        if submitted.may_be_lost:
            await asyncio.sleep(0)  # what the other replicas are told goes out first
            await self._runs.keep(submitted.run.id)
        return submitted

    async def _submit(self, submit: Callable[[], Awaitable[Submitted]]) -> Submitted:
        """Submit, and again when what the request stood on has changed meanwhile.

        When the branch is busy with a reply that is being stopped, wait for its end first.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + STOPPING_WAIT_S
        moves = 0
        while True:
            try:
                async with self._turnstile.turn():
                    return await submit()
            except Moved as error:
                moves += 1
                if moves >= MOST_MOVES and loop.time() >= give_up:
                    raise StoreUnavailable("The conversation is changing too fast. Try again.") from error
                continue
            except ConversationBusy as busy:
                if not busy.extra.pop("stop_requested", False) or loop.time() >= give_up:
                    raise
                response_id = str(busy.extra["response_id"])
            while not await self._runs.ended([response_id]):
                if loop.time() >= give_up:
                    break
                await asyncio.sleep(STOPPING_POLL_S)
