"""The configuration for people: the effective one as TOML without secrets, and the reference of all keys.

``docs/configuration.md`` is ``reference()``; a test keeps it current. ``python -m chatsvc.config_show`` prints it.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec

import chatsvc.config
import chatsvc.limits
from chatsvc.config import Config, ModelConfig, PeerConfig
from chatsvc.config_load import CONFIG_VARIABLE, ENGINE_VARIABLE, SECRET_KEYS, Key, known_keys
from chatsvc.config_values import in_words
from chatsvc.limits import Tier
from chatsvc.logs import MASK, mask_secrets

_INTRODUCTION: Final = f"""\
# Configuration

<!-- Made by `make docs` from chatsvc/config.py. Change it there. -->

One TOML file, named by `--config` or `{CONFIG_VARIABLE}`, and environment variables. Both are optional: every key
has a default. The environment wins over the file. An unknown key or variable is an error, and all errors are
reported at once. `python -m chatsvc check` prints the configuration in effect, without secrets, and tries each part.

In a variable, lists are separated by commas; an empty variable counts as not set. In the file, a relative `data_dir`
starts at the directory the server is started in.

```toml
data_dir = "/srv/chatsvc"

[server]
port = 9000

[auth]
mode = "proxy"
trusted_proxies = ["10.1.0.0/16"]

[tiers.pro]
weight = 32            # what is not said keeps its default

[models.small]
engine = "vllm:/models/small"
default = true

[models.large]
engine = "openai:http://10.1.0.7:8000/v1#large"
window = 32768
```
"""

_VARIABLES_ONLY: Final = (
    (CONFIG_VARIABLE, "Path of the TOML file."),
    (
        ENGINE_VARIABLE,
        (
            "The one model to serve, as an engine URL; default `auto`: vLLM on a GPU, else the small embedded model."
            " Not together with `[models.…]` in the file."
        ),
    ),
    ("CHATSVC_OPENAI_API_KEY", "The key that `openai:` engines send. Never printed."),
)


def effective(config: Config) -> str:
    """The configuration as TOML, one key a line, in the order of the structs; passwords and tokens are masked."""
    lines: list[str] = []
    for table, values in _tables(config):
        lines += ["", f"[{table}]"] if table else []
        for name, value in values:
            # TOML has no null: a key without a value is shown as one would leave it out.
            lines.append(f"# {name} is not set" if value is None else f"{name} = {_shown(table, name, value)}")
    return "\n".join(lines).lstrip("\n") + "\n"


def reference() -> str:
    """All keys with type, default, variable and meaning, as Markdown."""
    documented = _docstrings(chatsvc.config) | _docstrings(chatsvc.limits)
    parts = [_INTRODUCTION]
    classes = {field.name: field.type for field in msgspec.structs.fields(Config)}
    for table, keys in _grouped(known_keys()):
        owner = Tier if table.startswith("tiers.") else classes.get(table, Config)
        summary = documented[owner.__name__] if owner not in (Tier, Config) else ""
        parts += [f"## `[{table}]`\n" if table else "## At the top of the file\n", *_sentence(summary)]
        parts.append(_rows(keys, {key.name: documented[f"{owner.__name__}.{key.name}"] for key in keys}))
    for table, named in (("regions.<name>", PeerConfig), ("models.<name>", ModelConfig)):
        keys = [Key(table, f.name, f.type, f.default) for f in msgspec.structs.fields(named)]
        parts += [f"## `[{table}]`\n", *_sentence(documented[named.__name__])]
        meanings = {key.name: documented[f"{named.__name__}.{key.name}"] for key in keys}
        parts.append(_rows(keys, meanings, variables=False))
    parts.append("## Variables that are no keys of the file\n\n| variable | meaning |\n|---|---|")
    parts += [f"| `{name}` | {meaning} |" for name, meaning in _VARIABLES_ONLY]
    return "\n".join(parts) + "\n"


def _tables(config: Config) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    fields = {field.name: getattr(config, field.name) for field in msgspec.structs.fields(Config)}
    yield "", [(name, value) for name, value in fields.items() if not isinstance(value, (msgspec.Struct, dict))]
    for name, value in fields.items():
        if isinstance(value, msgspec.Struct):
            yield name, list(msgspec.structs.asdict(value).items())
    for group, field in (("regions", "peers"), ("models", "models"), ("tiers", "tiers")):
        for name, value in fields[field].items():
            bare = re.fullmatch(r"[A-Za-z0-9_-]+", name)
            items = msgspec.structs.asdict(value).items()
            yield f"{group}.{name if bare else json.dumps(name)}", [item for item in items if item[0] != "name"]


def _shown(table: str, name: str, value: Any) -> str:
    return _toml(MASK if value and (table, name) in SECRET_KEYS else value)


def _toml(value: Any) -> str:
    if isinstance(value, (frozenset, tuple)):
        return f"[{', '.join(_toml(item) for item in (sorted(value) if isinstance(value, frozenset) else value))}]"
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    # What JSON writes for text is also a basic string of TOML.
    return json.dumps(mask_secrets(str(value)), ensure_ascii=False)


def _grouped(keys: Iterable[Key]) -> Iterator[tuple[str, list[Key]]]:
    groups: dict[str, list[Key]] = {}
    for key in keys:
        groups.setdefault(key.table, []).append(key)
    yield from groups.items()


def _rows(keys: list[Key], meanings: dict[str, str], *, variables: bool = True) -> str:
    column = "| variable " if variables else ""
    lines = [f"| key {column}| takes | default | meaning |", f"|---{'|---' if variables else ''}|---|---|---|"]
    for key in keys:
        variable = f"| `{key.variable}` " if variables else ""
        default = "" if key.default in (msgspec.NODEFAULT, None) else f"`{_toml(key.default)}`"
        meaning = " ".join(meanings[key.name].replace("``", "`").split()).replace("|", "\\|")
        takes = in_words(key.type).replace('"', "`")
        lines.append(f"| `{key.name}` {variable}| {takes} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def _sentence(docstring: str) -> list[str]:
    """The docstring of a table's struct without the table's name: ``[stream]: how …`` → ``How …``."""
    text = docstring.partition(": ")[2].replace("``", "`")
    return [f"{text[0].upper()}{text[1:]}\n"] if text else []


def _docstrings(module: ModuleType) -> dict[str, str]:
    """Docstrings of the module's classes (``Class``) and of their annotated names (``Class.name``)."""
    found: dict[str, str] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        found[node.name] = ast.get_docstring(node) or ""
        for here, after in zip(node.body, node.body[1:], strict=False):
            if not isinstance(here, ast.AnnAssign) or not isinstance(here.target, ast.Name):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                found[f"{node.name}.{here.target.id}"] = str(after.value.value)
    return found


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(reference(), encoding="utf-8")
