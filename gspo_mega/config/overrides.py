"""`key.sub=value` from the command line, laid over a parsed document before it is validated.

Values are read by the same YAML rules as files; `data.sources.0.path=x` addresses list entries. The
validation (`loader.py`) checks that the key exists and the value fits, and names the override.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gspo_mega.config.strict_yaml import KeyPath, parse


@dataclass(frozen=True)
class Override:
    text: str
    path: tuple[str, ...]
    value: Any


def parse_overrides(texts: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Read all of them; returns (overrides, problem lines), a line for each one that cannot be read."""
    overrides, problems = [], []
    for text in texts:
        key, separator, written = text.partition("=")
        path = tuple(key.strip().split("."))
        if not separator:
            problems.append(f"override {text!r}: no `=` in it; write key=value, for example train.num_steps=10")
        elif not all(path):
            problems.append(f"override {text!r}: the key {key!r} has an empty part; write section.key=value")
        else:
            document = parse(written)
            problems += [f"override {text!r}: {key}: {problem.text}" for problem in document.problems]
            if not document.problems:
                overrides.append(Override(text, path, document.value))
    return overrides, problems


def apply_override(tree: dict[str, Any], override: Override) -> tuple[KeyPath | None, str | None]:
    """Change `tree` in place. Returns (path as in the tree, None), or (None, problem line).

    Sections that are absent or empty (null) are made; list entries must exist.
    """
    node: Any = tree
    path: list[str | int] = []
    for index, part in enumerate(override.path):
        last = index == len(override.path) - 1
        if isinstance(node, list):
            if not part.isdecimal() or int(part) >= len(node):
                entries = f"entries 0 to {len(node) - 1}" if node else "no entries"
                return None, f"override {override.text!r}: {_dotted(path)} is a list with {entries}, not {part!r}"
            path.append(int(part))
            if last:
                node[int(part)] = override.value
            elif node[int(part)] is None:
                node[int(part)] = {}
            node = node[int(part)]
        elif isinstance(node, dict):
            path.append(part)
            if last:
                node[part] = override.value
            elif node.get(part) is None:
                node[part] = {}
            node = node[part]
        else:
            return None, f"override {override.text!r}: {_dotted(path)} is {node!r}, a value without keys inside"
    return tuple(path), None


def _dotted(path: Sequence[str | int]) -> str:
    return ".".join(map(str, path))
