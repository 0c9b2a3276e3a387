"""Indexes old passages behind everybody's back: words at once, then what they mean.

    soon(branch) ─▶ store: recall_due ─▶ one worker takes the conversation ─▶ messages that are not indexed
                 ─▶ context.passages ─▶ chunks with words ─▶ embedder, a few texts at a time ─▶ vectors

A branch is asked for when it was folded, and by any question that finds some of it missing; so what was lost with a
worker, or came before the index, is made up for. Nothing is said twice by doing it twice: chunks have one place each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final

import msgspec
import numpy as np
import structlog

from chatsvc.clock import Clock
from chatsvc.context.passages import Passage, Spoken, chunked, pack, pack_vectors
from chatsvc.context.words import VERSION
from chatsvc.conversation import Role
from chatsvc.errors import EngineUnavailable, StoreUnavailable
from chatsvc.inference.embedder import BATCH, Embedder
from chatsvc.store import NewChunk, RecallBranch, RecallDue, RecallIndex

_log = structlog.get_logger(__name__)

LOOK_S: Final = 5.0
"""How often other processes' wishes are looked for; this one's own are seen at once."""
MESSAGES_AT_ONCE: Final = 256
AGAIN_S: Final = 300.0
"""A model that cannot be used is tried again after so long; a branch that was asked for is asked for again after it."""
_MOST_ASKED: Final = 4096
_SPOKEN: Final = frozenset({Role.USER, Role.ASSISTANT})


class Indexer:
    """See the module's docstring. ``may_work``: whether there is time for vectors now; words take next to none."""

    def __init__(
        self,
        *,
        index: RecallIndex,
        embedder: Embedder | None,
        clock: Clock,
        may_work: Callable[[], bool] = lambda: True,
    ) -> None:
        self._index = index
        self._embedder = embedder
        self._clock = clock
        self._may_work = may_work
        self._wanted = asyncio.Event()
        self._wishes: dict[RecallBranch, None] = {}
        self._asked: dict[RecallBranch, float] = {}
        self._failed_at: float | None = None

    def soon(self, branch: RecallBranch, *, anew: bool = False) -> None:
        """Have a branch indexed. ``anew``: it has just grown; else the same wish within ``AGAIN_S`` is ignored."""
        now = self._clock.monotonic()
        if not anew and now - self._asked.get(branch, -AGAIN_S) < AGAIN_S:
            return
        if len(self._asked) >= _MOST_ASKED:
            self._asked.clear()
        self._asked[branch] = now
        self._wishes[branch] = None
        self._wanted.set()

    async def run(self) -> None:
        """Index what there is, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._wanted.wait()
            self._wanted.clear()
            try:
                while await self.step():
                    pass
            except StoreUnavailable as error:
                _log.warning("old passages not indexed yet", reason=error.detail)
            except Exception as error:  # noqa: BLE001
                # Whatever it was, replies go on without it. It is held, and so tried again in a minute at the earliest.
                _log.exception("old passages not indexed", error_type=type(error).__name__)

    async def step(self) -> bool:
        """Index one conversation; whether there was one. Raises ``StoreUnavailable``: then it is left for later."""
        await self._pass_on()
        due = await self._index.take()
        if due is None:
            return False
        # Ids are in the order of time. The later one of a branch goes on from the earlier one's chunks.
        branches = [
            RecallBranch(user_id=due.user_id, conversation_id=due.conversation_id, through=through)
            for through in sorted(due.through_message_ids)
        ]
        for branch in branches:
            await self._words(branch, due)
        for branch in branches:
            if not await self._vectors(branch, due):
                return True  # it is due again when nobody holds it any more
        await self._index.done(due)
        return True

    async def _pass_on(self) -> None:
        """Write down what is wanted, where every worker sees it."""
        while self._wishes:
            branch = next(iter(self._wishes))
            await self._index.ask(branch)
            del self._wishes[branch]

    async def _words(self, branch: RecallBranch, due: RecallDue) -> None:
        gap = await self._index.gap(branch, version=VERSION)
        previous = gap.previous_id
        for first in range(0, len(gap.message_ids), MESSAGES_AT_ONCE):
            ids = gap.message_ids[first : first + MESSAGES_AT_ONCE]
            rows = await self._index.contents(ids)
            spoken = [
                Spoken(row["id"], row["content"] if Role(row["role"]) in _SPOKEN else "", row["said_at"])
                for row in (rows[id_] for id_ in ids if id_ in rows)
            ]
            for chunk in await asyncio.to_thread(_packed, spoken, previous):
                previous = await self._index.add(
                    branch, msgspec.structs.replace(chunk, previous_id=previous), version=VERSION
                )
                if previous is None:
                    return  # it was deleted meanwhile
            await self._index.hold(due)

    async def _vectors(self, branch: RecallBranch, due: RecallDue) -> bool:
        """False: there is no time for it now."""
        embedder = self._embedder
        if embedder is None or self.embedder_rests:
            return True
        for chunk in await self._index.without_vectors(branch, version=VERSION, embedder=embedder.name):
            texts = await self._index.texts(chunk)
            rows = []
            for first in range(0, len(texts), BATCH):
                if not self._may_work():
                    return False
                try:
                    rows.append(await embedder.embed(texts[first : first + BATCH]))
                except EngineUnavailable as error:
                    self.embedder_failed()
                    _log.warning("old passages are indexed by their words only", reason=error.detail)
                    return True
            if rows:
                packed = await asyncio.to_thread(pack_vectors, np.concatenate(rows))
                await self._index.set_vectors(chunk, embedder=embedder.name, vectors=packed)
            await self._index.hold(due)
        return True

    def embedder_failed(self) -> None:
        """Leave the model alone for ``AGAIN_S``."""
        self._failed_at = self._clock.monotonic()

    @property
    def embedder_rests(self) -> bool:
        """Whether the model has failed a while ago, here or for a question, and is not tried again yet."""
        return self._failed_at is not None and self._clock.monotonic() - self._failed_at <= AGAIN_S


def _packed(spoken: Sequence[Spoken], previous_id: int | None) -> list[NewChunk]:
    """The chunks of some messages; each is to be put behind the one before."""

    def new(through: str, passages: list[Passage]) -> NewChunk:
        packed = pack(passages)
        return NewChunk(
            previous_id=previous_id,
            through=through,
            message_ids=packed.message_ids,
            starts=packed.starts,
            ends=packed.ends,
            words=packed.words,
        )

    chunks: Iterator[tuple[str, list[Passage]]] = chunked(spoken)
    return [new(through, passages) for through, passages in chunks]
