"""The chat messages of data rows: what a message may hold, and how it is read.

Arrow, and so Parquet and every data set that `datasets` wrote, gives all messages of a column the same keys: a key that
only some messages have is null in the others. So null means that the key is absent, in JSONL as in Parquet. Only the
role, and the text of a message that calls no tool, have to be there.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from gspo_mega.data.jsonl import type_name

Message: TypeAlias = dict[str, Any]

_FORM = '{"role": "user", "content": "text"}'
_CALL_FORM = '{"function": {"name": "text", "arguments": {...}}}'


def problem_of_message(message: Any) -> str | None:
    """What is wrong with one message of a row, or None: a phrase that goes on from "has message 3 that" and names the
    key.
    """
    if not isinstance(message, dict):
        return f"is {type_name(message)}, not of the form {_FORM}"
    if (problem := _problem_of_text(message, "role")) is not None:
        return problem
    if (calls := message.get("tool_calls")) is not None and (problem := _problem_of_calls(message, calls)) is not None:
        return problem
    for key, value in message.items():
        if key not in ("role", "content", "tool_calls") and not isinstance(value, str | None):
            return f"has {key!r} that is {type_name(value)}, not a text"
    if calls and message.get("content") is None:
        return None
    return _problem_of_text(message, "content")


def read_message(message: Message) -> Message:
    """A message without problem, without its keys that are null, and without an empty list of calls; content that is
    null is empty. Nulls inside calls and their arguments are left out, too; arguments that are JSON text stay as they
    are.
    """
    read = {key: value for key, value in message.items() if value is not None}
    read.setdefault("content", "")
    calls = read.pop("tool_calls", None)
    return read | {"tool_calls": _without_nulls(calls)} if calls else read


def _problem_of_text(message: Message, key: str) -> str | None:
    if key not in message:
        return f"has no {key!r}, so that it is not of the form {_FORM}"
    return None if isinstance(message[key], str) else f"has {key!r} that is {type_name(message[key])}, not a text"


def _problem_of_calls(message: Message, calls: Any) -> str | None:
    if calls and message["role"] != "assistant":
        return "calls tools, which only the assistant does"
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        return f"has tool_calls that are no list of {_CALL_FORM}"
    return None


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    return isinstance(function.get("arguments"), dict | str | None)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
