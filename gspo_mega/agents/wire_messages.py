"""A message as clients of OpenAI's API write it, in the one form that records have.

Owns what is the same message: null and empty fields that clients add to an answer when they hand it back, text in
parts, the role `developer`. What it changes, it changes in every request alike, so that a history that comes back
unedited is found in the record.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

Refuse = Callable[[str, str], NoReturn]

_ROLES = ("system", "developer", "user", "assistant", "tool")
# Of a message that a client hands back: what an answer here never has, so that it holds nothing.
_EMPTY = ("annotations", "audio", "function_call", "refusal", "tool_calls")
_FIELDS = {
    "system": ("content", "name"),
    "user": ("content", "name"),
    "assistant": ("content", "name", "reasoning_content", "tool_calls"),
    "tool": ("content", "name", "tool_call_id"),
}


def message_of(message: Any, where: str, refuse: Refuse) -> dict[str, Any]:
    """The message in the records' form. `refuse` is called with the place and the text of what is wrong."""
    if not isinstance(message, dict):
        refuse(where, f"is {_shown(message)}; an object with role and content was expected")
    role = message.get("role")
    if role not in _ROLES:
        refuse(f"{where}.role", f"{_shown(role)}; valid: {', '.join(_ROLES)}")
    role = "system" if role == "developer" else role
    made: dict[str, Any] = {"role": role}
    for key, value in message.items():
        if key == "role" or value is None or (key in _EMPTY and not value):
            continue
        if key not in _FIELDS[role]:
            refuse(f"{where}.{key}", f"no field of a message of role {role}; valid: {', '.join(_FIELDS[role])}")
        if key == "content":
            made[key] = _content(value, f"{where}.content", refuse)
        elif key == "tool_calls":
            made[key] = _calls(value, f"{where}.tool_calls", refuse)
        elif isinstance(value, str):
            made[key] = value
        else:
            refuse(f"{where}.{key}", f"is {_shown(value)}; a text was expected")
    if "content" not in made:
        if role != "assistant":
            refuse(f"{where}.content", "missing; a text was expected")
        made["content"] = ""
    if role == "tool" and "tool_call_id" not in made:
        refuse(f"{where}.tool_call_id", "missing; the id of the call that this answers was expected")
    return made


def _content(content: Any, where: str, refuse: Refuse) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        refuse(where, f"is {_shown(content)}; a text or a list of text parts was expected")
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            refuse(
                f"{where}[{place}]",
                f'{_shown(part)}; valid: {{"type": "text", "text": ...}}, for the policy reads text',
            )
        texts.append(part["text"])
    return "".join(texts)


def _calls(calls: Any, where: str, refuse: Refuse) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        refuse(where, f"is {_shown(calls)}; a list was expected")
    made = []
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if (
            not isinstance(function, dict)
            or call.get("type", "function") != "function"
            or not all(
                isinstance(one, str) for one in (call.get("id"), function.get("name"), function.get("arguments"))
            )
        ):
            refuse(
                f"{where}[{place}]",
                f'{_shown(call)}; valid: {{"id": text, "type": "function", "function": {{"name": text, "arguments":'
                " JSON text}}",
            )
        named = {"name": function["name"], "arguments": function["arguments"]}
        made.append({"id": call["id"], "type": "function", "function": named})
    return made


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:80]}..."
