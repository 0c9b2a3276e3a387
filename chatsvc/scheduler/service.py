"""The scheduler as the API sees it, and the tasks behind it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec
import structlog

from chatsvc.clock import Clock
from chatsvc.config import AuthMode, Config
from chatsvc.errors import Draining, StoreUnavailable
from chatsvc.events import Queued
from chatsvc.inference.base import Engine, EngineHealth
from chatsvc.inference.embedder import Embedder
from chatsvc.limits import Principal
from chatsvc.run import Run, RunStatus
from chatsvc.scheduler.abandon import Abandonment
from chatsvc.scheduler.active import ActiveRun, Interrupt
from chatsvc.scheduler.checkpoint import Checkpointer
from chatsvc.scheduler.clearing import clear_now_and_then
from chatsvc.scheduler.dispatch import Dispatcher
from chatsvc.scheduler.ending import announce
from chatsvc.scheduler.fleet import Fleet
from chatsvc.scheduler.fold_runner import FoldRunner
from chatsvc.scheduler.folds import Folds
from chatsvc.scheduler.forget import LogForgetter
from chatsvc.scheduler.lease import LeaseKeeper
from chatsvc.scheduler.lines import Lines
from chatsvc.scheduler.orphans import Orphans
from chatsvc.scheduler.overdue import Overdue
from chatsvc.scheduler.positions import Positions, Teller, Watch
from chatsvc.scheduler.pressure import Pressure
from chatsvc.scheduler.prompts import Prompts
from chatsvc.scheduler.recall import Recall
from chatsvc.scheduler.replicas import Replicas
from chatsvc.scheduler.request import NewAnswer, NewMessage
from chatsvc.scheduler.runner import Runner
from chatsvc.scheduler.shared_state import Board, MemoryState, SharedState
from chatsvc.scheduler.submit import Submitter
from chatsvc.scheduler.warming import Warming
from chatsvc.store import Signal, Store, Submitted
from chatsvc.streamlog.base import StreamLog
from chatsvc.streamlog.writer import LogWriter

_log = structlog.get_logger(__name__)

HEALTH_EVERY_S: Final = 2.0


class Scheduler:
    """Take messages in, stop replies, say where they stand. ``run`` is to be kept running by whoever made it."""

    def __init__(
        self,
        *,
        store: Store,
        log: StreamLog,
        writer: LogWriter,
        engines: Mapping[str, Engine],
        default_model: str,
        config: Config,
        clock: Clock,
        shared: SharedState | None = None,
        embedder: Embedder | None = None,
    ) -> None:
        """``shared``: what replicas have in common; None: this is the only one. ``embedder`` None: recall by words."""
        self._store = store
        self._writer = writer
        self.engines = engines
        self.models = frozenset(config.models)
        """All that are served, here or by other workers."""
        self.default_model = default_model
        self._health: dict[str, EngineHealth] = {}
        self._log_ttl_s = config.stream.log_ttl_s
        self._draining = False
        slots = {
            name: min(engine.limits.slots, config.models[name].slots or engine.limits.slots)
            for name, engine in engines.items()
        }
        weights = {name: tier.weight for name, tier in config.tiers.items()}
        worker_id = f"{config.region}-{uuid.uuid4().hex}"
        fleet = Fleet(worker_id, clock)
        lines = Lines(engines, slots, weights, clock, config.service, models=config.models, neighbours=fleet)
        self.replicas = Replicas(state=shared or MemoryState(Board()), fleet=fleet, lines=lines, clock=clock)
        self.positions = Positions(store, lines)
        self.pressure = Pressure(
            config=config,
            queues=list(lines),
            clock=clock,
            fullness=self.replicas.fullness,
            # With one user there is nobody to share with.
            enabled=config.degradation.enabled and config.auth.mode is not AuthMode.NONE,
        )
        self._forgetter = LogForgetter(log, store.deleted_runs)
        self._checkpoints = Checkpointer(store, clock, every_s=config.lease.checkpoint_s)
        self._recall = Recall(
            index=store.recall,
            engines=engines,
            embedder=embedder,
            clock=clock,
            most=config.context.recall_turns,
            may_work=lambda: all(map(self.pressure.allows_background, engines)),
        )
        self.prompts = Prompts(engines, config.context, self._recall)
        self._runner = Runner(
            store=store,
            writer=writer,
            engines=engines,
            prompts=self.prompts,
            checkpoints=self._checkpoints,
            forgetter=self._forgetter,
            log_ttl_s=self._log_ttl_s,
            history_share=config.degradation.history_share,
        )
        self.folds = Folds(
            store=store,
            engines=engines,
            prompts=self.prompts,
            default_model=default_model,
            config=config.context,
            may_work=self.pressure.allows_background,
        )
        self.warming = Warming(
            store=store,
            engines=engines,
            prompts=self.prompts,
            lines=lines,
            clock=clock,
            may_work=self.pressure.allows_background,
            home=self.replicas.home,
            me=worker_id,
        )
        self._fold_runner = FoldRunner(
            store=store,
            engines=engines,
            folds=self.folds,
            warming=self.warming,
            indexer=self._recall.indexer if config.context.recall_tokens else None,
        )
        self.dispatcher = Dispatcher(
            store=store,
            lines=lines,
            replicas=self.replicas,
            engines=engines,
            runner=self._runner,
            folds=self.folds,
            fold_runner=self._fold_runner,
            warming=self.warming,
            worker_id=worker_id,
        )
        self._overdue = Overdue(
            store=store,
            writer=writer,
            log_ttl_s=self._log_ttl_s,
            gone=lambda run_id: self.dispatcher.interrupt(run_id, Interrupt.GONE),
            refused=self.pressure.refused,
            ended=self._runner.ended,
        )
        self._orphans = Orphans(
            store=store,
            log=log,
            writer=writer,
            clock=clock,
            log_ttl_s=self._log_ttl_s,
            count_tokens=self._count_tokens,
            ended=self._runner.ended,
        )
        self._lease = LeaseKeeper(
            store=store,
            dispatcher=self.dispatcher,
            orphans=self._orphans,
            roles=[*sorted(config.roles), *(f"model:{name}" for name in engines)],
            capacity=sum(slots.values()),
            renew_s=config.lease.renew_s,
            ttl_s=config.lease.ttl_s,
            clock=clock,
        )
        self._abandonment = Abandonment(log=log, dispatcher=self.dispatcher, tiers=config.tiers, clock=clock)
        self._submitter = Submitter(
            store=store,
            engines=engines,
            models=self.models,
            default_model=default_model,
            region=config.region,
            max_content_chars=config.server.max_content_chars,
            is_ready=self._is_ready,
            # A reply that nobody could watch is not begun; those that run go on without Redis.
            check_log=log.ping,
            dispatcher=self.dispatcher,
            replicas=self.replicas,
            pressure=self.pressure,
            prompts=self.prompts,
            cost=config.service,
        )

    # For the API --------------------------------------------------------------------------------------------------

    async def submit(self, principal: Principal, conversation_id: str, new: NewMessage) -> Submitted:
        """Store a user message and queue its reply; see ``Submitter.message`` for what is raised."""
        with self._taking_in(principal):
            return await self._submitter.message(principal, conversation_id, new)

    async def answer_again(self, principal: Principal, user_message_id: str, new: NewAnswer) -> Submitted:
        """Queue another reply to a user message; see ``Submitter.answer_again``."""
        with self._taking_in(principal):
            return await self._submitter.answer_again(principal, user_message_id, new)

    async def stop(self, user_id: str, response_id: str) -> Run:
        """Stop a reply, wherever it runs (L9); one that has ended stays as it is. Raises ``NotFound``."""
        before = await self._store.runs.get(user_id, response_id)
        if before.status.ended:
            return before
        run = await self._store.runs.request_stop(user_id, response_id)
        # In another process the notification that was committed with the request does this.
        self.dispatcher.interrupt(response_id, Interrupt.STOP)
        if run.status is RunStatus.STOPPED and run.owner is None:
            # It ended in the queue, so no worker will say so.
            self._runner.ended[run.model, run.status.value] += 1
            kept = await self._store.runs.kept_text(run)
            await announce(self._writer, run, kept, self._log_ttl_s)
        return run

    async def delete_conversation(self, user_id: str, conversation_id: str) -> None:
        """Delete a conversation and all that hangs on it; what still generates is cut off. Raises ``NotFound``."""
        deleted = await self._store.conversations.delete(user_id, conversation_id)
        for response_id in deleted.running:
            self.dispatcher.interrupt(response_id, Interrupt.GONE)
        await self._forgetter.forget(deleted.response_ids)

    def check_model(self, model: str | msgspec.UnsetType | None) -> None:
        """Raises ``UnknownModel`` when a model is named that is not served here."""
        if isinstance(model, str):
            self._submitter.check_model(model)

    async def position(self, run: Run) -> Queued | None:
        """Where a queued run stands; None when it does not wait."""
        return (await self.places([run])).get(run.id)

    async def places(self, runs: Sequence[Run]) -> Mapping[str, Queued]:
        """Where those of the runs stand that wait, by id."""
        queued = [run for run in runs if run.status is RunStatus.QUEUED]
        return await self.positions.of(queued) if queued else {}

    def active(self, response_id: str) -> ActiveRun | None:
        """The reply, if this process works on it."""
        return self.dispatcher.active(response_id)

    def watch_position(self, run: Run, teller: Teller) -> Watch:
        """Be told where a queued run stands, now and when it changes."""
        return self.positions.watch(run, teller)

    async def check_system_prompt(self, model: str | None, system_prompt: str | None) -> None:
        """Raises ``UnknownModel``, and ``SystemPromptTooLong`` for one of more than half the model's window.

        Where the model is not in this process, only what it makes of messages can tell.
        """
        self.check_model(model)
        if system_prompt:
            await self.prompts.check_system(model or self.default_model, system_prompt)

    def health(self) -> Mapping[str, EngineHealth]:
        """The engines' last known health, by model."""
        return dict(self._health)

    @property
    def ended(self) -> Mapping[tuple[str, str], int]:
        """How many replies ended here, by model and status."""
        return self._runner.ended

    @property
    def folded(self) -> Mapping[tuple[str, str], int]:
        """How many folds ended here, by model and status."""
        return self._fold_runner.ended

    @property
    def tokens(self) -> Mapping[tuple[str, str], int]:
        """How many tokens the replies that ended here used, by model and kind (prompt, cached, output)."""
        return self._runner.tokens

    @property
    def abandoned(self) -> int:
        """How many replies were stopped here because nobody read them."""
        return self._abandonment.count

    @property
    def draining(self) -> bool:
        """True from the moment the process began to shut down."""
        return self._draining

    def runs_here(self, response_id: str) -> bool:
        """Whether this process works on a reply."""
        return self.active(response_id) is not None

    async def others_serve(self) -> bool:
        """Whether another process serves the API; False too when the store cannot be asked."""
        try:
            return await self._store.workers.has_others(self.dispatcher.worker_id, "api")
        except StoreUnavailable as error:
            _log.warning("whether others serve is not known", reason=error.detail)
            return False

    async def _count_tokens(self, model: str, text: str) -> int | None:
        engine = self.engines.get(model)
        return None if engine is None else len(await engine.encode(text))

    # Behind the door ----------------------------------------------------------------------------------------------

    @contextmanager
    def _taking_in(self, principal: Principal) -> Iterator[None]:
        """Around what queues a reply. Raises ``Draining``."""
        if self._draining:
            raise Draining("This server is shutting down. The same request will be taken by the next one.")
        with self.pressure.counting(principal.tier):
            yield

    def _is_ready(self, model: str) -> bool:
        health = self._health.get(model)
        return health is None or health.ready

    def _heard(self, signal: Signal) -> None:
        if signal.waiting is not None:
            self.dispatcher.offer(signal.waiting)
        elif signal.kind == "prefix":
            self.warming.changed(signal.user_id, signal.conversation_id)
        else:
            self.dispatcher.interrupt(signal.response_id, Interrupt.STOP if signal.kind == "stop" else Interrupt.GONE)

    def _reread(self) -> None:
        """Notifications may have been missed: look for what they would have said."""
        self.dispatcher.sweep_soon()
        self._lease.beat_soon()

    async def _watch_health(self) -> None:
        while True:
            await self.look_at_engines()
            await asyncio.sleep(HEALTH_EVERY_S)

    async def look_at_engines(self) -> None:
        """See which take work. Do it once before ``run`` and the first request: an engine that is away is given none,

        and ``/readyz`` has its name. One that is slow to say how it is keeps those after it waiting.
        """
        for model, engine in self.engines.items():
            health = await engine.health()
            before = self._health.get(model)
            if before is None or before.ready != health.ready:
                _log.info("engine health", model=model, ready=health.ready, reason=health.reason)
            self._health[model] = health
            self.dispatcher.set_ready(model, health.ready)

    async def run(self) -> None:
        """All loops of the scheduler, until cancelled.

        One that fails takes the others, and the process, down with it.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.positions.run(), name="positions")
            tasks.create_task(self._forgetter.run(), name="logs to forget")
            # Also without engines: somebody has to judge the dead when the last worker dies.
            tasks.create_task(self._lease.run(), name="lease")
            tasks.create_task(self.pressure.run(self._overdue.refuse), name="degradation")
            # And places in the lines are told by every process that serves readers.
            tasks.create_task(self.replicas.run(), name="replicas")
            tasks.create_task(self.dispatcher.run(), name="dispatch")
            if not self.engines:
                return
            tasks.create_task(self._checkpoints.run(), name="checkpoints")
            tasks.create_task(self._watch_health(), name="engine health")
            tasks.create_task(self.folds.run(), name="folds")
            tasks.create_task(self.warming.run(), name="prefixes to warm")
            tasks.create_task(self._recall.indexer.run(), name="old passages to index")
            tasks.create_task(self._store.signals.listen(self._heard, self._reread), name="store notifications")
            tasks.create_task(self._abandonment.run(), name="abandoned replies")
            tasks.create_task(clear_now_and_then(self._store, self._forgetter), name="what is kept for a while")

    async def aclose(self) -> None:
        """Cut what still runs, and give the lease up so that nobody waits for it to run out."""
        await self.dispatcher.aclose()
        await self._recall.aclose()
        await self._overdue.aclose()
        await self._orphans.aclose()
        await self.replicas.aclose()
        try:
            await self._store.workers.leave(self.dispatcher.worker_id)
        except StoreUnavailable as error:
            _log.warning("lease will run out by itself", reason=error.detail)

    async def drain(self, grace_s: float) -> None:
        """Take no new work and wait for what runs; see ``Dispatcher.drain``."""
        self._draining = True
        await self.replicas.leave()
        await self.dispatcher.drain(grace_s)
