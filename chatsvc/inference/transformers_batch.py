"""A model in this process and the thread that steps it: continuous batching as transformers does it.

Imported only when a ``transformers:`` engine starts, since it imports torch. Requests go in by thread-safe queues; what
was sampled comes out by ``deliver``, called in the batching thread once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.utils import logging as transformers_logging

from chatsvc.errors import EngineUnavailable
from chatsvc.inference.transformers_options import TransformersOptions
from chatsvc.inference.transformers_sampling import Draw, per_request_sampling
from chatsvc.prompt import Sampling

_PAGE_TOKENS: Final = 16
_STOP_TIMEOUT_S: Final = 30.0

Deliver = Callable[[Sequence[Any]], None]
"""Takes the outputs of one step: ``request_id``, ``generated_tokens`` (all so far), ``is_finished()``, ``error``."""


class _Router(OutputRouter):
    """Hands every output to ``deliver``. The stock router keeps what nobody waits for in a queue that only grows."""

    def __init__(self, deliver: Deliver) -> None:
        super().__init__()
        self._deliver = deliver

    def deliver(self, output: Any) -> None:
        self._deliver([output])

    def deliver_batch(self, outputs: list[Any]) -> None:
        self._deliver(outputs)


class TransformersBatch:
    """One model with its batching loop. Construction loads and starts it, which takes seconds: do it in a thread.

    Raises ``EngineUnavailable`` with what to do when the model cannot be loaded.
    """

    def __init__(self, source: str, options: TransformersOptions, deliver: Deliver) -> None:
        transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        device = "cuda" if options.device == "auto" and torch.cuda.is_available() else options.device
        device = "cpu" if device == "auto" else device
        dtype = torch.bfloat16 if options.dtype == "auto" else getattr(torch, options.dtype)
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(source)
            model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation="sdpa")
        except (OSError, ValueError) as error:
            first_line = str(error).strip().partition("\n")[0]
            raise EngineUnavailable(
                f"The model '{source}' cannot be loaded: {first_line} Give a directory with a model, or the name of one"
                " in the local hub cache; HF_HUB_OFFLINE=1 forbids downloads."
            ) from error
        self._device = torch.device(device)
        self._model: Any = model.to(self._device).eval()
        self._ends = self._end_tokens()
        self.window = int(getattr(model.config.get_text_config(), "max_position_embeddings", options.kv_tokens))
        self.page_tokens = _PAGE_TOKENS
        self._cached: dict[str, list[int]] = {}
        """Per running request: nothing yet, or what the prefix cache served."""
        self._manager: Any = self._model.init_continuous_batching(
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=_PAGE_TOKENS,
                # Said outright: left to itself the cache takes most of the machine's memory and zeroes it first.
                num_blocks=options.kv_tokens // _PAGE_TOKENS,
                max_batch_tokens=options.batch_tokens,
                max_requests_per_batch=options.slots,
                # Draws are prepared and used step by step.
                use_async_batching=False,
                use_cuda_graph=False,
                # Would ask a hub for kernels.
                auto_switch_to_flash=False,
            )
        )
        self._manager.logit_processor = per_request_sampling()
        self._manager.generation_config.do_sample = False
        self._manager.output_router = _Router(deliver)
        self._manager.warmup()
        self._watch_prefixes()
        self._manager.start()

    def submit(self, run_id: str, token_ids: Sequence[int], max_tokens: int, sampling: Sampling) -> None:
        """Queue a request. Raises ``EngineUnavailable`` when the loop takes none any more."""
        self._cached[run_id] = []
        taken = self._manager.add_request(
            list(token_ids),
            request_id=run_id,
            max_new_tokens=max_tokens,
            streaming=True,
            eos_token_id=sorted(self._ends),
            draw=Draw(sampling, self._device),
        )
        if taken is None:
            raise EngineUnavailable(self.failure or "The model's batching loop has ended.")

    def cancel(self, run_id: str) -> None:
        """Free the sequence before the next step. Does nothing when it has ended already."""
        self._manager.cancel_request(run_id)
        self.forget(run_id)

    def forget(self, run_id: str) -> None:
        """Drop what is kept about a request that has ended."""
        self._cached.pop(run_id, None)

    def is_end(self, token_id: int) -> bool:
        """True when the model ends its turn with this token."""
        return token_id in self._ends

    def cached_tokens(self, run_id: str) -> int:
        """How many tokens of the prompt came from the prefix cache. Known with the first output."""
        return next(iter(self._cached.get(run_id, ())), 0)

    @property
    def running(self) -> int:
        """Requests that the loop works on."""
        active: dict[str, Any] = self._manager.batch_processor.scheduler.active_requests
        return len(active)

    @property
    def waiting(self) -> int:
        """Requests that the loop has not begun."""
        queued: dict[str, Any] = self._manager.batch_processor.scheduler.waiting_requests
        return len(queued) + int(self._manager.input_queue.qsize())

    @property
    def steps(self) -> int:
        """Steps done since the start; grows while there is work."""
        return int(self._manager.current_batch)

    @property
    def failure(self) -> str | None:
        """Why the loop takes no more work, None while it does."""
        error = self._manager.background_thread_status.fatal_error
        if error is not None:
            return f"The model's batching loop failed: {error}"
        return None if self._manager.is_running() else "The model's batching loop has ended."

    def close(self) -> None:
        """End the loop after its current step and wait for it. Requests still running are failed."""
        self._manager.stop(block=True, timeout=_STOP_TIMEOUT_S, hard_stop=True)

    def _end_tokens(self) -> frozenset[int]:
        configured = self._model.generation_config.eos_token_id
        ends = {configured} if isinstance(configured, int) else set(configured or ())
        if self.tokenizer.eos_token_id is not None:
            ends.add(self.tokenizer.eos_token_id)
        return frozenset(ends)

    def _watch_prefixes(self) -> None:
        """Note what the prefix cache serves: the loop itself tells nobody."""
        cache = self._manager.batch_processor.cache
        search = cache.search_prefix_match

        def noted(request_id: str, prompt_ids: list[int]) -> int:
            matched = int(search(request_id, prompt_ids))
            found = self._cached.get(request_id)
            # A request that was put back counts what its first start found.
            if found is not None and not found:
                found.append(matched)
            return matched

        cache.search_prefix_match = noted
