"""Starts waiting runs whenever an engine has a free slot, and owns the tasks that carry them out.

The queue in this process only proposes. Postgres decides: ``claim`` is a compare-and-set, so two workers that propose
the same run start it once. Notifications are hints; a sweep of the queued rows finds what a lost hint would have left.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import Final

import structlog

from chatsvc.errors import StoreUnavailable
from chatsvc.inference.base import Engine
from chatsvc.run import Run, RunKind, WaitingRun, waiting
from chatsvc.scheduler.active import ActiveRun, Interrupt
from chatsvc.scheduler.fold_runner import FoldRunner
from chatsvc.scheduler.folds import Folds
from chatsvc.scheduler.giving_way import giving_way
from chatsvc.scheduler.lines import Lines, Meter
from chatsvc.scheduler.prompts import Prepared
from chatsvc.scheduler.replicas import Replicas
from chatsvc.scheduler.routing import Choice
from chatsvc.scheduler.runner import Runner
from chatsvc.scheduler.shared_state import Home
from chatsvc.scheduler.warming import Warming
from chatsvc.store import Store

_log = structlog.get_logger(__name__)

SWEEP_S: Final = 5.0
"""How often the queued rows are read for runs whose notification was lost."""
SWEEP_LIMIT: Final = 1000
RETRY_S: Final = 0.5


class Place:
    """A slot held for a run while it is being written; ``owner`` None: there was none to be had.

    Then ``choice`` says which replica the run is to wait for, ``away`` whether that is another one, and ``home`` where
    its conversation's prefix is.
    """

    def __init__(
        self, owner: str | None, choice: Choice | None = None, home: Home | None = None, *, away: bool = False
    ) -> None:
        self.owner = owner
        self.choice = choice
        self.home = home
        self.away = away
        self.taken: Run | None = None
        self.prepared: Prepared | None = None

    def take(self, run: Run, prepared: Prepared | None) -> None:
        """The run was written as ours: it begins when the place is left."""
        self.taken, self.prepared = run, prepared


class Dispatcher:
    """The runs of this process: waiting, active, ending."""

    def __init__(
        self,
        *,
        store: Store,
        lines: Lines,
        replicas: Replicas,
        engines: Mapping[str, Engine],
        runner: Runner,
        folds: Folds,
        fold_runner: FoldRunner,
        warming: Warming,
        worker_id: str,
    ) -> None:
        self.worker_id = worker_id
        self._store = store
        self._lines = lines
        self._replicas = replicas
        self._engines = engines
        self._runner = runner
        self._folds = folds
        self._fold_runner = fold_runner
        self._warming = warming
        self._active: dict[str, ActiveRun] = {}
        self._claiming: dict[str, Interrupt | None] = {}
        self._again: set[str] = set()
        """Runs that are about to be put into their line again."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._work = asyncio.Event()
        self._sweep = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        replicas.wakes(self._work.set, self.sweep_soon)

    # What others tell it ------------------------------------------------------------------------------------------

    def offer(self, run: WaitingRun) -> None:
        """Postgres says that a run waits."""
        if self._is_new(run.id):
            self._replicas.overhear(run)

    def post(self, run: WaitingRun, place: Place) -> None:
        """A run was posted here for which there was no place."""
        if self._is_new(run.id):
            self._replicas.post(run, place.choice, place.home)

    async def home(self, model: str, conversation_id: str) -> Home | None:
        """Where a model served a conversation's last turn, if it matters and is known."""
        return await self._replicas.home(model, conversation_id)

    @property
    def is_alone(self) -> bool:
        """Whether no other process is known to live."""
        return not self._replicas.known

    def _is_new(self, run_id: str) -> bool:
        return run_id not in self._active and run_id not in self._claiming and run_id not in self._again

    @contextlib.contextmanager
    def place(self, run: WaitingRun, home: Home | None = None) -> Iterator[Place]:
        """A place for a run that is about to be submitted, if it is to be served here, there is one, and nobody waits.

        The run is then written as claimed by this worker: with room, a request waits for nothing. A place that is not
        used, because the run came before or was refused, is free again in the end.
        """
        with self._replicas.choosing(run, home) as choice:
            here = choice is None or choice.replica_id == self.worker_id
            if self._draining or not here or not self._lines.take_at_once(run):
                yield Place(None, choice, home, away=not here)
            else:
                with self._held(run) as place:
                    yield place

    @contextlib.contextmanager
    def _held(self, run: WaitingRun) -> Iterator[Place]:
        place = Place(self.worker_id)
        meter = self._lines.meter(run.model, run.id)
        self._claiming[run.id] = None
        self._idle.clear()
        try:
            yield place
        finally:
            interrupted = self._claiming.pop(run.id, None)
            if place.taken is not None:
                self._start(place.taken, meter, interrupted, place.prepared)
            else:
                meter.refund()
                self._work.set()
                self._note_idle()

    def interrupt(self, run_id: str, why: Interrupt) -> bool:
        """Cut a run short if it is in this process; False when it is not."""
        self._replicas.discard(run_id)
        self._again.discard(run_id)
        active = self._active.get(run_id)
        if run_id in self._claiming:
            # Whether the claim succeeds is not known yet; if it does, the run begins with this.
            self._claiming[run_id] = why
            return True
        if active is None:
            return False
        active.interrupt(why)
        return True

    def give_up(self, run_id: str, attempt: int) -> None:
        """The lease on this attempt is gone, by the word of Postgres.

        Runs that are being ended decide for themselves.
        """
        active = self._active.get(run_id)
        if active is not None and active.run.attempt == attempt and not active.settling:
            active.interrupt(Interrupt.LOST)

    def set_ready(self, model: str, ready: bool) -> None:
        """An engine that is not ready gets no work; its runs wait for it, or for another worker."""
        self._lines.set_ready(model, ready)
        if ready:
            self._work.set()

    # What others ask it -------------------------------------------------------------------------------------------

    @property
    def active_count(self) -> int:
        """Runs being worked on."""
        return len(self._active)

    @property
    def waiting_count(self) -> int:
        """Runs in this process's queue."""
        return len(self._lines)

    def attempts(self) -> set[tuple[str, int]]:
        """Run id and attempt of every run being worked on."""
        return {(active.run.id, active.run.attempt) for active in self._active.values()}

    def run_ids(self) -> set[str]:
        """The runs being worked on, and those whose claim is under way."""
        return self._active.keys() | self._claiming.keys()

    def actives(self) -> list[ActiveRun]:
        """All runs being worked on."""
        return list(self._active.values())

    def active(self, run_id: str) -> ActiveRun | None:
        """The run, if this process works on it."""
        return self._active.get(run_id)

    # What it does -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Dispatch until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._dispatch_when_there_is_work(), name="dispatch waiting runs")
            tasks.create_task(self._sweep_now_and_then(), name="sweep the queue")

    def sweep_soon(self) -> None:
        """Read the queued rows now: notifications may have been missed."""
        self._sweep.set()

    async def _dispatch_when_there_is_work(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            try:
                await self._dispatch()
            except StoreUnavailable as error:
                _log.warning("dispatch postponed", reason=error.detail)
                await asyncio.sleep(RETRY_S)
                self._work.set()

    async def _sweep_now_and_then(self) -> None:
        while True:
            self._sweep.clear()
            try:
                before = self._lines.ids()
                queued = await self._store.runs.queued(limit=SWEEP_LIMIT)
                await self._replicas.place([run for run in queued if self._is_new(run.id)])
                gone = before - {run.id for run in queued}
                if gone and len(queued) >= SWEEP_LIMIT:  # or they may be among those that were not read
                    gone -= await self._store.runs.still_queued(gone)
                for run_id in gone:
                    # They have begun or ended elsewhere: they would only be proposed in vain, and be before others.
                    self._replicas.discard(run_id)
            except StoreUnavailable as error:
                _log.warning("sweep of the queue postponed", reason=error.detail)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_S):
                    await self._sweep.wait()

    async def _dispatch(self) -> None:
        while not self._draining and (taken := self._lines.take()):
            meters = {run_id: self._lines.meter(model, run_id) for model, run_id in taken}
            self._claiming |= dict.fromkeys(meters, None)
            self._idle.clear()
            claimed: list[Run] = []
            try:
                claimed = await self._store.runs.claim(list(meters), self.worker_id)
            except BaseException:
                # Whether they were claimed is not known: those that were not are found by the next sweep.
                self._sweep.set()
                raise
            finally:
                interrupted = {run_id: self._claiming.pop(run_id, None) for run_id in meters}
                for run in claimed:
                    self._start(run, meters.pop(run.id), interrupted[run.id])
                for meter in meters.values():
                    meter.refund()  # somebody else has them
                self._note_idle()
        self._make_way()

    def _make_way(self) -> None:
        """Nothing more can be taken: replies that wait all the same have the places of what nobody waits for.

        If none does, prefixes may be read.
        """
        self._warming.make_room()
        for line in self._lines:
            if line.held_up and self._lines.slots(line.model):
                actives = [active for active in self._active.values() if active.run.model == line.model]
                for active in giving_way(actives, line.held_up, line.began_by_turn, line.helps):
                    active.interrupt(Interrupt.GIVE_WAY)
        self._warming.look()

    def _note_idle(self) -> None:
        if not self._active and not self._claiming:
            self._idle.set()

    def _start(self, run: Run, meter: Meter, interrupted: Interrupt | None, prepared: Prepared | None = None) -> None:
        if run.id in self._active:
            _log.error("run was claimed twice by one worker", run_id=run.id, attempt=run.attempt)
            self._active[run.id].interrupt(Interrupt.LOST)
        active = ActiveRun(run, meter, prepared)
        # Claimed while the shutdown began: given back at once.
        if why := Interrupt.DRAIN if self._draining and interrupted is None else interrupted:
            active.interrupt(why)
        self._active[run.id] = active
        meter.claimed()
        self._warming.run_begins(run)
        self._replicas.tell_soon()
        self._idle.clear()
        task = asyncio.create_task(self._carry_out(active), name=f"run {run.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, active: ActiveRun) -> None:
        model = active.run.model
        try:
            if active.run.kind is RunKind.FOLD:
                engine_was_there = await self._fold_runner.execute(active)
            else:
                engine_was_there = await self._runner.execute(active)
                self._folds.consider(active)
                self._warming.after_reply(active)
            if not engine_was_there:
                # What waits is not to be burnt on a dead engine; one that merely refused this run goes on.
                self.set_ready(model, (await self._engines[model].health()).ready)
        except Exception as error:  # noqa: BLE001
            # Not even its end could be written. The run is still ours in Postgres: the lease keeper finds it there.
            _log.exception("run was dropped", run_id=active.run.id, error_type=type(error).__name__)
        finally:
            age_s = active.meter.age_s
            if active.queued_again:
                active.meter.refund()
            elif active.why is Interrupt.LOST:
                active.meter.lost()
                self.sweep_soon()  # it may wait again: we were told so while we believed to have it
            else:
                active.meter.end(complete=active.complete)
            if self._active.get(active.run.id) is active:
                del self._active[active.run.id]
            if active.run.kind is RunKind.FOLD:
                self._warming.fold_ended(active.run)
            active.ended.set()
            self._replicas.tell_soon()
            if active.queued_again:
                self._put_again(active, age_s)
            self._work.set()
            self._note_idle()

    def _put_again(self, active: ActiveRun, age_s: float) -> None:
        """It is not left to the next sweep. An engine that is well and failed it all the same gets a moment."""
        run = waiting(active.run, age_s)
        failed = active.why is None and not self._draining and self._lines.slots(run.model) > 0

        def put() -> None:
            if run.id in self._again:  # else it was stopped or deleted
                self._again.discard(run.id)
                self._replicas.post_again(run)

        self._again.add(run.id)
        asyncio.get_running_loop().call_later(RETRY_S * active.run.attempt if failed else 0.0, put)

    async def drain(self, grace_s: float) -> None:
        """Take no new work; wait for what runs, at most ``grace_s`` seconds, then end the rest honestly.

        0: at once, as after a second signal.
        """
        self._draining = True
        self._warming.stop()
        for active in self.actives():
            if active.run.kind is RunKind.FOLD:
                # Nobody waits for it, and nothing of it was seen: another process, or the next start, does it again.
                active.interrupt(Interrupt.DRAIN)
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            why = "grace time is over" if grace_s > 0 else "replies are ended at once"
            _log.warning(why, still_running=len(self._active))
            for active in list(self._active.values()):
                active.interrupt(Interrupt.DRAIN)
            # What remains is a compare-and-set and one append each; only an absent Postgres can hold it up.
            if self._tasks:
                await asyncio.wait(set(self._tasks), timeout=5.0)

    async def aclose(self) -> None:
        """Cancel what still runs and wait for it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
