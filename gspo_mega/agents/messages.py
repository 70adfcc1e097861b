"""The text of a turn while it is sampled: what a reader may already be shown, and never has to take back.

Owns the text of tokens that come in pieces, and what of it is content for sure: not a part of a character, not thinking
or a call, nor the beginning of what may become one, nor white space at either end, which content beside a call has not.

What a policy sampled, as a message: its thinking, its tool calls, its content.

Owns the formats in which models write tool calls, one entry of `FORMATS` each. Nothing here fails on what a policy
writes: a broken call stays in the content and is counted.

Thinking is what stands before the first `</think>`, where the turn, or the template's text before it, opens with
`<think>`. A turn that never closes its thinking is nothing but thinking. Calls are looked for behind it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gspo_mega.base.errors import DataError
from gspo_mega.data.rows import read_plain

_OPEN_THINKING, _CLOSE_THINKING = "<think>", "</think>"
_OPEN_CALL, _CLOSE_CALL = "<tool_call>", "</tool_call>"
_OPENED_BY_TEMPLATE = re.compile(rf"{_OPEN_THINKING}\s*\Z")
_BRACKETS = re.compile(r"\[([^\[\]]+)\]")
_SPACES = re.compile(r"\s*")
# The tool's name and its argument, for a format that writes neither.
_Only = tuple[str, str]


@dataclass(frozen=True)
class ToolFormat:
    """A format. `openers`: texts at which a call or thinking may begin; content is never past one of them, nor past
    the white space before it.
    """

    name: str
    openers: tuple[str, ...]


@dataclass(frozen=True)
class MessageParts:
    """A sampled message in OpenAI form, and how many calls in it could not be read."""

    message: dict[str, Any]
    num_broken_calls: int


class _Found(NamedTuple):
    """Where a call stands in a text, and its name and arguments; None of a broken one."""

    start: int
    end: int
    call: tuple[str, dict[str, Any]] | None


class _Format(NamedTuple):
    format: ToolFormat
    find: Callable[[str, _Only | None], list[_Found]]


def format_of(name: str, template: str, tools: Sequence[dict[str, Any]] | None) -> ToolFormat:
    """The format `name` of the configuration; `auto` reads the template's text. Without tools nobody could answer a
    call, so none is looked for.

    Raises DataError: `auto`, tools, and a template with a format that isn't known; `brackets`, and not one tool with
    one text argument.
    """
    if name == "auto" and tools:
        name = _format_shown(template)
    if not tools or name == "none":
        return FORMATS["none"].format
    if name == "brackets":
        _only_argument(tools)
    return FORMATS[name].format


def opens_thinking(context: str) -> bool:
    """Has a context's text, the template's, begun the thinking of the turn behind it?"""
    return _OPENED_BY_TEMPLATE.search(context) is not None


def parts_of(
    text: str,
    tool_format: ToolFormat,
    *,
    turn: int,
    tools: Sequence[dict[str, Any]] | None = None,
    gap: str = "",
) -> MessageParts:
    """The message that `text`, a sampled turn without its end token, is. `turn`: its number, in the calls' ids.
    `gap`: the context's text before it, which may have opened its thinking.

    A turn without thinking and calls is its text, to the character. Otherwise content is what is left, without white
    space behind it, and behind thinking without white space before it. A call's arguments are JSON text, as in OpenAI's
    form.
    """
    thinking, rest = _split_thinking(text, gap)
    only = _only_argument(tools or ()) if tool_format.name == "brackets" else None
    found = FORMATS[tool_format.name].find(rest, only)
    calls, kept, at = [], [], 0
    for one in found:
        if one.call is None:
            continue
        kept.append(rest[at : one.start])
        at = one.end
        calls.append(_call(turn, len(calls), *one.call))
    message: dict[str, Any] = {"role": "assistant", "content": rest}
    if calls:
        message["content"] = "".join([*kept, rest[at:]]).rstrip()
        message["tool_calls"] = calls
    if thinking:
        message["reasoning_content"] = thinking
    return MessageParts(message, len(found) - len(calls))


def _split_thinking(text: str, gap: str) -> tuple[str, str]:
    """The thinking, and what comes behind it."""
    if text.lstrip().startswith(_OPEN_THINKING):
        inner = text.lstrip()[len(_OPEN_THINKING) :]
    elif opens_thinking(gap):
        inner = text
    else:
        return "", text
    thinking, _, rest = inner.partition(_CLOSE_THINKING)
    return thinking.strip(), rest.strip()


def _call(turn: int, number: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    # Nine letters, which is what the strictest templates want of an id.
    written = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"c{turn:04d}t{number:03d}",
        "type": "function",
        "function": {"name": name, "arguments": written},
    }


def _no_calls(text: str, only: _Only | None) -> list[_Found]:
    return []


def _hermes_calls(text: str, only: _Only | None) -> list[_Found]:
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, any number of them."""
    found: list[_Found] = []
    end = 0
    while (start := text.find(_OPEN_CALL, end)) >= 0:
        call, end = _read_hermes(text, start + len(_OPEN_CALL))
        found.append(_Found(start, end, call))
    return found


def _read_hermes(text: str, at: int) -> tuple[tuple[str, dict[str, Any]] | None, int]:
    """The call whose JSON begins at `at`, or None where it is broken, and where it ends."""
    read = read_plain(text, _behind_spaces(text, at))
    if read is not None and (call := _named_call(read[0])) is not None:
        behind = _behind_spaces(text, read[1])
        if text.startswith(_CLOSE_CALL, behind):
            return call, behind + len(_CLOSE_CALL)
    # A closing tag may be missing: what comes behind may be a sound call.
    close, following = text.find(_CLOSE_CALL, at), text.find(_OPEN_CALL, at)
    if close >= 0 and (following < 0 or close < following):
        return None, close + len(_CLOSE_CALL)
    return None, following if following >= 0 else len(text)


def _named_call(value: Any) -> tuple[str, dict[str, Any]] | None:
    """The name and arguments of a call written as JSON. Arguments may be JSON text; a call may have none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments")
    if isinstance(arguments, str):
        read = read_plain(arguments.strip())
        if read is None or read[1] != len(arguments.strip()):
            return None
        arguments = read[0]
    if arguments is None:
        arguments = {}
    return (value["name"], arguments) if isinstance(arguments, dict) else None


def _behind_spaces(text: str, at: int) -> int:
    found = _SPACES.match(text, at)
    return at if found is None else found.end()


def _bracket_calls(text: str, only: _Only | None) -> list[_Found]:
    """`[47*86]`: the text in brackets is the only argument of the only tool."""
    assert only is not None
    name, argument = only
    found = []
    end = 0
    while (start := text.find("[", end)) >= 0:
        read = _BRACKETS.match(text, start)
        end = start + 1 if read is None else read.end()
        found.append(_Found(start, end, None if read is None else (name, {argument: read[1]})))
    return found


def _only_argument(tools: Sequence[dict[str, Any]]) -> _Only:
    """The name of the only tool, and of its only argument. Raises DataError."""
    names = [tool["function"]["name"] for tool in tools]
    if len(names) != 1:
        raise DataError(
            f"episodes.tool_format: brackets is for one tool with one text argument; there are {len(names)}:"
            f" {', '.join(names)}"
        )
    properties = (tools[0]["function"].get("parameters") or {}).get("properties") or {}
    if len(properties) != 1 or next(iter(properties.values())).get("type") != "string":
        taken = ", ".join(f"{key} ({one.get('type', 'any')})" for key, one in properties.items()) or "none"
        raise DataError(
            f"episodes.tool_format: brackets is for one tool with one text argument; {names[0]} takes {taken}"
        )
    return names[0], next(iter(properties))


def _format_shown(template: str) -> str:
    """The format that a template writes calls in. Raises DataError."""
    # Others put XML between the same tags.
    if _OPEN_CALL in template and not any(word in template for word in ("<arg_key>", "<function=", "<parameter=")):
        return "hermes"
    known = ", ".join(repr(name) for name in FORMATS)
    raise DataError(
        "episodes.tool_format: auto cannot tell from the chat template how the policy writes tool calls; set one of"
        f" {known}"
    )


FORMATS: dict[str, _Format] = {
    "hermes": _Format(ToolFormat("hermes", (_OPEN_CALL, _OPEN_THINKING)), _hermes_calls),
    "brackets": _Format(ToolFormat("brackets", ("[", _OPEN_THINKING)), _bracket_calls),
    "none": _Format(ToolFormat("none", (_OPEN_THINKING,)), _no_calls),
}


Decode = Callable[[list[int]], str]

_BROKEN = "�"  # what decoders write for a part of a character
# Tokens are decoded with these many before them, which some decoders need for the space in front of a word.
_BEFORE = 8
# A character has at most four bytes, each a token at worst.
_MOST_OF_A_CHARACTER = 4
# More tokens than these without a whole character at their end are no text; they wait for the end of the turn.
_MOST_WAITING = 64


class TokenText:
    """Tokens to text, piece by piece; each token is decoded a bounded number of times."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._token_ids: list[int] = []
        self._read = 0
        self._is_text = True

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens add, without a part of a character at its end."""
        self._token_ids += token_ids
        start = max(0, self._read - _BEFORE)
        before = self._decode(self._token_ids[start : self._read])
        for end in range(len(self._token_ids), self._read, -1) if self._is_text else ():
            text = self._decode(self._token_ids[start:end])
            if not text.endswith(_BROKEN) and text.startswith(before):
                self._read = end
                return text[len(before) :]
            if len(self._token_ids) - end >= _MOST_OF_A_CHARACTER:
                break
        self._is_text = self._is_text and len(self._token_ids) - self._read < _MOST_WAITING
        return ""


class StreamedContent:
    """Which part of a turn's content may be sent. `add` is fed the reports of a turn, `rest` the whole content."""

    def __init__(self, decode: Decode, openers: Sequence[str], stop_token_ids: Sequence[int]) -> None:
        """`openers`: texts at which thinking or a call may begin."""
        self._text = TokenText(decode)
        self._openers = tuple(openers)
        self._stops = frozenset(stop_token_ids)
        self._num_tokens = 0
        self._held = ""
        self._is_over = False
        self.sent = ""

    def hold(self) -> None:
        """Send nothing before the whole message is known."""
        self._is_over = True

    def add(self, position: int, token_ids: Sequence[int]) -> str:
        """The content to send now, of tokens from `position` of the turn on. Where tokens were taken back, nothing more
        is sent before the end.
        """
        if position != self._num_tokens:
            self._is_over = True
        self._num_tokens = position + len(token_ids)
        if self._is_over:
            return ""
        self._held += self._text.add([token for token in token_ids if token not in self._stops])
        return self._take(self._sure())

    def rest(self, content: str) -> str | None:
        """What is left of the whole content; None where it does not begin with what was sent."""
        return content[len(self.sent) :] if content.startswith(self.sent) else None

    def _sure(self) -> int:
        """How much of what is held is content, whatever follows."""
        held = self._held
        if not self.sent and held[:1].isspace():
            self._is_over = True
            return 0
        places = [place for opener in self._openers if (place := held.find(opener)) >= 0]
        if places:
            self._is_over = True
            return len(held[: min(places)].rstrip())
        end = len(held)
        for opener in self._openers:
            for length in range(min(len(opener) - 1, len(held)), 0, -1):
                if held.endswith(opener[:length]):
                    end = min(end, len(held) - length)
                    break
        return len(held[:end].rstrip())

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        self.sent += taken
        return taken
