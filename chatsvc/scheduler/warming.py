"""Has the engine read what the next turn's prompt begins with, while nobody waits for it.

    a reply with recalled turns │
    one that fills the window   ├─▶ a wish ─▶ is there room? ─▶ the stable prefix ─▶ engine.generate, max_tokens=1
    a fold                      │
    an edit or a pin            │

What was recalled stands before the question of its turn only, so the next prompt has that question and its answer
where the engine has read something else (L11); a new summary or pin changes all behind it, and so does the next step
of turns that there is no room for. The same tokens would be computed when the next message comes, and somebody would
wait for them.

It takes a place that nobody uses or waits for, and gives it back at once: no line knows of it. What is lost is lost
work, never an answer: nothing here is raised into a reply's path, and nothing rests on it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from datetime import timedelta
from typing import Final

import msgspec
import structlog

from chatsvc.clock import Clock
from chatsvc.conversation import BranchView, Conversation
from chatsvc.errors import ChatError, MessageTooLong, NotFound
from chatsvc.ids import uuid7_hex
from chatsvc.inference.base import Engine
from chatsvc.limits import Usage
from chatsvc.prompt import Prompt, Sampling
from chatsvc.run import Run, RunKind
from chatsvc.scheduler.active import ActiveRun
from chatsvc.scheduler.line import Spare
from chatsvc.scheduler.lines import Lines
from chatsvc.scheduler.next_prefix import ended, prefix
from chatsvc.scheduler.next_reply import asked_tokens
from chatsvc.scheduler.prompts import Prompts
from chatsvc.scheduler.shared_state import Home
from chatsvc.scheduler.wanted import Wanted
from chatsvc.store import Store

_log = structlog.get_logger(__name__)

PRIORITY: Final = 4
"""Behind all replies, and behind folds."""
MOST_AT_ONCE: Final = 2
"""Of one engine."""
USED_WITHIN: Final = timedelta(minutes=10)
"""What is changed in a conversation that nobody has used for longer is read when the next message comes."""
WISH_S: Final = 60.0
"""So long a wish waits for room; by then the next message has come, or nobody is in a hurry."""
_MOST_WISHES: Final = 1000


class _Wish(msgspec.Struct, frozen=True, kw_only=True):
    """Whose prefix is to be read, up to where.

    ``model`` None: the one that the conversation speaks with; ``leaf_id`` None: the head, wherever that is.
    """

    user_id: str
    conversation_id: str
    noted_at: float
    model: str | None = None
    leaf_id: str | None = None
    tokens: int = 0
    """Of the prefix, where that is known."""
    changed: bool = False
    """The user has changed what the prompt begins with: only of use where it was read lately."""


class _Reading:
    """A prefix that is made or read now."""

    def __init__(self, wish: _Wish) -> None:
        self.wish = wish
        self.tokens = wish.tokens
        self.given_up = False
        self.task: asyncio.Task[None] | None = None

    def give_up(self) -> None:
        self.given_up = True
        if self.task is not None:
            self.task.cancel()


def fits(sizes: Sequence[int], spare: Spare) -> bool:
    """Whether prefixes of so many tokens may be read at the same time in what an engine has to spare."""
    return len(sizes) <= min(MOST_AT_ONCE, spare.places) and sum(sizes) <= spare.kv_tokens


class Warming:
    """``run`` is its loop. ``home`` says where a model served a conversation last, if it matters and is known."""

    def __init__(
        self,
        *,
        store: Store,
        engines: Mapping[str, Engine],
        prompts: Prompts,
        lines: Lines,
        clock: Clock,
        may_work: Callable[[str], bool],
        home: Callable[[str, str], Awaitable[Home | None]],
        me: str,
    ) -> None:
        self._store = store
        self._engines = engines
        self._prompts = prompts
        self._lines = lines
        self._clock = clock
        self._may_work = may_work
        self._home = home
        self._me = me
        self._wishes: dict[str, _Wish] = {}
        self._readings: dict[str, _Reading] = {}
        self._behind: dict[str, _Wish] = {}
        """What a fold that is under way has put off."""
        self._wake = asyncio.Event()
        self._stopped = not prompts.config.warm
        self.ended: Counter[tuple[str, str]] = Counter()
        """Prefixes by model and what became of them: ``read``, ``given_up`` or ``failed``."""

    @property
    def busy(self) -> bool:
        """Whether a prefix is to be read, or is being read."""
        return bool(self._wishes or self._readings)

    # When -----------------------------------------------------------------------------------------------------------

    def after_reply(self, active: ActiveRun) -> None:
        """A reply has ended. The next prompt begins with what the engine has read for this one, and with the reply,
        unless turns were recalled for it, or the next one leaves out some that it had.
        """
        run, prepared = active.run, active.prepared
        if not active.complete or prepared is None:
            return
        report = prepared.report
        # Where it had none of them, all that can stand in front of the next question has been read.
        if report.recalled or (report.parts.verbatim and active.output_tokens > prepared.room):
            self._note(
                _Wish(
                    user_id=run.user_id,
                    conversation_id=run.conversation_id,
                    noted_at=self._clock.monotonic(),
                    model=run.model,
                    leaf_id=run.message_id,
                )
            )

    def after_fold(self, run: Run) -> None:
        """A fold's summary was written, and nothing more is to be folded."""
        self._note(
            _Wish(
                user_id=run.user_id,
                conversation_id=run.conversation_id,
                noted_at=self._clock.monotonic(),
                model=run.model,
            )
        )

    def fold_ended(self, run: Run) -> None:
        """A fold's place is free again, whatever it came to. Where that is no summary, all is as it was."""
        if (wish := self._behind.pop(run.conversation_id, None)) is not None:
            self._note(msgspec.structs.replace(wish, noted_at=self._clock.monotonic()))

    def changed(self, user_id: str, conversation_id: str) -> None:
        """The user has changed what the prompts of a conversation begin with; it may be at home elsewhere."""
        if any(line.warmth.cached(conversation_id) for line in self._lines):
            self._note(
                _Wish(
                    user_id=user_id,
                    conversation_id=conversation_id,
                    noted_at=self._clock.monotonic(),
                    changed=True,
                )
            )

    def _note(self, wish: _Wish) -> None:
        if self._stopped:
            return
        self._wishes.pop(wish.conversation_id, None)
        self._behind.pop(wish.conversation_id, None)
        if (reading := self._readings.get(wish.conversation_id)) is not None:
            reading.give_up()  # it reads what is out of date
        if len(self._wishes) >= _MOST_WISHES:
            del self._wishes[next(iter(self._wishes))]
        self._wishes[wish.conversation_id] = wish
        self._wake.set()

    # Who goes first -------------------------------------------------------------------------------------------------

    def run_begins(self, run: Run) -> None:
        """A run has a place. One of the same conversation reads the prefix itself, or makes another of it, as a fold
        does that comes to something.
        """
        name = run.conversation_id
        wish, behind = self._wishes.pop(name, None), self._behind.pop(name, None)
        if (reading := self._readings.get(name)) is not None:
            reading.give_up()
            wish = wish or reading.wish
        if run.kind is RunKind.FOLD and (wish := wish or behind) is not None:
            self._behind[name] = wish
        self.make_room()

    def make_room(self) -> None:
        """Give up what there is no room for any more, the newest first: runs have begun, or wait."""
        if not self._readings:
            return
        for model in self._engines:
            under_way = self._of(model)
            while under_way and not fits([reading.tokens for reading in under_way], self._lines.spare(model)):
                under_way.pop().give_up()

    def look(self) -> None:
        """Places may have become free."""
        if self._wishes:
            self._wake.set()

    def stop(self) -> None:
        """The process shuts down: begin nothing more, and give up what is being read."""
        self._stopped = True
        self._wishes.clear()
        for reading in self._readings.values():
            reading.give_up()

    def _of(self, model: str) -> list[_Reading]:
        return [each for each in self._readings.values() if each.wish.model == model and not each.given_up]

    def _has_room(self, reading: _Reading) -> bool:
        model = reading.wish.model
        if model is None:
            return True  # which one it is, is read first
        others = [other.tokens for other in self._of(model) if other is not reading]
        return fits([*others, reading.tokens], self._lines.spare(model))

    # What it does ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read prefixes until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._wake.wait()
                self._wake.clear()
                for wish in list(self._wishes.values()):
                    await self._grant(wish, tasks)

    async def _grant(self, wish: _Wish, tasks: asyncio.TaskGroup) -> None:
        """Begin to read if that may be; else the wish goes on waiting, or is forgotten."""
        name = wish.conversation_id
        if self._wishes.get(name) is not wish or name in self._readings:
            return
        late = self._clock.monotonic() - wish.noted_at > WISH_S
        if late or (wish.model is not None and not self._may_work(wish.model)):
            del self._wishes[name]
            return
        reading = _Reading(wish)
        if not self._has_room(reading):
            return
        del self._wishes[name]
        self._readings[name] = reading
        prompt = await self._made(reading)
        if prompt is None or reading.given_up:
            self._release(reading)
        elif self._has_room(reading):
            reading.task = tasks.create_task(self._read(reading, prompt), name=f"warm {name}")
            # One that is cancelled before its first step never gets to its own last.
            reading.task.add_done_callback(lambda _: self._release(reading))
        else:
            del self._readings[name]
            self._wishes[name] = reading.wish

    def _release(self, reading: _Reading) -> None:
        name = reading.wish.conversation_id
        if self._readings.get(name) is reading:
            del self._readings[name]
            self.look()

    async def _made(self, reading: _Reading) -> Prompt | None:
        """The prefix; None: it is of no use, or cannot be had."""
        try:
            wanted = await self._wanted(reading.wish)
            if wanted is None:
                return None
            reading.wish = msgspec.structs.replace(reading.wish, model=wanted.model)
            prompt = await prefix(self._prompts, self._engines[wanted.model], wanted)
        except NotFound:
            return None  # deleted meanwhile
        except ChatError as error:
            self._failed(reading.wish, error)
            return None
        except Exception as error:  # noqa: BLE001
            # Whatever a tokenizer or a template throws: other conversations are not to suffer.
            self._failed(reading.wish, error)
            return None
        reading.tokens = prompt.tokens + 1
        reading.wish = msgspec.structs.replace(reading.wish, tokens=reading.tokens)
        return prompt if prompt.tokens else None

    async def _wanted(self, wish: _Wish) -> Wanted | None:
        """What the next turn is likely to ask for. Raises ``NotFound`` and ``StoreUnavailable``."""
        conversations = self._store.conversations
        leaf = wish.leaf_id or (await conversations.get(wish.user_id, wish.conversation_id)).head_message_id
        if leaf is None:
            return None
        conversation, view = await conversations.view(wish.user_id, wish.conversation_id, leaf, leaf_may_be_folded=True)
        verbatim = ended(view.verbatim)
        if not verbatim or conversation.head_message_id != leaf:
            return None  # the next message has come
        model = wish.model or conversation.model or verbatim[-1].model
        if model is None or not await self._is_of_use(wish, conversation, model):
            return None
        return Wanted(
            model=model,
            conversation=conversation,
            view=BranchView(summary=view.summary, pinned=view.pinned, verbatim=verbatim),
            leaf_id=leaf,
            max_tokens=await asked_tokens(self._store, wish.user_id, verbatim),
        )

    async def _is_of_use(self, wish: _Wish, conversation: Conversation, model: str) -> bool:
        """Whether the next turn is likely to come, and to find here what was read."""
        engine, line = self._engines.get(model), self._lines.line(model)
        if engine is None or line is None or not (engine.limits.keeps_prefixes and self._may_work(model)):
            return False
        if wish.changed and not (
            line.warmth.cached(conversation.id) and self._clock.now() - conversation.updated_at <= USED_WITHIN
        ):
            return False
        home = None if wish.leaf_id else await self._home(model, conversation.id)
        return home is None or home.replica_id == self._me

    async def _read(self, reading: _Reading, prompt: Prompt) -> None:
        wish = reading.wish
        model = wish.model or ""
        how, usage = "failed", Usage(prompt_tokens=prompt.tokens)
        request_id = f"{uuid7_hex()}.warm"
        generating = self._engines[model].generate(prompt, Sampling(max_tokens=1), request_id, PRIORITY)
        try:
            async with aclosing(generating) as chunks:
                async for chunk in chunks:
                    usage = Usage(
                        prompt_tokens=prompt.tokens,
                        cached_tokens=chunk.cached_tokens or 0,
                        output_tokens=usage.output_tokens + chunk.output_tokens,
                    )
            how = "read"
        except asyncio.CancelledError:
            if not reading.given_up:
                raise  # all of it is being ended
            how, usage = "given_up", Usage()
        except Exception as error:  # noqa: BLE001
            # Whatever a backend throws: the next turn computes what this has not.
            self._failed(wish, error)
        finally:
            self._release(reading)
        self.ended[model, how] += 1
        _log.info(
            "prefix warmed" if how == "read" else "prefix not warmed",
            conversation_id=wish.conversation_id,
            how=how,
            prompt_tokens=prompt.tokens,
            cached_tokens=usage.cached_tokens,
        )
        await self._bill(wish, usage)

    async def _bill(self, wish: _Wish, usage: Usage) -> None:
        """What was computed is counted, except that what gave way costs nothing, as with runs."""
        if usage == Usage():
            return
        try:
            await self._store.allowances.bill(wish.user_id, usage, RunKind.FOLD)
        except Exception as error:  # noqa: BLE001
            # It is a note of what was done in the background: no reply is to end for it.
            _log.warning("warmed prefix not counted", error_type=type(error).__name__, reason=str(error))

    def _failed(self, wish: _Wish, error: Exception) -> None:
        reason = error.detail if isinstance(error, ChatError) else type(error).__name__
        if isinstance(error, MessageTooLong):
            say = _log.info  # beside a reply as long as the last one that was asked for there is no room: no fault
        else:
            say = _log.warning if isinstance(error, ChatError) else _log.exception
        say("prefix not warmed", conversation_id=wish.conversation_id, reason=reason)
