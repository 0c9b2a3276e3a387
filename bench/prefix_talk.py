"""A long conversation under one policy, through the service's own assembling and fold planning. See prefix.py."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from chatsvc.config import ContextConfig
from chatsvc.context.assemble import ASKED as MARK
from chatsvc.context.budget import reply_reserve
from chatsvc.context.material import Recalled
from chatsvc.conversation import BranchView, Conversation, Message, Role, Summary
from chatsvc.inference.base import Engine
from chatsvc.inference.scripted import ScriptedEngine, ScriptedOptions
from chatsvc.inference.scripted_cache import PrefixCache
from chatsvc.inference.scripted_text import encode
from chatsvc.prompt import ChatMessage, Prompt
from chatsvc.run import RunStatus
from chatsvc.scheduler.folds import Folds
from chatsvc.scheduler.prompts import Prompts
from chatsvc.scheduler.wanted import Wanted
from chatsvc.store import NewFold

MODEL: Final = "scripted"
SYSTEM, ASKED, ANSWERED = 1500, 150, 450
"""Tokens of the system prompt, of a question and of an answer."""
RECALLED_TURNS: Final = 4
FRAME_TOKENS: Final = 24
"""Of a recalled turn: its date, the marks of its lines, its share of the sentence before all."""
CACHE_TOKENS: Final = 50_000_000
COMMON: Final = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area", "money",
)  # fmt: skip
BEGAN: Final = datetime(2026, 1, 1, tzinfo=UTC)


def words(name: str, tokens: int) -> str:
    """A text of so many tokens, like no other but for chance: common words, of one token each in most vocabularies."""
    return "".join(f" {word}" for word in random.Random(name).choices(COMMON, k=tokens))


class Reminding:
    """Recalls other old turns each time, as many tokens as are wanted."""

    def __init__(self) -> None:
        self.times = 0
        self.tokens = 0

    async def recall(
        self, user_id: str, conversation_id: str, leaf_id: str, through_id: str, question: str,
        *, lately: str, budget_tokens: int, model: str,
    ) -> tuple[Recalled, ...]:  # fmt: skip
        """As ``scheduler.recall`` does it."""
        del user_id, conversation_id, leaf_id, through_id, question, lately, model
        self.times += 1
        self.tokens = budget_tokens
        size = budget_tokens // RECALLED_TURNS - FRAME_TOKENS
        return tuple(
            Recalled(
                message_ids=(f"msg_{number}",),
                text=words(f"r{self.times}x{number}", size),
                said_at=BEGAN + timedelta(days=number),
                score=float(number),
                tokens=size,
            )
            for number in range(RECALLED_TURNS)
        )


class Planned:
    """What folding asks of the store, noted instead of done."""

    def __init__(self) -> None:
        self.summaries = self
        self.fold: NewFold | None = None

    async def resting(self, conversation_id: str, base_id: str | None, *, rest_s: float) -> dict[str, bool]:
        """No fold fails."""
        del conversation_id, base_id, rest_s
        return {}

    async def queue(self, fold: NewFold, *, rest_s: float) -> None:
        """Note the fold."""
        del rest_s
        self.fold = fold


class Talk:
    """One conversation. Its turns are counted once its first fold was due, for all policies alike."""

    def __init__(self, window: int, policy: str, *, engine: Engine | None = None, system_tokens: int = SYSTEM) -> None:
        self.policy = policy
        self.engine = engine or ScriptedEngine(ScriptedOptions(window=window), model=MODEL)
        engines, config = {MODEL: self.engine}, ContextConfig()
        self.reminding = Reminding()
        self.prompts = Prompts(engines, config, self.reminding)
        self.planned = Planned()
        store: Any = self.planned
        self.folds = Folds(
            store=store,
            engines=engines,
            default_model=MODEL,
            prompts=self.prompts,
            config=config,
            may_work=lambda _model: True,
        )
        self.cache = PrefixCache(CACHE_TOKENS)
        self.conversation = Conversation(
            id="conv_1", user_id="ada", title=None, system_prompt=words("s", system_tokens), model=None,
            head_message_id=None, pinned=False, temporary=False, created_at=BEGAN, updated_at=BEGAN,
        )  # fmt: skip
        self.view = BranchView(summary=None, pinned=(), verbatim=())
        self.due = False
        """Whether the first fold was due."""
        self.folded: list[int] = []
        self.kept: list[int] = []
        """Tokens that went into each fold, and those that were left verbatim behind it."""
        self.computed = self.prompted = 0
        """Tokens since then: those that no cache had, and those of all prompts."""

    async def turn(self, number: int) -> None:
        """One question, its prompt and its answer; then the fold that is due."""
        asked, answered = words(f"q{number}", ASKED), words(f"a{number}", ANSWERED)
        prompt = await self._prompt(asked)
        computed = prompt.tokens - self.cache.served(prompt.token_ids)
        self.cache.store((*prompt.token_ids, *encode(answered)))
        if self.due:
            self.computed += computed
            self.prompted += prompt.tokens
        turn = (message(2 * number, Role.USER, asked), message(2 * number + 1, Role.ASSISTANT, answered))
        self.view = msgspec.structs.replace(self.view, verbatim=(*self.view.verbatim, *turn))
        await self._fold()

    @property
    def share(self) -> float:
        """Computed of all prompt tokens, in percent."""
        return 100 * self.computed / self.prompted if self.prompted else float("nan")

    async def _prompt(self, asked: str, *, recall: bool = True) -> Prompt:
        if self.policy == "full":
            return await self._newest_that_fit(asked)
        last = self.view.verbatim[-1].id if self.view.verbatim and recall else None
        wanted = Wanted(model=MODEL, conversation=self.conversation, view=self.view, leaf_id=last, question=asked)
        prompt = (await self.prompts.prepare(wanted)).prompt
        return await self.engine.render(to_the_front(prompt.messages)) if self.policy == "front" else prompt

    async def _newest_that_fit(self, asked: str) -> Prompt:
        """The system prompt and as many of the newest turns as the window takes beside a reply."""
        limit = self.engine.limits.window - reply_reserve(self.engine.limits.window, None)
        system = ChatMessage(Role.SYSTEM, self.conversation.system_prompt or "")
        while True:
            history = [ChatMessage(said.role, said.content) for said in self.view.verbatim]
            prompt = await self.engine.render([system, *history, ChatMessage(Role.USER, asked)])
            if prompt.tokens <= limit:
                return prompt
            self.view = msgspec.structs.replace(self.view, verbatim=self.view.verbatim[2:])

    async def _fold(self) -> None:
        """What the plan says; with ``each_turn`` also the oldest turn after every turn once the first fold was due."""
        self.planned.fold = None
        await self.folds.fold_if_due(self.conversation, self.view, MODEL)
        fold = self.planned.fold
        if fold is None and not (self.policy == "each_turn" and self.due):
            return
        first, self.due = not self.due, True
        if self.policy == "full":
            return
        verbatim = self.view.verbatim
        through = 2  # one turn
        if fold is not None and (first or self.policy != "each_turn"):
            through = [said.id for said in verbatim].index(fold.through_message_id) + 1
        self.folded.append(tokens_of(verbatim[:through]))
        self.kept.append(tokens_of(verbatim[through:]))
        most = fold.max_tokens if fold is not None else self.view.summary.tokens if self.view.summary else 1
        self.view = BranchView(
            summary=summary(len(self.folded), verbatim[through - 1].id, most), pinned=(), verbatim=verbatim[through:]
        )
        if self.policy == "ours":
            # As a fold's run does it: what the next turn will begin with is computed off its path.
            await self._warmed(await self._prompt("…", recall=False))

    async def _warmed(self, prompt: Prompt) -> None:
        self.computed += prompt.tokens - self.cache.served(prompt.token_ids)
        self.cache.store(prompt.token_ids)


def tokens_of(messages: Sequence[Message]) -> int:
    """All tokens of these."""
    return sum(said.tokens or 0 for said in messages)


def message(number: int, role: Role, text: str) -> Message:
    """A stored message, counted."""
    return Message(
        id=f"msg_{number}", conversation_id="conv_1", parent_id=f"msg_{number - 1}" if number else None, role=role,
        content=text, status=RunStatus.COMPLETE, created_at=BEGAN + timedelta(minutes=number), tokens=len(encode(text)),
    )  # fmt: skip


def summary(number: int, through: str, tokens: int) -> Summary:
    """What a fold has come to: another text each time, as long as it may be."""
    return Summary(
        id=f"sum_{number}", conversation_id="conv_1", through_message_id=through, version=1, previous_id=None,
        text=words(f"z{number}", tokens), tokens=tokens, edited=False, model=MODEL, created_at=BEGAN,
    )  # fmt: skip


def to_the_front(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The reminder in the last message put in front of the first verbatim turn, behind the summary."""
    *before, last = messages
    reminder, mark, question = last.content.rpartition(f"\n\n{MARK}\n\n")
    if not mark:
        return list(messages)
    return [*before[:3], ChatMessage(Role.USER, reminder), *before[3:], ChatMessage(Role.USER, question)]
