"""The vectors of new questions, kept a little: the door and the runner ask for the same."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from typing import Final

import structlog

from chatsvc.context.retrieve import Floats
from chatsvc.errors import EngineUnavailable
from chatsvc.events import clean_text
from chatsvc.inference.embedder import Embedder
from chatsvc.scheduler.indexing import Indexer

_log = structlog.get_logger(__name__)

MOST: Final = 4
"""Questions whose vector is being made: one that comes when so many are open would not have its own in time."""
_KEPT: Final = 64
"""Vectors that are kept for who asks the same again: the same message answered again, say."""
_CHARS: Final = 1000
"""Of a question's end: what is asked stands there more often than in front. A small model reads some 250 tokens, and of
more it would leave out this very end."""


class QuestionVectors:
    """See the module's docstring. ``embedder`` None: there are none."""

    def __init__(self, embedder: Embedder | None, indexer: Indexer) -> None:
        self._embedder = embedder
        self._indexer = indexer
        self._tasks: OrderedDict[bytes, asyncio.Task[Floats | None]] = OrderedDict()
        """By a digest of who asks what: a text stays no longer than its conversation, and nobody finds another's."""
        self._under_way = 0
        self._works = False
        """The model has made a vector: until then questions do not queue up for it to load."""

    def asked(self, conversation_id: str, question: str) -> asyncio.Task[Floats | None] | None:
        """The task that makes the question's vector, or has made it; its result is None where that failed.

        None: there is no model, it rests after a failure, or too many wait for it.
        """
        most = MOST if self._works else 1
        text = clean_text(question[-_CHARS:])
        key = hashlib.sha256(f"{conversation_id} {text}".encode()).digest()
        if (known := self._tasks.get(key)) is not None:
            return known
        if self._embedder is None or self._indexer.embedder_rests or self._under_way >= most:
            return None
        # A task of its own: what comes too late for this question has loaded the model for the next one.
        self._under_way += 1
        task = self._tasks[key] = asyncio.create_task(self._vector(self._embedder, text), name="embed a question")
        task.add_done_callback(lambda done: self._ended(key, done))
        return task

    def _ended(self, key: bytes, task: asyncio.Task[Floats | None]) -> None:
        self._under_way -= 1
        failed = task.cancelled() or task.exception() is not None or task.result() is None
        if failed and self._tasks.get(key) is task:
            del self._tasks[key]  # to be tried again
        while len(self._tasks) > _KEPT + self._under_way:
            oldest = next(name for name, one in self._tasks.items() if one.done())
            del self._tasks[oldest]

    async def _vector(self, embedder: Embedder, text: str) -> Floats | None:
        try:
            vector: Floats = (await embedder.embed([text]))[0]
        except Exception as error:  # noqa: BLE001
            # A library of models raises what it likes; words alone decide, whatever it was.
            self._works = False
            self._indexer.embedder_failed()
            if isinstance(error, EngineUnavailable):
                _log.warning("questions are compared by their words only", reason=error.detail)
            else:
                _log.exception("questions are compared by their words only", error_type=type(error).__name__)
            return None
        self._works = True
        return vector

    async def aclose(self) -> None:
        """Wait for nothing more."""
        left = [task for task in self._tasks.values() if not task.done()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
