"""Everything that touches vLLM's own types. Imported only when a ``vllm:`` engine starts, since it imports torch."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from typing import Any, Final

# Before vLLM is imported, since it reads them then. What the operator has set stays.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import psutil  # type: ignore[import-untyped]
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from chatsvc.inference.vllm_options import VllmOptions
from chatsvc.prompt import Sampling

__all__ = [
    "CoreProcesses",
    "CoreStats",
    "EngineDeadError",
    "embedding_params",
    "kill_with_workers",
    "sampling_params",
    "start_core",
    "start_pooling_core",
]

_ON_CPU: Final[dict[str, Any]] = {
    "max_num_seqs": 32,
    # Prefill takes a CPU some milliseconds a token. In small steps the replies that run go on meanwhile, and of many
    # prompts that come at once the first need not wait for the last.
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 1 << 30,
    "block_size": 32,
    "dtype": "bfloat16",
    "enforce_eager": True,
}
_ON_GPU: Final[dict[str, Any]] = {
    # The library's defaults for in-process use are far below those of its server.
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
}
_NOWHERE: Final = frozenset({psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD})
_STEPS_BACK: Final = 5
"""Of niceness: a third of the share of what else wants the core (Linux: 335 to 1,024)."""
_NOT_VLLMS: Final = frozenset({"hang_s", "busy_s"})


class CoreStats:
    """The scheduler's last words about itself."""

    def __init__(self) -> None:
        self.running = 0
        self.kv_used = 0.0


class CoreProcesses:
    """The core and its workers as the operating system sees them: alive and busy, or not."""

    def __init__(self, core: AsyncLLM) -> None:
        manager: Any = core.engine_core.resources.engine_manager
        self._cores = [psutil.Process(process.pid) for process in manager.processes]
        self._all = [*self._cores, *(worker for process in self._cores for worker in process.children(recursive=True))]

    def step_back(self) -> None:
        """Let everything else on this machine go first, where the model runs on the processor itself.

        Its threads keep every core busy for whole steps. Whoever takes a message in, or hands a token out, needs a
        core for a moment only, and what waits for that moment is somebody's next token.
        """
        if not current_platform.is_cpu():
            return
        nice = min(os.getpriority(os.PRIO_PROCESS, 0) + _STEPS_BACK, 19)
        for process in self._all:
            # Linux keeps a priority for each thread; those to come inherit it.
            for thread in process.threads():
                with suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, thread.id, nice)

    def cpu_seconds(self) -> float:
        """Processor time used so far. -1 when a process is gone, or stopped: such a core gets nowhere."""
        total = 0.0
        for process in self._all:
            try:
                if process.status() in _NOWHERE:
                    return -1.0
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                return -1.0
            total += times.user + times.system
        return total


def start_core(model: str, options: VllmOptions, stats: CoreStats) -> AsyncLLM:
    """Start the engine core in processes of its own and wait until it is ready: half a minute, or more."""

    class Recorder(StatLoggerBase):
        """How busy the core is, told to us directly.

        vLLM's stock logger, which it adds beside this one, registers its numbers in the process-wide Prometheus
        registry, and a second engine there erases those of the first. Nothing here reads them.
        """

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                stats.running = scheduler_stats.num_running_reqs
                stats.kv_used = scheduler_stats.kv_cache_usage

        def log_engine_initialized(self) -> None:
            pass

    defaults = _ON_CPU if current_platform.is_cpu() else _ON_GPU
    said = {
        name: value
        for name in options.__struct_fields__
        if name not in _NOT_VLLMS and (value := getattr(options, name)) is not None
    }
    args = AsyncEngineArgs(model=model, scheduling_policy="priority", disable_log_stats=True, **{**defaults, **said})
    with _deaf_to_ctrl_c():
        return AsyncLLM.from_engine_args(args, stat_loggers=[Recorder])


def kill_with_workers(pid: int) -> None:
    """End a core and its workers at once, if they are there."""
    with suppress(psutil.NoSuchProcess):
        core = psutil.Process(pid)
        for process in [core, *core.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Processes started by this thread meanwhile, and theirs, are never given SIGINT.

    A terminal sends Ctrl-C to the core too, whose own handler would end it and every reply with it. We tell it to end
    when the replies have. A blocked signal stays blocked whatever handler is set.
    """
    # Where it is not running yet, the start of a process would start it, and unblock the signal on the way.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def sampling_params(sampling: Sampling, max_tokens: int) -> SamplingParams:
    """A ``Sampling`` in vLLM's terms. Outputs are deltas; everything with a surprising default is said."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        stop=list(sampling.stop) or None,
        output_kind=RequestOutputKind.DELTA,
    )


def start_pooling_core(model: str, *, max_model_len: int | None, gpu_memory_utilization: float) -> AsyncLLM:
    """Start a core that makes vectors of texts: no replies, so no priorities and a small batch."""
    defaults = _ON_CPU if current_platform.is_cpu() else _ON_GPU | {"gpu_memory_utilization": gpu_memory_utilization}
    sized = {name: value for name, value in defaults.items() if name not in {"max_num_batched_tokens", "dtype"}}
    args = AsyncEngineArgs(model=model, runner="pooling", max_model_len=max_model_len, disable_log_stats=True, **sized)
    with _deaf_to_ctrl_c():
        return AsyncLLM.from_engine_args(args)


def embedding_params() -> PoolingParams:
    """What a text's vector is asked with."""
    return PoolingParams(task="embed")
