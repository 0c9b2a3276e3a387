"""Engine URLs: ``<scheme>:<target>?<options>#<model>``, taken apart and checked, every fault said at once."""

from __future__ import annotations

from typing import Final, TypeVar
from urllib.parse import parse_qsl

import msgspec

from chatsvc.errors import ConfigError

_WITH_FRAGMENT: Final = frozenset({"openai"})
"""Schemes in which ``#`` splits off the model's name; elsewhere it is an ordinary character."""

OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)


class EngineUrl(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of an engine URL. ``options`` is the query, percent-decoded, in the order given."""

    scheme: str
    target: str
    options: tuple[tuple[str, str], ...]
    model: str | None = None


def parse_engine_url(url: str) -> EngineUrl:
    """Take an engine URL apart. A bare word is a scheme without a target. Nothing is checked yet."""
    scheme, _, rest = url.strip().partition(":")
    scheme = scheme.lower()
    model: str | None = None
    if scheme in _WITH_FRAGMENT:
        rest, _, fragment = rest.partition("#")
        model = fragment or None
    target, _, query = rest.partition("?")
    return EngineUrl(scheme=scheme, target=target, options=tuple(parse_qsl(query, keep_blank_values=True)), model=model)


def parse_options(url: EngineUrl, type_: type[OptionsT]) -> OptionsT:
    """The query as a struct: every field an option, its annotation the check.

    Raises ``ConfigError`` with one line for each unknown, repeated or unacceptable option.
    """
    fields = {field.name: field for field in msgspec.structs.fields(type_)}
    values: dict[str, object] = {}
    problems: list[str] = []
    for name, raw in url.options:
        field = fields.get(name)
        if field is None:
            allowed = ", ".join(sorted(fields)) or "none"
            problems.append(f"engine {url.scheme}: unknown option '{name}'; options are: {allowed}")
        elif name in values:
            problems.append(f"engine {url.scheme}: option '{name}' is given more than once")
        else:
            try:
                values[name] = msgspec.convert(raw, field.type, strict=False)
            except msgspec.ValidationError as error:
                values[name] = None
                problems.append(f"engine {url.scheme}: option '{name}': {error}, got '{raw}'")
    if problems:
        raise ConfigError(problems)
    return type_(**values)
