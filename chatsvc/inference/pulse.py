"""Tells a core that has hung from one that is only busy with a long step.

Both leave a question unanswered. A busy one uses the processor meanwhile; one that is stopped or waits for what never
comes does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

_ANSWER_S: Final = 1.5
"""So that ``Engine.health`` answers within two seconds."""
_BUSY_SHARE: Final = 0.2
"""Processors used, on average since the question was put, that count as busy."""


class Pulse:
    """``ask`` is answered by the core's own loop. ``cpu_seconds``: used by its processes; -1: they cannot run."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[object]],
        cpu_seconds: Callable[[], float],
        *,
        answer_s: float = _ANSWER_S,
    ) -> None:
        self._ask = ask
        self._cpu_seconds = cpu_seconds
        self._answer_s = answer_s
        self._question: asyncio.Task[None] | None = None
        self._asked_at = 0.0
        self._cpu_then = 0.0
        self.busy = False
        """Whether the core has used the processor while it owed an answer."""

    @property
    def silent_s(self) -> float:
        """For how many seconds the core has owed an answer."""
        return 0.0 if self._question is None else asyncio.get_running_loop().time() - self._asked_at

    async def beats(self) -> bool:
        """Ask; True when the answer comes in time, or the core is busy. One question is open at a time."""
        question = self._question
        if question is None:
            self._asked_at = asyncio.get_running_loop().time()
            self._cpu_then = self._cpu_seconds()
            question = self._question = asyncio.create_task(self._put_question())
        await asyncio.wait([question], timeout=self._answer_s)
        if question.done():
            if self._question is question:
                self._question = None
            self.busy = False
            return not question.cancelled() and question.exception() is None
        used = self._cpu_seconds()
        self.busy = used >= 0 and used - self._cpu_then >= _BUSY_SHARE * self.silent_s
        return self.busy

    async def aclose(self) -> None:
        """Withdraw the open question."""
        question, self._question = self._question, None
        if question is not None:
            question.cancel()
            await asyncio.gather(question, return_exceptions=True)

    async def _put_question(self) -> None:
        await self._ask()
