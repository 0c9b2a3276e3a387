"""docs/engines.md says every option there is, and none that there is not."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from chatsvc.inference.openai import OpenAIOptions
from chatsvc.inference.scripted import ScriptedOptions
from chatsvc.inference.transformers_options import TransformersOptions
from chatsvc.inference.vllm_options import VllmOptions

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("vllm", VllmOptions),
        ("transformers", TransformersOptions),
        ("openai", OpenAIOptions),
        ("scripted", ScriptedOptions),
    ],
)
def test_the_page_lists_the_options_of_an_engine(scheme: str, options: type[msgspec.Struct]):
    section = PAGE.read_text().partition(f"## `{scheme}:`\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    documented = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(documented) == sorted(options.__struct_fields__)
