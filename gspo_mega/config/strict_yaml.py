"""YAML text to plain values, with the position of every key. Scalars follow YAML 1.2, and nothing is accepted silently.

PyYAML scans and composes: by libyaml, which is several times as fast, where a text is as simple as most are and has no
error. Otherwise in Python, which decides what is an error, and where. Its own scalar rules (YAML 1.1) are not used,
because they read `1e-6` as text, `no` as False and `1:30:00` as 5400, and let the last of two equal keys win. `parse`
collects all problems of a document; after a syntax error the rest means nothing, so that error is reported on its own.
This module does not know the schema, which `loader.py` checks.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

KeyPath = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"
_MAX_NODES = 100_000  # aliases of aliases can make a small file grow without bound
# The most digits of a whole number. Python writes out no more than 4300, in messages and files.
_MOST_DIGITS = 1000

# YAML 1.2, core schema, chapter 10.3.2.
SCALARS: tuple[tuple[str, re.Pattern[str], str], ...] = (
    ("null", re.compile(r"^(?:null|Null|NULL|~|)$"), "nN~\0"),
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("int", re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), "-+0123456789"),
    (
        "float",
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        "-+0123456789.",
    ),
    ("merge", re.compile(r"^<<$"), "<"),
)


def implicit_resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Return the table of `SCALARS` in the form of PyYAML's resolver class: first character to (tag, pattern)."""
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for name, pattern, first in SCALARS:
        for character in first:
            table.setdefault("" if character == "\0" else character, []).append((_TAG + name, pattern))
    return table


class _Composer(yaml.SafeLoader):
    yaml_implicit_resolvers = implicit_resolvers()


def _with_libyaml() -> type[yaml.CSafeLoader] | None:
    """The same with libyaml; None where PyYAML was built without it."""
    if not yaml.__with_libyaml__:
        return None

    class Composer(yaml.CSafeLoader):
        yaml_implicit_resolvers = implicit_resolvers()

    return Composer


_FastComposer = _with_libyaml()
# What libyaml reads as PyYAML does, with the same positions: printable ASCII without anchors, tags, directives,
# escapes, block scalars and second documents. libyaml's composer recurses in C, so that brackets are bounded.
_SIMPLE = re.compile(r"[\n -~]*")
_NOT_SIMPLE = re.compile(r"[&*!|>@?\\]|^(?:%|---|\.\.\.)|^[ -]{100}", re.MULTILINE)
_MOST_BRACKETS = 400


def _compose(text: str) -> yaml.Node | None:
    """The document's root node; None if it is empty. Raises YAMLError, or RecursionError if it is nested too deeply."""
    if (
        _FastComposer is not None
        and _SIMPLE.fullmatch(text)
        and not _NOT_SIMPLE.search(text)
        and text.count("[") + text.count("{") <= _MOST_BRACKETS
    ):
        try:
            return yaml.compose(text, _FastComposer)
        except yaml.YAMLError:
            pass  # it is told as Python finds it
    return yaml.compose(text, _Composer)


@dataclass(frozen=True)
class YamlPosition:
    """One-based line and column."""

    line: int
    column: int

    @classmethod
    def of(cls, mark: yaml.Mark) -> YamlPosition:
        return cls(mark.line + 1, mark.column + 1)


@dataclass(frozen=True)
class YamlProblem:
    """What is wrong at a position. `path`: the key concerned, () if it is the document itself."""

    position: YamlPosition | None
    path: KeyPath
    text: str


@dataclass
class Document:
    """`value`: dict, list, str, int, float, bool or None. `positions`: those of every key and list entry in it."""

    value: Any = None
    positions: dict[KeyPath, YamlPosition] = field(default_factory=dict)
    problems: list[YamlProblem] = field(default_factory=list)


def parse(text: str) -> Document:
    """Read one YAML document. A bad document raises nothing; its `problems` say what is wrong."""
    document = Document()
    try:
        root = _compose(text)
        if root is not None:
            document.value = _Builder(document).build(root, (), frozenset())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        document.problems.append(YamlProblem(YamlPosition.of(mark) if mark else None, (), _explain_syntax(error, text)))
        return document
    except yaml.YAMLError as error:  # from the reader: a character that YAML does not allow
        document.problems.append(YamlProblem(_reader_position(error, text), (), f"not YAML: {_reader_reason(error)}"))
        return document
    except RecursionError:
        return Document(problems=[YamlProblem(None, (), "nested too deeply to be a configuration")])
    return document


def _explain_syntax(error: yaml.MarkedYAMLError, text: str) -> str:
    mark = error.problem_mark
    line = text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else ""
    indentation = line[: len(line) - len(line.lstrip())]
    if "\t" in indentation or (error.problem and "'\\t'" in error.problem):
        return "a tab where YAML requires spaces; indent with spaces"
    if error.context == "expected a single document in the stream":
        return "a second document starts here; one configuration per file (remove `---`)"
    if error.context == "while parsing a block mapping" or error.problem == "mapping values are not allowed here":
        before = (
            next((n for n in range(mark.line - 1, -1, -1) if _is_text(text.splitlines()[n])), None) if mark else None
        )
        if before is not None and re.match(r"\s*[A-Za-z_]\w*:[^\s:/]", text.splitlines()[before]):
            return f"line {before + 1} has no space after its colon; write key: value"
        if mark and any("\u00a0" in one for one in text.splitlines()[before or 0 : mark.line + 1]):
            return "a no-break space (U+00A0) here or in the line above; YAML takes ordinary spaces"
        return (
            "indented differently from the lines of its section; the keys of a section begin in the same column, deeper"
            " than the section's own name"
        )
    problem = error.problem or "cannot be read"
    return f"not YAML: {error.context}, {problem}" if error.context else f"not YAML: {problem}"


def _is_text(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _reader_reason(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        return f"the character {chr(error.character)!r} may not stand here"
    return str(error)


def _reader_position(error: yaml.YAMLError, text: str) -> YamlPosition | None:
    if not isinstance(error, yaml.reader.ReaderError):
        return None
    before = text[: error.position]
    return YamlPosition(before.count("\n") + 1, error.position - (before.rfind("\n") + 1) + 1)


class _Builder:
    """Turns nodes into values. An aliased node is built anew at each place, so every path has its own positions."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._num_nodes = 0

    def build(self, node: yaml.Node, path: KeyPath, ancestors: frozenset[int]) -> Any:
        self._document.positions.setdefault(path, YamlPosition.of(node.start_mark))
        if self._too_many(node, path):
            return None
        if id(node) in ancestors:
            self._problem(node, path, "an alias that contains itself")
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, ancestors | {id(node)})
        if isinstance(node, yaml.SequenceNode):
            return self._sequence(node, path, ancestors | {id(node)})
        assert isinstance(node, yaml.ScalarNode)  # YAML has no fourth kind
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath, ancestors: frozenset[int]) -> dict[str, Any]:
        self._check_tag(node, path, "map")
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if key.tag == _TAG + "merge":
                for name, pair in self._merge(value, path, ancestors).items():
                    merged.setdefault(name, pair)
                continue
            if not isinstance(key, yaml.ScalarNode) or key.tag != _TAG + "str":
                self._problem(key, path, f"a key must be text{_as_written(key)}; quote it if it is meant as text")
                continue
            self._scalar(key, (*path, key.value))
            if key.value in own:
                first = own[key.value][0].start_mark.line + 1
                self._problem(key, (*path, key.value), f"duplicate key, first at line {first}; keep one")
                continue
            own[key.value] = (key, value)
        result = {}
        for name, (key, value) in {**own, **{k: v for k, v in merged.items() if k not in own}}.items():
            self._document.positions[(*path, name)] = YamlPosition.of(key.start_mark)
            result[name] = self.build(value, (*path, name), ancestors)
        return result

    def _merge(
        self, node: yaml.Node, path: KeyPath, ancestors: frozenset[int]
    ) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Return the keys that `<<: *anchor` or `<<: [*a, *b]` brings in. If several bring the same key, the earliest
        wins.
        """
        pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        if self._too_many(node, path):
            return pairs
        for source in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(source, yaml.MappingNode) or id(source) in ancestors:
                self._problem(node, path, "`<<` takes a mapping that stands elsewhere (`<<: *name`) or a list of them")
                continue
            inherited: dict[str, tuple[yaml.Node, yaml.Node]] = {}
            for key, value in source.value:
                if key.tag == _TAG + "merge":
                    for name, pair in self._merge(value, path, ancestors | {id(source)}).items():
                        inherited.setdefault(name, pair)
                elif isinstance(key, yaml.ScalarNode):
                    pairs.setdefault(key.value, (key, value))
            for name, pair in inherited.items():
                pairs.setdefault(name, pair)
        return pairs

    def _sequence(self, node: yaml.SequenceNode, path: KeyPath, ancestors: frozenset[int]) -> list[Any]:
        self._check_tag(node, path, "seq")
        return [self.build(item, (*path, index), ancestors) for index, item in enumerate(node.value)]

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        text, tag = node.value, node.tag.removeprefix(_TAG)
        if tag in ("str", "merge"):
            if any("\ud800" <= character <= "\udfff" for character in text):
                self._problem(
                    node, path, "an escape that is half a character (a surrogate); write the character itself"
                )
            return text
        if tag == "null":
            return None
        try:
            if tag == "bool" and text.lower() in ("true", "false"):
                return text.lower() == "true"
            if tag == "int" and len(text) > _MOST_DIGITS:
                self._problem(
                    node, path, f"a number of {len(text)} characters, {text[:20]}...; no key takes so long a number"
                )
                return 0
            if tag == "int":
                return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
            if tag == "float":
                number = float(re.sub(r"^([-+]?)\.(?=[in])", r"\1", text.lower()))
                if math.isfinite(number):
                    return number
                self._problem(node, path, f"{text} is not a finite number")
                return 0.0
        except ValueError:
            pass  # an explicit tag that its text does not fit, as in `!!int x`
        self._problem(node, path, f"the tag {node.tag!r} with {text!r} is not understood; leave the tag out")
        return None

    def _too_many(self, node: yaml.Node, path: KeyPath) -> bool:
        self._num_nodes += 1
        if self._num_nodes == _MAX_NODES + 1:
            self._problem(node, path, f"aliases make the document larger than {_MAX_NODES} values")
        return self._num_nodes > _MAX_NODES

    def _check_tag(self, node: yaml.Node, path: KeyPath, expected: str) -> None:
        if node.tag != _TAG + expected:
            self._problem(node, path, f"the tag {node.tag!r} is not understood; leave it out")

    def _problem(self, node: yaml.Node, path: KeyPath, text: str) -> None:
        self._document.problems.append(YamlProblem(YamlPosition.of(node.start_mark), path, text))


def _as_written(node: yaml.Node) -> str:
    return f", not {node.value!r}" if isinstance(node, yaml.ScalarNode) else ""
