"""One fold, from its claim to its one end.

    claimed run ─▶ old summary and the turns ─▶ engine.generate ─▶ context.fold.accept ─┬▶ summary and end, one commit
                                                        └─ refused: once more ◀──────────┘      └▶ warming.py

It writes no log and no message. Until its summary is committed nothing has changed: a fold that fails, is refused or
whose worker dies leaves the turns as they are. Running replies do not notice; the next prompt has the new summary.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

import structlog
from msgspec.structs import replace

from chatsvc.context.budget import PART_SHARE, clipped
from chatsvc.context.fold import STOPS, Draft, Said, SummaryRefused, accept, repeats, request, shortened
from chatsvc.conversation import BranchView, Role
from chatsvc.errors import ChatError, Draining, EngineFailed, EngineUnavailable, NotFound, SummaryChanged
from chatsvc.ids import new_summary_id
from chatsvc.inference.base import Engine
from chatsvc.limits import Usage
from chatsvc.prompt import Prompt, Sampling
from chatsvc.run import MOST_LOSSES, Outcome, Run, RunKind, RunStatus
from chatsvc.scheduler.active import ActiveRun, Interrupt
from chatsvc.scheduler.folds import Folds
from chatsvc.scheduler.indexing import Indexer
from chatsvc.scheduler.patience import patiently
from chatsvc.scheduler.warming import Warming
from chatsvc.store import Committed, RecallBranch, Store

_log = structlog.get_logger(__name__)

PRIORITY: Final = 3
"""Behind all replies."""
TRIES: Final = 2
TEMPERATURES: Final = (0.5, 0.8)
"""Of the first try and the second: what was wrong is not to be said again. Small models repeat themselves at less."""
_OPENING_TOKENS: Final = 8
"""More than the summary's first words have."""
_SHRINK: Final = 0.9
_SHORTENINGS: Final = 6
_AWAY: Final = (EngineUnavailable, EngineFailed)


class _Refused(ChatError):
    """No draft had the form of a summary."""

    code = "summary_refused"
    title = "The summary was not usable"


class _Work:
    """What a fold has come to so far; read after it ended, however it ended."""

    def __init__(self) -> None:
        self.usage = Usage()
        self.failure: ChatError | None = None
        self.gone = False
        self.text = ""
        self.tokens = 0


class FoldRunner:
    """Carries out claimed runs of kind *fold*. Stateless but for what is handed in."""

    def __init__(
        self,
        *,
        store: Store,
        engines: Mapping[str, Engine],
        folds: Folds,
        warming: Warming,
        indexer: Indexer | None = None,
    ) -> None:
        self._store = store
        self._engines = engines
        self._folds = folds
        self._warming = warming
        self._indexer = indexer
        self.ended: Counter[tuple[str, str]] = Counter()
        """Folds ended by this process, by model and status."""

    async def execute(self, active: ActiveRun) -> bool:
        """See the fold to its end. False when its engine turned out to be away."""
        run = active.run
        with structlog.contextvars.bound_contextvars(run_id=run.id, conversation_id=run.conversation_id):
            work = _Work()
            if self._folds.may_work(run.model):
                await self._until_interrupted(active, self._write(active, work), work)
            else:
                # It was queued in better times. The next reply's end looks again.
                active.interrupt(Interrupt.STOP)
            if active.why is Interrupt.LOST:
                _log.info("fold given up", why="lost")
                return True
            if active.why is Interrupt.GONE or work.gone:
                _log.info("fold given up", why="gone")
                await patiently(lambda: self._store.allowances.bill(run.user_id, work.usage, RunKind.FOLD))
                return True
            active.settling = True
            committed = await self._end(active, work)
            if committed:
                self._index(run)
                await self._go_on(active)
            return not isinstance(work.failure, _AWAY)

    async def _until_interrupted(
        self, active: ActiveRun, coroutine: Coroutine[Any, Any, None], work: _Work | None
    ) -> None:
        said = "next fold not looked for" if work is None else "fold failed"
        task = asyncio.create_task(coroutine, name=f"fold {active.run.id}")
        active.guard(task)
        try:
            await task
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if active.why is None or (own is not None and own.cancelling()):
                raise  # our own task is being cancelled, not only the work
        except ChatError as error:
            # A conversation that was deleted behind its fold is no trouble.
            say = _log.info if work is None and isinstance(error, NotFound) else _log.warning
            say(said, code=error.code, detail=error.detail)
            if work is not None:
                work.failure = error
        except Exception as error:  # noqa: BLE001
            # The last line of defence: whatever a backend throws must end the run honestly, not leave it hanging.
            _log.exception(said, error_type=type(error).__name__)
            if work is not None:
                work.failure = ChatError("The server failed to finish this summary.")

    async def _write(self, active: ActiveRun, work: _Work) -> None:
        run = active.run
        engine = self._engines[run.model]
        try:
            view = await patiently(lambda: self._view(run))
        except NotFound:
            work.gone = True
            return
        if (view.summary.id if view.summary else None) != run.fold_base_id:
            raise SummaryChanged("The branch goes on from another summary by now.")
        previous = await _readable(engine, view.summary.text) if view.summary else None
        said = [Said(message.role, message.content) for message in view.verbatim]
        cap = run.max_tokens or 1
        source_tokens = await _tokens(engine, previous, said)
        refused: str | None = None
        for number in range(TRIES):
            prompt, opening = await _fitting(engine, previous, said, cap, refused)
            draft = replace(await self._draft(active, work, prompt, cap, number), opening=opening)
            try:
                text = accept(draft, source_tokens=source_tokens, cap_tokens=cap)
            except SummaryRefused as error:
                refused = str(error)
                _log.info("summary refused", reason=refused, tokens=draft.tokens, finish_reason=draft.finish_reason)
            else:
                tokens = len(await engine.encode(text))
                work.text, work.tokens = text, tokens  # both or, when it is interrupted before, neither
                return
        raise _Refused(f"No summary: {refused}.")

    async def _view(self, run: Run) -> BranchView:
        _, view = await self._store.conversations.view(
            run.user_id, run.conversation_id, run.fold_through_id or "", leaf_may_be_folded=True
        )
        return view

    async def _draft(self, active: ActiveRun, work: _Work, prompt: Prompt, cap: int, number: int) -> Draft:
        run = active.run
        # Room for the words that the summary begins with.
        sampling = Sampling(max_tokens=max(1, cap - _OPENING_TOKENS), temperature=TEMPERATURES[number], stop=STOPS)
        before = work.usage
        work.usage = _sum(before, Usage(prompt_tokens=prompt.tokens))
        pieces: list[str] = []
        output_tokens = 0
        finish_reason: str | None = None
        first = True
        request_id = f"{run.id}.{run.attempt}.{number}"
        async with aclosing(self._engines[run.model].generate(prompt, sampling, request_id, PRIORITY)) as chunks:
            async for chunk in chunks:
                if first:
                    first = False
                    active.meter.started(prompt.tokens, chunk.cached_tokens or 0)
                output_tokens += chunk.output_tokens
                active.meter.delivered(chunk.output_tokens)
                pieces.append(chunk.text)
                finish_reason = chunk.finish_reason
                work.usage = _sum(
                    before,
                    Usage(
                        prompt_tokens=prompt.tokens if chunk.prompt_tokens is None else chunk.prompt_tokens,
                        cached_tokens=chunk.cached_tokens or 0,
                        output_tokens=output_tokens,
                    ),
                )
                if "\n" in chunk.text and repeats("".join(pieces)):
                    break  # nothing else will come
        return Draft(text="".join(pieces), tokens=output_tokens, finish_reason=finish_reason)

    async def _end(self, active: ActiveRun, work: _Work) -> bool:
        """Write what it came to; whether that is a summary."""
        run = active.run
        if _worth_another_attempt(active, work) and await patiently(
            lambda: self._store.runs.requeue(run.id, run.attempt, lost=active.why is None)
        ):
            active.queued_again = True
            _log.info("fold queued again", why="engine away" if active.why is None else active.why.value)
            return False
        outcome = _outcome(active, work)
        committed = Committed.NO
        if work.text:
            summary_id = new_summary_id()
            committed = await patiently(
                lambda: self._store.summaries.commit(run, summary_id, work.text, work.tokens, outcome)
            )
        else:
            await patiently(lambda: self._store.runs.finish(run.id, run.attempt, outcome))
        changed = committed is Committed.CHANGED or isinstance(work.failure, SummaryChanged)
        if changed or isinstance(work.failure, _Refused):
            self._folds.look_again(run)  # refused: for fewer turns
        status = RunStatus.FAILED if changed else outcome.status
        self.ended[run.model, status.value] += 1
        _log.info(
            "fold ended",
            status=status.value,
            committed=committed.value,
            error_code=outcome.error_code,
            summary_tokens=work.tokens,
            prompt_tokens=work.usage.prompt_tokens,
            output_tokens=work.usage.output_tokens,
        )
        return committed is Committed.YES

    def _index(self, run: Run) -> None:
        """What is folded now is to be found again by questions."""
        if self._indexer is not None and run.fold_through_id is not None:
            branch = RecallBranch(user_id=run.user_id, conversation_id=run.conversation_id, through=run.fold_through_id)
            self._indexer.soon(branch, anew=True)

    async def _go_on(self, active: ActiveRun) -> None:
        """After the fold: the next one where there is more to fold, else warm what the next turn will begin with."""
        await self._until_interrupted(active, self._look_on(active.run), None)

    async def _look_on(self, run: Run) -> None:
        if not self._folds.may_work(run.model):
            return
        conversation = await self._store.conversations.get(run.user_id, run.conversation_id)
        leaf = conversation.head_message_id
        if leaf is None:
            return
        _, view = await self._store.conversations.view(run.user_id, run.conversation_id, leaf, leaf_may_be_folded=True)
        if not await self._folds.fold_if_due(conversation, view, run.model):
            self._warming.after_fold(run)


async def _readable(engine: Engine, summary: str) -> str:
    """As much of a summary that a larger model wrote as prompts of this one show; more leaves no room for the turns."""
    return clipped(summary, len(await engine.encode(summary)), engine.limits.most // PART_SHARE)


async def _tokens(engine: Engine, previous: str | None, said: Sequence[Said]) -> int:
    texts = [each.text for each in said] + ([previous] if previous else [])
    return sum([len(await engine.encode(text)) for text in texts])


async def _fitting(
    engine: Engine, previous: str | None, said: Sequence[Said], cap: int, refused: str | None
) -> tuple[Prompt, str]:
    """The summariser's prompt, with the longest messages shortened where not all of it fits beside its answer; and what
    its answer is begun with.
    """
    most = engine.limits.most - cap
    chars = sum(len(each.text) for each in said)
    shown = said
    for _ in range(_SHORTENINGS):
        messages = request(previous, shown, cap_tokens=cap, refused=refused)
        prompt = await engine.render(messages)
        if not prompt.token_ids:
            # A server on the far side need not know how to go on with an answer that was begun.
            messages = request(previous, shown, cap_tokens=cap, refused=refused, begun=False)
            prompt = await engine.render(messages)
        if prompt.tokens <= most:
            break
        chars = int(chars * _SHRINK * most / prompt.tokens)
        shown = shortened(said, chars)
    return prompt, messages[-1].content if messages[-1].role is Role.ASSISTANT else ""


def _worth_another_attempt(active: ActiveRun, work: _Work) -> bool:
    if work.text:
        return False
    if active.why in {Interrupt.DRAIN, Interrupt.GIVE_WAY}:
        return True  # neither has to do with the fold
    return active.why is None and isinstance(work.failure, _AWAY) and active.run.losses + 1 < MOST_LOSSES


def _outcome(active: ActiveRun, work: _Work) -> Outcome:
    if work.text:
        return Outcome(status=RunStatus.COMPLETE, text="", last_seq=0, finish_reason="stop", usage=work.usage)
    if active.why is Interrupt.STOP:
        return Outcome(status=RunStatus.STOPPED, text="", last_seq=0, finish_reason="stopped", usage=work.usage)
    failure = work.failure or Draining("The server was shut down before this summary was finished.")
    return Outcome(
        status=RunStatus.FAILED,
        text="",
        last_seq=0,
        usage=work.usage,
        error_code=failure.code,
        error_message=failure.detail,
    )


def _sum(one: Usage, other: Usage) -> Usage:
    return Usage(
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
        cached_tokens=one.cached_tokens + other.cached_tokens,
        output_tokens=one.output_tokens + other.output_tokens,
    )
