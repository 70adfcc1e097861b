"""The built-in reward `json_schema`: is the response JSON, and does it fit a schema?

This module reads the JSON out of a response. The package jsonschema validates it, with RE2 for `pattern`, and fetches
nothing.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

from gspo_mega.base.errors import RewardError
from gspo_mega.rewards.builtin import compiled
from gspo_mega.rewards.fenced_code import last_block


def check_json_schema(schema: dict[str, Any], fenced: bool = False, compare: bool = False) -> None:
    """Raise RewardError if the options of `json_schema` are not valid."""
    if not isinstance(schema, dict):
        raise RewardError(
            f"reward 'json_schema': schema is {schema!r}; a JSON Schema is expected, such as {{type: object}}"
        )
    keys = {key for inner in _objects(schema) for key in inner}
    if {"patternProperties", "unevaluatedProperties"} <= keys:
        raise RewardError(
            "reward 'json_schema': patternProperties together with unevaluatedProperties is not read; a response could"
            " make their matching slow. Use additionalProperties"
        )
    _validator(json.dumps(schema))


def json_schema(
    *,
    prompt: str,
    response: str,
    answer: Any,
    metadata: dict[str, Any],
    schema: dict[str, Any],
    fenced: bool = False,
    compare: bool = False,
) -> float | dict[str, float | bool]:
    """Return 1 if the response is JSON that the schema allows, else 0.

    `fenced`: the JSON stands in the response's last ``` block. `compare`: the value must also equal the answer (the
    row's value, or the JSON in its text); the response then counts as right or wrong accordingly.
    """
    text = response
    if fenced:
        block = last_block(response, _is_json)
        if block is None:
            return _result(False, compare)
        text = block
    try:
        value = json.loads(text, parse_constant=_refuse)
        fits = _validator(json.dumps(schema)).is_valid(value)
        given = _canonical(value) if fits and compare else ""
    except (ValueError, RecursionError):
        return _result(False, compare)
    return _result(fits and (not compare or given == _canonical(_expected(answer))), compare)


def _result(is_right: bool, compare: bool) -> float | dict[str, float | bool]:
    return {"reward": float(is_right), "correct": is_right} if compare else float(is_right)


def _expected(answer: Any) -> Any:
    if not isinstance(answer, str):
        return answer
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        return answer


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _values_of(key: str, schema: Any) -> Iterator[str]:
    """Yield the texts that stand under a keyword anywhere in a schema."""
    for inner in _objects(schema):
        if isinstance(inner.get(key), str):
            yield inner[key]


def _patterns_of_properties(schema: Any) -> Iterator[str]:
    for inner in _objects(schema):
        if isinstance(inner.get("patternProperties"), dict):
            yield from inner["patternProperties"]


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _objects(inner)


@functools.lru_cache(maxsize=16)
def _validator(schema_text: str) -> Any:
    """Return the validator of a schema. Raises RewardError if it is no JSON Schema or refers to another place, or if
    jsonschema is not installed.
    """
    try:
        import jsonschema.validators
        import referencing
        import referencing.exceptions
        import referencing.jsonschema
    except ModuleNotFoundError as error:
        raise RewardError("reward 'json_schema': needs the package jsonschema: pip install jsonschema") from error
    schema = json.loads(schema_text)
    base = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        base.check_schema(schema)
    except jsonschema.SchemaError as error:
        place = "/".join(map(str, error.absolute_path)) or "its top"
        raise RewardError(f"reward 'json_schema': schema is no JSON Schema: at {place}: {error.message}") from error
    for pattern in [*_values_of("pattern", schema), *_patterns_of_properties(schema)]:
        try:
            compiled(pattern)
        except RewardError as error:
            raise RewardError(f"reward 'json_schema': {error}") from error
    resource = referencing.Resource.from_contents(schema, default_specification=referencing.jsonschema.DRAFT202012)
    resolver = referencing.Registry().resolver_with_root(resource)
    for place in _values_of("$ref", schema):
        try:
            resolver.lookup(place)
        except referencing.exceptions.Unresolvable as error:
            raise RewardError(
                f"reward 'json_schema': $ref {place!r} is not in the schema; nothing is fetched"
            ) from error
    own = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
        "uniqueItems": _unique_items,
    }
    return jsonschema.validators.extend(base, own)(schema, registry=referencing.Registry())


# Keywords whose implementations in jsonschema take more than linear time for some values. Each function yields errors;
# only whether there are any matters.


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    if isinstance(value, str) and compiled(pattern).search(value) is None:
        yield _wrong("pattern")


def _pattern_properties(validator: Any, patterns: dict[str, Any], value: Any, schema: Any) -> Iterator[Any]:
    for pattern, below in patterns.items() if isinstance(value, dict) else ():
        for key, inner in value.items():
            if compiled(pattern).search(key) is not None:
                yield from validator.descend(inner, below, path=key, schema_path=pattern)


def _additional_properties(validator: Any, allowed: Any, value: Any, schema: Any) -> Iterator[Any]:
    if not isinstance(value, dict):
        return
    patterns = [compiled(pattern) for pattern in schema.get("patternProperties", {})]
    for key, inner in value.items():
        if key not in schema.get("properties", {}) and all(one.search(key) is None for one in patterns):
            if isinstance(allowed, dict):
                yield from validator.descend(inner, allowed, path=key)
            elif not allowed:
                yield _wrong("additionalProperties")


def _unique_items(validator: Any, wanted: bool, value: Any, schema: Any) -> Iterator[Any]:
    if wanted and isinstance(value, list) and len(set(map(_canonical, value))) < len(value):
        yield _wrong("uniqueItems")


def _wrong(keyword: str) -> Any:
    import jsonschema

    return jsonschema.ValidationError(keyword)


def _canonical(value: Any) -> str:
    """Return equal texts for equal JSON values: 1.0 equals 1, and True does not."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _whole(inner) for key, inner in value.items()}
    return [_whole(inner) for inner in value] if isinstance(value, list) else value
