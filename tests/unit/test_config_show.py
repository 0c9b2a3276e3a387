"""The configuration for people: nothing secret in it, complete, and readable by the loader again."""

from pathlib import Path

import msgspec
import pytest

from chatsvc.config import ModelConfig
from chatsvc.config_load import ENGINE_VARIABLE, SECRET_VARIABLES, known_keys, load_config
from chatsvc.config_show import effective, reference
from chatsvc.config_values import in_words

ROOT = Path(__file__).parents[2]
FULL = """
data_dir = "/data"
region = "eu-1"
roles = ["worker"]
[server]
host = "::1"
grace_s = 2.5
[auth]
trusted_proxies = ["10.0.0.0/8"]
[tiers.pro]
weight = 3.5
[models.a]
engine = "scripted:?text=\\"ü\\""
default = true
[models."b/2"]
engine = "openai:http://h/v1#m"
window = 100
"""


def test_the_effective_configuration_loads_to_the_same_configuration(tmp_path):
    (tmp_path / "full.toml").write_text(FULL, encoding="utf-8")
    config = load_config(tmp_path / "full.toml", {})
    (tmp_path / "again.toml").write_text(effective(config), encoding="utf-8")
    assert load_config(tmp_path / "again.toml", {}) == config


def test_the_effective_configuration_masks_every_secret():
    text = effective(
        load_config(
            None,
            {
                "HOME": "/h",
                "CHATSVC_DATABASE_URL": "postgresql://user:hunter2@h/d?sslpassword=hunter2",
                "CHATSVC_REDIS_URL": "redis://:hunter2@h/0",
                "CHATSVC_ENGINE": "openai:https://me:hunter2@h/v1?api_key=hunter2#m",
                "CHATSVC_OPENAI_API_KEY": "hunter2",
            },
        )
    )
    assert "hunter2" not in text
    assert "postgresql://user:***@h/d" in text
    assert "redis://:***@h/0" in text


def test_the_reference_in_the_documentation_is_current():
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == reference(), "run `make docs`"


def test_the_reference_names_every_key_and_every_variable():
    text = reference()
    for key in known_keys():
        assert f"| `{key.name}` | `{key.variable}` |" in text
    for field in msgspec.structs.fields(ModelConfig):
        assert f"| `{field.name}` |" in text
    for variable in (ENGINE_VARIABLE, *SECRET_VARIABLES):
        assert f"| `{variable}` |" in text


@pytest.mark.parametrize("key", known_keys(), ids=lambda key: key.variable)
def test_what_a_key_takes_can_be_said_in_words(key):
    assert in_words(key.type)
