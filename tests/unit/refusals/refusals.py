"""Every refusal in the product's checks, found by `ast`, and a way to spoil one: its words replaced when the module is
imported.

A refusal is a text that is raised or recorded for a person: `raise ...Error(text)`, `Violation(key, text)`,
`.problem(key, text)`, or what a function of `TEXTS` returns. One that only hands on another's text has no words of its
own and is none.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType

PACKAGES = ("gspo_mega.config", "gspo_mega.plan", "gspo_mega.models", "gspo_mega.base.network")
# What ranks check of the model that they built; when_refused.py classifies it.
_OF_RANKS = "gspo_mega.models.parameter_names"
# Functions that return, or append, the text of a refusal that is raised elsewhere.
TEXTS = {
    "precision_problem",
    "chip_problem",
    "_recipe_problem",
    "_fp8_problem",
    "optimizer_problems",
    "explain",
    "_unknown_key",
    "_explain_syntax",
    "_reader_reason",
    "apply_override",
    "parse_overrides",
    "address_problem",
    "_no_address_problem",
}
_RECORDERS = {"Violation", "problem", "_problem", "YamlProblem"}
_SPOILER = "__refusal__"
_FEWEST_LETTERS = 4


def refusals(root: Path) -> Iterator[str]:
    """`file:line` of each refusal, below `root`."""
    for package in PACKAGES:
        place = root / package.replace(".", "/")
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]:
            if path == (root / _OF_RANKS.replace(".", "/")).with_suffix(".py"):
                continue
            yield from sites(ast.parse(path.read_text(encoding="utf-8")), path.relative_to(root).as_posix())


def reader_name(test: str) -> str:
    """The id of a unit test as `readers.txt` has it: relative to tests/unit and without parameters."""
    return test.partition("[")[0].removeprefix("tests/unit/")


def listed_readers() -> set[str]:
    """The tests that `readers.txt` names: between them they read every refusal, or did when it was written."""
    return set(Path(__file__).with_name("readers.txt").read_text(encoding="utf-8").split())


def sites(tree: ast.Module, name: str) -> list[str]:
    """`name:line` of each refusal in a module."""
    found: list[str] = []
    _Wrap(tree, name, found.append)
    return sorted(set(found))


class _Wrap:
    """Puts every literal of a refusal's text into a call of `_SPOILER(site, literal)`, in place, and names the
    sites.
    """

    def __init__(self, tree: ast.Module, name: str, tell: Callable[[str], object]) -> None:
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Raise)
                and isinstance(node.exc, ast.Call)
                and ast.unparse(node.exc.func).endswith("Error")
            ):
                self._texts(node.exc.args, 0, f"{name}:{node.lineno}", tell)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in _RECORDERS:
                self._texts(node.args, 1, f"{name}:{node.lineno}", tell)
            elif isinstance(node, ast.FunctionDef) and node.name in TEXTS:
                self._function(node, name, tell)

    def _function(self, function: ast.FunctionDef, name: str, tell: Callable[[str], object]) -> None:
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and node.value is not None:
                values = [node.value]
                self._texts(values, 0, f"{name}:{node.lineno}", tell)
                node.value = values[0]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".append"):
                self._texts(node.args, 0, f"{name}:{node.lineno}", tell)

    def _texts(self, arguments: list[ast.expr], first: int, site: str, tell: Callable[[str], object]) -> None:
        """Of several texts of one refusal (what is wrong, what would be valid) the first with words is what has to be
        read.
        """
        for index in range(first, len(arguments)):
            self._count = 0
            arguments[index] = self._wrapped(arguments[index], site)
            if self._count:
                tell(site)
                return

    def _wrapped(self, node: ast.expr, site: str) -> ast.expr:
        """`node` with the words that a person reads wrapped: not what is looked up, compared or called with."""
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and sum(map(str.isalpha, node.value)) >= _FEWEST_LETTERS
        ):
            self._count += 1
            call = ast.Call(ast.Name(_SPOILER, ast.Load()), [ast.Constant(site), ast.Constant(node.value)], [])
            return ast.fix_missing_locations(ast.copy_location(call, node))
        if isinstance(node, ast.JoinedStr):
            parts = [self._wrapped(value, site) for value in node.values]
            node.values = [
                (
                    ast.fix_missing_locations(ast.copy_location(ast.FormattedValue(p, -1), p))
                    if isinstance(p, ast.Call)
                    else p
                )
                for p in parts
            ]
        elif isinstance(node, ast.FormattedValue):
            node.value = self._wrapped(node.value, site)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            node.left, node.right = self._wrapped(node.left, site), self._wrapped(node.right, site)
        elif isinstance(node, ast.IfExp):
            node.body, node.orelse = self._wrapped(node.body, site), self._wrapped(node.orelse, site)
        elif isinstance(node, (ast.BoolOp, ast.Tuple)):
            children = node.values if isinstance(node, ast.BoolOp) else node.elts
            children[:] = [self._wrapped(child, site) for child in children]
        return node


class _Loader(SourceFileLoader):
    root = Path()

    def get_code(self, fullname: str) -> CodeType:
        """From the source, whatever is cached."""
        path = Path(self.get_filename(fullname))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        _Wrap(tree, path.relative_to(self.root).as_posix(), lambda site: None)
        return compile(tree, str(path), "exec")


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if not fullname.startswith(PACKAGES) or fullname == _OF_RANKS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            spec.loader = _Loader(fullname, spec.origin)
        return spec


def spoil_through(root: Path, spoiler: Callable[[str, str], str]) -> None:
    """From now on, modules of `PACKAGES` that are imported give each literal of a refusal to `spoiler(site,
    literal)`.
    """
    import builtins

    loaded = [name for name in sys.modules if name.startswith(PACKAGES)]
    assert not loaded, f"imported too early: {loaded}"
    _Loader.root = root
    setattr(builtins, _SPOILER, spoiler)
    sys.meta_path.insert(0, _Finder())
