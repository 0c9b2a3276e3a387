"""From an engine URL to an engine. Backends are imported only when they are asked for.

To add a backend: a module with an ``Engine``, a line in ``_BACKENDS``, a place in the contract suite's table.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from chatsvc.errors import ConfigError
from chatsvc.inference.base import Engine
from chatsvc.inference.embedded_model import EMBEDDED_MODEL
from chatsvc.inference.urls import EngineUrl, OptionsT, parse_engine_url, parse_options
from chatsvc.logs import mask_secrets

_FORMS: Final = (
    "auto, vllm:<model>?…, transformers:<model>, openai:<base url>#<model>, scripted:?… "
    "(<model>: a name or a directory; empty: the embedded model)"
)


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend is made from. ``window`` and ``slots`` overrule what the URL or the engine says."""

    url: EngineUrl
    name: str
    data_dir: Path
    window: int | None
    slots: int | None


def create_engine(
    url: str, *, name: str, data_dir: Path, window: int | None = None, slots: int | None = None
) -> Engine:
    """The engine that a URL describes, not started yet, served under ``name``.

    ``data_dir`` is where the embedded model is unpacked to. ``window`` (tokens) and ``slots`` (sequences) overrule the
    engine's own. Raises ``ConfigError`` with every fault of the URL.
    """
    parsed = _resolve(parse_engine_url(url))
    make = _BACKENDS.get(parsed.scheme)
    if make is None:
        raise ConfigError([f"engine '{url}': unknown kind '{parsed.scheme}'; use one of: {_FORMS}"])
    return make(_Request(url=parsed, name=name, data_dir=data_dir, window=window, slots=slots))


def default_model_name(url: str) -> str:
    """The name a model is served under when the configuration gives it none.

    The model's own: the fragment of an ``openai:`` URL, the last part of a path, the embedded model's name.
    """
    parsed = parse_engine_url(url)
    if parsed.scheme == "scripted":
        return "scripted"
    if parsed.scheme == "openai":
        return parsed.model or "default"
    target = parsed.target.rstrip("/")
    if target in {"", "embedded"}:
        return EMBEDDED_MODEL
    return target.rpartition("/")[2] if Path(target).is_absolute() else target


def _resolve(url: EngineUrl) -> EngineUrl:
    """What ``auto`` stands for here: vLLM where it is installed and a GPU is seen, else transformers."""
    if url.scheme != "auto":
        return url
    if url.target or url.options:
        raise ConfigError(["engine auto takes no model and no options; name the kind: " + _FORMS])
    scheme = "vllm" if importlib.util.find_spec("vllm") is not None and _gpu_seen() else "transformers"
    return EngineUrl(scheme=scheme, target="", options=())


def _gpu_seen() -> bool:
    """True when the driver of an NVIDIA card is loaded. Asking CUDA itself would claim memory in this process."""
    return any(Path("/proc/driver/nvidia/gpus").glob("*")) or any(Path("/dev").glob("nvidia[0-9]*"))


def _scripted(request: _Request) -> Engine:
    from chatsvc.inference.scripted import ScriptedEngine, ScriptedOptions  # noqa: PLC0415

    if request.url.target:
        raise ConfigError([f"engine scripted: '{request.url.target}' is no option; write scripted:?name=value&…"])
    return ScriptedEngine(_overrule(parse_options(request.url, ScriptedOptions), request), model=request.name)


def _transformers(request: _Request) -> Engine:
    from chatsvc.inference.transformers import TransformersEngine  # noqa: PLC0415
    from chatsvc.inference.transformers_options import TransformersOptions  # noqa: PLC0415

    options = _overrule(parse_options(request.url, TransformersOptions), request)
    return TransformersEngine(options, model=request.name, source=_model_source(request.url), data_dir=request.data_dir)


def _vllm(request: _Request) -> Engine:
    from chatsvc.inference.vllm import VllmEngine  # noqa: PLC0415
    from chatsvc.inference.vllm_options import VllmOptions  # noqa: PLC0415

    options = parse_options(request.url, VllmOptions)
    options = _overrule(options, request, window="max_model_len", slots="max_num_seqs")
    return VllmEngine(options, model=request.name, source=_model_source(request.url), data_dir=request.data_dir)


def _openai(request: _Request) -> Engine:
    try:
        from chatsvc.inference.openai import OpenAIEngine, OpenAIOptions  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError([f"engine openai: needs the extra 'openai' of this package ({error})"]) from error

    if not _is_base_url(request.url.target):
        shown = mask_secrets(request.url.target)
        raise ConfigError([f"engine openai: '{shown}' is no base URL; write openai:http://host/v1#model"])
    return OpenAIEngine(
        _overrule(parse_options(request.url, OpenAIOptions), request),
        model=request.name,
        base_url=request.url.target,
        remote_model=request.url.model,
        api_key=os.environ.get("CHATSVC_OPENAI_API_KEY"),
    )


def _is_base_url(text: str) -> bool:
    try:
        address = urlsplit(text)
        return address.scheme in {"http", "https"} and bool(address.hostname) and address.port != 0
    except ValueError:  # no port, or no address of IPv6
        return False


def _model_source(url: EngineUrl) -> str | None:
    """The directory or name that a model is loaded from, None for the embedded one."""
    if url.target in {"", "embedded"}:
        return None
    if url.target.startswith(("/", "./", "../")) and not Path(url.target).is_dir():
        raise ConfigError([f"engine {url.scheme}: there is no directory {url.target}"])
    return url.target


def _overrule(options: OptionsT, request: _Request, *, window: str = "window", slots: str = "slots") -> OptionsT:
    """The options with what the configuration says beside the URL; ``window`` and ``slots`` name the fields."""
    said = {window: request.window, slots: request.slots}
    return msgspec.structs.replace(options, **{name: value for name, value in said.items() if value is not None})


_BACKENDS: Final[dict[str, Callable[[_Request], Engine]]] = {
    "scripted": _scripted,
    "transformers": _transformers,
    "vllm": _vllm,
    "openai": _openai,
}
