"""The door to the queue: validate, admit, then write, in one transaction (L8). Nothing is half-done behind an error.

came before? ─▶ model, content ─▶ prompt fits the window? ─▶ a free place? ─▶ store.submit: owner, parent, busy, open
replies, rows ─▶ begun at once, or offered to the queue
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

import msgspec
from msgspec.structs import asdict

from chatsvc.context.budget import reply_reserve
from chatsvc.conversation import BranchView, Message
from chatsvc.errors import (
    ConversationBusy,
    EngineUnavailable,
    InvalidInput,
    MessageTooLong,
    NotFound,
    UnknownModel,
    UnknownParent,
)
from chatsvc.events import clean_text
from chatsvc.ids import new_message_id, new_response_id
from chatsvc.inference.base import Engine
from chatsvc.limits import Principal, ServiceCost, TierName
from chatsvc.prompt import ContextReport
from chatsvc.run import WaitingRun, waiting
from chatsvc.scheduler.admission import EXPECTED_OUTPUT, expected_cost
from chatsvc.scheduler.dispatch import Dispatcher, Place
from chatsvc.scheduler.elsewhere import surely_fits, surely_shown
from chatsvc.scheduler.entrance import Entrance
from chatsvc.scheduler.pressure import Pressure, Terms, UsualReply
from chatsvc.scheduler.prompts import Prepared, Prompts
from chatsvc.scheduler.ready_engines import ReadyEngines
from chatsvc.scheduler.replicas import Replicas
from chatsvc.scheduler.request import NewAnswer, NewMessage, checked_id, continuable, digest, title_from
from chatsvc.scheduler.shared_state import Home
from chatsvc.scheduler.wanted import Wanted
from chatsvc.store import Moved, NewReply, Regeneration, Store, Submission, Submitted


class _Taken(NamedTuple):
    """A request, ready to be written."""

    terms: Terms
    prepared: Prepared | None
    charge: float
    wish: WaitingRun
    """The run that is to be, under its id."""

    def report(self, place: Place) -> ContextReport | None:
        """What the prompt is made of, if it begins at once: made anew later, it may be another."""
        return self.prepared.report if self.prepared is not None and place.owner is not None else None


class Submitter:
    """Takes messages in. ``engines`` may be empty in a process without the worker role, and of those that are not ready
    no use is made: the runner checks sizes then.
    """

    def __init__(
        self,
        *,
        store: Store,
        engines: Mapping[str, Engine],
        models: frozenset[str],
        default_model: str,
        region: str,
        max_content_chars: int,
        is_ready: Callable[[str], bool],
        check_log: Callable[[], Awaitable[None]],
        dispatcher: Dispatcher,
        replicas: Replicas,
        prompts: Prompts,
        pressure: Pressure,
        cost: ServiceCost,
    ) -> None:
        self._cost = cost
        self._entrance = Entrance(store.runs)
        self._check_log = check_log
        self._dispatcher = dispatcher
        self._replicas = replicas
        self._prompts = prompts
        self._pressure = pressure
        self._store = store
        self._engines = ReadyEngines(engines, is_ready)
        self._models = models
        self._default_model = default_model
        self._region = region
        self._max_content_chars = max_content_chars
        self._is_ready = is_ready

    async def message(self, principal: Principal, conversation_id: str, new: NewMessage) -> Submitted:
        """Store a user message and queue its reply.

        Raises ``InvalidInput`` and its kinds, ``NotFound``, ``IdempotencyMismatch``, ``ConversationBusy``,
        ``TooManyReplies``, ``QuotaExceeded``, ``Unavailable`` and its kinds.
        """
        request_hash = digest("message", conversation_id, new)

        async def submit() -> Submitted:
            return await self._message(principal, conversation_id, new, request_hash)

        return await self._entrance.enter(submit)

    async def _message(
        self, principal: Principal, conversation_id: str, new: NewMessage, request_hash: bytes
    ) -> Submitted:
        ground = await self._store.runs.ground(
            principal.user_id, conversation_id, new.parent_id, checked_id(new.client_msg_id), request_hash
        )
        if ground.known is not None:
            return ground.known
        conversation = ground.conversation
        if conversation is None:
            raise NotFound("There is no such conversation.")
        named = new.model or conversation.model
        home = await self._home(named, conversation_id)
        content = self._checked_content(new.content)
        view = ground.view
        if new.parent_id not in {None, msgspec.UNSET} and view is None:
            raise UnknownParent("The parent is not a message of this conversation.", field="parent_id")
        if view is not None:
            await self._refuse_running(principal, view.leaf, new.client_msg_id)
        wanted = Wanted(
            model=self._checked_model(named),
            conversation=conversation,
            view=view.branch if view else BranchView(summary=None, pinned=(), verbatim=()),
            leaf_id=view.leaf.id if view else None,
            question=content,
            max_tokens=new.max_tokens,
        )

        async def write(reply: NewReply) -> Submitted:
            return await self._store.runs.submit(
                Submission(
                    **asdict(reply),
                    conversation_id=conversation_id,
                    parent_id=view.leaf.id if view else None,
                    content=content,
                    title=None if conversation.title else title_from(content),
                    user_tokens=await self._tokens(reply.model, content),
                    at_head=new.parent_id is msgspec.UNSET,
                )
            )

        return await self._written(principal, new, wanted, home, request_hash, new_message_id(), write)

    async def answer_again(self, principal: Principal, user_message_id: str, new: NewAnswer) -> Submitted:
        """Queue another reply to a user message that is there already: a sibling. Raises as ``message`` does."""
        return await self._entrance.enter(lambda: self._answer_again(principal, user_message_id, new))

    async def _answer_again(self, principal: Principal, user_message_id: str, new: NewAnswer) -> Submitted:
        request_hash = digest("answer", user_message_id, new)
        client_msg_id = checked_id(new.client_msg_id)
        if (replay := await self._store.runs.replay(principal.user_id, client_msg_id, request_hash)) is not None:
            return replay
        message = await self._store.conversations.owner_of_message(principal.user_id, user_message_id)
        conversation, view = await self._store.conversations.view(
            principal.user_id, message.conversation_id, user_message_id
        )
        named = new.model or conversation.model
        home = await self._home(named, message.conversation_id)
        wanted = Wanted(
            model=self._checked_model(named),
            conversation=conversation,
            view=view,
            leaf_id=user_message_id,
            continued=continuable(new.continues) if new.continues is not None else None,
            max_tokens=new.max_tokens,
        )

        async def write(reply: NewReply) -> Submitted:
            continues = new.continues.id if new.continues else None
            return await self._store.runs.regenerate(Regeneration(**asdict(reply), continues_message_id=continues))

        return await self._written(principal, new, wanted, home, request_hash, user_message_id, write)

    async def _written(
        self,
        principal: Principal,
        new: NewMessage | NewAnswer,
        wanted: Wanted,
        home: Home | None,
        request_hash: bytes,
        user_message_id: str,
        write: Callable[[NewReply], Awaitable[Submitted]],
    ) -> Submitted:
        """Have the reply written on the terms that hold now, and begin it, or have it wait. ``home`` is the model's
        that was asked for.
        """
        taken = await self._on_terms(principal, wanted, named=(new.model or wanted.conversation.model) is not None)
        terms, wish = taken.terms, taken.wish
        if terms.moved:
            home = await self._dispatcher.home(terms.model, wanted.conversation.id)
        with self._dispatcher.place(wish, home) as place:
            self._refuse_late(wish, place)
            submitted = await write(
                NewReply(
                    principal=principal,
                    client_msg_id=new.client_msg_id,
                    request_hash=request_hash,
                    model=terms.model,
                    max_tokens=terms.max_tokens,
                    temperature=new.temperature,
                    background=new.background,
                    tier=terms.tier,
                    charge=taken.charge,
                    prompt_tokens=wish.prompt_tokens,
                    user_message_id=user_message_id,
                    message_id=new_message_id(),
                    response_id=wish.id,
                    owner=place.owner,
                    context=taken.report(place),
                    asked_model=terms.asked_model if terms.moved else None,
                    degraded=terms.degraded,
                    hurried=place.away,
                )
            )
            # The text that is gone on with may have grown since it was read: the runner reads it again.
            self._begin(submitted, place, taken.prepared if wanted.continued is None else None, terms)
        return submitted

    async def _home(self, named: str | None, conversation_id: str) -> Home | None:
        """Where the model served the conversation last, asked for while it is asked whether the log is there. Raises
        ``LogUnavailable``.
        """
        model = named or self._default_model
        if self._dispatcher.is_alone:
            await self._check_log()
            return None
        home, _ = await asyncio.gather(self._dispatcher.home(model, conversation_id), self._check_log())
        return home

    async def _refuse_running(self, principal: Principal, parent: Message, client_msg_id: str) -> None:
        """A reply that is still written has no text to be answered to. Raises ``ConversationBusy`` and ``Moved``."""
        if parent.status.ended or parent.response_id is None:
            return
        run = await self._store.runs.get(principal.user_id, parent.response_id)
        # Of the same message, posted twice at once, the other one may have been written between the looks at the id
        # and at the branch (L8).
        if run.status.ended or run.client_msg_id == client_msg_id:
            raise Moved
        raise ConversationBusy(
            "A reply is still running on this branch. Wait for its end, or stop it.",
            response_id=run.id,
            stop_requested=run.stop_requested,
        )

    async def _on_terms(self, principal: Principal, wanted: Wanted, *, named: bool) -> _Taken:
        """What is wanted, on the terms that hold now. Raises ``MessageTooLong``."""
        terms = self._terms(principal.tier, wanted, named=named)
        if terms.moved and not self._may_fit(terms.of(wanted)):
            terms = self._terms(principal.tier, wanted, named=named, may_move=False)
        try:
            prepared, size, charge = await self._fitting_prompt(terms.of(wanted))
        except MessageTooLong:
            if not terms.moved:
                raise
            # Too long for the smaller model only: then the one that was asked for answers.
            terms = self._terms(principal.tier, wanted, named=named, may_move=False)
            prepared, size, charge = await self._fitting_prompt(terms.of(wanted))
        if terms.history_share < 1 and self._is_all_shown(terms.of(wanted), prepared):
            terms = terms.with_all_history()
        wish = WaitingRun(
            id=new_response_id(self._region),
            user_id=principal.user_id,
            tier=principal.tier,
            model=terms.model,
            prompt_tokens=size,
            max_tokens=terms.max_tokens,
            conversation_id=wanted.conversation.id,
        )
        return _Taken(terms, prepared, charge, wish)

    def _terms(self, tier: TierName, wanted: Wanted, *, named: bool, may_move: bool = True) -> Terms:
        return self._pressure.terms(
            tier,
            wanted.model,
            named=named,
            max_tokens=wanted.max_tokens,
            usual=self._usual_reply,
            is_ready=self._replicas.is_served if may_move else lambda _: False,
        )

    def _may_fit(self, wanted: Wanted) -> bool:
        """False where nobody here can say that the message fits: the model is elsewhere, and cannot be asked."""
        if wanted.model in self._engines:
            return True
        window = self._replicas.window(wanted.model)
        return window is not None and surely_fits(wanted, window)

    def _is_all_shown(self, wanted: Wanted, prepared: Prepared | None) -> bool:
        if prepared is not None:
            return not prepared.curtailed
        window = self._replicas.window(wanted.model)
        return window is not None and surely_shown(wanted, window)

    def _usual_reply(self, model: str) -> UsualReply:
        engine = self._engines.get(model)
        if engine is not None:
            return UsualReply(engine.limits.reply_tokens, reply_reserve(engine.limits.window, None))
        window = self._replicas.window(model)
        return UsualReply(window.reply_tokens, reply_reserve(window.tokens, None)) if window else UsualReply(None, None)

    def _refuse_late(self, wish: WaitingRun, place: Place) -> None:
        """Raises ``TooLate``: better a no at once than a yes after the deadline."""
        if place.owner is None:
            self._pressure.refuse_late(wish.tier, wish.model)

    def _begin(self, submitted: Submitted, place: Place, prepared: Prepared | None, terms: Terms) -> None:
        run = submitted.run
        if not submitted.created:
            return
        self._pressure.note(run.tier, terms, run.expected_prompt_tokens)
        if place.owner is not None:
            place.take(run, prepared)
        else:
            self._dispatcher.post(waiting(run), place)

    def _checked_content(self, content: str) -> str:
        content = clean_text(content)
        if not content.strip():
            raise InvalidInput("The message is empty. Write something to answer.", field="content")
        if len(content) > self._max_content_chars:
            raise InvalidInput(
                f"The message has {len(content)} characters; at most {self._max_content_chars} are taken.",
                field="content",
                limit=self._max_content_chars,
            )
        return content

    def check_model(self, model: str) -> None:
        """Raises ``UnknownModel`` when the model is not served here."""
        if model not in self._models:
            raise UnknownModel(
                f"The model {model!r} is not served here. Served: {', '.join(sorted(self._models))}.", field="model"
            )

    def _checked_model(self, wanted: str | None) -> str:
        model = wanted or self._default_model
        self.check_model(model)
        if not self._is_ready(model) and not self._replicas.others_serve(model):
            raise EngineUnavailable(f"The model {model!r} is not ready. Try again shortly.", retry_after=5)
        return model

    async def _fitting_prompt(self, wanted: Wanted) -> tuple[Prepared | None, int, float]:
        """The prompt, by the model's own count; its tokens; and what the reply is expected to cost.

        No prompt where the model is not: there the size is a guess, and the worker's count decides. Raises
        ``MessageTooLong``.
        """
        if wanted.model not in self._engines:
            guess = self._prompts.guess(wanted)
            limit = EXPECTED_OUTPUT if wanted.max_tokens is None else wanted.max_tokens
            return None, guess, expected_cost(self._cost, prompt_tokens=guess, reply_limit=limit)
        prepared = await self._prompts.prepare(wanted)
        tokens = prepared.prompt.tokens
        return prepared, tokens, expected_cost(self._cost, prompt_tokens=tokens, reply_limit=prepared.reply_limit)

    async def _tokens(self, model: str, content: str) -> int | None:
        """The message's tokens, without template."""
        engine = self._engines.get(model)
        return None if engine is None else len(await engine.encode(content))
