"""One value: from text or TOML to the type of its key, and in words what that type takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import inspect

from chatsvc.logs import mask_secrets

_MOST_SHOWN: Final = 80
_TRUTHS: Final = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(("false", "0", "no", "off"), False)


class UnusableValue(Exception):
    """A value that its key cannot take; the text says what the key takes instead."""


def parse_value(value: Any, type_: Any) -> Any:
    """A TOML value as ``type_``. Raises ``UnusableValue``."""
    return _convert(value, type_, strict=True)


def parse_text(text: str, type_: Any) -> Any:
    """A variable's text as ``type_``; lists are separated by commas. Raises ``UnusableValue``."""
    kind = _without_none(inspect.type_info(type_))
    if isinstance(kind, inspect.BoolType):
        return _convert(_TRUTHS.get(text.lower(), text), type_, strict=True)
    if isinstance(kind, (inspect.VarTupleType, inspect.FrozenSetType)):
        return _convert([item.strip() for item in text.split(",") if item.strip()], type_, strict=True)
    if isinstance(kind, (inspect.EnumType, inspect.LiteralType)):
        text = text.lower()
    return _convert(text, type_, strict=False)


def in_words(type_: Any) -> str:
    """What a key of this type takes: ``a whole number, at least 1``."""
    kind = _without_none(inspect.type_info(type_))
    for known, words in _WORDS.items():
        if isinstance(kind, known):
            return words(kind)
    raise TypeError(f"no words for {kind}")


def shown(value: Any) -> str:
    """A value as it may appear in a message: short, and without secrets."""
    text = mask_secrets(f'"{value}"' if isinstance(value, str) else _as_toml(value))
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"


def _convert(value: Any, type_: Any, *, strict: bool) -> Any:
    try:
        result = msgspec.convert(value, type_, strict=strict, dec_hook=_path)
    except (msgspec.ValidationError, TypeError):
        raise UnusableValue(in_words(type_)) from None
    if isinstance(result, float) and not math.isfinite(result):
        raise UnusableValue(in_words(type_))
    return result


def _path(type_: Any, value: Any) -> Any:
    if type_ is Path and isinstance(value, str) and value and "\0" not in value:
        return Path(value)
    raise TypeError


def _without_none(kind: inspect.Type) -> inspect.Type:
    if isinstance(kind, inspect.UnionType):
        (kind,) = (part for part in kind.types if not isinstance(part, inspect.NoneType))
    return kind


def _range(kind: Any) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" from {kind.ge} to {kind.le}"
    bounds = ((kind.ge, "of at least"), (kind.gt, "above"), (kind.le, "of at most"), (kind.lt, "below"))
    return "".join(f" {word} {bound:.12g}" for bound, word in bounds if bound is not None)


def _choice(values: list[Any]) -> str:
    named = [f'"{value}"' for value in values if value != ""]
    return f"{', '.join(named[:-1])} or {named[-1]}"


_WORDS: Final[dict[type[inspect.Type], Callable[[Any], str]]] = {
    inspect.IntType: lambda kind: f"a whole number{_range(kind)}",
    inspect.FloatType: lambda kind: f"a number{_range(kind)}",
    inspect.BoolType: lambda _: "true or false",
    inspect.StrType: lambda _: "text",
    inspect.CustomType: lambda _: "a path",
    inspect.EnumType: lambda kind: _choice([member.value for member in kind.cls]),
    inspect.LiteralType: lambda kind: _choice(list(kind.values)),
    inspect.VarTupleType: lambda _: "a list of texts",
    inspect.FrozenSetType: lambda _: "a list of texts",
}


def _as_toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{type(value).__name__} {value}" if isinstance(value, dict) else str(value)
