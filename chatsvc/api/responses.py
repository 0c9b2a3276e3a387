"""Replies: their state, and stop. Their stream is ``stream.py``'s."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from litestar import Controller, get, patch, post

from chatsvc.api.context import ContextOut, context_out
from chatsvc.api.conversations import plausible
from chatsvc.api.schemas import (
    MeOut,
    OpenReplies,
    PatchMe,
    QuotaOut,
    ResponseOut,
    StopOut,
    UsageOut,
    UserOut,
    WaitingReply,
    budget_out,
    response_out,
)
from chatsvc.api.stream_token import StreamTokens
from chatsvc.api.strict_json import StrictJson
from chatsvc.clock import Clock
from chatsvc.config import Config
from chatsvc.errors import NotFound
from chatsvc.limits import Principal
from chatsvc.scheduler import Scheduler
from chatsvc.store import Store

USAGE_PERIOD: Final = timedelta(days=1)


class ResponseController(Controller):
    """``/v1/responses``."""

    path = "/v1/responses"
    tags = ("responses",)

    @get("/{response_id:str}", operation_id="getResponse", summary="Read a reply's state")
    async def read(
        self, response_id: str, principal: Principal, store: Store, scheduler: Scheduler, tokens: StreamTokens
    ) -> ResponseOut:
        """Status, place in the queue while waiting, usage and error once ended."""
        run = await store.runs.get(principal.user_id, plausible(response_id, "response"))
        return response_out(run, await scheduler.position(run), tokens.url)

    @get("/{response_id:str}/context", operation_id="getContext", summary="What a reply's prompt was made of")
    async def context(self, response_id: str, principal: Principal, store: Store) -> ContextOut:
        """How the window was used: tokens by part, what a summary stands for, which old turns were quoted.

        404 until it is known: while the reply waits for its turn, and for a moment after; also where it ended before.
        """
        report = await store.runs.context(principal.user_id, plausible(response_id, "response"))
        if report is None and (await store.runs.get(principal.user_id, response_id)).status.ended:
            # It may have ended between the two looks, and its end brings the report.
            report = await store.runs.context(principal.user_id, response_id)
            if report is None:
                raise NotFound("What this reply's prompt was made of is not known: it ended before it had one.")
        if report is None:
            raise NotFound("What this reply's prompt is made of is not known yet.")
        return context_out(report)

    @post("/{response_id:str}/stop", status_code=202, operation_id="stopResponse", summary="Stop a reply")
    async def stop(self, response_id: str, principal: Principal, scheduler: Scheduler) -> StopOut:
        """Stop generating and keep the text. Idempotent; a reply that has ended stays as it is."""
        return StopOut((await scheduler.stop(principal.user_id, plausible(response_id, "response"))).status)


class MeController(Controller):
    """``/v1/me``."""

    path = "/v1/me"
    dto = StrictJson
    return_dto = None
    tags = ("me",)

    @get(operation_id="getMe", summary="Who am I, and what is left")
    async def me(self, principal: Principal, store: Store, scheduler: Scheduler, config: Config, clock: Clock) -> MeOut:
        """The caller, their tier, what they used in the last day, what they may still start, and what waits."""
        return await self._me(principal, store, scheduler, config, clock)

    @staticmethod
    async def _me(principal: Principal, store: Store, scheduler: Scheduler, config: Config, clock: Clock) -> MeOut:
        since = clock.now() - USAGE_PERIOD
        usage = await store.allowances.usage(principal.user_id, since)
        open_runs = await store.runs.open_runs(principal.user_id)
        open_ids = [run.id for run in open_runs]
        places = await scheduler.places(open_runs)
        waiting = [WaitingReply(run_id, place.position, place.eta_s) for run_id, place in places.items()]
        allowance = await store.allowances.allowance(principal.user_id, config.tiers[principal.tier])
        limit = allowance.open_limit
        return MeOut(
            user=UserOut(principal.user_id),
            tier=principal.tier.value,
            usage=UsageOut(since, usage.prompt_tokens, usage.cached_tokens, usage.output_tokens),
            quota=QuotaOut(
                OpenReplies(limit, len(open_ids), max(0, limit - len(open_ids)), open_ids, waiting),
                budget_out(allowance),
                refills_at=allowance.refills_at,
            ),
            memory=await store.memories.enabled(principal.user_id),
        )

    @patch(operation_id="updateMe", summary="Turn memory on or off")
    async def change(
        self,
        data: PatchMe,
        principal: Principal,
        store: Store,
        scheduler: Scheduler,
        config: Config,
        clock: Clock,
    ) -> MeOut:
        """On: memories are shown to the model in conversations that begin from now on, and in others after their next
        summary. Off, as it is at first: at once, nowhere. The memories themselves are kept.
        """
        await store.memories.enable(principal, enabled=data.memory)
        return await self._me(principal, store, scheduler, config, clock)
