"""A tool: a typed function, its schema for the chat template, and its arguments and result between text and Python.

    def search(query: str, limit: int = 5, kind: Literal["all", "news"] = "all") -> list[str]:
        '''Find pages.

        Args:
            query: What to look for.
            limit: Most results.
        '''

The schema has OpenAI's form: the function's name, the docstring up to `Args:`, and one JSON schema per parameter, with
its text under `Args:` (or from `Annotated[str, "What to look for."]`), its default, and whether it is required. A
parameter annotated `Task`, or named `task` without annotation, is hidden from the policy: it gets the episode's task.

Supported types are str, int, float, bool, Literal, list[T], dict[str, T], T | None, and dataclasses of these. Any other
type is refused by name: a type that is not checked would pass the policy's mistakes on to the function. A policy
sometimes writes a number or a truth value as text; such a text is accepted as the value. Nothing else is guessed.

`load_tools` and `Tool` come first, then the types of parameters. `episode_worker.py` runs tools, and `messages.py`
finds calls in the text of a turn.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gspo_mega.agents.protocol import Task
from gspo_mega.base.errors import EpisodeError
from gspo_mega.base.user_functions import import_function, place_of

_SHOWN_CHARACTERS = 80


# A longer result is cut: it would fill the context, and it has to pass through pipes.
MAX_RESULT_CHARACTERS = 64 * 1024

SUPPORTED = "str, int, float, bool, Literal, list[T], dict[str, T], T | None, or a dataclass of these"

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):\s*$")

_ARGUMENT = re.compile(r"^(\s*)\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


class ToolError(Exception):
    """The policy made a wrong call. The text of the error is the answer that the policy gets."""


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call.

    `name` is the name by which the policy calls it, `source` is `package.module:function`, and `schema` is what the
    chat template is given. `task_parameter` names the parameter that gets the episode's task, if there is one.
    """

    name: str
    source: str
    function: Callable[..., Any]
    schema: dict[str, Any]
    task_parameter: str | None
    _types: dict[str, ArgumentType]
    _required: tuple[str, ...]

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def arguments_of(self, arguments: dict[str, Any] | str) -> dict[str, Any]:
        """Return the keyword arguments of a call, checked and converted. A number or truth value written as text is
        accepted as the value. Raises ToolError.
        """
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError) as error:
                raise ToolError(f"the arguments of {self.name} are not JSON: {error}") from None
        if not isinstance(arguments, dict):
            raise ToolError(f"the arguments of {self.name} are {shown(arguments)}; an object was expected")
        for key in arguments:
            if key not in self._types:
                raise ToolError(f"{self.name} has no argument {key!r:.80}; it takes {', '.join(self._types) or 'none'}")
        missing = [key for key in self._required if key not in arguments]
        if missing:
            raise ToolError(f"{self.name} lacks its argument {missing[0]!r}")
        return {
            key: converted(value, self._types[key], f"argument {key!r} of {self.name}")
            for key, value in arguments.items()
        }


def load_tools(names: Sequence[str]) -> dict[str, Tool]:
    """Return the tools that `rollout.tools` names, by the name by which the policy calls them.

    Raises EpisodeError as `load_tool`, and if two tools have the same name.
    """
    tools: dict[str, Tool] = {}
    for name in names:
        tool = load_tool(name)
        if tool.name in tools:
            raise EpisodeError(
                f"tool {name!r}: {tools[tool.name].source!r} is called {tool.name} too; the policy could not tell them"
                " apart"
            )
        tools[tool.name] = tool
    return tools


def load_tool(name: str) -> Tool:
    """Return the function that `name` (`package.module:function`) stands for, as a tool.

    Raises EpisodeError if it cannot be found, has no docstring or no plain name, or has a parameter of an unsupported
    kind or type.
    """
    function = import_function(name, "tool", EpisodeError)
    where = f"tool {name!r}{place_of(function)}"
    called = getattr(function, "__name__", "")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", called):
        raise EpisodeError(f"{where}: {called or type(function).__name__!r} is not a name that a policy can call")
    if inspect.isclass(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise EpisodeError(f"{where}: a plain or async function is expected, not a class or a generator")
    text, described = _read_docstring(inspect.getdoc(function) or "")
    if not text:
        raise EpisodeError(f"{where}: it has no docstring, from which the policy learns what the tool is for")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        signature = inspect.signature(function)
    except Exception as error:  # an annotation may be any expression
        raise EpisodeError(f"{where}: its annotations cannot be read: {error}") from error
    properties: dict[str, Any] = {}
    types_: dict[str, ArgumentType] = {}
    task_parameter = None
    for key, parameter in signature.parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise EpisodeError(f"{where}: parameter {parameter} has no name that a call could use")
        if hints.get(key) is Task or (key == "task" and key not in hints):
            if task_parameter is not None:
                raise EpisodeError(f"{where}: both {task_parameter} and {key} are the task")
            task_parameter = key
            continue
        if key not in hints:
            raise EpisodeError(f"{where}: parameter {key!r} has no type; supported are {SUPPORTED}")
        try:
            types_[key] = type_of(hints[key], f"{where}: parameter {key!r}")
        except RecursionError:
            raise EpisodeError(f"{where}: the type of parameter {key!r} contains itself") from None
        properties[key] = _property(types_[key].schema, parameter.default, described.get(key, ""))
    unknown = [key for key in described if key not in signature.parameters]
    if unknown:
        raise EpisodeError(f"{where}: its docstring describes {unknown[0]!r}, which is none of its parameters")
    required = tuple(key for key in types_ if signature.parameters[key].default is inspect.Parameter.empty)
    schema = {
        "type": "function",
        "function": {
            "name": called,
            "description": text,
            "parameters": {"type": "object", "properties": properties, "required": list(required)},
        },
    }
    return Tool(called, name, function, schema, task_parameter, types_, required)


def _property(schema: dict[str, Any], default: Any, description: str) -> dict[str, Any]:
    described = {**schema, "description": description} if description else dict(schema)
    if default is inspect.Parameter.empty or default is None:
        return described
    try:
        default = json.loads(json.dumps(default, allow_nan=False))
    except (TypeError, ValueError):  # a dataclass as default: the policy does not need to know it
        return described
    return {**described, "default": default}


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description, and the text of each parameter under `Args:` (Google style)."""
    description: list[str] = []
    arguments: dict[str, str] = {}
    section, indent, current = "", 0, ""
    for line in text.splitlines():
        if found := _SECTION.match(line):
            section, current = found[1], ""
        elif not section:
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            found = _ARGUMENT.match(line)
            if found and (not current or len(found[1]) <= indent):
                indent, current = len(found[1]), found[2]
                arguments[current] = found[3].strip()
            elif current:
                arguments[current] = f"{arguments[current]} {line.strip()}".strip()
    return "\n".join(description).strip(), arguments


def text_of(result: Any) -> tuple[str, bool]:
    """Return what the policy is shown of a tool's result, and whether it was cut. A text is shown as it is, anything
    else as JSON.

    Raises ToolError if the result is neither text nor JSON.
    """
    if not isinstance(result, str):
        if dataclasses.is_dataclass(result) and not isinstance(result, type):
            result = dataclasses.asdict(result)
        try:
            result = json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ToolError(f"the tool returned {type(result).__name__}, which is not JSON: {error}") from None
    # Half of a UTF-16 surrogate pair cannot be encoded as UTF-8.
    result = result.encode("utf-8", "replace").decode("utf-8")
    if len(result) <= MAX_RESULT_CHARACTERS:
        return result, False
    return f"{result[:MAX_RESULT_CHARACTERS]}\n[cut after {MAX_RESULT_CHARACTERS} characters]", True


def shown(value: Any) -> str:
    """Return a value as JSON of bounded length, to be shown in a refusal."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deep"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


class ArgumentType(NamedTuple):
    """A parameter's type: its JSON schema, and a function that makes a value from JSON (it raises ToolError)."""

    schema: dict[str, Any]
    convert: Callable[[Any], Any]


def type_of(hint: Any, where: str) -> ArgumentType:
    """Return the type that an annotation stands for. Raises EpisodeError with a text that begins with `where`."""
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
    (kind,) = kinds
    by_text = {str(value): value for value in values}

    def convert(value: Any) -> Any:
        if type(value) is kind and value in values:
            return value
        if isinstance(value, str) and value in by_text:
            return by_text[value]
        raise ToolError(f"is {shown(value)}; valid: {', '.join(json.dumps(one) for one in values)}")

    return ArgumentType({"type": _NAMES[kind], "enum": list(values)}, convert)


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
    """Return `value`, which came from JSON, as a value of the type. Raises ToolError with a text that begins with
    `what`.
    """
    try:
        return kind.convert(value)
    except ToolError as error:
        raise ToolError(f"{what} {error}".strip()) from None


def _parsed(value: Any, kind: type) -> Any:
    """Return a list or dictionary, which may have been given as JSON text. Raises ToolError for anything else."""
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


_NAMES: dict[type, str] = {str: "string", int: "integer", bool: "boolean", list: "array", dict: "object"}

_PLAIN: dict[Any, ArgumentType] = {
    str: ArgumentType({"type": "string"}, _text),
    int: ArgumentType({"type": "integer"}, _integer),
    float: ArgumentType({"type": "number"}, _number),
    bool: ArgumentType({"type": "boolean"}, _truth),
}
