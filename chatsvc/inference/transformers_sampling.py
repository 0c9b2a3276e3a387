"""Drawing tokens for a batch whose requests each have their own temperature, nucleus and seed.

The batching loop takes the arg max of what its logits processors return. So this one returns, per row, a race that a
token wins with its probability: p / e with e drawn from an exponential distribution (the Gumbel-max trick, E. J. Gumbel
1954, in its exponential form). At temperature 0 the logits are left alone, and the arg max is exact.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)

from chatsvc.prompt import Sampling


class Draw:
    """How one request draws. Its generator goes on from token to token, so a seed fixes the whole reply."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self.temperature = sampling.temperature
        self.top_p = sampling.top_p
        self.generator: torch.Generator | None = None
        if sampling.seed is not None:
            self.generator = torch.Generator(device).manual_seed(sampling.seed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Draw:
        # The loop copies a request's arguments when it puts the request back; the draw goes on all the same.
        return self

    def race(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores of one row, the largest of which is the token drawn."""
        if self.temperature <= 0:
            return logits
        probabilities = (logits / self.temperature).softmax(dim=-1)
        if self.top_p < 1:
            ordered, places = probabilities.sort(descending=True)
            # A token is in the nucleus while those before it have not filled it; the first always is.
            outside = ordered.cumsum(dim=-1) - ordered >= self.top_p
            probabilities = probabilities.scatter(-1, places[outside], 0.0)
        return probabilities / torch.empty_like(probabilities).exponential_(generator=self.generator)


class _PerRequest(ContinuousBatchingLogitsProcessor):
    """Hands each row of the logits to its request's ``Draw``. In synchronous batches rows and logits go together."""

    supported_kwargs = {"draw": Draw}  # noqa: RUF012 - as declared by the base class
    ignored_kwargs = ()

    def __init__(self) -> None:
        self._rows: list[Draw | None] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        self._rows = [request.state.logit_processor_kwargs.get("draw") for request in requests_with_new_token]
        return torch.zeros(len(self._rows), dtype=torch.int32)

    def __call__(self, scores: Any, tensor_arg: Any) -> Any:
        for row, draw in enumerate(self._rows):
            if draw is not None:
                scores[row] = draw.race(scores[row])
        return scores


def per_request_sampling() -> ContinuousBatchingLogitsProcessorList:
    """What a batching manager is given for its ``logit_processor``; each request then brings ``draw=Draw(…)``."""
    processors = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([_PerRequest()]))
    processors.tensors_required = 1
    return processors
