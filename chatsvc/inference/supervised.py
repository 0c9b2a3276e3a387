"""An engine that comes back: one that has died or hung is closed and started anew, with back-off, by itself.

    ready ──(not healthy, twice in a row)──▶ closed ──▶ starting ──▶ ready
                                               ▲          │ fails
                                               └─ wait ◀──┘

The first start fails for good, so that what is wrong is set right; unless all that is wrong is that the engine's server
is not there yet: that is waited for in the same way.

While it is away ``generate`` and ``render`` raise ``EngineUnavailable`` and ``health`` says why, so the process gets no
work and its ``/readyz`` says no. Replies that were running end with ``EngineFailed`` as soon as the old engine closes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Final

import structlog

from chatsvc.errors import ChatError, EngineUnavailable
from chatsvc.inference.base import Engine, EngineHealth, EngineLimits, EngineLoad, Progress, ServerAway
from chatsvc.prompt import ChatMessage, Chunk, Prompt, Sampling

_logger = structlog.get_logger(__name__)

_LOOK_EVERY_S: Final = 2.0
_BAD_LOOKS: Final = 2
"""One bad answer may be a long step; two in a row, four seconds apart at most, are an engine to be replaced."""
_WAITS_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 60.0)


class SupervisedEngine(Engine):
    """Wraps engines made by ``make``, one after the other. ``run`` is the watchdog;

    the composition root owns its task.
    """

    def __init__(
        self,
        make: Callable[[], Engine],
        *,
        model: str,
        look_every_s: float = _LOOK_EVERY_S,
        waits_s: Sequence[float] = _WAITS_S,
    ) -> None:
        self._make = make
        self._model = model
        self._look_every_s = look_every_s
        self._waits_s = waits_s
        self._engine: Engine | None = None
        self._limits: EngineLimits | None = None
        self._why_away = "it has not been started"
        self.restarts = 0
        """How often the engine was replaced."""

    async def start(self, progress: Progress) -> None:
        engine = self._make()
        try:
            await engine.start(progress)
        except BaseException as error:
            if isinstance(error, ServerAway):
                self._limits = self._limits or engine.limits
            await engine.aclose()
            raise
        self._limits = engine.limits
        self._engine = engine

    async def start_or_wait(self, progress: Progress) -> bool:
        """``start``; False where its server is away: then ``run`` goes on trying. Raises ``EngineUnavailable``."""
        try:
            await self.start(progress)
        except ServerAway as error:
            self._not_started(error, self._waits_s[0])
            return False
        return True

    async def run(self) -> None:
        """Look after the engine until cancelled."""
        bad_looks = 0
        if self._engine is None:
            await self._started_again(after=1)
            _logger.info("engine has come", model=self._model)
        while True:
            await asyncio.sleep(self._look_every_s)
            health = await self._looked_at()
            bad_looks = 0 if health.ready else bad_looks + 1
            if bad_looks >= _BAD_LOOKS:
                await self._replace(health.reason or "it is not healthy")
                bad_looks = 0

    async def _looked_at(self) -> EngineHealth:
        try:
            return await self.health()
        except Exception as error:
            _logger.exception("engine could not be looked at", model=self._model, error_type=type(error).__name__)
            return EngineHealth(ready=False, reason=f"it cannot tell how it is ({type(error).__name__})")

    async def _replace(self, reason: str) -> None:
        _logger.error("engine is replaced", model=self._model, reason=reason)
        broken, self._engine = self._engine, None
        self._why_away = f"it is being restarted ({reason})"
        if broken is not None:
            try:
                await broken.aclose()
            except Exception as error:
                # It is broken; whatever it says while it goes, a new one is made.
                _logger.exception(
                    "broken engine did not close well", model=self._model, error_type=type(error).__name__
                )
        await self._started_again()
        self.restarts += 1
        _logger.info("engine is back", model=self._model, restarts=self.restarts)

    async def _started_again(self, after: int = 0) -> None:
        """Try until it is started; so many times it has failed before."""
        failures = after
        if failures:
            await asyncio.sleep(self._wait_s(failures))
        while self._engine is None:
            try:
                await self.start(_logger.info)
            except Exception as error:  # noqa: BLE001
                # Starting runs a library's own code, which raises what it likes: all of it means "not now".
                failures += 1
                self._not_started(error, self._wait_s(failures))
                await asyncio.sleep(self._wait_s(failures))

    def _wait_s(self, failures: int) -> float:
        return self._waits_s[min(failures, len(self._waits_s)) - 1]

    def _not_started(self, error: Exception, wait_s: float) -> None:
        if isinstance(error, ChatError):
            told = reason = error.detail.removesuffix(".")
        else:  # a library's own words are for the log only: everybody may read /readyz
            told, reason = type(error).__name__, f"{type(error).__name__}: {error}"
        self._why_away = f"it could not be started ({told}); trying again"
        _logger.warning("engine could not be started", model=self._model, reason=reason, wait_s=wait_s)

    def _here(self) -> Engine:
        if self._engine is None:
            raise EngineUnavailable(f"The engine of {self._model} is away: {self._why_away}.", retry_after=10)
        return self._engine

    @property
    def limits(self) -> EngineLimits:
        if self._limits is None:
            return self._here().limits
        return self._limits

    async def render(self, messages: Sequence[ChatMessage]) -> Prompt:
        return await self._here().render(messages)

    async def encode(self, text: str) -> Sequence[int]:
        return await self._here().encode(text)

    async def generate(
        self, prompt: Prompt, sampling: Sampling, run_id: str, priority: int = 0
    ) -> AsyncGenerator[Chunk, None]:
        async with aclosing(self._here().generate(prompt, sampling, run_id, priority)) as chunks:
            async for chunk in chunks:
                yield chunk

    def load(self) -> EngineLoad:
        return EngineLoad(running=0, waiting=0) if self._engine is None else self._engine.load()

    async def health(self) -> EngineHealth:
        if self._engine is None:
            return EngineHealth(ready=False, reason=self._why_away)
        return await self._engine.health()

    async def aclose(self) -> None:
        engine, self._engine = self._engine, None
        self._why_away = "it was closed"
        if engine is not None:
            await engine.aclose()
