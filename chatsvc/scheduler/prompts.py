"""From a branch to the prompt that an engine reads: the one place where it is made, for the door and for the runner.

    branch ─▶ budget ─▶ what has to be left out? ─▶ recall ─▶ context.assemble ─▶ engine.render ─▶ fits? ─▶ report

Sizes that were counted before are only a first guess. What decides is the rendered prompt, so nothing overflows,
whatever the script or the tokenizer. The same branch gives the same prompt at any time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import msgspec

from chatsvc.config import ContextConfig
from chatsvc.context.assemble import assemble, in_order, question_of
from chatsvc.context.budget import (
    Budget,
    check_question,
    check_system,
    clipped,
    cuts,
    first_fit,
    halvings,
    holds_for,
    reply_limit,
    split,
)
from chatsvc.context.material import Assembled, Material, Recalled
from chatsvc.context.need import lately
from chatsvc.context.turns import turns
from chatsvc.conversation import Branch, Conversation, Message, Role, Summary
from chatsvc.errors import EngineUnavailable
from chatsvc.inference.base import Engine
from chatsvc.prompt import ChatMessage, ContextReport, Prompt, RecalledTurn, SummaryUsed
from chatsvc.scheduler.admission import CHARS_PER_TOKEN
from chatsvc.scheduler.parts import parts_of
from chatsvc.scheduler.remembered import fitting
from chatsvc.scheduler.sizes import Sizes
from chatsvc.scheduler.wanted import Wanted, material, question_apart

_NEAR: Final = 1.3
"""A guess that is further than this from fitting is believed without rendering it."""
_READ_AGAIN: Final = 8
"""A reply's text need not be read in as many tokens as it was written in."""
_PROBE: Final = (
    ChatMessage(Role.USER, "x"),
    ChatMessage(Role.ASSISTANT, "x"),
    ChatMessage(Role.USER, "x"),
)


class Recall(Protocol):
    """Finds old turns of a branch for a new question."""

    async def recall(
        self,
        user_id: str,
        conversation_id: str,
        leaf_id: str,
        through_id: str,
        question: str,
        *,
        lately: str,
        budget_tokens: int,
        model: str,
    ) -> tuple[Recalled, ...]:
        """Turns up to ``through_id`` needed beside what was said ``lately``; in time, or none; never raises."""
        ...


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that fits, and what is known of it."""

    prompt: Prompt
    reply_limit: int
    """Most tokens of the reply."""
    room: int
    """So many tokens may the reply have before the next prompt leaves out something more."""
    report: ContextReport
    curtailed: bool
    """For want of history's budget (``history_share``) turns are left out, or a pin or the summary's end are."""


class Prompts:
    """See the module's docstring. ``engines`` are those of this process; ``recall`` None: nothing is recalled."""

    def __init__(
        self, engines: Mapping[str, Engine], config: ContextConfig | None = None, recall: Recall | None = None
    ) -> None:
        self._engines = engines
        self._config = config or ContextConfig()
        self._recall = recall
        self._overheads: dict[str, int] = {}

    async def prepare(self, wanted: Wanted) -> Prepared:
        """The prompt of an engine of this process. Raises ``MessageTooLong``, ``EngineUnavailable``."""
        return await _Making(self, self._engines[wanted.model], wanted).prepared()

    @staticmethod
    def guess(wanted: Wanted) -> int:
        """About how many tokens the prompt has, where the engine is elsewhere."""
        assembled = assemble(material(wanted, wanted.view.verbatim))
        return sum(len(message.content) for message in assembled.messages) // CHARS_PER_TOKEN

    async def check_system(self, model: str, system_prompt: str) -> None:
        """Raises ``SystemPromptTooLong``. An engine that is elsewhere, or away, is not asked."""
        engine = self._engines.get(model)
        if engine is None:
            return
        try:
            window, tokens = engine.limits.most, len(await engine.encode(system_prompt))
        except EngineUnavailable:
            return  # what cannot be counted now is refused with the message it leaves no room for
        check_system(tokens, window)

    async def system_tokens(self, conversation: Conversation, model: str, engine: Engine) -> int:
        """Tokens of the system message: the system prompt, and what the user wants to be known."""
        memory = await fitting(engine, conversation.memory, self._config.memory_tokens)
        sizes = Sizes(engine, model, await self.overhead(model, engine))
        return await sizes.of(assemble(Material(conversation=conversation, memory=memory)).system)

    async def overhead(self, model: str, engine: Engine) -> int:
        """Tokens that the chat template adds to a message."""
        if model not in self._overheads:
            three, one = await engine.render(_PROBE), await engine.render(_PROBE[:1])
            letter = len(await engine.encode("x"))
            self._overheads[model] = max(0, (three.tokens - one.tokens) // 2 - letter)
        return self._overheads[model]

    @property
    def config(self) -> ContextConfig:
        """``[context]``."""
        return self._config

    async def recalled(
        self, user_id: str, wanted: Wanted, through_id: str, question: str, said: str, budget: int
    ) -> Sequence[Recalled]:
        """The turns to quote, the best first. ``said`` stands in the prompt."""
        if self._recall is None or budget <= 0 or wanted.leaf_id is None:
            return ()
        return await self._recall.recall(
            user_id,
            wanted.conversation.id,
            wanted.leaf_id,
            through_id,
            question,
            lately=said,
            budget_tokens=budget,
            model=wanted.model,
        )

    @property
    def recalls(self) -> bool:
        """Whether anything may be recalled."""
        return self._recall is not None and self._config.recall_tokens > 0


class _Making:
    """One prompt in the making."""

    def __init__(self, prompts: Prompts, engine: Engine, wanted: Wanted) -> None:
        self._prompts = prompts
        self._engine = engine
        self._wanted = wanted
        self._sizes = Sizes(engine, wanted.model, 0)
        self._steps: tuple[Sequence[int], Sequence[int], int] = (), (), 0
        """The turns' sizes, the places at which history may begin, and how often steps are halved."""
        history, tail = question_apart(wanted)
        self._turns = list(turns(history))
        self._tail = tail
        """The stored question, and the reply that is gone on with: what stands at the end, whole."""
        self._asked = wanted.question if wanted.question is not None else question_of(tail)
        self._question_tokens = 0
        self._spare = 0
        """Tokens that are kept for a longer question."""
        self._rendered: dict[int, tuple[Assembled, Prompt]] = {}
        """What was rendered without anything recalled, by how much was left out."""

    async def prepared(self) -> Prepared:
        wanted, engine = self._wanted, self._engine
        self._sizes = Sizes(engine, wanted.model, await self._prompts.overhead(wanted.model, engine))
        memory = await fitting(engine, wanted.conversation.memory, self._prompts.config.memory_tokens)
        wanted = self._wanted = msgspec.structs.replace(wanted, memory=memory)
        bare = assemble(material(wanted, self._tail, bare=True))
        budget = self._budget(await self._sizes.of(bare.system), wanted.history_share)
        question_tokens = self._question_tokens = await self._sizes.of(bare.question)
        check_question(budget, question_tokens)
        summary = await self._fitting_summary(budget)
        cut = await self._cut(budget, summary, question_tokens)
        recalled = await self._recalled(budget, summary, cut)
        return await self._verified(budget, summary, cut, recalled)

    def _budget(self, system_tokens: int, history_share: float) -> Budget:
        config = self._prompts.config
        return split(
            window=self._engine.limits.most,
            system_tokens=system_tokens,
            requested=self._wanted.max_tokens,
            recall_tokens=config.recall_tokens,
            step_tokens=config.fold_step_tokens,
            history_share=history_share,
        )

    async def _fitting_summary(self, budget: Budget) -> Summary | None:
        summary = self._wanted.view.summary
        if summary is None:
            return None
        counted = await self._sizes.of_text(summary.text)
        text = clipped(summary.text, counted, budget.summary)
        if not text:
            return None
        if text == summary.text:
            return msgspec.structs.replace(summary, tokens=counted)
        return msgspec.structs.replace(summary, text=text, tokens=await self._sizes.of_text(text))

    async def _cut(self, budget: Budget, summary: Summary | None, question_tokens: int) -> int:
        """How many of the oldest verbatim turns are left out: the first place at which the rest fits."""
        sizes = [await self._sizes.of_turn(turn) for turn in self._turns]
        # Of this room nothing changes from turn to turn but with a fold: so the steps stay where they are.
        kept = 0 if summary is None else summary.tokens + 2 * self._sizes.overhead
        recalled = budget.recalled if self._prompts.recalls else 0
        halved = halvings(budget.step, budget.verbatim(summary=kept, recalled=recalled, question=budget.question))
        places = cuts(sizes, budget.step, halved)
        self._steps = sizes, places, halved
        self._spare = max(0, budget.question - question_tokens)
        pins = await self._pins(budget, 0)
        taken = kept + await self._sizes.of_turn(pins) + question_tokens + self._spare
        reserve = self._reserve(budget, summary, 0)
        index = first_fit(sizes, places, budget.verbatim(summary=taken, recalled=reserve))
        if not index and sum(sizes) + taken + reserve <= budget.allowed // 2:
            return 0  # far from the limit; what was counted is verified when all is there
        if await self._fits(budget, summary, places[index]):
            while index and sum(sizes[places[index - 1] :]) <= _NEAR * budget.verbatim(summary=taken):
                if not await self._fits(budget, summary, places[index - 1]):
                    break
                index -= 1
        else:
            while index + 1 < len(places):
                index += 1
                if await self._fits(budget, summary, places[index]):
                    break
        return places[index]

    async def _fits(self, budget: Budget, summary: Summary | None, cut: int) -> bool:
        assembled = await self._assembled(budget, summary, cut)
        prompt = await self._engine.render(assembled.messages)
        self._rendered[cut] = assembled, prompt
        return prompt.tokens + self._spare + self._reserve(budget, summary, cut) <= budget.allowed

    def _reserve(self, budget: Budget, summary: Summary | None, cut: int) -> int:
        """Room that is kept for what may be recalled."""
        return budget.recalled if self._prompts.recalls and (summary is not None or cut) else 0

    async def _recalled(self, budget: Budget, summary: Summary | None, cut: int) -> Sequence[Recalled]:
        through = self._turns[cut - 1][-1].id if cut else summary.through_message_id if summary else None
        if through is None or not self._asked:
            return ()
        user_id = self._wanted.conversation.user_id
        said = lately(reversed(self._turns[cut:]), self._asked)
        found = await self._prompts.recalled(user_id, self._wanted, through, self._asked, said, budget.recalled)
        seen = {message.id for message in await self._pins(budget, cut)}
        return [turn for turn in found if not seen.issuperset(turn.message_ids)]

    async def _verified(
        self, budget: Budget, summary: Summary | None, cut: int, recalled: Sequence[Recalled]
    ) -> Prepared:
        """Render, and while the prompt is too long give up what can best be done without."""
        kept = sorted(recalled, key=lambda turn: -turn.score)
        used, pins = summary, True
        limit = budget.window - budget.reply
        while True:
            if not kept and pins and summary is used and cut in self._rendered:
                assembled, prompt = self._rendered[cut]
            else:
                assembled = await self._assembled(budget, summary, cut, in_order(kept), pins=pins)
                prompt = await self._engine.render(assembled.messages)
            excess = prompt.tokens - (budget.allowed if kept else limit)
            if excess <= 0:
                break
            if kept:
                while kept and excess > 0:
                    excess -= max(1, kept.pop().tokens)
            elif cut < len(self._turns):
                cut = self._next_place(cut, excess)
            elif pins:
                pins = False
            elif summary is not None:
                summary = None
            else:
                break  # the message alone is too long: refused below
        limits = self._engine.limits
        parts = await parts_of(assembled, prompt.tokens, self._sizes)
        return Prepared(
            prompt=prompt,
            curtailed=await self._curtailed(budget, cut),
            room=self._room(budget, summary, cut, prompt.tokens - parts.recalled),
            reply_limit=reply_limit(
                prompt_tokens=prompt.tokens,
                window=budget.window,
                requested=self._wanted.max_tokens,
                default=limits.reply_tokens,
            ),
            report=ContextReport(
                window=budget.window,
                reply_reserve=budget.reply,
                prompt_tokens=prompt.tokens,
                cached_tokens=None,
                parts=parts,
                left_out=cut,
                summary=None
                if summary is None
                else SummaryUsed(
                    id=summary.id,
                    version=summary.version,
                    through_message_id=summary.through_message_id,
                    tokens=summary.tokens,
                ),
                recalled=tuple(
                    RecalledTurn(
                        message_ids=turn.message_ids, score=turn.score, tokens=turn.tokens, created_at=turn.said_at
                    )
                    for turn in in_order(kept)
                ),
            ),
        )

    async def _curtailed(self, budget: Budget, cut: int) -> bool:
        if self._wanted.history_share >= 1:
            return False
        if cut:
            return True
        usual = self._budget(budget.system, 1.0)
        if await self._fitting_summary(budget) != await self._fitting_summary(usual):
            return True
        return await self._pins(budget, 0) != await self._pins(usual, 0)

    def _room(self, budget: Budget, summary: Summary | None, cut: int, tokens: int) -> int:
        """For the reply to a prompt of so many tokens, until the next prompt leaves out something more."""
        beside = 2 * self._sizes.overhead + _READ_AGAIN
        room = budget.allowed - tokens - budget.question - beside - self._reserve(budget, summary, cut)
        sizes, _, halved = self._steps
        most = holds_for(sizes, budget.step, cut, halved)
        return room if most is None else min(room, most - self._question_tokens - beside)

    def _next_place(self, cut: int, excess: int) -> int:
        """The next place at which history may begin that makes it shorter by ``excess``, as far as is known."""
        sizes, places, _ = self._steps
        later = [place for place in places if place > cut]
        return next((place for place in later if sum(sizes[cut:place]) >= excess), later[-1])

    async def _assembled(
        self,
        budget: Budget,
        summary: Summary | None,
        cut: int,
        recalled: tuple[Recalled, ...] = (),
        *,
        pins: bool = True,
    ) -> Assembled:
        shown = [message for turn in self._turns[cut:] for message in turn]
        return assemble(
            msgspec.structs.replace(
                material(self._wanted, (*shown, *self._tail)),
                summary=summary,
                pinned=await self._pins(budget, cut) if pins else (),
                recalled=recalled,
            )
        )

    async def _pins(self, budget: Budget, cut: int) -> Branch:
        """Pinned messages that are not shown in their place, the newest that fit their share."""
        hidden = [message for turn in self._turns[:cut] for message in turn if message.pinned]
        kept: list[Message] = []
        left = budget.pinned
        for message in reversed((*self._wanted.view.pinned, *hidden)):
            left -= await self._sizes.of_text(message.content) + 2 * self._sizes.overhead
            if left < 0:
                break
            kept.append(message)
        return tuple(reversed(kept))
