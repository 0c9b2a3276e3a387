"""Finds what was said long ago for a new question: reads the branch's index, ranks, and quotes what fits.

    question ─▶ store: chunks ─▶ words: may context.need be met? ─▶ embedder: vector ─▶ context.need, context.retrieve
             ─▶ store: texts of the best ─▶ as many as fit

A reply never waits for long: what is not there in time (a model that loads, a chunk that is not indexed, a store that
is slow) is done without, and is made up for in the background.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import structlog

from chatsvc.clock import Clock
from chatsvc.context.material import Recalled
from chatsvc.context.need import Need, need
from chatsvc.context.passages import Words, cosines, question_keys
from chatsvc.context.retrieve import Floats, Postings, best, fused, joined, words_scores
from chatsvc.context.words import VERSION, terms
from chatsvc.conversation import Role
from chatsvc.errors import EngineUnavailable, StoreUnavailable
from chatsvc.inference.base import Engine
from chatsvc.inference.embedder import Embedder
from chatsvc.scheduler.admission import CHARS_PER_TOKEN
from chatsvc.scheduler.indexing import Indexer
from chatsvc.scheduler.question_vectors import QuestionVectors
from chatsvc.store import RecallBranch, RecallIndex, StoredChunk, StoredPassage

_log = structlog.get_logger(__name__)

DEADLINE_S: Final = 1.0
"""For all of it. On a quiet machine it takes some 20 ms."""
VECTOR_S: Final = 0.25
"""For the question's vector. Later, words alone decide."""
QUOTE_TOKENS: Final = 12
"""What the date and the marks around a quotation take, about."""
LINE_TOKENS: Final = 3
"""What the marks around a further line of it take."""
SMALLEST: Final = 8
"""Tokens of room in which nothing worth quoting fits."""
TOGETHER: Final = 4
"""Neighbouring passages that are one quotation at most: what is one is shown or left out whole."""
_CANDIDATES: Final = 2
"""Passages are read for so many times as many as may be chosen: some may be too long, or in the prompt already."""
_OFFLOAD: Final = 512
"""Passages that are ranked in a thread, since it takes longer than the event loop should stand still."""
_OFFLOAD_CHARS: Final = 4000
"""Of a question: so does splitting a longer one into words."""
_KEPT: Final = 256
_KEPT_S: Final = 30.0
"""An answer is given again for so long: the door and the runner ask the same within moments. Then it is forgotten: the
conversation that it quotes may be deleted.
"""
_SPEAKERS: Final = {Role.USER: "User", Role.ASSISTANT: "Assistant"}


class Recall:
    """See the module's docstring.

    ``embedder`` None: words alone decide. ``most``: passages that are quoted at most. ``may_work``: whether there is
    time to index.
    """

    def __init__(
        self,
        *,
        index: RecallIndex,
        engines: Mapping[str, Engine],
        embedder: Embedder | None,
        clock: Clock,
        most: int,
        may_work: Callable[[], bool] = lambda: True,
    ) -> None:
        self._index = index
        self._engines = engines
        self._embedder = embedder
        self.indexer = Indexer(index=index, embedder=embedder, clock=clock, may_work=may_work)
        """To be kept running by one who serves."""
        self._clock = clock
        self._most = most
        self._answers: OrderedDict[tuple[object, ...], tuple[float, tuple[Recalled, ...]]] = OrderedDict()
        self._forgetting: asyncio.TimerHandle | None = None
        """Waits for the oldest answer to be of no more use, while there are any."""
        self._vectors = QuestionVectors(embedder, self.indexer)

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
        """What was said in the branch up to ``through_id`` and fits the question, the best first; never raises.

        Nothing where the question can do without (``context.need``). ``leaf_id`` ends the branch that ``through_id``
        lies on; ``lately`` is what was said last, which the prompt has anyway.
        """
        branch = RecallBranch(user_id=user_id, conversation_id=conversation_id, through=through_id)
        key = (branch, question, lately, budget_tokens, model)
        if (kept := self._answers.get(key)) is not None and self._clock.monotonic() - kept[0] < _KEPT_S:
            return kept[1]
        try:
            async with asyncio.timeout(DEADLINE_S):
                complete, found = await self._find(branch, question, lately, budget_tokens, model)
        except (TimeoutError, StoreUnavailable, EngineUnavailable) as error:
            _log.warning("nothing recalled: not in time", reason=str(error) or type(error).__name__)
            return ()
        except Exception as error:  # noqa: BLE001
            # The last line of defence: whatever it was, the reply goes on without it.
            _log.exception("nothing recalled", error_type=type(error).__name__)
            return ()
        if complete:
            self._keep(key, found)
        return found

    async def _find(
        self, branch: RecallBranch, question: str, lately: str, budget_tokens: int, model: str
    ) -> tuple[bool, tuple[Recalled, ...]]:
        """What to quote, and whether all that may be found was looked at."""
        is_long = len(question) > _OFFLOAD_CHARS
        if not (await asyncio.to_thread(terms, question) if is_long else terms(question)):
            return True, ()  # nothing was said that could be compared
        name, unrelated = (self._embedder.name, self._embedder.unrelated) if self._embedder else (None, None)
        chunks = await self._index.chunks(branch, version=VERSION, embedder=name)
        lacking = not chunks or chunks[0].missing > 0 or self._lacks_vectors(chunks)
        if lacking:
            self.indexer.soon(branch)
        if not chunks:
            return False, ()
        is_much = is_long or sum(chunk.passages for chunk in chunks) > _OFFLOAD
        compare = partial(compared, chunks, question, lately)
        told = await asyncio.to_thread(compare) if is_much else compare()
        if not msgspec.structs.replace(told.need, room=budget_tokens).is_open:
            return not lacking, ()
        embedding = self._vectors.asked(branch.conversation_id, question)
        vector = await _in_time(embedding)
        count = self._most * _CANDIDATES
        rank = partial(_rank, chunks, told, vector, count, room=budget_tokens, unrelated=unrelated)
        ranked = await asyncio.to_thread(rank) if is_much else rank()
        stored = await self._index.passages(branch.user_id, [place for place, *_ in ranked]) if ranked else ()
        scored = [Scored(passage, *ranked[passage.place - 1][1:]) for passage in stored]
        chosen = await self._within(scored, budget_tokens, model)
        return not lacking and (vector is not None or embedding is None), chosen

    def _lacks_vectors(self, chunks: Sequence[StoredChunk]) -> bool:
        return self._embedder is not None and any(chunk.passages and chunk.vectors is None for chunk in chunks)

    async def _within(self, scored: Sequence[Scored], budget_tokens: int, model: str) -> tuple[Recalled, ...]:
        """As many as fit, the best first; neighbours are one quotation. What is too long for what is left is passed
        over.
        """
        chosen: dict[int, Scored] = {}
        left = budget_tokens
        for one in scored:
            if len(chosen) == self._most or left < SMALLEST:
                break
            if one.passage.pinned:
                continue  # it stands in the prompt as it is
            beside = one.position - 1 in chosen or one.position + 1 in chosen
            tokens = await self._count(_line(one.passage), model) + (LINE_TOKENS if beside else QUOTE_TOKENS)
            if tokens <= left:
                left -= tokens
                chosen[one.position] = one
        quotes = [_quote(group) for group in _neighbours(chosen)]
        counted = [msgspec.structs.replace(quote, tokens=await self._count(quote.text, model)) for quote in quotes]
        return tuple(sorted(counted, key=lambda quote: -quote.score))

    async def _count(self, text: str, model: str) -> int:
        engine = self._engines.get(model)
        return len(await engine.encode(text)) if engine is not None else -(-len(text) // CHARS_PER_TOKEN)

    def _keep(self, key: tuple[object, ...], found: tuple[Recalled, ...]) -> None:
        self._answers[key] = self._clock.monotonic(), found
        self._answers.move_to_end(key)
        if len(self._answers) > _KEPT:
            self._answers.popitem(last=False)
        if self._forgetting is None:
            self._forgetting = asyncio.get_running_loop().call_later(_KEPT_S, self._forget)

    def _forget(self) -> None:
        self._forgetting = None
        now = self._clock.monotonic()
        while self._answers:
            left_s = next(iter(self._answers.values()))[0] + _KEPT_S - now
            if left_s > 0:
                self._forgetting = asyncio.get_running_loop().call_later(left_s, self._forget)
                break
            self._answers.popitem(last=False)

    async def aclose(self) -> None:
        """Wait for nothing more, and keep nothing."""
        if self._forgetting is not None:
            self._forgetting.cancel()
            self._forgetting = None
        self._answers.clear()
        await self._vectors.aclose()


class Scored(msgspec.Struct, frozen=True):
    """A passage, its place in the branch and its score."""

    passage: StoredPassage
    position: int
    score: float


class Ranked(msgspec.Struct, frozen=True):
    """Scores by passage over the chunks of a branch, in order."""

    starts: list[int]
    scores: Floats
    need: Need


class Told(msgspec.Struct, frozen=True):
    """What a question's words tell of the passages of a branch: their lengths, where its terms occur, by their number,
    and which of those were said lately.
    """

    starts: list[int]
    lengths: Floats
    occurring: dict[int, Postings]
    said: npt.NDArray[np.bool_]
    need: Need


def compared(chunks: Sequence[StoredChunk], question: str, lately: str = "") -> Told:
    """Compare a question with every passage of a branch, word by word."""
    wanted = question_keys(question)
    starts: list[int] = []
    lengths: list[Floats] = []
    found: dict[int, list[tuple[int, Postings]]] = {}
    position = 0
    for chunk in chunks:
        read = Words(chunk.words)
        starts.append(position)
        lengths.append(read.lengths)
        for number, postings in read.find(wanted):
            found.setdefault(number, []).append((position, postings))
        position += chunk.passages
    occurring = {number: joined(parts) for number, parts in found.items()}
    every = np.concatenate(lengths)
    said = np.isin(wanted, question_keys(lately))
    return Told(starts, every, occurring, said, need(every, occurring, said, None, unrelated=None))


def scores_of(
    chunks: Sequence[StoredChunk],
    told: Told,
    vector: Floats | None,
    *,
    words: bool = True,
    unrelated: float | None = None,
) -> Ranked:
    """Score every passage of a branch, and whether any is needed. ``words`` False: by meaning alone, to compare."""
    by_words = words_scores(told.lengths, told.occurring.values()) if words else None
    if vector is None:
        return Ranked(told.starts, fused(by_words, None), told.need)
    meaning = np.concatenate([cosines(chunk.vectors, chunk.passages, vector) for chunk in chunks])
    needed = need(told.lengths, told.occurring, told.said, meaning, unrelated=unrelated)
    return Ranked(told.starts, fused(by_words, meaning), needed)


def _rank(
    chunks: Sequence[StoredChunk],
    told: Told,
    vector: Floats | None,
    count: int,
    *,
    room: int,
    unrelated: float | None,
) -> list[tuple[tuple[int, int], int, float]]:
    """The best passages: (chunk, position in it), position in the branch, score. None where nothing old is needed."""
    ranked = scores_of(chunks, told, vector, unrelated=unrelated)
    needed = msgspec.structs.replace(ranked.need, room=room)
    if not needed.met:
        return []
    places: list[tuple[tuple[int, int], int, float]] = []
    for position in best(ranked.scores, count, enough=needed.enough):
        number = int(np.searchsorted(ranked.starts, position, side="right")) - 1
        place = chunks[number].id, position - ranked.starts[number]
        places.append((place, position, float(ranked.scores[position])))
    return places


def _neighbours(chosen: Mapping[int, Scored]) -> Iterator[list[Scored]]:
    """What was said one after the other, together, but not more than ``TOGETHER``; oldest first."""
    group: list[Scored] = []
    for position in sorted(chosen):
        if group and (position != group[-1].position + 1 or len(group) == TOGETHER):
            yield group
            group = []
        group.append(chosen[position])
    if group:
        yield group


def _quote(group: Sequence[Scored]) -> Recalled:
    ids = dict.fromkeys(one.passage.message_id for one in group)
    return Recalled(
        message_ids=tuple(ids),
        text="\n".join(_line(one.passage) for one in group),
        said_at=group[0].passage.said_at,
        score=round(max(one.score for one in group), 4),
        tokens=0,
    )


def _line(passage: StoredPassage) -> str:
    return f"{_SPEAKERS.get(passage.role, passage.role.value)}: {passage.text.strip()}"


async def _in_time(embedding: asyncio.Task[Floats | None] | None) -> Floats | None:
    if embedding is None:
        return None
    done, _ = await asyncio.wait({embedding}, timeout=VECTOR_S)
    # A model that is being closed takes its vectors with it, not the replies.
    return embedding.result() if done and not embedding.cancelled() else None
