"""Find the blocks of code in a response, as CommonMark reads them, and the one that is the program.

A fence is three or more backticks or tildes; it is closed by the same sign at least as often, and an open block runs to
the end. Beyond CommonMark, models' habits are read: a fence after text on its line, a block that a new one interrupts,
a closing fence after the last line of code or before other text. No fence is paired by counting, so that an odd one
costs the block that it is in, and no other. Every search takes time linear in the text.
"""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass

_PYTHON = re.compile(r"(?:i|c)?python[0-9.]*|py[0-9.]*|pypy[0-9.]*")
_THINKING = re.compile(r"</(?:think|thinking|thought|reasoning)>|\u25c1/think\u25b7|\[/THINK\]", re.IGNORECASE)
_FENCE = re.compile(r"(?P<quote>(?:[ \t]{0,3}>[ ]?)*)(?P<before>[^`~]*?)(?P<fence>`{3,}|~{3,})(?P<rest>[^\n]*)")
_ITEM = re.compile(r"[ \t]*(?:[-*+]|[0-9]{1,9}[.)])[ \t]+")
_QUOTE = re.compile(r"[ \t]{0,3}>[ ]?")
_INFO = re.compile(
    r"[ \t]*(?:\{[ \t]*)?\.?([A-Za-z][A-Za-z0-9+#.\-]*)[ \t]*"
    r"(?:[:,;={(\[].*|\}.*|[A-Za-z_-]+[ \t]*=.*|\.[A-Za-z].*|[^\s`]+[ \t]*)?$"
)
_ONE_LINE = re.compile(r"(`{3,})[ \t]*(?:python3?|py)?[ \t]+([^`\n]+?)[ \t]*\1")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_MOST_PARSED = 8  # blocks whose syntax is looked at, from the last one


@dataclass(frozen=True)
class CodeBlock:
    """A block of code. `language`: the first word after its fence, in lower case, or an empty text."""

    language: str
    text: str
    is_closed: bool

    @property
    def is_python(self) -> bool:
        return _PYTHON.fullmatch(self.language) is not None


@dataclass
class _Open:
    sign: str
    length: int
    language: str
    indent: int
    quote: bool
    lines: list[str]

    def closed(self, is_closed: bool) -> CodeBlock:
        text = "".join(f"{_unindented(line, self.indent)}\n" for line in self.lines)
        return CodeBlock(self.language, text, is_closed)


def blocks(text: str) -> list[CodeBlock]:
    """Return the blocks of code in a text, in order; the last may be unclosed."""
    found: list[CodeBlock] = []
    now: _Open | None = None
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        if now is not None and now.quote:
            if _QUOTE.match(line) is None:  # the quotation ends, and with it the block
                found.append(now.closed(True))
                now = None
            else:
                line = _QUOTE.sub("", line, count=1)
        fence = _FENCE.match(line) if "```" in line or "~~~" in line else None
        if now is None:
            now = _opened(fence)
            continue
        if fence is None or fence["fence"][0] != now.sign:
            now.lines.append(line)
            continue
        before, rest = fence["before"], fence["rest"]
        if len(fence["fence"]) < now.length or (not before.strip() and _width(before) > now.indent + 3):
            now.lines.append(line)
        elif not before.strip() and (again := _opened(fence)) is not None and again.language:
            found.append(now.closed(False))  # a new block interrupts one that was never closed
            now = again
        elif not before.strip():
            found.append(now.closed(True))
            now = None
        elif not rest.strip() and now.sign == "`" and not before.lstrip().startswith("#"):
            now.lines.append(before)  # after the last line of code
            found.append(now.closed(True))
            now = None
        else:
            now.lines.append(line)
    if now is not None:
        while now.lines and not now.lines[-1]:
            now.lines.pop()
        found.append(now.closed(False))
    return found


def _opened(fence: re.Match[str] | None) -> _Open | None:
    """Return the block that a line opens, or None."""
    if fence is None:
        return None
    sign, rest, before = fence["fence"][0], fence["rest"], fence["before"]
    if sign == "`" and "`" in rest:
        return None  # code within a line
    info = _INFO.match(rest)
    language = "" if info is None else info[1].lower()
    language = "python" if language.endswith(".py") else language
    item = _ITEM.match(before)
    if item is not None:
        before = " " * len(before) if item.end() == len(before) else before[item.end() :]
    if before.strip() and (_PYTHON.fullmatch(language) is None or sign != "`"):
        return None
    if rest.strip() and info is None and rest.strip()[0] not in "{.<":
        language = rest.split()[0].lower()
    return _Open(sign, len(fence["fence"]), language, 0 if before.strip() else _width(before), bool(fence["quote"]), [])


def _width(space: str) -> int:
    return len(space.expandtabs(4))


def _unindented(line: str, width: int) -> str:
    """Return a line without the indentation of its block's fence."""
    at = column = 0
    while column < width and at < len(line) and line[at] in " \t":
        column = column + 1 if line[at] == " " else (column // 4 + 1) * 4
        at += 1
    return line[at:]


def program_of(response: str) -> str | None:
    """Return the program of a response: its last complete one, or None without a block of code.

    Text after the thinking comes first. A block that only uses what an earlier one defines is an example of its use,
    and no program. Of the others that are Python or name no language, one that parses as a program comes before one
    that does not, then a closed one before an unclosed one, then Python before no language; the last of the best is
    taken. Without any of them, code in a fence within one line is taken.
    """
    *_, after = _THINKING.split(response) if len(response) < 10**7 else (response,)
    for text in dict.fromkeys((after, response)):
        found = [one for outer in blocks(text) for one in _inner(outer) if one.is_python or not one.language]
        for accepts in _ACCEPTED:
            last = found[-_MOST_PARSED * 4 :]
            accepted = (
                one for at, one in reversed(list(enumerate(last))) if accepts(one) and not _is_usage(one, last[:at])
            )
            program = next(accepted, None)
            if program is not None:
                return _dedented(program.text)
        *_, line = _ONE_LINE.findall(text) or [None]
        if line is not None:
            return f"{line[1]}\n"
    return None


def last_block(response: str, accepts: Callable[[str], bool]) -> str | None:
    """Return the text of the last closed block that `accepts` takes; else of the last closed one; None if there is
    none.
    """
    closed = [one.text for one in blocks(response) if one.is_closed]
    return next((text for text in reversed(closed[-_MOST_PARSED:]) if accepts(text)), closed[-1] if closed else None)


def _inner(block: CodeBlock) -> list[CodeBlock]:
    """Return the block itself, or, if it is a text that contains blocks between shorter fences, those."""
    if block.language in ("", "markdown", "md", "text") and _tree(block.text) is None and blocks(block.text):
        return blocks(block.text)
    return [block]


def _dedented(program: str) -> str:
    if _tree(program) is None and _tree(shorter := textwrap.dedent(program)) is not None:
        return shorter
    return program


def _is_program(block: CodeBlock) -> bool:
    """Return whether a block does something: it defines, assigns, imports or calls. A number or a name is an output."""
    tree = _tree(block.text) or _tree(textwrap.dedent(block.text))
    if tree is None:
        return False
    return any(
        not isinstance(one, ast.Expr) or any(isinstance(part, ast.Call) for part in ast.walk(one)) for one in tree.body
    )


def _is_usage(block: CodeBlock, before: list[CodeBlock]) -> bool:
    """Return whether a block defines no function and no class, and needs a name that a block before it defines."""
    tree = _tree(block.text) or _tree(textwrap.dedent(block.text))
    if tree is None or any(isinstance(one, _DEFINITIONS) for one in tree.body):
        return False
    names = [one for one in ast.walk(tree) if isinstance(one, ast.Name)]
    needed = {one.id for one in names if isinstance(one.ctx, ast.Load)} - set(dir(builtins))
    needed -= {one.id for one in names if isinstance(one.ctx, ast.Store)}
    for one in reversed(before[-_MOST_PARSED:]):
        defining = _tree(one.text) or _tree(textwrap.dedent(one.text))
        body = [] if defining is None else defining.body
        if any(isinstance(part, _DEFINITIONS) and part.name in needed for part in body):
            return True
    return False


def _tree(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


_ACCEPTED: tuple[Callable[[CodeBlock], bool], ...] = (
    lambda one: one.is_closed and one.is_python and _is_program(one),
    lambda one: one.is_closed and not one.language and _is_program(one),
    lambda one: one.is_python and _is_program(one),
    lambda one: not one.language and _is_program(one),
    lambda one: one.is_closed and one.is_python,
    lambda one: one.is_closed,
    lambda one: True,
)
