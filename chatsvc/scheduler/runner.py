"""One run, from its claim to its one end (L4, L5). This is the main path of the service:

    claimed run ─▶ branch from the store ─▶ context.assemble ─▶ engine.render ─▶ engine.generate
                ─▶ deltas into the log ─▶ store.finish (compare-and-set) ─▶ terminal event into the log

The final text is in Postgres before ``done`` is in the log; when Postgres is away the end waits for it. Whatever goes
wrong on the way, the run ends: as complete, stopped or failed, or back in the queue when nothing was shown yet.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import aclosing
from typing import Final

import msgspec
import structlog

from chatsvc.errors import Abandoned, ChatError, Draining, EngineFailed, EngineUnavailable
from chatsvc.events import Context, Start
from chatsvc.inference.base import Engine
from chatsvc.limits import TierName, Usage
from chatsvc.prompt import ContextReport, Sampling
from chatsvc.run import MOST_LOSSES, Outcome, Run, RunStatus
from chatsvc.scheduler.active import ActiveRun, Interrupt
from chatsvc.scheduler.checkpoint import Checkpointer
from chatsvc.scheduler.ending import terminal_event_for
from chatsvc.scheduler.forget import LogForgetter
from chatsvc.scheduler.patience import patiently
from chatsvc.scheduler.pressure import HISTORY
from chatsvc.scheduler.prompts import Prepared, Prompts
from chatsvc.scheduler.wanted import Wanted
from chatsvc.store import Store
from chatsvc.streamlog.base import Fenced
from chatsvc.streamlog.writer import LogWriter, ReplyWriter

_log = structlog.get_logger(__name__)

PRIORITY: Final = {TierName.PRO: 0, TierName.PLUS: 1, TierName.FREE: 2}
ENGINE_AWAY: Final = (EngineUnavailable, EngineFailed)


class _Progress:
    """What a generation has come to so far; read after it ended, however it ended."""

    def __init__(self) -> None:
        self.usage = Usage()
        self.finish_reason: str | None = None
        self.failure: ChatError | None = None
        self.context: ContextReport | None = None
        self.kept = ""
        """Text of the reply that is gone on with. Not shown before the first token, so that a run that has not
        generated any can still be queued again."""

    def show_kept(self, reply: ReplyWriter) -> None:
        """Begin the reply with the kept text, once."""
        if self.kept:
            reply.delta(self.kept, 0)
            self.kept = ""


class Runner:
    """Carries out claimed runs. Stateless but for what is handed in."""

    def __init__(
        self,
        *,
        store: Store,
        writer: LogWriter,
        engines: Mapping[str, Engine],
        prompts: Prompts,
        checkpoints: Checkpointer,
        forgetter: LogForgetter,
        log_ttl_s: float,
        history_share: float,
    ) -> None:
        self._store = store
        self._writer = writer
        self._engines = engines
        self._prompts = prompts
        self._checkpoints = checkpoints
        self._forgetter = forgetter
        self._log_ttl_s = log_ttl_s
        self._history_share = history_share
        self.ended: Counter[tuple[str, str]] = Counter()
        """Replies ended by this process, by model and status."""
        self.tokens: Counter[tuple[str, str]] = Counter()
        """Tokens they used, by model and kind, on every kind of end."""

    async def execute(self, active: ActiveRun) -> bool:
        """See the run to its end. False when its engine turned out to be away."""
        run = active.run
        with structlog.contextvars.bound_contextvars(run_id=run.id, conversation_id=run.conversation_id):
            try:
                reply = await self._writer.open(run.id, run.attempt)
            except Fenced:
                _log.info("run was taken over before it began", attempt=run.attempt)
                return True
            progress = _Progress()
            try:
                await self._carry_out(active, reply, progress)
            except BaseException:
                reply.discard()
                raise
            self._count(run, progress)
            return not isinstance(progress.failure, ENGINE_AWAY)

    async def _carry_out(self, active: ActiveRun, reply: ReplyWriter, progress: _Progress) -> None:
        run = active.run
        try:
            self._checkpoints.track(active, reply, lambda: progress.usage)
            await self._generate(active, reply, progress)
        finally:
            self._checkpoints.forget(run.id)
        if active.why is Interrupt.GONE or active.why is Interrupt.LOST or reply.fenced:
            reply.discard()
            _log.info("run given up", why="fenced" if active.why is None else active.why.value)
            if active.why is Interrupt.GONE:
                # Opening the log may have made it anew after the delete.
                await self._forgetter.forget([run.id])
                # Its rows are gone, and what it used was used all the same.
                await patiently(lambda: self._store.allowances.bill(run.user_id, progress.usage))
        else:
            await self._end(active, reply, progress)

    def _count(self, run: Run, progress: _Progress) -> None:
        usage = progress.usage
        for kind, count in (
            ("prompt", usage.prompt_tokens),
            ("cached", usage.cached_tokens),
            ("output", usage.output_tokens),
        ):
            self.tokens[run.model, kind] += count

    async def _generate(self, active: ActiveRun, reply: ReplyWriter, progress: _Progress) -> None:
        generation = asyncio.create_task(self._produce(active, reply, progress), name=f"generate {active.run.id}")
        active.guard(generation)
        try:
            await generation
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if active.why is None or (task is not None and task.cancelling()):
                raise  # our own task is being cancelled, not only the generation
        except ChatError as error:
            progress.failure = error
            _log.warning("generation failed", code=error.code, detail=error.detail)
        except Exception as error:  # noqa: BLE001
            # The last line of defence: whatever a backend throws must end the run honestly, not leave it hanging.
            progress.failure = ChatError("The server failed to finish this reply.")
            _log.exception("generation failed unexpectedly", error_type=type(error).__name__)

    async def _produce(self, active: ActiveRun, reply: ReplyWriter, progress: _Progress) -> None:
        run = active.run
        engine = self._engines[run.model]
        if reply.last_seq == 0:
            reply.event(
                Start(
                    response_id=run.id,
                    message_id=run.message_id,
                    model=run.asked_model or run.model,
                    created_at=run.created_at,
                    served_model=run.model,
                    degraded=run.degraded,
                )
            )
        prepared = active.prepared = active.prepared or await self._prepared(run, progress)
        prompt, report = prepared.prompt, prepared.report
        progress.context = report
        sampling = Sampling(
            max_tokens=prepared.reply_limit,
            temperature=engine.limits.temperature if run.temperature is None else run.temperature,
        )
        progress.usage = Usage(prompt_tokens=prompt.tokens)
        output_tokens = 0
        first = True
        request_id = f"{run.id}.{run.attempt}"
        async with aclosing(engine.generate(prompt, sampling, request_id, PRIORITY[run.tier])) as chunks:
            async for chunk in chunks:
                output_tokens += chunk.output_tokens
                active.output_tokens = output_tokens
                progress.usage = Usage(
                    prompt_tokens=prompt.tokens if chunk.prompt_tokens is None else chunk.prompt_tokens,
                    cached_tokens=chunk.cached_tokens or 0,
                    output_tokens=output_tokens,
                )
                if first:
                    first = False
                    active.meter.started(progress.usage.prompt_tokens, progress.usage.cached_tokens)
                    progress.context = report = msgspec.structs.replace(report, cached_tokens=chunk.cached_tokens)
                    reply.event(_context_event(report, progress.usage))
                    progress.show_kept(reply)
                active.meter.delivered(chunk.output_tokens)
                if chunk.text:
                    reply.delta(chunk.text, chunk.output_tokens)
                if chunk.finish_reason is not None:
                    progress.finish_reason = chunk.finish_reason
                if reply.fenced:
                    return

    async def _prepared(self, run: Run, progress: _Progress) -> Prepared:
        """What the run is to answer. A reply that goes on with another one's text begins with it."""
        leaf = run.continues_message_id or run.user_message_id
        conversation, view = await patiently(
            lambda: self._store.conversations.view(run.user_id, run.conversation_id, leaf)
        )
        if run.continues_message_id is not None:
            progress.kept = view.verbatim[-1].content
            if not progress.kept:
                view = msgspec.structs.replace(view, verbatim=view.verbatim[:-1])
        return await self._prompts.prepare(
            Wanted(
                model=run.model,
                conversation=conversation,
                view=view,
                leaf_id=run.user_message_id,
                max_tokens=run.max_tokens,
                history_share=self._history_share if HISTORY in run.degraded else 1.0,
            )
        )

    async def _end(self, active: ActiveRun, reply: ReplyWriter, progress: _Progress) -> None:
        run = active.run
        active.settling = True
        if _worth_another_attempt(active, reply, progress):
            lost = active.why is None
            requeued = await patiently(lambda: self._store.runs.requeue(run.id, run.attempt, reply.last_seq, lost=lost))
            if requeued:
                active.queued_again = True
                _log.info("run queued again, nothing was shown yet")
                await reply.close(None)
                return
        if run.continues_message_id is not None and not reply.text and not progress.kept:
            # Cut short before the text was read that it was to go on with: that text stays all the same.
            progress.kept = await patiently(lambda: self._store.runs.kept_text(run))
        progress.show_kept(reply)
        outcome = _outcome(active, reply, progress)
        won = await patiently(lambda: self._store.runs.finish(run.id, run.attempt, outcome, progress.context))
        if not won:
            _log.info("run had been ended elsewhere")
            reply.discard()
            return
        active.complete = outcome.status is RunStatus.COMPLETE
        active.last_seq = outcome.last_seq
        reply.event(terminal_event_for(run.message_id, outcome))
        await reply.close(self._log_ttl_s)
        self.ended[run.model, outcome.status.value] += 1
        _log.info(
            "run ended",
            status=outcome.status.value,
            finish_reason=outcome.finish_reason,
            error_code=outcome.error_code,
            prompt_tokens=outcome.usage.prompt_tokens,
            cached_tokens=outcome.usage.cached_tokens,
            output_tokens=outcome.usage.output_tokens,
        )


def _context_event(report: ContextReport, usage: Usage) -> Context:
    summary = report.summary
    return Context(
        condensed=report.condensed,
        summary_through=summary.through_message_id if summary else None,
        retrieved=tuple(message_id for turn in report.recalled for message_id in turn.message_ids),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=report.cached_tokens,
        window=report.window,
        left_out=report.left_out,
        parts=report.parts,
    )


def _worth_another_attempt(active: ActiveRun, reply: ReplyWriter, progress: _Progress) -> bool:
    """Nothing was shown, and what ended it has nothing to do with the run (L6). A run that breaks engines is not."""
    if reply.text or progress.finish_reason is not None:
        return False
    if active.why is None:
        return isinstance(progress.failure, ENGINE_AWAY) and active.run.losses + 1 < MOST_LOSSES
    return active.why is Interrupt.DRAIN


def _outcome(active: ActiveRun, reply: ReplyWriter, progress: _Progress) -> Outcome:
    """Judge what happened. A reply that reached its own end is complete, even when a stop came with its last token."""
    last_seq = reply.seal()
    text = reply.text
    if progress.finish_reason is not None:
        return Outcome(
            status=RunStatus.COMPLETE,
            text=text,
            last_seq=last_seq,
            finish_reason=progress.finish_reason,
            usage=progress.usage,
        )
    if active.why in {Interrupt.STOP, Interrupt.ABANDON}:
        abandoned = active.why is Interrupt.ABANDON
        return Outcome(
            status=RunStatus.STOPPED,
            text=text,
            last_seq=last_seq,
            finish_reason="stopped",
            usage=progress.usage,
            error_code=Abandoned.code if abandoned else None,
            error_message=f"{Abandoned.title}." if abandoned else None,
        )
    failure = progress.failure or Draining("The server was shut down before this reply was finished. Try again.")
    return Outcome(
        status=RunStatus.FAILED,
        text=text,
        last_seq=last_seq,
        usage=progress.usage,
        error_code=failure.code,
        error_message=failure.detail,
    )
