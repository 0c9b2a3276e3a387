"""From a URL to an engine, and every fault of the URL at once."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from chatsvc.errors import ConfigError
from chatsvc.inference import factory
from chatsvc.inference.factory import create_engine, default_model_name
from chatsvc.inference.transformers import TransformersEngine
from chatsvc.inference.vllm import VllmEngine


@pytest.mark.parametrize(
    ("installed", "gpu", "kind"),
    [
        (True, True, VllmEngine),
        (True, False, TransformersEngine),
        (False, True, TransformersEngine),
        (False, False, TransformersEngine),
    ],
)
def test_auto_is_vllm_where_it_is_installed_and_a_gpu_is_seen(monkeypatch, installed, gpu, kind):
    found = importlib.util.find_spec("asyncio") if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: found)
    monkeypatch.setattr(factory, "_gpu_seen", lambda: gpu)
    assert type(create_engine("auto", name="m", data_dir=Path("/nonexistent"))) is kind


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("scripted:?tokens=0", ["tokens"]),
        ("scripted:?tokens=x&slots=-1&speed=3", ["tokens", "slots", "speed", "tokens_per_s"]),
        ("scripted:?fault=explode@3", ["fault"]),
        ("scripted:?tokens=1&tokens=2", ["tokens", "once"]),
        ("scripted:?tokens_per_s=nan", ["tokens_per_s"]),
        ("scripted:foo", ["foo"]),
        ("magic:model", ["magic", "vllm", "scripted"]),
        ("auto:model", ["auto"]),
        ("auto:?slots=3", ["auto"]),
        ("openai:localhost:8000/v1#m", ["localhost:8000/v1", "http://"]),
        ("openai:http://host:99999/v1#m", ["host:99999/v1", "base URL"]),
        ("openai:http://host:port/v1#m", ["host:port/v1", "base URL"]),
        ("openai:http://[::1/v1#m", ["http://[::1/v1", "base URL"]),
        ("openai:http://host/v1?slots=0&key=x#m", ["slots", "key", "idle_s"]),
        ("vllm:/no/such/directory", ["/no/such/directory"]),
        ("transformers:./nowhere", ["./nowhere"]),
        ("vllm:m?gpu_memory_utilization=1.5&model=x", ["gpu_memory_utilization", "model", "max_model_len"]),
        ("transformers:?dtype=int3&device=tpu", ["dtype", "device"]),
    ],
)
def test_a_bad_engine_url_is_refused_with_every_fault_named(url: str, words: list[str]):
    with pytest.raises(ConfigError) as caught:
        create_engine(url, name="m", data_dir=Path("/nonexistent"))
    for word in words:
        assert word in caught.value.detail


def test_window_and_slots_of_the_configuration_overrule_the_url():
    engine = create_engine("scripted:?slots=3&window=100", name="m", data_dir=Path("/x"), window=512, slots=7)
    assert (engine.limits.window, engine.limits.slots) == (512, 7)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("scripted:?tokens=3", "scripted"),
        ("auto", "SmolLM2-135M-Instruct"),
        ("vllm:", "SmolLM2-135M-Instruct"),
        ("transformers:embedded", "SmolLM2-135M-Instruct"),
        ("vllm:Qwen/Qwen3-8B?dtype=auto", "Qwen/Qwen3-8B"),
        ("vllm:/models/mine/", "mine"),
        ("openai:http://host:8000/v1#gpt-x", "gpt-x"),
    ],
)
def test_a_model_has_a_name_even_when_none_is_configured(url: str, name: str):
    assert default_model_name(url) == name
