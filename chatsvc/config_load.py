"""From a TOML file and environment variables to a checked ``Config``; every fault of both is found in one go.

A key ``name`` of table ``[table]`` is also the variable ``CHATSVC_TABLE_NAME``; the most frequent ones have a shorter
name instead (``SHORT_NAMES``). One key, one variable. An empty variable counts as not set.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from chatsvc.config import UNNAMED_MODEL, Config, ModelConfig, PeerConfig
from chatsvc.config_rules import broken_rules
from chatsvc.config_values import UnusableValue, parse_text, parse_value, shown
from chatsvc.errors import ConfigError
from chatsvc.limits import Tier, TierName

PREFIX: Final = "CHATSVC_"
ENGINE_VARIABLE: Final = "CHATSVC_ENGINE"
CONFIG_VARIABLE: Final = "CHATSVC_CONFIG"

SHORT_NAMES: Final[dict[tuple[str, str], str]] = {
    ("server", "host"): "CHATSVC_HOST",
    ("server", "port"): "CHATSVC_PORT",
    ("server", "base_path"): "CHATSVC_BASE_PATH",
    ("auth", "mode"): "CHATSVC_AUTH",
    ("database", "redis_url"): "CHATSVC_REDIS_URL",
    # CHATSVC_DATA_DIR, _DATABASE_URL, _REGION, _ROLES, _LOG_FORMAT and _LOG_LEVEL follow from the rule.
}
SECRET_KEYS: Final = frozenset({("regions", "secret")})
"""Keys whose value is never shown, neither in faults nor in the configuration in effect."""
# Read elsewhere, by the part that needs them; never kept in Config, so that it holds no secret of this kind.
SECRET_VARIABLES: Final = frozenset({"CHATSVC_OPENAI_API_KEY"})

# With a service named "chatsvc", Kubernetes puts variables such as CHATSVC_PORT=tcp://10.0.0.1:80 into every pod.
_KUBERNETES_HINT: Final = (
    "looks like one that Kubernetes sets for a service named chatsvc: put `enableServiceLinks: false` into the pod's"
    " spec, or rename the service"
)


_THE_TIERS: Final = f"; the tiers are {', '.join(TierName)}"


class Key(msgspec.Struct, frozen=True):
    """A key that can be set: ``[table] name``; ``table`` is empty at the top of the file."""

    table: str
    name: str
    type: Any
    default: Any

    @property
    def variable(self) -> str:
        """The environment variable of this key."""
        return SHORT_NAMES.get((self.table, self.name)) or _regular_variable(self.table, self.name)

    @property
    def label(self) -> str:
        """The key as it is written in messages: ``[table] name``."""
        return f"[{self.table}] {self.name}" if self.table else self.name

    @property
    def secret(self) -> bool:
        """True when nobody may see the value."""
        return (self.table, self.name) in SECRET_KEYS


def known_keys() -> tuple[Key, ...]:
    """Every key but those of ``[models.<name>]`` and ``[regions.<name>]``, whose names are free."""
    keys: list[Key] = []
    tiers: dict[TierName, Tier] = {}
    for field in msgspec.structs.fields(Config):
        if field.name == "tiers":
            tiers = field.default_factory()
        elif isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            keys += [Key(field.name, f.name, f.type, f.default) for f in msgspec.structs.fields(field.type)]
        elif field.name not in {"models", "peers"}:
            keys.append(Key("", field.name, field.type, field.default))
    for name, tier in tiers.items():
        for f in msgspec.structs.fields(Tier):
            if f.name != "name":
                keys.append(Key(f"tiers.{name}", f.name, f.type, getattr(tier, f.name)))
    return tuple(keys)


def load_config(path: Path | None, environ: Mapping[str, str]) -> Config:
    """The configuration of this process. ``path`` None: the file that ``CHATSVC_CONFIG`` names, or none.

    Raises ``ConfigError`` with every problem found.
    """
    keys = known_keys()
    faults = Faults()
    if path is None and environ.get(CONFIG_VARIABLE):
        path = Path(environ[CONFIG_VARIABLE])
    document = _read_file(path, faults) if path is not None else {}
    if document is None:
        faults.doubtful.update(key.label for key in keys)
        document = {}

    models = _models(document.pop("models", {}), environ.get(ENGINE_VARIABLE, ""), faults)
    peers = _peers(document, faults)
    values = _from_document(document, keys, faults) | _from_environment(environ, keys, faults)
    by_table: dict[str, dict[str, Any]] = {}
    for key in keys:
        by_table.setdefault(key.table, {})[key.name] = values.get((key.table, key.name), key.default)

    top = by_table.pop("")
    top["data_dir"] = _data_dir(top["data_dir"], environ, faults)
    tiers = {name: Tier(name=name, **by_table.pop(f"tiers.{name}")) for name in TierName}
    tables = {f.name: f.type(**by_table[f.name]) for f in msgspec.structs.fields(Config) if f.name in by_table}
    config = Config(**top, **tables, models=models, peers=peers, tiers=tiers)
    variables = {key.label: key.variable for key in keys}
    for label, fault in broken_rules(config, faults.doubtful):
        faults.add(f"{label} ({variables[label]})" if label in variables else label, fault)
    if faults.problems:
        raise ConfigError(faults.problems)
    return config


class Faults:
    """What is wrong so far, and the labels of keys whose value is therefore unknown."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.doubtful: set[str] = set()

    def add(self, where: str, what: str, *, doubtful: str | None = None) -> None:
        """Note one fault. ``doubtful`` names the key whose value it leaves open."""
        self.problems.append(f"{where}: {what}")
        if doubtful:
            self.doubtful.add(doubtful)


def _read_file(path: Path, faults: Faults) -> dict[str, Any] | None:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        faults.add(str(path), f"cannot be read: {error.strerror}")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        faults.add(str(path), f"is no valid TOML: {error}")
    return None


def _from_document(document: dict[str, Any], keys: Iterable[Key], faults: Faults) -> dict[tuple[str, str], Any]:
    known = {(key.table, key.name): key for key in keys}
    tables = {key.table for key in keys} | {"tiers"}
    values: dict[tuple[str, str], Any] = {}
    for table, name, value in _leaves(document, "", tables):
        key = known.get((table, name))
        if key is None:
            label = f"[{table}] {name}" if table else name
            near = _near(table, name, known.values(), tables)
            faults.add(label, f"there is no such key{near or (_THE_TIERS if table == 'tiers' else '')}")
            continue
        try:
            values[table, name] = parse_value(value, key.type)
        except UnusableValue as error:
            faults.add(key.label, f"must be {error}, not {_shown(value, key)}", doubtful=key.label)
    return values


def _shown(value: Any, key: Key) -> str:
    return "what it is" if key.secret else shown(value)


def _leaves(table: dict[str, Any], path: str, tables: set[str]) -> Iterator[tuple[str, str, Any]]:
    """Every ``(table, key, value)`` of the document; known tables are entered, all else is a value."""
    for name, value in table.items():
        below = f"{path}.{name}" if path else name
        if below in tables and isinstance(value, dict):
            yield from _leaves(value, below, tables)
        else:
            yield path, name, value


def _near(table: str, name: str, keys: Iterable[Key], tables: set[str]) -> str:
    """What an unknown key may have been meant to be: first in its own table, then anywhere."""
    prefix = f"{table}." if table else ""
    here = {t.removeprefix(prefix): f"`[{t}]`" for t in tables | {"models"} if t and t.startswith(prefix)}
    here |= {key.name: f"`{key.name}`" for key in keys if key.table == table}
    elsewhere = {key.name: f"`{key.name}` in {f'table [{key.table}]' if key.table else 'no table'}" for key in keys}
    return _did_you_mean(name, here) or _did_you_mean(name, elsewhere)


def _from_environment(environ: Mapping[str, str], keys: Iterable[Key], faults: Faults) -> dict[tuple[str, str], Any]:
    known = {key.variable: key for key in keys}
    # The long form of a short name is no second way to say the same, but the first thing one would guess.
    guesses = {_regular_variable(key.table, key.name): f"`{key.variable}`" for key in keys}
    guesses |= {name: f"`{name}`" for name in (*known, *SECRET_VARIABLES, ENGINE_VARIABLE, CONFIG_VARIABLE)}
    values: dict[tuple[str, str], Any] = {}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX) or variable in SECRET_VARIABLES | {ENGINE_VARIABLE, CONFIG_VARIABLE}:
            continue
        if _set_by_kubernetes(variable, text):
            faults.add(variable, _KUBERNETES_HINT)
        elif (key := known.get(variable)) is None:
            hint = "; models are set by CHATSVC_ENGINE or in the file" if "MODEL" in variable else ""
            faults.add(variable, f"there is no such variable{hint or _did_you_mean(variable, guesses)}")
        elif text.strip():
            try:
                values[key.table, key.name] = parse_text(text.strip(), key.type)
            except UnusableValue as error:
                faults.add(variable, f"must be {error}, not {_shown(text, key)}", doubtful=key.label)
    return values


def _models(tables: Any, engine: str, faults: Faults) -> dict[str, ModelConfig]:
    """``[models.<name>]`` of the file, or the one model of ``CHATSVC_ENGINE``."""
    if not tables:
        return {UNNAMED_MODEL: ModelConfig(engine=engine.strip() or "auto", default=True)}
    if not isinstance(tables, dict):
        faults.add("models", f"must be tables such as [models.small], not {shown(tables)}")
        return {}
    if engine.strip():
        faults.add(ENGINE_VARIABLE, "the file has [models.…] tables already: remove one of the two")
    models: dict[str, ModelConfig] = {}
    for name, table in tables.items():
        model = _model(f"models.{name}", table, faults)
        if model is not None:
            models[name] = model
    if len(tables) == 1:
        return {name: msgspec.structs.replace(model, default=True) for name, model in models.items()}
    return models


def _model(name: str, table: Any, faults: Faults) -> ModelConfig | None:
    if not isinstance(table, dict):
        faults.add(f"[{name}]", f"must be a table with the key `engine`, not {shown(table)}")
        return None
    keys = [Key(name, f.name, f.type, f.default) for f in msgspec.structs.fields(ModelConfig)]
    values = {key: value for (_, key), value in _from_document({name: table}, keys, faults).items()}
    if "engine" not in table:
        faults.add(f"[{name}]", "the key `engine` is missing")
    return ModelConfig(**values) if "engine" in values else None


def _peers(document: dict[str, Any], faults: Faults) -> dict[str, PeerConfig]:
    """``[regions.<name>]`` of the file; taken out of the document, so that keys of ``[regions]`` itself stay."""
    regions = document.get("regions")
    if not isinstance(regions, dict):
        return {}
    tables = {name: table for name, table in regions.items() if isinstance(table, dict)}
    document["regions"] = {name: value for name, value in regions.items() if name not in tables}
    peers: dict[str, PeerConfig] = {}
    for name, table in tables.items():
        label = f"regions.{name}"
        before = len(faults.problems)
        keys = [Key(label, f.name, f.type, f.default) for f in msgspec.structs.fields(PeerConfig)]
        values = {key: value for (_, key), value in _from_document({label: table}, keys, faults).items()}
        if len(faults.problems) == before:
            peers[name] = PeerConfig(**values)
    return peers


def _data_dir(value: Any, environ: Mapping[str, str], faults: Faults) -> Path:
    """The data directory as an absolute path; by default where the system keeps a user's data."""
    home = environ.get("HOME", "")
    if isinstance(value, Path):
        below_home = value.parts[:1] == ("~",) and home
        return (Path(home, *value.parts[1:]) if below_home else value).absolute()
    if xdg := environ.get("XDG_DATA_HOME"):
        return Path(xdg).absolute() / "chatsvc"
    if not home:
        faults.add("data_dir (CHATSVC_DATA_DIR)", "no home directory is known, so this must be set")
    return Path(home or "/").absolute() / ".local" / "share" / "chatsvc"


def _set_by_kubernetes(variable: str, text: str) -> bool:
    service = variable.startswith(("CHATSVC_SERVICE_HOST", "CHATSVC_SERVICE_PORT"))
    return service or (variable.startswith("CHATSVC_PORT") and ("://" in text or variable != "CHATSVC_PORT"))


def _did_you_mean(word: str, known: Mapping[str, str]) -> str:
    """``; did you mean …?`` for the known word nearest to ``word``, or nothing when none is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {known[near[0]]}?" if near else ""


def _regular_variable(table: str, name: str) -> str:
    return PREFIX + "_".join(part for part in (table, name) if part).replace(".", "_").upper()
