"""When is each refusal of a rank, a server or a worker said? A new one has to be classified here.

What is wrong is refused before processes start wherever it can be known then, by the function that a rank calls
(`launcher/input_trial.py` for what needs libraries of ranks). The table `when_refused.py` names, for every function that
raises an error for a person after processes started, when it is said, or why it cannot be said before.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from when_refused import PACKAGES, RUN, TABLE, TRIED, WHEN

from gspo_mega.base import errors

ROOT = Path(__file__).parents[3]
ERRORS = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}


def raised(tree: ast.AST) -> Counter[str]:
    """{qualified name: number of errors for a person that it makes and raises}"""
    found: Counter[str] = Counter()

    def look(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            is_named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            inner = f"{name}.{child.name}".lstrip(".") if is_named else name
            if isinstance(child, ast.Raise) and isinstance(child.exc, ast.Call):
                found[name] += ast.unparse(child.exc.func).split(".")[-1] in ERRORS
            look(child, inner)

    look(tree, "")
    return +found


def sites() -> Iterator[tuple[str, str, int]]:
    """(file, function, number) of all refusals that can come after processes started."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / "gspo_mega" / package).rglob("*.py"))]
    for path in [*paths, ROOT / "gspo_mega/models/parameter_names.py"]:
        name = path.relative_to(ROOT / "gspo_mega").as_posix()
        for function, count in raised(ast.parse(path.read_text(encoding="utf-8"))).items():
            yield name, function, count


def test_every_refusal_after_the_start_is_classified():
    found = {(file, function): count for file, function, count in sites()}
    told = {(file, function): entry[0] for file, functions in TABLE.items() for function, entry in functions.items()}
    new = [
        f"{file}::{function}: {count}, not in when_refused.py"
        for (file, function), count in found.items()
        if (file, function) not in told
    ]
    gone = [f"{file}::{function}: in when_refused.py, raises nothing" for file, function in told.keys() - found.keys()]
    others = [
        f"{file}::{function}: raises {found[file, function]}, and when_refused.py classifies {told[file, function]}"
        for file, function in told.keys() & found.keys()
        if told[file, function] != found[file, function]
    ]
    assert not new + gone + others, "\n".join(["", *new, *gone, *others])


def test_the_table_says_when_or_why_not():
    for file, functions in TABLE.items():
        for function, (_, when, *why) in functions.items():
            assert when in WHEN, f"{file}::{function}: {when}"
            assert bool(why and why[0]) == (when == RUN), (
                f"{file}::{function}: a reason for what is known only in a run"
            )


def test_what_the_trial_says_it_reaches():
    """The functions that the table gives to the trial are reached from its imports."""
    source = (ROOT / "gspo_mega/launcher/input_trial.py").read_text()
    for file in {file for file, functions in TABLE.items() for entry in functions.values() if entry[1] == TRIED}:
        room = file.split("/")[0]
        assert f"gspo_mega.{room}." in source, f"{file}: the trial imports nothing of {room}"


@pytest.mark.parametrize(
    ("code", "count"), [("def f():\n    raise DataError('x')", 1), ("def f():\n    raise ValueError('x')", 0)]
)
def test_refusals_are_found(code, count):
    assert raised(ast.parse(code))["f"] == count
