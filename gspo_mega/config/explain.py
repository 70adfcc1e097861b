"""A violation of the schema in words that a person can act on: what is wrong and what would be valid.

`explain` turns one entry of pydantic's `ValidationError.errors()` into a text; for a mistyped key it suggests the
nearest one of the schema, and for one of another library (`other_names.py`) what it is called here. `loader.py` adds
the position in the file.
"""

from __future__ import annotations

import difflib
import functools
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from gspo_mega.config.other_names import answer, library_of_section, named_leaves
from gspo_mega.config.schema import Config
from gspo_mega.config.schema.section import section_of
from gspo_mega.config.strict_yaml import KeyPath

_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "tuple_type": "a list",
    "dict_type": "keys with values",
    "model_type": "a section: keys with values, indented below it",
}
_BOUNDS = {
    "greater_than": ("gt", ">"),
    "greater_than_equal": ("ge", ">="),
    "less_than": ("lt", "<"),
    "less_than_equal": ("le", "<="),
}


# Keys that earlier versions had, and what replaced them.
_GONE: dict[tuple[str | int, ...], str] = {
    ("mismatch", "cap"): (
        "the bound is `bound_nats` now, in nats for a response of one token and divided by sqrt(L) for one of L;"
        " docs/mismatch.md"
    ),
}


def explain_errors(errors: Sequence[ErrorDetails]) -> list[tuple[KeyPath, str]]:
    """Return (location, text) of everything to say about pydantic's `ValidationError.errors()`. A key that is missing
    because it is mistyped is left to the line about the mistyped one.
    """
    said = [line for error in errors for line in explain_all(error)]
    missing = {tuple(error["loc"]) for error in errors if error["type"] == "missing"}
    mistyped = {
        key
        for key in missing
        for location, text in said
        if location[:-1] == key[:-1] and text.startswith("unknown key; ") and text.endswith(_question(key[-1]))
    }
    return [(location, text) for location, text in said if location not in mistyped]


def explain_all(error: ErrorDetails) -> list[tuple[KeyPath, str]]:
    """Return (location, text) of everything to say about one entry of pydantic's `ValidationError.errors()`: one, or,
    for a section of another library, one for each of its keys that is known here.
    """
    location, value = tuple(error["loc"]), error.get("input")
    if not (isinstance(value, dict) and error["type"] in ("extra_forbidden", "literal_error")):
        return [(location, explain(error))]
    known, rest = named_leaves([str(part) for part in location], value, _own_names())
    library = library_of_section(str(location[0])) if len(location) == 1 else None
    if not known and (library is None or error["type"] != "extra_forbidden"):
        return [(location, explain(error))]
    lines: list[tuple[KeyPath, str]] = [(leaf, f"unknown key; {answer(leaf, _own_names())}") for leaf in known]
    if rest:
        lines.append((location, f"unknown section; no key here is known by the names {', '.join(rest)}"))
    return lines


def explain(error: ErrorDetails) -> str:
    """Return the text for one entry of pydantic's `ValidationError.errors()`."""
    kind, location, value, context = error["type"], error["loc"], error.get("input"), error.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(location)
    if kind == "missing":
        field = _field(location)
        meaning = f" ({field.description})" if field is not None and field.description else ""
        return f"missing; it has no default{meaning}"
    if kind in _TYPES:
        return f"is {_written(value)}; must be {_TYPES[kind]}{_hint(kind, value, tuple(location))}"
    if kind == "literal_error":
        return f"is {_written(value)}; valid: {context['expected']}{_did_you_mean(value, context['expected'])}"
    if kind in _BOUNDS:
        key, sign = _BOUNDS[kind]
        bound = context[key]
        return f"is {_written(value)}; must be {sign} {bound if isinstance(bound, int) else format(bound, 'g')}"
    if kind == "string_too_short" or kind == "too_short":
        return "is empty; must hold at least one entry" if kind == "too_short" else "is empty; must be some text"
    if kind == "string_pattern_mismatch":
        return f"is {_written(value)}; valid: letters, digits and `.`, `_`, `-`"
    return f"is {_written(value)}; {error['msg']}"


def known_elsewhere(path: Sequence[str]) -> str:
    """Return what another library's key of this path is called here, to append to a message, or an empty text."""
    said = answer(path, _own_names())
    return "" if said is None else f"; {said}"


def closest(name: str, valid: typing.Iterable[str]) -> str | None:
    """Return the nearest of `valid` to a mistyped `name`, or None if nothing is near."""
    matches = difflib.get_close_matches(name.lower(), list(valid), 1, 0.6)
    return matches[0] if matches else None


def all_keys(model: type[BaseModel] = Config, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key of the schema, each section before its keys; entries of lists are left out."""
    for name, field in model.model_fields.items():
        yield (*prefix, name)
        section = section_of(field.annotation)
        if section is not None and not _is_list(field.annotation):
            yield from all_keys(section, (*prefix, name))


@functools.cache
def _own_names() -> frozenset[str]:
    return frozenset(path[-1] for path in all_keys())


def _unknown_key(location: tuple[str | int, ...]) -> str:
    if location in _GONE:
        return f"is no longer a key: {_GONE[location]}"
    model = _model_at(location[:-1])
    name = str(location[-1])
    siblings = list(model.model_fields) if model is not None else []
    near = closest(name, siblings)
    said = answer([str(part) for part in location], _own_names())
    if said is not None:
        also = f"; or {_question(near)}" if near is not None and near not in said else ""
        return f"unknown key; {said}{also}"
    if near is not None:
        return f"unknown key; {_question(near)}"
    elsewhere = [".".join(path) for path in all_keys() if path[-1] == name]
    if elsewhere:
        return f"unknown key here; did you mean {' or '.join(map(repr, elsewhere))}?"
    return f"unknown key; valid: {', '.join(siblings)}"


def _question(name: str | int) -> str:
    return f"did you mean {name!r}?"


def _model_at(location: tuple[str | int, ...]) -> type[BaseModel] | None:
    """Return the section class that the keys at `location` belong to; None if the schema has none there."""
    model: type[BaseModel] | None = Config
    for part in location:
        if isinstance(part, int):
            continue  # entries of a list have the class that the list's annotation names
        if model is None or part not in model.model_fields:
            return None
        model = section_of(model.model_fields[part].annotation)
    return model


def _field(location: tuple[str | int, ...]) -> Any:
    model = _model_at(location[:-1])
    return model.model_fields.get(str(location[-1])) if model is not None else None


def _is_list(annotation: Any) -> bool:
    """Return whether `annotation` is `tuple[X, ...]`, perhaps annotated or optional."""
    if typing.get_origin(annotation) is tuple:
        return True
    return any(_is_list(inner) for inner in typing.get_args(annotation))


def _written(value: Any) -> str:
    """Return a value as a message shows it, at most 80 characters long."""
    if value is None:
        return "empty (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return "a list"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _hint(kind: str, value: Any, location: KeyPath | None = None) -> str:
    """Return how to write the value that was probably meant, or an empty text."""
    if isinstance(value, float) and value.is_integer() and kind.startswith("int"):
        return f"; write {int(value)}"
    if isinstance(value, str):
        if kind.startswith("bool") and value.lower() in ("yes", "no", "on", "off"):
            return f"; write {'true' if value.lower() in ('yes', 'on') else 'false'}"
        if kind.startswith("bool") and value.lower() in ("true", "false"):
            return f"; write {value.lower()}, without quotes"
        if kind.startswith(("int", "float")) and re.fullmatch(r"[-+]?\d+(\.\d+)?([eE][-+]?\d+)?", value):
            return f"; write {value}, without quotes"
        bare = value.replace("_", "").replace(",", "")
        if kind.startswith(("int", "float")) and bare != value and bare.isdecimal():
            return f"; write {bare}"
    if kind == "model_type" and location is not None and location[:2] == ("reward", "functions"):
        return f"; write {{function: {value}}}"
    if kind == "string_type" and isinstance(value, (int, float, bool)):
        return f'; quote it: "{_written(value)}"'
    return ""


def _did_you_mean(value: Any, expected: str) -> str:
    near = closest(str(value), [choice.strip("' ") for choice in expected.replace(" or ", ", ").split(",")])
    return f"; did you mean {near!r}?" if near is not None else ""
