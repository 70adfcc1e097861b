"""What a policy sampled, as a message: its thinking, its tool calls and its content.

The first part reads the whole text of a turn (`parts_of`). Models write tool calls in several formats; each is an entry
of `FORMATS`. Nothing that a policy writes raises an error: a broken call stays in the content and is counted. Thinking
is what stands before the first `</think>`, if the turn, or the template's text before it, opens with `<think>`. A turn
that never closes its thinking is all thinking. Calls are looked for after the thinking.

The second part turns tokens into text while a turn is sampled (`StreamedContent`), so that a client can be shown
content that never has to be taken back. It holds back a part of a character, thinking and calls, what may become the
beginning of either, and white space at both ends, which content next to a call does not have.

`StopWatch` finds the token at which a turn ends because its text has a stop string. Whether a turn ends at a token
depends only on the tokens up to there, so the tokens up to there, that one included, are a draw from the policy like
any other turn. They are all recorded and trained, also those of the stop string and what the last token says after it.
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

# The names of the only tool and of its only argument, for a format that writes neither.
_Only = tuple[str, str]


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls. `openers` are texts at which a call or thinking may begin. Streamed content ends before
    the first of them, and before the white space in front of it.
    """

    name: str
    openers: tuple[str, ...]


@dataclass(frozen=True)
class MessageParts:
    """A sampled message in OpenAI form, and how many calls in it could not be read."""

    message: dict[str, Any]
    num_broken_calls: int


class _Found(NamedTuple):
    """Where a call stands in a text, and its name and arguments; `call` is None if it is broken."""

    start: int
    end: int
    call: tuple[str, dict[str, Any]] | None


class _Format(NamedTuple):
    format: ToolFormat
    find: Callable[[str, _Only | None], list[_Found]]


def parts_of(
    text: str,
    tool_format: ToolFormat,
    *,
    turn: int,
    tools: Sequence[dict[str, Any]] | None = None,
    gap: str = "",
) -> MessageParts:
    """Return `text`, a sampled turn without its end token, as a message. `turn` is its number, which goes into the ids
    of its calls. `gap` is the text of the context before it, which may have opened its thinking.

    The content of a turn without thinking and calls is its exact text. Otherwise the content is what is left, without
    white space at its end, and after thinking without white space at its beginning. A call's arguments are JSON text,
    as in OpenAI's form.
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


def opens_thinking(context: str) -> bool:
    """Whether the text of a context ends with an open `<think>`, so that the turn after it begins inside its
    thinking.
    """
    return _OPENED_BY_TEMPLATE.search(context) is not None


def _split_thinking(text: str, gap: str) -> tuple[str, str]:
    """Return the thinking and the text after it."""
    if text.lstrip().startswith(_OPEN_THINKING):
        inner = text.lstrip()[len(_OPEN_THINKING) :]
    elif opens_thinking(gap):
        inner = text
    else:
        return "", text
    thinking, _, rest = inner.partition(_CLOSE_THINKING)
    return thinking.strip(), rest.strip()


def _call(turn: int, number: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    # The strictest templates want an id of nine characters.
    written = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"c{turn:04d}t{number:03d}",
        "type": "function",
        "function": {"name": name, "arguments": written},
    }


def format_of(name: str, template: str, tools: Sequence[dict[str, Any]] | None) -> ToolFormat:
    """Return the format that the configuration names; `auto` finds it in the template's text. Without tools nobody
    could answer a call, so the format is `none`.

    Raises DataError for `auto` if there are tools and the template's format is not known, and for `brackets` if there
    is not exactly one tool with one text argument.
    """
    if name == "auto" and tools:
        name = _format_shown(template)
    if not tools or name == "none":
        return FORMATS["none"].format
    if name == "brackets":
        _only_argument(tools)
    return FORMATS[name].format


def _format_shown(template: str) -> str:
    """Return the name of the format in which a template writes calls. Raises DataError if it is not known."""
    # Some formats have XML between the same tags.
    if _OPEN_CALL in template and not any(word in template for word in ("<arg_key>", "<function=", "<parameter=")):
        return "hermes"
    known = ", ".join(repr(name) for name in FORMATS)
    raise DataError(
        "episodes.tool_format: auto cannot tell from the chat template how the policy writes tool calls; set one of"
        f" {known}"
    )


def _only_argument(tools: Sequence[dict[str, Any]]) -> _Only:
    """Return the name of the only tool and of its only argument. Raises DataError if there is not one of each."""
    names = [tool["function"]["name"] for tool in tools]
    if len(names) != 1:
        raise DataError(
            f"episodes.tool_format: brackets is for one tool with one text argument; there are {len(names)} tools:"
            f" {', '.join(names)}"
        )
    properties = (tools[0]["function"].get("parameters") or {}).get("properties") or {}
    if len(properties) != 1 or next(iter(properties.values())).get("type") != "string":
        taken = ", ".join(f"{key} ({one.get('type', 'any')})" for key, one in properties.items()) or "none"
        raise DataError(
            f"episodes.tool_format: brackets is for one tool with one text argument; {names[0]} takes {taken}"
        )
    return names[0], next(iter(properties))


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
    """Read the call whose JSON begins at `at`. Return it (None if it is broken) and where it ends."""
    read = read_plain(text, _skip_spaces(text, at))
    if read is not None and (call := _named_call(read[0])) is not None:
        end = _skip_spaces(text, read[1])
        if text.startswith(_CLOSE_CALL, end):
            return call, end + len(_CLOSE_CALL)
    # The closing tag may be missing, and a sound call may follow.
    close, following = text.find(_CLOSE_CALL, at), text.find(_OPEN_CALL, at)
    if close >= 0 and (following < 0 or close < following):
        return None, close + len(_CLOSE_CALL)
    return None, following if following >= 0 else len(text)


def _named_call(value: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the name and arguments of a call written as JSON, or None. Arguments may be JSON text, or missing."""
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


def _skip_spaces(text: str, at: int) -> int:
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


FORMATS: dict[str, _Format] = {
    "hermes": _Format(ToolFormat("hermes", (_OPEN_CALL, _OPEN_THINKING)), _hermes_calls),
    "brackets": _Format(ToolFormat("brackets", ("[", _OPEN_THINKING)), _bracket_calls),
    "none": _Format(ToolFormat("none", (_OPEN_THINKING,)), _no_calls),
}


Decode = Callable[[list[int]], str]

_REPLACEMENT = "�"  # what decoders write for a part of a character

# Tokens are decoded together with this many earlier ones: some decoders need them for the space in front of a word.
_TOKENS_BEFORE = 8

# A character has at most four bytes; each may be a token of its own.
_MAX_TOKENS_OF_CHARACTER = 4

# If so many tokens end without a whole character, they are not text, and nothing more is sent before the turn's end.
_MAX_WAITING_TOKENS = 64


class TokenText:
    """Decodes tokens piece by piece. Each token is decoded a bounded number of times."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._token_ids: list[int] = []
        self._read = 0
        self._is_text = True

    def copy(self) -> TokenText:
        """Return another one that goes on from here."""
        start = max(0, self._read - _TOKENS_BEFORE)
        other = TokenText(self._decode)
        other._token_ids, other._read, other._is_text = self._token_ids[start:], self._read - start, self._is_text
        return other

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens add, without a part of a character at its end."""
        self._token_ids += token_ids
        start = max(0, self._read - _TOKENS_BEFORE)
        before = self._decode(self._token_ids[start : self._read])
        for end in range(len(self._token_ids), self._read, -1) if self._is_text else ():
            text = self._decode(self._token_ids[start:end])
            if not text.endswith(_REPLACEMENT) and text.startswith(before):
                self._read = end
                return text[len(before) :]
            if len(self._token_ids) - end >= _MAX_TOKENS_OF_CHARACTER:
                break
        self._is_text = self._is_text and len(self._token_ids) - self._read < _MAX_WAITING_TOKENS
        return ""


class StopWatch:
    """Finds where a turn ends: at the first token with which its text has one of the texts `stops`. Feed it the turn's
    tokens, without an end token, as they are reported.
    """

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._decode = decode
        self._longest = max(map(len, self.stops))
        self._restart()

    def _restart(self) -> None:
        self._text = TokenText(self._decode)
        self._tail = ""  # the end of the text, in which a stop string may have begun
        self._token_ids: list[int] = []
        self.end: int | None = None

    def add(self, position: int, token_ids: Sequence[int]) -> bool:
        """Note the tokens from `position` of the turn on, and return whether the turn has ended. A position below what
        is known takes tokens back. `end` is then the number of tokens that the turn has.
        """
        if position < len(self._token_ids):
            token_ids = [*self._token_ids[:position], *token_ids]
            self._restart()
        if self.end is None:
            text, tail = self._text.copy(), self._tail
            if self._has_stop(token_ids):
                self._text, self._tail = text, tail
                for place, token in enumerate(token_ids, start=len(self._token_ids) + 1):
                    if self._has_stop([token]):
                        self.end = place
                        break
        self._token_ids += token_ids
        return self.end is not None

    def end_of(self, token_ids: Sequence[int]) -> int | None:
        """Return how many of a turn's tokens, all known now, belong to it; None if it has no stop string."""
        self._restart()
        for start in range(0, len(token_ids), _MAX_WAITING_TOKENS):
            if self.add(start, token_ids[start : start + _MAX_WAITING_TOKENS]):
                break
        return self.end

    def _has_stop(self, token_ids: Sequence[int]) -> bool:
        text = self._tail + self._text.add(token_ids)
        self._tail = text[max(0, len(text) - self._longest + 1) :] if self._longest > 1 else ""
        return any(stop in text for stop in self.stops)


def before_stop(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Return the text before the first stop string in it, and that string; the whole text and "" if there is none."""
    found = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    if not found:
        return text, ""
    place, stop = min(found, key=lambda one: one[0])
    return text[:place], stop


class StreamedContent:
    """Decides which part of a turn's content may already be sent.

    `add` gets the reports of a turn, `rest` the whole content at the end. `sent` is what was sent so far.
    """

    def __init__(self, decode: Decode, openers: Sequence[str], stop_token_ids: Sequence[int]) -> None:
        """`openers` are texts at which thinking or a call may begin."""
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
        """Return the content to send now, given the tokens from `position` of the turn on. Once tokens were taken back,
        nothing more is sent before the end.
        """
        if position != self._num_tokens:
            self._is_over = True
        self._num_tokens = position + len(token_ids)
        if self._is_over:
            return ""
        self._held += self._text.add([token for token in token_ids if token not in self._stops])
        return self._release(self._sure_length())

    def rest(self, content: str) -> str | None:
        """Return what is left to send of the whole content; None if the content does not begin with what was sent."""
        return content[len(self.sent) :] if content.startswith(self.sent) else None

    def _sure_length(self) -> int:
        """How many of the held characters are content, no matter what follows."""
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

    def _release(self, length: int) -> str:
        released, self._held = self._held[:length], self._held[length:]
        self.sent += released
        return released
