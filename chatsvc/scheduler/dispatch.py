"""Starts waiting runs whenever an engine has a free slot, and owns the tasks that carry them out.

The queue in this process only proposes. Postgres decides: ``claim`` is a compare-and-set, so two workers that propose
the same run start it once. Notifications are hints; a sweep of the queued rows finds what a lost hint would have left.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import structlog

from chatsvc.errors import StoreUnavailable
from chatsvc.inference.base import Engine
from chatsvc.prompt import Prompt
from chatsvc.run import Run
from chatsvc.scheduler.active import ActiveRun, Interrupt
from chatsvc.scheduler.queue import RunQueue, Waiting
from chatsvc.scheduler.runner import Runner
from chatsvc.scheduler.throughput import Throughput
from chatsvc.store import Store

_log = structlog.get_logger(__name__)

SWEEP_S: Final = 5.0
"""How often the queued rows are read for runs whose notification was lost."""
SWEEP_LIMIT: Final = 1000
RETRY_S: Final = 0.5


class Place:
    """A slot held for a run while it is being written; ``owner`` None: there was none to be had."""

    def __init__(self, owner: str | None) -> None:
        self.owner = owner
        self.taken: Run | None = None
        self.prompt: Prompt | None = None

    def take(self, run: Run, prompt: Prompt | None) -> None:
        """The run was written as ours: it begins when the place is left."""
        self.taken, self.prompt = run, prompt


class Dispatcher:
    """The runs of this process: waiting, active, ending."""

    def __init__(
        self,
        *,
        store: Store,
        queue: RunQueue,
        engines: Mapping[str, Engine],
        slots: Mapping[str, int],
        runner: Runner,
        throughput: Throughput,
        worker_id: str,
    ) -> None:
        self.worker_id = worker_id
        self._store = store
        self._queue = queue
        self._engines = engines
        self._slots = slots
        self._runner = runner
        self._throughput = throughput
        self._active: dict[str, ActiveRun] = {}
        self._used: Counter[str] = Counter()
        self._claiming: dict[str, Interrupt | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._work = asyncio.Event()
        self._sweep = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._unready: set[str] = set()

    # What others tell it ------------------------------------------------------------------------------------------

    def offer(self, run_id: str, model: str) -> None:
        """A run waits. Called for runs posted here and for those that Postgres notifies of."""
        if run_id not in self._active and run_id not in self._claiming and model in self._engines:
            self._queue.put(Waiting(run_id, model))
            self._work.set()

    @contextlib.contextmanager
    def place(self, run_id: str, model: str) -> Iterator[Place]:
        """A place for a run that is about to be submitted, if there is one and nobody waits for it.

        The run is then written as claimed by this worker: with room, a request waits for nothing. A place that is not
        used, because the run came before or was refused, is free again in the end.
        """
        if not self._has_place(model):
            yield Place(None)
            return
        place = Place(self.worker_id)
        self._claiming[run_id] = None
        self._used[model] += 1
        self._idle.clear()
        try:
            yield place
        finally:
            self._used[model] -= 1
            interrupted = self._claiming.pop(run_id, None)
            if place.taken is not None:
                self._start(place.taken, interrupted, place.prompt)
            else:
                self._work.set()
                self._note_idle()

    def _has_place(self, model: str) -> bool:
        return not self._draining and self._free().get(model, 0) > 0 and not self._queue.waits_for(model)

    def interrupt(self, run_id: str, why: Interrupt) -> bool:
        """Cut a run short if it is in this process; False when it is not."""
        self._queue.discard(run_id)
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
        if ready:
            self._unready.discard(model)
            self._work.set()
        else:
            self._unready.add(model)

    # What others ask it -------------------------------------------------------------------------------------------

    @property
    def active_count(self) -> int:
        """Runs being worked on."""
        return len(self._active)

    @property
    def waiting_count(self) -> int:
        """Runs in this process's queue."""
        return len(self._queue)

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
                before = self._queue.ids()
                queued = await self._store.runs.queued(limit=SWEEP_LIMIT)
                for run in queued:
                    self.offer(run.id, run.model)
                if len(queued) < SWEEP_LIMIT:
                    # Others have taken these: they would only be proposed in vain.
                    for run_id in before - {run.id for run in queued}:
                        self._queue.discard(run_id)
            except StoreUnavailable as error:
                _log.warning("sweep of the queue postponed", reason=error.detail)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_S):
                    await self._sweep.wait()

    async def _dispatch(self) -> None:
        while not self._draining and (taken := self._queue.take(self._free())):
            self._claiming |= dict.fromkeys((waiting.run_id for waiting in taken), None)
            self._used.update(waiting.model for waiting in taken)
            self._idle.clear()
            try:
                claimed = await self._store.runs.claim([waiting.run_id for waiting in taken], self.worker_id)
            except BaseException:
                interrupted = self._forget_claims(taken)
                for waiting in taken:
                    if interrupted[waiting.run_id] is None:
                        self._queue.put(waiting)
                self._note_idle()
                raise
            interrupted = self._forget_claims(taken)
            for run in claimed:
                self._start(run, interrupted[run.id])
            self._note_idle()

    def _forget_claims(self, taken: Sequence[Waiting]) -> dict[str, Interrupt | None]:
        """The claims are answered, and the places held for them free; what was to interrupt the runs meanwhile."""
        self._used.subtract(waiting.model for waiting in taken)
        return {waiting.run_id: self._claiming.pop(waiting.run_id, None) for waiting in taken}

    def _note_idle(self) -> None:
        if not self._active and not self._claiming:
            self._idle.set()

    def _free(self) -> dict[str, int]:
        return {
            model: free
            for model, slots in self._slots.items()
            if model not in self._unready and (free := slots - self._used[model]) > 0
        }

    def _start(self, run: Run, interrupted: Interrupt | None, prompt: Prompt | None = None) -> None:
        if run.id in self._active:
            _log.error("run was claimed twice by one worker", run_id=run.id, attempt=run.attempt)
            self._active[run.id].interrupt(Interrupt.LOST)
        active = ActiveRun(run, prompt)
        # Claimed while the shutdown began: given back at once.
        if why := Interrupt.DRAIN if self._draining and interrupted is None else interrupted:
            active.interrupt(why)
        self._active[run.id] = active
        self._used[run.model] += 1
        self._idle.clear()
        task = asyncio.create_task(self._carry_out(active), name=f"run {run.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, active: ActiveRun) -> None:
        model = active.run.model
        try:
            with self._throughput.measure(model):
                engine_was_there = await self._runner.execute(active)
            if not engine_was_there:
                # What waits is not to be burnt on a dead engine; one that merely refused this run goes on.
                self.set_ready(model, (await self._engines[model].health()).ready)
        except Exception as error:  # noqa: BLE001
            # Not even its end could be written. The run is still ours in Postgres: the lease keeper finds it there.
            _log.exception("run was dropped", run_id=active.run.id, error_type=type(error).__name__)
        finally:
            self._used[model] -= 1
            if self._active.get(active.run.id) is active:
                del self._active[active.run.id]
            active.ended.set()
            self._work.set()
            self._note_idle()

    async def drain(self, grace_s: float) -> None:
        """Take no new work; wait for what runs, at most ``grace_s`` seconds, then end the rest honestly.

        0: at once, as after a second signal.
        """
        self._draining = True
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
