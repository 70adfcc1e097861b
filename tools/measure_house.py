"""Measures of the source tree: files, lines per file, functions, imports between rooms, words of documentation.

    python tools/measure_house.py [ROOT]

Standard library only.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path

PACKAGE = "gspo_mega"


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    files = {module_of(path, root): path for path in sorted((root / PACKAGE).rglob("*.py"))}
    lines, code, functions, configs = [], 0, 0, 0
    imports: dict[str, set[str]] = {}
    for module, path in files.items():
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        length = text.count("\n")
        if path.name != "__init__.py" or length >= 20:
            lines.append(length)
        code += code_lines(text, tree)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                functions += 1
                given = [*node.args.args, *node.args.kwonlyargs]
                configs += any(a.arg == "config" and is_config(a.annotation) for a in given)
        imports[module] = imported(tree, files)
    users: dict[str, set[str]] = defaultdict(set)
    for module, targets in imports.items():
        for target in targets:
            users[target].add(module)
    single = [m for m, by in users.items() if len(by) == 1 and m.count(".") > 1 and room(m) == room(next(iter(by)))]
    arrows = {(room(a), room(b)) for a, targets in imports.items() for b in targets if room(a) != room(b)}
    measures = {
        "files": len(lines),
        "median lines": round(statistics.median(lines)),
        "longest": max(lines),
        "under 40 lines": sum(length < 40 for length in lines),
        "imported by one file of their room": len(single),
        "circles between files": len(circles(files)),
        "lines of code": code,
        "functions": functions,
        "lines of code per function": round(code / functions, 1),
        "parameters `config: Config`": configs,
        "rooms": len({room(module) for module in files if module.count(".") > 1}),
        "arrows between rooms": len(arrows),
        "words of README": words(root / "README.md"),
        "words of docs, without generated tables": sum(words(page) for page in (root / "docs").rglob("*.md")),
    }
    width = max(map(len, measures))
    for name, value in measures.items():
        print(f"{name:<{width}}  {value}")
    return 0


def module_of(path: Path, root: Path) -> str:
    return path.relative_to(root).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")


def is_config(annotation: ast.expr | None) -> bool:
    """Whether a parameter is the run's whole configuration, and not Megatron's or a command's own."""
    return annotation is not None and "Config" in ast.unparse(annotation).split(" | ")


def room(module: str) -> str:
    return ".".join(module.split(".")[1:2])


def code_lines(text: str, tree: ast.Module) -> int:
    """Lines that are neither blank, nor comments, nor docstrings."""
    prose: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                prose |= set(range(first.lineno, (first.end_lineno or 0) + 1))
    numbered = enumerate(text.splitlines(), 1)
    return sum(
        1 for number, line in numbered if line.strip() and not line.strip().startswith("#") and number not in prose
    )


def imported(nodes: ast.AST, files: dict[str, Path], *, when_loaded: bool = False) -> set[str]:
    """Modules of the package that these import; `when_loaded`: without those in functions and for types."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(nodes) if when_loaded else ast.walk(nodes):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in files else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {module for module in found if module in files and module != PACKAGE}


def circles(files: dict[str, Path]) -> list[set[str]]:
    """Sets of files that import each other when they are loaded (packages' own files aside)."""
    graph = {
        module: imported(ast.parse(path.read_text(encoding="utf-8")), files, when_loaded=True)
        for module, path in files.items()
        if path.name != "__init__.py"
    }
    reached = {module: reachable(module, graph) for module in graph}
    found: list[set[str]] = []
    for module, others in reached.items():
        circle = {module} | {other for other in others if module in reached.get(other, ())}
        if len(circle) > 1 and circle not in found:
            found.append(circle)
    return found


def reachable(module: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    rest = list(graph[module])
    while rest:
        target = rest.pop()
        if target not in seen:
            seen.add(target)
            rest += graph.get(target, ())
    return seen


def words(page: Path) -> int:
    text = page.read_text(encoding="utf-8")
    if page.name in ("configuration.md", "metrics.md", "other_names.md"):
        text = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    return sum(re.search(r"\w", word) is not None for word in text.split())


if __name__ == "__main__":
    sys.exit(main())
