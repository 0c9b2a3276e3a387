"""The query of a ``transformers:`` URL."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


class TransformersOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Every field an option; the defaults suit a laptop."""

    slots: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 8
    """Sequences that run at the same time; others wait, by priority, then in order."""
    window: Annotated[int, msgspec.Meta(ge=16, le=10_000_000)] | None = None
    """Context window in tokens; default: the model's, at most ``kv_tokens``."""
    kv_tokens: Annotated[int, msgspec.Meta(ge=64, le=10_000_000)] = 16_384
    """Tokens that the KV cache holds, all sequences and the kept prefixes together."""
    batch_tokens: Annotated[int, msgspec.Meta(ge=16, le=65_536)] = 256
    """Most tokens of one step; a longer prompt is read over several steps, so that others go on meanwhile."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the weights; ``auto`` is bfloat16."""
    device: Annotated[str, msgspec.Meta(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")] = "auto"
    """Where the model runs; ``auto``: on a GPU if there is one."""
