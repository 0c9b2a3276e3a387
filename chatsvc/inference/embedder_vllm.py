"""An embedder of vLLM: any pooling model that it knows, in an engine core of its own, started at first use."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, Final

import numpy as np
import structlog

from chatsvc import ids
from chatsvc.errors import EngineUnavailable
from chatsvc.inference.embedder import Embedder, Rows, VllmEmbedderOptions, unit
from chatsvc.inference.loading import forget_loaded, load_in_thread

_log = structlog.get_logger(__name__)

_ANSWER_S: Final = 60.0
"""A core that does not answer for so long is hung, though it may still say that it is well."""
_SHUTDOWN_S: Final = 5.0


class VllmEmbedder(Embedder):
    """See ``Embedder``. The texts of a call are one batch to the core."""

    def __init__(self, source: str, options: VllmEmbedderOptions) -> None:
        self.name = f"vllm/{source}"
        self.unrelated = options.unrelated
        self._source = source
        self._options = options
        self._loading = asyncio.Lock()
        self._core: Any = None

    async def embed(self, texts: Sequence[str]) -> Rows:
        core = self._core or await self._load()
        try:
            async with asyncio.timeout(_ANSWER_S):
                rows = await asyncio.gather(*(self._one(core, text) for text in texts))
        except TimeoutError as error:
            await self._give_up(core)
            raise EngineUnavailable(f"The embedding model {self.name} did not answer for {_ANSWER_S:.0f} s.") from error
        except Exception as error:
            # vLLM raises errors of its own. A core that is dead stays so; a text that it refuses harms no other.
            if core.errored:
                await self._give_up(core)
            raise EngineUnavailable(f"The embedding model {self.name} failed: {_one_line(error)}") from error
        return unit(np.stack(rows)) if rows else np.zeros((0, core.model_config.get_hidden_size()), np.float32)

    async def aclose(self) -> None:
        core, self._core = self._core, None
        if core is not None:
            await asyncio.to_thread(_shut_down, core)
            await asyncio.to_thread(forget_loaded)

    async def _give_up(self, core: Any) -> None:
        """End a core that is of no use any more. Of calls that fail together the first one does; a next one loads."""
        async with self._loading:
            if self._core is core:
                self._core = None
                await asyncio.to_thread(_shut_down, core)

    async def _load(self) -> Any:
        async with self._loading:
            if self._core is None:
                try:
                    self._core = await load_in_thread(self._start, _shut_down)
                except Exception as error:
                    raise EngineUnavailable(
                        f"The embedding model {self.name} cannot be loaded: {_one_line(error)}"
                    ) from error
                _log.info("embedding model loaded", model=self.name)
            return self._core

    def _start(self) -> Any:
        from chatsvc.inference.vllm_core import start_pooling_core  # noqa: PLC0415

        return start_pooling_core(
            self._source,
            max_model_len=self._options.max_model_len,
            gpu_memory_utilization=self._options.gpu_memory_utilization,
        )

    async def _one(self, core: Any, text: str) -> Any:
        from chatsvc.inference.vllm_core import embedding_params  # noqa: PLC0415

        # What is too long is cut at its end; -1 stands for the model's own length.
        options = {"truncate_prompt_tokens": -1}
        outputs = core.encode({"prompt": text}, embedding_params(), ids.uuid7_hex(), tokenization_kwargs=options)
        async with aclosing(outputs) as answers:
            async for answer in answers:
                data = answer.outputs.data
        return data.float().cpu().numpy()


def _shut_down(core: Any) -> None:
    core.shutdown(timeout=_SHUTDOWN_S)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
