"""An embedder of transformers: any encoder whose token vectors are pooled into one. One thread, loaded at first use."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import structlog

from chatsvc.errors import EngineUnavailable
from chatsvc.inference.embedder import Embedder, Rows, TransformersEmbedderOptions, unit
from chatsvc.inference.loading import forget_loaded, load_in_thread

_log = structlog.get_logger(__name__)

_ANSWER_S: Final = 300.0
"""A thread that does not answer for so long is hung: a call takes seconds at most, with the largest model minutes."""
_TRIAL: Final = "A question as long as they are: what was it that you said about the trip to the sea with your sister?"
_TRIALS: Final = 4
"""The first is not counted: it prepares what the others find."""
_FASTER: Final = 0.8
"""Of the time with float32: what gains less than a fifth is not worth its rounding."""


class TransformersEmbedder(Embedder):
    """See ``Embedder``. ``source`` is a directory or the name of a model in the local hub cache.

    ``sha256``: that of the weights in the directory, compared before they are loaded; None: whatever is there.
    """

    def __init__(
        self, source: str, options: TransformersEmbedderOptions, *, name: str, sha256: str | None = None
    ) -> None:
        self.name = name
        self.unrelated = options.unrelated
        self._source = source
        self._options = options
        self._sha256 = sha256
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embedder")
        self._loading = asyncio.Lock()
        self._model: _Model | None = None

    async def embed(self, texts: Sequence[str]) -> Rows:
        model = self._model or await self._load()
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await asyncio.get_running_loop().run_in_executor(self._thread, model.embed, list(texts))
        except TimeoutError as error:
            raise EngineUnavailable(f"The embedding model {self.name} did not answer for {_ANSWER_S:g} s.") from error
        except Exception as error:
            # Each part raises errors of its own, and torch says so when memory is short.
            raise EngineUnavailable(f"The embedding model {self.name} failed: {_one_line(error)}") from error

    async def aclose(self) -> None:
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
        if self._model is not None:
            self._model = None
            await asyncio.to_thread(forget_loaded)

    async def _load(self) -> _Model:
        async with self._loading:
            if self._model is None:
                try:
                    model = await load_in_thread(self._checked_model, lambda _: None)
                    dtype = await asyncio.get_running_loop().run_in_executor(self._thread, model.settle)
                except Exception as error:
                    raise EngineUnavailable(
                        f"The embedding model {self.name} cannot be loaded: {_one_line(error)}"
                    ) from error
                self._model = model
                _log.info("embedding model loaded", model=self.name, dtype=dtype)
            return self._model

    def _checked_model(self) -> _Model:
        if self._sha256 is not None:
            _compare(Path(self._source, "model.safetensors"), self._sha256)
        return _Model(self._source, self._options)


def _compare(file: Path, sha256: str) -> None:
    with file.open("rb") as weights:
        found = hashlib.file_digest(weights, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{file} is not what its authors published: its SHA-256 is {found}, not {sha256}")


class _Model:
    """Tokenizer and weights. Its methods run in the thread."""

    def __init__(self, source: str, options: TransformersEmbedderOptions) -> None:
        import torch  # noqa: PLC0415
        from transformers import AutoModel, AutoTokenizer  # noqa: PLC0415

        self._torch: Any = torch
        self._options = options
        self._tokenizer: Any = AutoTokenizer.from_pretrained(source)
        dtype = torch.float32 if options.dtype == "auto" else getattr(torch, options.dtype)
        self._network: Any = AutoModel.from_pretrained(source, dtype=dtype).eval().to(options.device)

    def settle(self) -> str:
        """Compute in this thread alone, with the faster type; says which.

        With a thread for each core, a text takes as long as the busiest of them lets it wait: measured beside other
        work on two cores, 300 ms instead of 10. It holds for the thread that says so, not for others' models.

        Processors that have instructions for bfloat16 take half the time with it, others several times as long. A
        row's cosine with that of float32 is 0.9999, so both kinds may be compared.
        """
        self._torch.set_num_threads(1)
        if self._options.dtype == "auto" and self._network.device.type == "cpu":
            plain = self._network
            plain_s = self._seconds()
            try:
                self._network = copy.deepcopy(plain).to(self._torch.bfloat16)
                if self._seconds() > _FASTER * plain_s:
                    self._network = plain
            except Exception as error:  # noqa: BLE001
                # Some models have parts that are not made for it, and there may be no memory for a copy.
                _log.info("embedding model computes with float32", reason=_one_line(error))
                self._network = plain
        return str(self._network.dtype).removeprefix("torch.")

    def _seconds(self) -> float:
        """How long a question takes now, at best."""
        took = []
        for _ in range(_TRIALS):
            began = time.perf_counter()
            self.embed([_TRIAL])
            took.append(time.perf_counter() - began)
        return min(took[1:])

    def embed(self, texts: list[str]) -> Rows:
        """A row for each text."""
        if not texts:
            return np.zeros((0, int(self._network.config.hidden_size)), np.float32)
        # Texts of one length together: what pads the shorter ones costs as much as they do.
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        tokens = self._tokenizer(
            [texts[number] for number in order],
            padding=True,
            truncation=True,
            max_length=self._options.most_tokens,
            return_tensors="pt",
        ).to(self._options.device)
        with self._torch.inference_mode():
            states = self._network(**tokens).last_hidden_state.float()
            pooled = self._pooled(states, tokens["attention_mask"]).cpu().numpy()
        rows = np.empty_like(pooled)
        rows[order] = pooled
        return unit(rows)

    def _pooled(self, states: Any, mask: Any) -> Any:
        if self._options.pooling == "mean":
            return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        if self._options.pooling == "cls":
            return states[:, 0]
        # Whichever side is padded, the last token is the one with the highest number among those that count.
        places = self._torch.arange(mask.shape[1], device=mask.device)
        return states[self._torch.arange(len(states)), (mask * places).argmax(1)]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
