"""The types that a tool's parameters may have: a JSON schema for each, and a checked value from JSON.

A policy writes numbers and truth values as texts now and then: such a text is taken as the value. Nothing else is
guessed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

from gspo_mega.base.errors import EpisodeError

_SHOWN_CHARACTERS = 80
SUPPORTED = "str, int, float, bool, Literal, list[T], dict[str, T], T | None, or a dataclass of these"


class ToolError(Exception):
    """A call that the policy got wrong; the text is its answer."""


class ArgumentType(NamedTuple):
    """A parameter's type: its JSON schema, and what makes a value of it from JSON (raises ToolError)."""

    schema: dict[str, Any]
    convert: Callable[[Any], Any]


def type_of(hint: Any, where: str) -> ArgumentType:
    """The type that an annotation stands for. Raises EpisodeError, which begins with `where`."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        made = type_of(inner[0], where)
        text = next((extra for extra in inner[1:] if isinstance(extra, str)), "")
        return ArgumentType({**made.schema, "description": text}, made.convert) if text else made
    if isinstance(hint, type) and hint in _PLAIN:
        return _PLAIN[hint]
    if origin is typing.Literal:
        return _literal(inner, where)
    if origin in (typing.Union, types.UnionType) and type(None) in inner and len(inner) == 2:
        made = type_of(next(one for one in inner if one is not type(None)), where)
        return ArgumentType(
            {**made.schema, "nullable": True}, lambda value: None if value is None else converted(value, made)
        )
    if origin is list:
        item = type_of(inner[0], where)
        return ArgumentType(
            {"type": "array", "items": item.schema},
            lambda value: [converted(one, item, f"element {n}") for n, one in enumerate(_parsed(value, list))],
        )
    if origin is dict and inner[0] is str:
        entry = type_of(inner[1], where)
        return ArgumentType(
            {"type": "object", "additionalProperties": entry.schema},
            lambda value: {key: converted(one, entry, f"entry {key!r}") for key, one in _parsed(value, dict).items()},
        )
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _dataclass(hint, where)
    name = hint.__name__ if isinstance(hint, type) and not inner else str(hint)
    raise EpisodeError(f"{where} has the type {name}; supported are {SUPPORTED}")


def _literal(values: tuple[Any, ...], where: str) -> ArgumentType:
    kinds = {type(value) for value in values}
    if len(kinds) != 1 or not kinds <= {str, int, bool}:
        raise EpisodeError(f"{where} has the type Literal{list(values)}; its values must be all texts or all integers")
    by_text = {str(value): value for value in values}

    def convert(value: Any) -> Any:
        if type(value) in kinds and value in values:
            return value
        if isinstance(value, str) and value in by_text:
            return by_text[value]
        raise ToolError(f"is {shown(value)}; valid: {', '.join(json.dumps(one) for one in values)}")

    return ArgumentType({"type": _NAMES[kinds.pop()], "enum": list(values)}, convert)


def _dataclass(hint: type, where: str) -> ArgumentType:
    hints = typing.get_type_hints(hint, include_extras=True)
    fields = [one for one in dataclasses.fields(hint) if one.init]
    made = {one.name: type_of(hints[one.name], f"{where}, its field {one.name!r}") for one in fields}
    required = [
        one.name for one in fields if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
    ]

    def convert(value: Any) -> Any:
        value = _parsed(value, dict)
        for key in value:
            if key not in made:
                raise ToolError(f"has an entry {key!r:.80}; it takes {', '.join(made) or 'none'}")
        for key in required:
            if key not in value:
                raise ToolError(f"lacks its entry {key!r}")
        try:
            return hint(**{key: converted(one, made[key], f"entry {key!r}") for key, one in value.items()})
        except (TypeError, ValueError) as error:  # of its __post_init__
            raise ToolError(f"is refused: {error}") from None

    properties = {key: one.schema for key, one in made.items()}
    return ArgumentType({"type": "object", "properties": properties, "required": required}, convert)


def converted(value: Any, kind: ArgumentType, what: str = "") -> Any:
    """The value as the type has it. Raises ToolError, which begins with `what`."""
    try:
        return kind.convert(value)
    except ToolError as error:
        raise ToolError(f"{what} {error}".strip()) from None


def _parsed(value: Any, kind: type) -> Any:
    """A list or dictionary, also one that was given as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ToolError(f"is the text {shown(value)}; a JSON {_NAMES[kind]} was expected") from None
    if not isinstance(value, kind):
        raise ToolError(f"is {shown(value)}; a JSON {_NAMES[kind]} was expected")
    return value


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise ToolError(f"is {shown(value)}; a text was expected")


def _integer(value: Any) -> int:
    try:
        if isinstance(value, str):
            return int(value)
        if not isinstance(value, bool) and isinstance(value, int | float) and value == int(value):
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise ToolError(f"is {shown(value)}; an integer was expected")


def _number(value: Any) -> float:
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ToolError(f"is {shown(value)}; a number was expected")
    return number


def _truth(value: Any) -> bool:
    found = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(found, bool):
        raise ToolError(f"is {shown(value)}; true or false was expected")
    return found


def shown(value: Any) -> str:
    """A value in a refusal, as JSON of bounded length."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deep"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


_NAMES: dict[type, str] = {str: "string", int: "integer", bool: "boolean", list: "array", dict: "object"}
_PLAIN: dict[Any, ArgumentType] = {
    str: ArgumentType({"type": "string"}, _text),
    int: ArgumentType({"type": "integer"}, _integer),
    float: ArgumentType({"type": "number"}, _number),
    bool: ArgumentType({"type": "boolean"}, _truth),
}
