"""When to fold: after a reply has ended, off every request's path, and one fold of a conversation at a time.

    reply ended ─▶ long enough to look? ─▶ branch from the store, counted ─▶ context.fold.plans ─▶ a run of kind *fold*

A fold is a run like others: it waits in the lines, is claimed, leased and accounted for. It waits in a line of its own,
beside that of its user's replies, with the weight of the lowest tier; Postgres lets one be open in a conversation.
Nothing is lost when a look is: the next reply's end looks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import structlog

from chatsvc.config import ContextConfig
from chatsvc.context.budget import Budget, reply_reserve, split
from chatsvc.context.fold import Counted, FoldPlan, plans, summary_cap
from chatsvc.conversation import BranchView, Conversation, Message, Summary
from chatsvc.errors import ChatError, NotFound, SummaryEmpty, SummaryTooLong
from chatsvc.events import clean_text
from chatsvc.ids import new_fold_id, new_summary_id
from chatsvc.inference.base import Engine
from chatsvc.limits import TierName
from chatsvc.run import Run
from chatsvc.scheduler.active import ActiveRun
from chatsvc.scheduler.admission import CHARS_PER_TOKEN
from chatsvc.scheduler.next_reply import asked_tokens
from chatsvc.scheduler.prompts import Prompts
from chatsvc.store import NewFold, Store

_log = structlog.get_logger(__name__)

LOWEST: Final = TierName.FREE
_LOOK_FROM: Final = 0.5
"""Of what starts a fold: after a shorter prompt and reply nobody looks."""
_LEAST_ROOM: Final = 0.5
"""Of the usual room for history: more is not given up for the replies that requests ask for."""
_TASK_TOKENS: Final = 400
"""What the summariser is told beside its material, about."""


class _Branch(msgspec.Struct, frozen=True):
    """Where to look."""

    user_id: str
    conversation_id: str
    leaf_id: str | None
    """None: the head."""
    model: str


class Folds:
    """``run`` is its loop. ``may_work`` says of a model whether there is room for what nobody waits for."""

    def __init__(
        self,
        *,
        store: Store,
        engines: Mapping[str, Engine],
        prompts: Prompts,
        default_model: str,
        config: ContextConfig,
        may_work: Callable[[str], bool],
    ) -> None:
        self._store = store
        self._engines = engines
        self._prompts = prompts
        self._default_model = default_model
        self._config = config
        self.may_work = may_work
        self._due: dict[str, _Branch] = {}
        self._some_due = asyncio.Event()
        self._under_way = False

    @property
    def looking(self) -> bool:
        """Whether a look is due or under way."""
        return bool(self._due) or self._under_way

    async def edit(
        self, user_id: str, conversation_id: str, through_message_id: str, *, text: str, version: int
    ) -> Summary:
        """Make the user's text the next version of a summary.

        Raises ``NotFound``, ``SummaryEmpty``, ``SummaryTooLong`` and ``SummaryChanged``.
        """
        text = clean_text(text).strip()
        if not text:
            raise SummaryEmpty("The summary is empty. Write what is to be kept.", field="text")
        conversation = await self._store.conversations.get(user_id, conversation_id)
        model = conversation.model or self._default_model
        engine = self._engines.get(model)
        if engine is None:
            limit, tokens = self._config.summary_tokens, len(text) // CHARS_PER_TOKEN
        else:
            budget = await self._budget(conversation, model, engine)
            limit, tokens = self._cap(budget), len(await engine.encode(text))
        if tokens > limit:
            raise SummaryTooLong(
                f"The summary has {tokens} tokens; at most {limit} are taken. Shorten it.",
                field="text",
                tokens=tokens,
                limit=limit,
            )
        return await self._store.summaries.edit(
            user_id,
            conversation_id,
            through_message_id,
            version=version,
            summary_id=new_summary_id(),
            text=text,
            tokens=max(1, tokens),
        )

    def consider(self, active: ActiveRun) -> None:
        """A reply has ended: look soon whether its branch is to be folded. Most are too short to be looked at."""
        run, prepared = active.run, active.prepared
        # For want of room a smaller model may have answered: history is not folded to its window, since the next turn
        # asks for the other one again.
        model = run.asked_model or run.model
        if prepared is None or model not in self._engines:
            return
        report = prepared.report
        tokens = report.prompt_tokens + active.output_tokens
        if report.left_out or tokens > _LOOK_FROM * self._config.fold_at * report.window:
            self._note(_Branch(run.user_id, run.conversation_id, run.message_id, model))

    def look_again(self, run: Run) -> None:
        """A fold came to nothing for which another may: look at the conversation's head."""
        self._note(_Branch(run.user_id, run.conversation_id, None, run.model))

    def _note(self, branch: _Branch) -> None:
        self._due[branch.conversation_id] = branch
        self._some_due.set()

    async def run(self) -> None:
        """Look where a look is due, until cancelled."""
        while True:
            await self._some_due.wait()
            self._some_due.clear()
            while self._due:
                branch = self._due.pop(next(iter(self._due)))
                self._under_way = True
                try:
                    await self._look(branch)
                except NotFound:
                    pass  # deleted meanwhile
                except ChatError as error:
                    _log.warning("fold not looked for", conversation_id=branch.conversation_id, reason=error.detail)
                except Exception as error:  # noqa: BLE001
                    # Whatever a tokenizer or a template throws: replies go on without, and so do other folds.
                    _log.exception(
                        "fold not looked for",
                        conversation_id=branch.conversation_id,
                        error_type=type(error).__name__,
                    )
                finally:
                    self._under_way = False

    async def _look(self, branch: _Branch) -> None:
        if not self.may_work(branch.model):
            return
        leaf = branch.leaf_id
        if leaf is None:
            leaf = (await self._store.conversations.get(branch.user_id, branch.conversation_id)).head_message_id
        if leaf is not None:
            conversation, view = await self._store.conversations.view(
                branch.user_id, branch.conversation_id, leaf, leaf_may_be_folded=True
            )
            # Where the conversation has a model of its own, a reply that was asked of another one once is no reason to
            # condense for its window what the next turn has room for.
            own = conversation.model
            model = own if own is not None and own in self._engines else branch.model
            if self.may_work(model):
                await self.fold_if_due(conversation, view, model)

    async def fold_if_due(self, conversation: Conversation, view: BranchView, model: str) -> bool:
        """Queue a fold of this branch if it is long enough; whether one is needed.

        Raises ``NotFound`` and ``StoreUnavailable``.
        """
        engine = self._engines[model]
        window = engine.limits.most
        history = await self._counted(model, engine, view.verbatim)
        summary_tokens = len(await engine.encode(view.summary.text)) if view.summary else 0
        asked = await asked_tokens(self._store, conversation.user_id, view.verbatim)
        budget = await self._budget(conversation, model, engine, asked)
        pinned = sum(message.tokens for message in await self._counted(model, engine, view.pinned))
        found = plans(
            history,
            window=window,
            room=budget.verbatim(
                summary=summary_tokens,
                pinned=min(pinned, budget.pinned),
                recalled=budget.recalled if self._prompts.recalls and view.summary else 0,
                question=budget.question,
            ),
            fold_at=self._config.fold_at,
            step_tokens=self._config.fold_step_tokens,
        )
        if not found:
            return False
        fold = await self._untried(conversation.id, view.summary, found)
        if fold is None:
            return True
        queued = await self._store.summaries.queue(
            NewFold(
                id=new_fold_id(),
                user_id=conversation.user_id,
                conversation_id=conversation.id,
                through_message_id=fold.through_message_id,
                base_id=view.summary.id if view.summary else None,
                model=model,
                tier=LOWEST,
                prompt_tokens=min(window, summary_tokens + fold.tokens + _TASK_TOKENS),
                max_tokens=self._cap(budget),
            ),
            rest_s=self._config.fold_rest_s,
        )
        if queued is not None:
            _log.info(
                "fold queued",
                run_id=queued.id,
                conversation_id=conversation.id,
                folded=fold.messages,
                tokens=fold.tokens,
            )
        return True

    async def _untried(
        self, conversation_id: str, summary: Summary | None, found: Sequence[FoldPlan]
    ) -> FoldPlan | None:
        """The largest that does not rest, if the larger ones do for their words: what failed otherwise may again."""
        base_id = summary.id if summary else None
        resting = await self._store.summaries.resting(conversation_id, base_id, rest_s=self._config.fold_rest_s)
        for fold in found:
            refused = resting.get(fold.through_message_id)
            if refused is None:
                return fold
            if not refused:
                break
        return None

    async def _budget(
        self, conversation: Conversation, model: str, engine: Engine, max_tokens: int | None = None
    ) -> Budget:
        """What the next prompt has room for, beside a usual reply or a longer one."""
        window = engine.limits.most
        system_tokens = await self._prompts.system_tokens(conversation, model, engine)
        reserve = reply_reserve(window, None)
        longest = window - system_tokens - int(_LEAST_ROOM * (window - system_tokens - reserve))
        reply = min(max_tokens or 0, longest)
        return split(
            window=window,
            system_tokens=system_tokens,
            requested=reply if reply > reserve else None,
            recall_tokens=self._config.recall_tokens,
            step_tokens=self._config.fold_step_tokens,
        )

    def _cap(self, budget: Budget) -> int:
        """Most tokens of a summary that a prompt shows whole."""
        return max(1, min(summary_cap(budget.window, self._config.summary_tokens), budget.summary))

    async def _counted(self, model: str, engine: Engine, messages: Sequence[Message]) -> list[Counted]:
        overhead = await self._prompts.overhead(model, engine)
        return [
            Counted(message.id, message.role, len(await engine.encode(message.content)) + overhead)
            for message in messages
        ]
