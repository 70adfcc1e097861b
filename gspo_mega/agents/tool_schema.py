"""A tool: a typed function, its schema for the chat template, and its arguments and result between text and Python.

    def search(query: str, limit: int = 5, kind: Literal["all", "news"] = "all") -> list[str]:
        '''Find pages.

        Args:
            query: What to look for.
            limit: Most results.
        '''

The schema is OpenAI's: the function's name, the docstring up to `Args:`, and one JSON schema a parameter, with its text
under `Args:` (or of `Annotated[str, "What to look for."]`), its default, and whether it is required. Supported types:
str, int, float, bool, Literal, list[T], dict[str, T], T | None, and dataclasses of these; everything else is refused by
name, since a type that is not checked would pass the policy's mistakes on to the function. A parameter annotated
`Task`, or named `task` without annotation, is not the policy's: it gets the episode's task.

Owns the schema and the texts; `argument_types.py` has the types. Running tools is
`episode_worker.py`'s; finding calls in sampled tokens is `message_parts.py`'s.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gspo_mega.agents.argument_types import SUPPORTED, ArgumentType, ToolError, converted, shown, type_of
from gspo_mega.agents.protocol import Task
from gspo_mega.base.errors import EpisodeError
from gspo_mega.rewards.user_functions import import_function, place_of

# A longer result is cut: it would fill the context, and pass through pipes.
MAX_RESULT_CHARACTERS = 64 * 1024
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"^(\s*)\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


@dataclass(frozen=True)
class Tool:
    """`name`: what the policy calls it. `schema`: what the chat template is given. `source`: `package.module:function`.

    `task_parameter`: the one that gets the episode's task, if any.
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
        """The keyword arguments of a call, checked and converted. A number or truth value written as text is taken as
        what it says. Raises ToolError.
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
    """The tools that `rollout.tools` names, by the name that the policy calls them.

    Raises EpisodeError: as `load_tool`, and two tools of one name.
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
    """The function that `name` (`package.module:function`) stands for, as a tool.

    Raises EpisodeError: it cannot be found, has no text or no plain name, or a parameter of an unsupported kind or
    type.
    """
    function = import_function(name, "tool", EpisodeError)
    where = f"tool {name!r}{place_of(function)}"
    called = getattr(function, "__name__", "")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", called):
        raise EpisodeError(f"{where}: {called or type(function).__name__!r} is no name that a policy can call")
    if inspect.isclass(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise EpisodeError(f"{where}: a plain or async function is expected, not a class or a generator")
    text, described = _read_docstring(inspect.getdoc(function) or "")
    if not text:
        raise EpisodeError(f"{where}: it has no docstring; the policy learns from it what the tool is for")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        signature = inspect.signature(function)
    except Exception as error:  # an annotation is any expression of the user's
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


def text_of(result: Any) -> tuple[str, bool]:
    """What the policy is shown of a tool's result: a text as it is, anything else as JSON; and whether it was cut.

    Raises ToolError: the result is neither.
    """
    if not isinstance(result, str):
        if dataclasses.is_dataclass(result) and not isinstance(result, type):
            result = dataclasses.asdict(result)
        try:
            result = json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ToolError(f"the tool returned {type(result).__name__}, which is no JSON: {error}") from None
    # Half a character of UTF-16 cannot be encoded in any text.
    result = result.encode("utf-8", "replace").decode("utf-8")
    if len(result) <= MAX_RESULT_CHARACTERS:
        return result, False
    return f"{result[:MAX_RESULT_CHARACTERS]}\n[cut after {MAX_RESULT_CHARACTERS} characters]", True


def _property(schema: dict[str, Any], default: Any, description: str) -> dict[str, Any]:
    described = {**schema, "description": description} if description else dict(schema)
    if default is inspect.Parameter.empty or default is None:
        return described
    try:
        default = json.loads(json.dumps(default, allow_nan=False))
    except (TypeError, ValueError):  # a dataclass as default: the policy need not know it
        return described
    return {**described, "default": default}


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description, and the text of each parameter under `Args:` (Google's form)."""
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
