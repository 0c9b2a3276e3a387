"""Tells the other replicas what waits and what runs here, hears the same of them, and says where a turn goes.

    every TICK_S   a sign of life, places and speed, what runs here have received since
    at once        a run was posted, begun or ended
    every WHOLE_S  all that is under way here: whoever missed something is right again

With nobody there nothing but the sign of life is said. With nothing shared (Redis is away) nobody is heard, so all are
alone, and each serves whatever waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import StrEnum
from typing import Final

import msgspec
import structlog

from chatsvc.clock import Clock
from chatsvc.errors import LogUnavailable
from chatsvc.run import RunKind, WaitingRun
from chatsvc.scheduler.fleet import Fleet
from chatsvc.scheduler.lines import Lines
from chatsvc.scheduler.loads import Loads
from chatsvc.scheduler.news import End, Held, News, Places, Posted, Window, decode, encode
from chatsvc.scheduler.routing import Choice, Replica, Why, choose, hashed
from chatsvc.scheduler.shared_state import Home, SharedState
from chatsvc.scheduler.spared import Fullness, together

_log = structlog.get_logger(__name__)

TICK_S: Final = 0.25
ALONE_TICK_S: Final = 0.5
WHOLE_S: Final = 2.0
ANSWER_S: Final = 1.0
"""So long it is waited to hear where a conversation is at home."""
OVERHEARD_S: Final = 0.5
"""A run that Postgres tells of, and nobody else, has lost its poster: after so long it goes where the hash says."""
_SETTLED_AT_ONCE: Final = 500


class Source(StrEnum):
    """Where one learns that a run waits: from its poster, from Postgres' notification, or from the rows themselves."""

    POSTER = "poster"
    NOTIFICATION = "notification"
    SWEEP = "sweep"


class Replicas:
    """``run`` it where runs are posted or carried out."""

    def __init__(self, *, state: SharedState, fleet: Fleet, lines: Lines, clock: Clock) -> None:
        self._state = state
        self._fleet = fleet
        self._lines = lines
        self._clock = clock
        self._on_work: Callable[[], None] = lambda: None
        self._on_lost: Callable[[], None] = lambda: None
        self._soon = asyncio.Event()
        self._posted: list[Posted] = []
        self._saying: set[asyncio.Task[None]] = set()
        self._homes: dict[str, Home] = {}
        self._sending: Loads[tuple[str, str]] = Loads()
        self._overheard: dict[str, tuple[float, WaitingRun]] = {}
        self._whole_due = 0.0
        self._sign_due = 0.0
        self._leaving = False
        self.routed: Counter[Why] = Counter()
        """What the choices rested on that were made here, while there were other replicas."""
        self.heard: Counter[Source] = Counter()
        """From whom it was learned here first that a run waits which was not posted here."""

    def wakes(self, on_work: Callable[[], None], on_lost: Callable[[], None] = lambda: None) -> None:
        """``on_work`` is called whenever something may be taken out of the lines, or nothing waits in one any more.

        ``on_lost``: another replica had a run no more that was taken over; whether it waits, only Postgres knows.
        """
        self._on_work, self._on_lost = on_work, on_lost

    # Where a turn goes --------------------------------------------------------------------------------------------

    async def home(self, model: str, conversation_id: str) -> Home | None:
        """Where this model served the conversation's last turn, if there is anybody to ask about and to ask."""
        [home] = await self._ask_homes([(model, conversation_id)])
        return home

    async def _ask_homes(self, turns: Sequence[tuple[str, str]]) -> Sequence[Home | None]:
        if self._fleet.listens():
            # If there is no answer, or none soon, the hash decides, the same for all.
            with contextlib.suppress(LogUnavailable, TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    return await self._state.homes([_home_of(model, name) for model, name in turns])
        return [None] * len(turns)

    @contextlib.contextmanager
    def choosing(self, run: WaitingRun, home: Home | None) -> Iterator[Choice | None]:
        """Where a run is to be served that is about to be posted; None: here, for there is nobody else.

        It counts as that replica's load from now on: until the block ends by itself, then because it waits there.
        """
        choice = self._choose(run, home)
        if choice is None:
            yield None
            return
        self.routed[choice.why] += 1
        self._sending[choice.replica_id, run.model] += 1
        try:
            yield choice
        finally:
            self._sending.less((choice.replica_id, run.model))

    def _choose(self, run: WaitingRun, home: Home | None) -> Choice | None:
        if not self._fleet.others(run.model):
            return None
        return choose(run.conversation_id, self._replicas(run.model), home.replica_id if home else None)

    def _replicas(self, model: str) -> list[Replica]:
        line = self._lines.line(model)
        slots = self._fleet.slots(model) | {self._fleet.me: 0 if self._leaving else self._lines.slots(model)}
        return [
            Replica(id=name, slots=count, load=(line.load(name) if line else 0) + self._sending[name, model])
            for name, count in slots.items()
        ]

    def post(self, run: WaitingRun, choice: Choice | None, home: Home | None = None) -> None:
        """Let a run wait that was written just now, for the replica that was chosen."""
        where = choice.replica_id if choice else ""
        cached = home.cached_tokens if home and home.replica_id == where else 0
        self._lines.put(run, where, cached)
        self._overheard.pop(run.id, None)
        if self._fleet.listens():
            self._posted.append(Posted(run=run, home=where, cached_tokens=cached))
            if len(self._posted) == 1:  # those posted in this turn of the loop are said together
                task = asyncio.create_task(self._say_posted(), name="tell other replicas what waits")
                self._saying.add(task)
                task.add_done_callback(self._saying.discard)
        self._on_work()

    def post_again(self, run: WaitingRun) -> None:
        """A run that was here waits again, and is to be served as soon as possible, by whoever can."""
        self.post(run, self._choose(run, None))

    def overhear(self, run: WaitingRun) -> None:
        """Postgres tells of a run that waits. Whoever posted it says where it goes; else the hash does."""
        if not self._fleet.others(run.model):
            self._lines.put(run)
            self._on_work()
        elif not self._knows(run):
            self._overheard[run.id] = (self._clock.monotonic(), run)

    async def place(self, runs: Sequence[WaitingRun]) -> None:
        """Let runs wait that the store says wait: those that are not known go where their conversations are at home."""
        unknown = [run for run in runs if not self._knows(run)]
        homes = await self._ask_homes([(run.model, run.conversation_id) for run in unknown])
        self.heard[Source.SWEEP] += len(unknown)
        for run, home in zip(unknown, homes, strict=True):
            self._overheard.pop(run.id, None)
            if home is not None and self._serves(home.replica_id, run.model):
                self._lines.put(run, home.replica_id, home.cached_tokens)
            else:
                self._put_by_hash(run)
        self._on_work()

    def discard(self, run_id: str) -> None:
        """A run waits no more."""
        self._lines.discard(run_id)
        self._overheard.pop(run_id, None)
        self._on_work()

    def _put_by_hash(self, run: WaitingRun) -> None:
        alone = not self._fleet.others(run.model)
        self._lines.put(run, "" if alone else hashed(run.conversation_id, self._replicas(run.model)) or "")

    def window(self, model: str) -> Window | None:
        """What a model takes that others serve; None where that is not known."""
        return self._fleet.window(model)

    def fullness(self, model: str) -> Fullness:
        """How much of all engines replies have, here and at all that are known of."""
        here = Fullness() if self._leaving else self._lines.fullness(model)
        return together([here, self._fleet.fullness(model)])

    def is_served(self, model: str) -> bool:
        """Whether a ready engine has the model, here or anywhere that is known of."""
        return self._lines.slots(model) > 0 or self.others_serve(model)

    def others_serve(self, model: str) -> bool:
        """Whether another replica that is known of has the model, and places for it."""
        return self._fleet.others(model)

    def _serves(self, replica_id: str, model: str) -> bool:
        if replica_id == self._fleet.me:
            return self._lines.slots(model) > 0
        return self._fleet.serves(replica_id, model)

    def _knows(self, run: WaitingRun) -> bool:
        line = self._lines.line(run.model)
        return line is None or line.knows(run.id)

    # What is said -------------------------------------------------------------------------------------------------

    def tell_soon(self) -> None:
        """Runs began or ended here."""
        self._soon.set()

    async def leave(self) -> None:
        """Take nothing more: what waits for this replica may be served by others at once."""
        self._leaving = True
        await self._say(sign=True)

    @property
    def known(self) -> int:
        """How many other processes are there."""
        return self._fleet.count()

    @property
    def came(self) -> Counter[str]:
        """How many runs were begun here that were at home here, stolen, or left by a home that is gone."""
        return sum((line.came for line in self._lines), Counter())

    async def aclose(self) -> None:
        """Let go of what is shared."""
        saying = list(self._saying)
        for task in saying:
            task.cancel()
        await asyncio.gather(*saying, return_exceptions=True)
        await self._state.aclose()

    async def run(self) -> None:
        """Speak and listen until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._state.follow(self._hear), name="hear other replicas")
            tasks.create_task(self._speak(), name="tell other replicas")
            tasks.create_task(self._look_around_now_and_then(), name="look for replicas that are gone")

    async def _speak(self) -> None:
        next_tick = self._clock.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, next_tick - self._clock.monotonic())):
                    await self._soon.wait()
            self._soon.clear()
            tick = self._clock.monotonic() >= next_tick
            if tick:
                next_tick = self._clock.monotonic() + TICK_S
            await self._say(sign=tick)

    async def _say(self, *, sign: bool) -> None:
        now = self._clock.monotonic()
        moved = [held for line in self._lines for held in line.flights.moved()]
        if not self._fleet.listens():
            for line in self._lines:
                line.flights.grown()
            if sign and now >= self._sign_due:
                self._sign_due = now + ALONE_TICK_S - TICK_S / 2
                await self._publish(News(replica=self._fleet.me, models=self._models(), leaving=self._leaving))
            return
        whole = sign and now >= self._whole_due
        if whole:
            self._whole_due = now + WHOLE_S
            moved += [held for line in self._lines for held in line.flights.whole()]
        elif sign:
            moved += [held for line in self._lines for held in line.flights.grown()]
        if not (sign or moved):
            return
        await self._tell(moved, whole=whole)

    async def _say_posted(self) -> None:
        """By itself: a run is not to wait until Redis has answered to what was said before.

        What was put back here waits again only for those who know that it is under way here no more, so that is said
        with it, and not after it.
        """
        posted, self._posted = self._posted, []
        await self._tell([held for line in self._lines for held in line.flights.moved()], posted=posted)

    async def _tell(self, held: list[Held], *, posted: Sequence[Posted] = (), whole: bool = False) -> None:
        """Publishing begins before anything else is awaited: in the order in which ``held`` is taken it is sent."""
        self._note_homes(held)
        news = News(
            replica=self._fleet.me,
            models=self._models(),
            leaving=self._leaving,
            whole=whole,
            held=held,
            posted=list(posted),
        )
        async with asyncio.TaskGroup() as tasks:
            if self._homes:
                tasks.create_task(self._settle(), name="note where conversations are at home")
            await self._publish(news)

    async def _publish(self, news: News) -> None:
        try:
            await self._state.publish(encode(news))
        except LogUnavailable as error:
            _log.debug("other replicas not told", reason=error.detail)

    async def _settle(self) -> None:
        homes = dict(list(self._homes.items())[:_SETTLED_AT_ONCE])
        try:
            await self._state.settle(homes)
        except LogUnavailable as error:
            _log.debug("homes not noted", reason=error.detail)
            return
        for name, home in homes.items():
            if self._homes.get(name) is home:
                del self._homes[name]

    def _note_homes(self, moved: Collection[Held]) -> None:
        for held in moved:
            run = held.run
            if run.conversation_id and run.kind is RunKind.REPLY and held.end is not End.REFUND:
                name = _home_of(run.model, run.conversation_id)
                self._homes[name] = Home(self._fleet.me, held.prompt_tokens + held.output_tokens)

    def _models(self) -> dict[str, Places]:
        return {
            line.model: Places(
                slots=self._lines.slots(line.model),
                speed=line.pace.per_second() or 0.0,
                window=line.limits.most,
                reply_tokens=line.limits.reply_tokens,
                sequences=(full := self._lines.fullness(line.model)).sequences,
                tokens=full.tokens,
            )
            for line in self._lines
            if line.slots and line.limits
        }

    # What is heard ------------------------------------------------------------------------------------------------

    def _hear(self, raw: bytes) -> None:
        try:
            news = decode(raw)
        except msgspec.DecodeError as error:
            _log.warning("news of another replica is not understood", error=str(error))
            return
        if news.replica == self._fleet.me:
            return
        if self._fleet.hear(news):
            _log.info("another replica is there", replica=news.replica, models=sorted(news.models))
            self._greet()
        waited = self._lines_with_waits()
        for held in news.held:
            if held.end is not End.REFUND and not held.lost:  # that one waits again
                self._overheard.pop(held.run.id, None)
        self._lines.hear(news.replica, news.held)
        if news.whole:
            self._lines.forget(news.replica, {held.run.id for held in news.held})
        for posted in news.posted:
            self.heard[Source.POSTER] += not self._knows(posted.run)
            self._overheard.pop(posted.run.id, None)
            self._lines.put(posted.run, posted.home, posted.cached_tokens)
        if news.posted or news.leaving or self._lines_with_waits() < waited:
            self._on_work()
        if any(held.lost for held in news.held):
            self._on_lost()

    def _lines_with_waits(self) -> int:
        return sum(line.queue.waits() for line in self._lines)

    def _greet(self) -> None:
        """Somebody is new: all is said once, and where conversations are at home that were served here."""
        self._whole_due = 0.0
        for line in self._lines:
            for conversation_id, tokens in line.warmth:
                self._homes.setdefault(_home_of(line.model, conversation_id), Home(self._fleet.me, tokens))

    async def _look_around_now_and_then(self) -> None:
        """By itself: what is said may take long while Redis hangs."""
        while True:
            self._look_around()
            await asyncio.sleep(TICK_S)

    def _look_around(self) -> None:
        if self._fleet.fell_silent():
            _log.warning("another replica has fallen silent: what waits for it may be served by others")
            self._on_work()
        for replica_id in self._fleet.take_gone():
            self._lines.forget(replica_id)
        now = self._clock.monotonic()
        for run_id, (heard_at, run) in list(self._overheard.items()):
            if now - heard_at >= OVERHEARD_S:
                del self._overheard[run_id]
                self.heard[Source.NOTIFICATION] += 1
                self._put_by_hash(run)
        if any(self._fleet.others(line.model) and line.queue.waits() for line in self._lines):
            self._on_work()


def _home_of(model: str, conversation_id: str) -> str:
    """Under which name a home is noted: each model has a prefix of its own."""
    return f"{model}:{conversation_id}"
