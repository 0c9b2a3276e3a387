"""A small model on this machine, stepped by transformers' continuous batching: the laptop's engine.

    transformers:                    the embedded model
    transformers:/models/mine        a directory
    transformers:org/name?slots=4    a model in the local hub cache

The batching loop runs in a thread of its own and hands what it sampled to the event loop, once per step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from chatsvc.errors import EngineFailed, EngineUnavailable
from chatsvc.inference.base import Engine, EngineHealth, EngineLimits, EngineLoad, Progress, room
from chatsvc.inference.chat_tokenizer import ChatTokenizer
from chatsvc.inference.embedded_model import EMBEDDED_HABITS, unpack_embedded_model
from chatsvc.inference.loading import forget_loaded, load_in_thread, warm_up
from chatsvc.inference.slots import Slots
from chatsvc.inference.text import StopStrings
from chatsvc.inference.transformers_options import TransformersOptions
from chatsvc.prompt import ChatMessage, Chunk, Prompt, Sampling

if TYPE_CHECKING:
    from chatsvc.inference.transformers_batch import TransformersBatch

_STALLED_S: Final = 30.0
"""A loop that has work and made no step for so long is taken for hung. One step takes a second or two at most."""


class _Mailbox:
    """Where one generation finds the newest output. Outputs are cumulative, so older ones may be overwritten."""

    def __init__(self) -> None:
        self.newest: Any = None
        self.filled = asyncio.Event()

    async def take(self) -> Any:
        await self.filled.wait()
        self.filled.clear()
        return self.newest

    def put(self, output: Any) -> None:
        self.newest = output
        self.filled.set()


class TransformersEngine(Engine):
    """See the module's docstring. ``source`` None: the embedded model, unpacked into ``data_dir``."""

    def __init__(self, options: TransformersOptions, *, model: str, source: str | None, data_dir: Path) -> None:
        self._options = options
        self._model = model
        self._source = source
        self._data_dir = data_dir
        self._slots = Slots(options.slots)
        self._mail: dict[str, _Mailbox] = {}
        self._batch: TransformersBatch | None = None
        self._tokenizer: ChatTokenizer | None = None
        self._limits: EngineLimits | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._progress_mark = (-1, 0.0)

    async def start(self, progress: Progress) -> None:
        self._loop = asyncio.get_running_loop()
        source = self._source or str(await unpack_embedded_model(self._data_dir, progress))
        progress(f"{self._model}: loading into memory")
        self._batch = batch = await load_in_thread(lambda: self._load(source), lambda loaded: loaded.close())
        self._tokenizer = ChatTokenizer(batch.tokenizer)
        kv_tokens = self._options.kv_tokens // batch.page_tokens * batch.page_tokens
        window = min(self._options.window or batch.window, batch.window, kv_tokens)
        self._limits = EngineLimits(
            model=self._model,
            window=window,
            slots=self._options.slots,
            kv_tokens=kv_tokens,
            kv_block=batch.page_tokens,
            keeps_prefixes=True,
            **({} if self._source else EMBEDDED_HABITS),
        )
        progress(f"{self._model}: warming up")
        await warm_up(self)

    def _load(self, source: str) -> TransformersBatch:
        try:
            from chatsvc.inference.transformers_batch import TransformersBatch  # noqa: PLC0415 - imports torch
        except ImportError as error:
            raise EngineUnavailable(
                f"The engine transformers: needs the extra 'transformers' of this package ({error})."
            ) from error
        return TransformersBatch(source, self._options, self._deliver)

    @property
    def limits(self) -> EngineLimits:
        if self._limits is None:
            raise EngineUnavailable(f"The model {self._model} is not started.")
        return self._limits

    async def render(self, messages: Sequence[ChatMessage]) -> Prompt:
        return await self._ready_tokenizer().render(messages)

    async def encode(self, text: str) -> Sequence[int]:
        return await self._ready_tokenizer().encode(text)

    async def generate(
        self, prompt: Prompt, sampling: Sampling, run_id: str, priority: int = 0
    ) -> AsyncGenerator[Chunk, None]:
        batch = self._ready_batch()
        budget = room(prompt, sampling, self.limits)
        detokenizer = self._ready_tokenizer().detokenizer()
        stops = StopStrings(sampling.stop)
        seen = 0
        ended = False
        async with self._slots.hold(priority):
            mailbox = self._mail[run_id] = _Mailbox()
            try:
                self._ready_batch().submit(run_id, prompt.token_ids, budget, sampling)
                while True:
                    output = await mailbox.take()
                    if output is None or output.error:
                        ended = True
                        raise self._death(output, any_said=seen > 0)
                    ended = output.is_finished()
                    fresh = output.generated_tokens[seen:]
                    seen += len(fresh)
                    text = stops.feed(detokenizer.feed(fresh))
                    reason = "stop" if stops.stopped else None
                    if ended and reason is None:
                        reason = "stop" if batch.is_end(output.generated_tokens[-1]) else "length"
                    yield Chunk(
                        text=text + stops.flush() if reason else text,
                        output_tokens=len(fresh),
                        finish_reason=reason,
                        prompt_tokens=prompt.tokens,
                        cached_tokens=batch.cached_tokens(run_id),
                    )
                    if reason:
                        return
            finally:
                del self._mail[run_id]
                batch.forget(run_id) if ended else batch.cancel(run_id)

    def load(self) -> EngineLoad:
        if self._batch is None or self._closed:
            return EngineLoad(running=0, waiting=0)
        return EngineLoad(running=self._batch.running, waiting=self._slots.waiting + self._batch.waiting)

    async def health(self) -> EngineHealth:
        if self._batch is None or self._closed:
            return EngineHealth(ready=False, reason="the engine is not running")
        if self._batch.failure is not None:
            return EngineHealth(ready=False, reason=self._batch.failure)
        now = asyncio.get_running_loop().time()
        if not self._batch.running or self._batch.steps != self._progress_mark[0]:
            self._progress_mark = (self._batch.steps, now)
        elif now - self._progress_mark[1] > _STALLED_S:
            return EngineHealth(ready=False, reason="the model makes no progress")
        return EngineHealth(ready=True)

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._slots.close(f"The model {self._model} was closed.")
        for mailbox in self._mail.values():
            mailbox.put(None)
        if self._batch is not None:
            await asyncio.to_thread(self._batch.close)
            await asyncio.to_thread(forget_loaded)

    def _deliver(self, outputs: Sequence[Any]) -> None:
        """Called in the batching thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._sort, outputs)

    def _sort(self, outputs: Sequence[Any]) -> None:
        if self._closed:
            return
        for output in outputs:
            mailbox = self._mail.get(output.request_id)
            if mailbox is not None:
                mailbox.put(output)

    def _death(self, output: Any, *, any_said: bool) -> EngineFailed | EngineUnavailable:
        reason = "was closed" if output is None else f"failed: {output.error}"
        kind = EngineFailed if any_said else EngineUnavailable
        return kind(f"The model {self._model} {reason}.")

    def _ready_batch(self) -> TransformersBatch:
        if self._batch is None or self._closed:
            raise EngineUnavailable(f"The model {self._model} is not running.")
        return self._batch

    def _ready_tokenizer(self) -> ChatTokenizer:
        if self._tokenizer is None:
            raise EngineUnavailable(f"The model {self._model} is not started.")
        return self._tokenizer
