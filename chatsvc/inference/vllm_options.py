"""The query of a ``vllm:`` URL: vLLM's own argument names, those that make sense from here."""

from __future__ import annotations

from typing import Annotated

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=1, le=100_000_000)]
_Bytes = Annotated[int, msgspec.Meta(ge=1)]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
_Word = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]+$")]


class VllmOptions(msgspec.Struct, frozen=True, kw_only=True):
    """None everywhere: what suits this machine, see ``vllm_core``."""

    max_model_len: _Count | None = None
    """Context window in tokens; default: the model's own."""
    max_num_seqs: _Count | None = None
    """Sequences that run at the same time. Default: 32 on a CPU, 256 on a GPU."""
    max_num_batched_tokens: _Count | None = None
    """Tokens of one step. Default: 256 on a CPU, 8,192 on a GPU."""
    gpu_memory_utilization: _Share | None = None
    kv_cache_memory_bytes: _Bytes | None = None
    """Default: 1 GiB on a CPU; on a GPU what ``gpu_memory_utilization`` leaves."""
    tensor_parallel_size: _Count | None = None
    pipeline_parallel_size: _Count | None = None
    block_size: _Count | None = None
    """Tokens in a block of the prefix cache: the shortest prefix that is served from it. Default: 32 on a CPU."""
    dtype: _Word | None = None
    quantization: _Word | None = None
    kv_cache_dtype: _Word | None = None
    load_format: _Word | None = None
    revision: _Word | None = None
    enforce_eager: bool | None = None
    """Default: true on a CPU."""
    enable_prefix_caching: bool = True
    hang_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 6.0
    """A core that answers nothing and uses no processor for so long has hung, and its replies are failed."""
    busy_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 60.0
    """The same for a core that is busy: longer than the longest step, such as the prefill of a full batch on a CPU."""
