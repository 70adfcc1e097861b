"""Shows that tests still find known faults after files were moved: `python tools/mutants.py [--check] [ID ...]`.

`tests/structure/mutants.toml` lists mutants. A mutant is a fault that replaces a snippet of the product's source, and
the tests that must then fail. The list names no folder: the tool looks for a snippet in all of `gspo_mega`, and for a
test by the name of its file. So the same mutants run before and after files are moved, merged or split.

The tool copies the working tree to a temporary folder, puts the copy first on PYTHONPATH, and never writes to the
working tree. First all named tests must pass in the unchanged copy. Then the tool applies one mutant at a time and runs
its tests. A mutant is killed if pytest reports that at least one of them failed. A file that no longer compiles, a test
that is not found and a run that takes too long kill nothing: they are errors.

`--check` only looks for every snippet and every test. Exit code 0: all mutants were killed, or with `--check`, all can
be applied. Standard library and pytest only.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MUTANTS = Path("tests/structure/mutants.toml")
PACKAGE = "gspo_mega"
# Prints where a process of the test run finds the package: a fault in a copy that no test imports would prove nothing.
_WHERE = f"import pathlib, {PACKAGE}; print(pathlib.Path({PACKAGE}.__file__).resolve().parent)"
FAILED_TESTS = 1  # pytest's exit code if tests ran and some failed


class MutantError(Exception):
    """A mutant cannot be applied, or its tests cannot be run."""


@dataclass(frozen=True)
class Mutant:
    """`snippet` occurs once in the package, or once in its functions of the name `function`; `tests`:
    `test_file.py::test_name`, without folder, with or without parameters in brackets.
    """

    id: str
    area: str
    fault: str
    snippet: str
    replacement: str
    tests: tuple[str, ...]
    function: str | None = None


@dataclass(frozen=True)
class Change:
    """One file of the tree with a mutant in it: its path inside the tree, and its whole text."""

    path: Path
    text: str


def read_mutants(path: Path) -> list[Mutant]:
    """The mutants of a file. Raises MutantError for entries that are no mutants, or share an id."""
    with path.open("rb") as file:
        entries = tomllib.load(file)["mutant"]
    mutants = []
    for entry in entries:
        try:
            mutants.append(Mutant(**(entry | {"tests": tuple(entry["tests"])})))
        except (TypeError, KeyError) as error:
            raise MutantError(f"{path}: {entry.get('id', 'an entry without id')}: {error}") from error
    ids = [mutant.id for mutant in mutants]
    if repeated := sorted({name for name in ids if ids.count(name) > 1}):
        raise MutantError(f"{path}: several mutants have the id {', '.join(repeated)}")
    return mutants


def applied(root: Path, mutant: Mutant) -> Change:
    """The file of `root` with the mutant in it. Raises MutantError unless the snippet is there exactly once, has no
    import, and the result is another program that compiles.
    """
    if "import " in mutant.snippet or f"{PACKAGE}." in mutant.snippet:
        raise MutantError("its snippet names a module, which a move changes")
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if mutant.snippet in text:
            found += [(path, text, place) for place in _places(text, mutant)]
    if len(found) != 1:
        places = ", ".join(f"{path.relative_to(root)}:{text.count(chr(10), 0, at) + 1}" for path, text, at in found)
        raise MutantError(f"its snippet occurs {len(found)} times{f': {places}' if places else ''}")
    ((path, text, place),) = found
    changed = text[:place] + mutant.replacement + text[place + len(mutant.snippet) :]
    try:
        if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(text)):
            raise MutantError("its replacement is the same program")
        compile(changed, str(path), "exec")
    except SyntaxError as error:
        raise MutantError(f"its replacement does not compile: {error}") from error
    return Change(path.relative_to(root), changed)


def _places(text: str, mutant: Mutant) -> list[int]:
    places, place = [], text.find(mutant.snippet)
    while place >= 0:
        places.append(place)
        place = text.find(mutant.snippet, place + 1)
    if mutant.function is None:
        return places
    spans = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == mutant.function
    ]
    lines = {place: text.count("\n", 0, place) + 1 for place in places}
    return [place for place in places if any(first <= lines[place] <= last for first, last in spans)]


def paths_of_tests(root: Path, mutant: Mutant) -> list[str]:
    """The mutant's tests as pytest takes them: the path of the file inside `root`, and the test's name.

    Raises MutantError for a file that is not there exactly once.
    """
    result = []
    for test in mutant.tests:
        file, _, name = test.partition("::")
        paths = sorted((root / "tests").rglob(file))
        if len(paths) != 1 or not name:
            raise MutantError(f"its test {test} is in {len(paths)} files")
        function = name.partition("[")[0].rpartition("::")[2]
        defined = {node.name for node in ast.walk(ast.parse(paths[0].read_text())) if isinstance(node, ast.FunctionDef)}
        if function not in defined:
            raise MutantError(f"its test {test} is not in that file")
        result.append(f"{paths[0].relative_to(root)}::{name}")
    return result


def copy_tree(root: Path, target: Path) -> None:
    """Copy what git tracks, and new files that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in sorted(set(filter(None, listed.split("\0")))):
        source, copy = root / name, target / name
        if source.is_file():  # git still lists a file that was deleted
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy)


class Copy:
    """A copy of the tree, in which mutants are applied and tests run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # What processes inherit: one thread each, as tests/run.sh has it, and the copy before all installed packages.
        self._python = ["env", "OMP_NUM_THREADS=1", f"PYTHONPATH={root}", sys.executable]
        self._time = int(time.time())

    def check_imports(self) -> None:
        """Raise MutantError unless a process of the test run, started in any folder, imports this copy."""
        printed = subprocess.run(
            [*self._python, "-c", _WHERE], cwd="/", capture_output=True, text=True, check=True
        ).stdout.strip()
        if Path(printed) != (self.root / PACKAGE).resolve():
            raise MutantError(f"tests would import the package from {printed} instead of the copy in {self.root}")

    def write(self, change: Change) -> None:
        """Replace a file. Python keeps compiled files by size and whole seconds, so every write gets another second."""
        self._time += 1
        path = self.root / change.path
        path.write_text(change.text, encoding="utf-8")
        os.utime(path, (self._time, self._time))

    def run(self, tests: Sequence[str], seconds: float) -> tuple[int | None, str]:
        """(pytest's exit code, None if its time was over; its output) of the tests."""
        command = [*self._python, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *tests]
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            return code, output.read()


def outcome_of(code: int | None, output: str) -> tuple[str, str]:
    """(killed, survived or error; the reason) of a mutant's test run."""
    if code is None:
        return "error", "its tests did not end in time"
    if code == 0:
        return "survived", "all of its tests passed"
    lines = [line for line in output.splitlines() if line.startswith("FAILED ")]
    if code == FAILED_TESTS and lines:
        path, _, test = lines[0].removeprefix("FAILED ").partition("::")
        return "killed", f"{path.rpartition('/')[2]}::{test.partition(' - ')[0]}"
    return "error", f"pytest ended with {code}: {' | '.join(output.splitlines()[-4:])}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Put known faults into a copy of the product; tests must find them.")
    parser.add_argument("ids", nargs="*", metavar="ID", help="mutants to run; all by default")
    parser.add_argument("--check", action="store_true", help="only look for every snippet and every test")
    parser.add_argument("--seconds", type=float, default=180, help="time for the tests of one mutant (180)")
    options = parser.parse_args(arguments)
    try:
        mutants = read_mutants(ROOT / MUTANTS)
    except MutantError as error:
        print(error)
        return 2
    if unknown := sorted(set(options.ids) - {mutant.id for mutant in mutants}):
        print(f"no mutant has the id {', '.join(unknown)}")
        return 2
    mutants = [mutant for mutant in mutants if not options.ids or mutant.id in options.ids]

    changes: dict[str, Change] = {}
    tests: dict[str, list[str]] = {}
    for mutant in mutants:
        try:
            changes[mutant.id], tests[mutant.id] = applied(ROOT, mutant), paths_of_tests(ROOT, mutant)
        except MutantError as error:
            print(f"error     {mutant.id}: {error}")
    if len(tests) < len(mutants) or options.check:
        print(f"{len(tests)} of {len(mutants)} mutants can be applied")
        return 0 if len(tests) == len(mutants) else 1

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder))
        copy_tree(ROOT, copy.root)
        copy.check_imports()
        every = sorted({test for names in tests.values() for test in names})
        code, output = copy.run(every, options.seconds * max(1, len(mutants)))
        print(f"unchanged: {(output.splitlines() or ['no output'])[-1]}", flush=True)
        if code != 0:
            print(output[-5000:])
            print("the tests do not pass without a fault")
            return 1
        outcomes = []
        for mutant in mutants:
            change = changes[mutant.id]
            original = (copy.root / change.path).read_text(encoding="utf-8")
            copy.write(change)
            began = time.monotonic()
            outcome, reason = outcome_of(*copy.run(tests[mutant.id], options.seconds))
            copy.write(Change(change.path, original))
            outcomes.append(outcome)
            print(f"{outcome:9} {mutant.id} ({time.monotonic() - began:.0f} s): {reason}", flush=True)
    counts = ", ".join(f"{outcomes.count(name)} {name}" for name in ("killed", "survived", "error"))
    print(f"{len(mutants)} mutants: {counts}")
    return 0 if outcomes.count("killed") == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
