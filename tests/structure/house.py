"""The rules of the source tree, as functions from a tree to the places that break them. Standard library only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# The rooms, top floor first: a room imports from itself and from the rooms below it.
ROOMS = (
    "cli",
    "verify",
    "report",
    "launcher",
    "train",
    "rollout",
    "sync",
    "agents",
    "checkpoint",
    "engine",
    "plan",
    "metrics",
    "rewards",
    "data",
    "cpu",
    "algorithm",
    "models",
    "config",
    "base",
)

# What may be imported (or touched) only in these packages or files; the empty set means nowhere.
HOMES: dict[str, set[str]] = {
    "megatron": {"engine", "checkpoint", "cpu"},
    "transformer_engine": {"engine", "checkpoint", "cpu"},
    "apex": {"engine", "checkpoint"},
    "megatron.training": set(),
    "megatron.core.parallel_state": {"engine/process_groups.py"},
    "megatron.core.mpu": set(),
    "torch.distributed": {
        *("cpu", "engine", "sync", "checkpoint", "train", "verify"),
        "launcher/all_reduce_probe.py",
    },
    "sglang": {"rollout", "cpu"},
    "wandb": {"metrics/wandb_sink.py"},
    "pyarrow": {"data/row_files.py"},
    "aiohttp": {
        "rollout",
        "agents/endpoint.py",
        "agents/adapters/openenv.py",
        "report/live_page.py",
        "rewards/remote.py",
    },
    "requests": set(),
    "httpx": set(),
    "http": {
        "rollout",
        "base/network.py",
        "metrics/prometheus.py",
        "agents/endpoint.py",
        "agents/adapters/openenv.py",
        "report/live_page.py",
    },
    "urllib.request": {"rollout", "launcher/alerts.py"},
    "pickle": {"checkpoint/safe_pickle.py"},  # which reads what others wrote so, by a list of names
    "os.environ": {
        "launcher",
        "train/worker.py",
        "train/standby.py",
        "sync/broadcast_group.py",
        "cpu/backend.py",
        "cpu/te_loading.py",
        "rollout/server/entry.py",
        "rollout/server/process.py",
        "cpu/sglang_hooks.py",
        "rewards/guarded_process.py",
        "rewards/remote.py",  # the keys of services
        "rollout/teacher_server.py",  # the address and the key of a teacher's server
        "rewards/reasoning_gym_worker.py",  # for itself, before it begins
        "rewards/sandbox/sandbox_server.py",  # for itself and what it runs
        "agents/agent_worker.py",
        "agents/owned_processes.py",
        "train/gpu_variables.py",
        "base/network.py",
        "verify/trace/entry.py",  # for itself, before it begins; so the next one
        "verify/trace/rank.py",
    },
    "os.getenv": set(),
    "os.putenv": set(),
}
WITHOUT = {
    **dict.fromkeys(("config", "models", "plan"), ("torch", "numpy", "transformers")),
    **dict.fromkeys(("base", "agents", "verify/simulate"), ("torch",)),  # a worker of episodes starts without torch
}
WITH_PRINT = {"cli", "tools"}
# Hundreds of lines are a story; from the first bound on a warning asks for a second look, from the second on a file is split.
MANY_LINES = 600
MOST_LINES = 1000
TOP_LEVEL = {
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs",
    "gspo_mega",
    "launch",
    "configs",
    "tools",
    "tests",
    ".gitignore",
    ".editorconfig",
    ".pre-commit-config.yaml",
    "examples",
    ".ci",
}

# Where the product was made is no part of it.
_WORDS = re.compile(
    r"/work\b|\.\./shared|/root/|/home/\w|\b(?:this|next|last|previous|earlier|later) session\b|\bDESIGN\b"
    r"|\bengineer [A-Z]\b",
)


class Broken(NamedTuple):
    path: str
    line: int
    rule: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}"


def python_files(root: Path) -> Iterator[tuple[Path, str, str]]:
    """(file, its room, its place inside gspo_mega or tools) of the product's Python."""
    for path in sorted((root / "gspo_mega").rglob("*.py")):
        inside = path.relative_to(root / "gspo_mega")
        package = inside.parts[0] if len(inside.parts) > 1 else inside.stem
        yield path, "" if package == "__init__" else package, inside.as_posix()
    for path in sorted((root / "tools").rglob("*.py")):
        yield path, "tools", path.relative_to(root).as_posix()


def check_imports(root: Path) -> list[Broken]:
    """Floors, homes of dangerous things, and rooms that stay light."""
    broken = []
    floors = {room: floor for floor, room in enumerate(reversed(ROOMS))}
    for path, room, inside in python_files(root):
        where = path.relative_to(root).as_posix()
        if room not in floors and room not in ("", "__main__", "tools"):
            broken.append(Broken(where, 1, f"{room} is none of the rooms"))
            continue
        floor = floors.get(room, -1 if room == "" else len(ROOMS))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        types = _for_types_alone(tree)
        for name, line in _used_names(tree):
            if name.startswith("."):
                broken.append(Broken(where, line, "relative import; write the whole name"))
            elif name == "gspo_mega" or name.startswith("gspo_mega."):
                target = ([*name.split("."), ""])[1]
                if target in floors and target != room and floors[target] > floor:
                    broken.append(Broken(where, line, f"{room} may not import {target}"))
            for thing, homes in HOMES.items():
                if _is_inside(name, thing) and room not in homes and inside not in homes:
                    broken.append(Broken(where, line, f"{thing} belongs in {', '.join(sorted(homes)) or 'no file'}"))
            for light, heavy_ones in WITHOUT.items():
                if room == light or inside.startswith(light + "/"):
                    for heavy in heavy_ones:
                        if _is_inside(name, heavy) and not any(_is_inside(name, only) for only in types):
                            broken.append(Broken(where, line, f"{light} works without {heavy}"))
    return broken


def check_calls(root: Path) -> list[Broken]:
    """`print` outside cli and tools, and errors that are swallowed."""
    broken = []
    for path, package, _ in python_files(root):
        where = path.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "print"
                and package not in WITH_PRINT
            ):
                broken.append(Broken(where, node.lineno, "print belongs in cli and tools"))
            if isinstance(node, ast.ExceptHandler) and _catches_all(node.type) and all(map(_does_nothing, node.body)):
                broken.append(Broken(where, node.lineno, "an error is swallowed"))
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).endswith("suppress")
                and any(map(_catches_all, node.args))
            ):
                broken.append(Broken(where, node.lineno, "an error is swallowed"))
    return broken


def check_homes(root: Path) -> list[Broken]:
    """Every home exists."""
    return [
        Broken(f"gspo_mega/{home}", 1, "a home that does not exist")
        for home in sorted(set().union(*HOMES.values()))
        if not (root / "gspo_mega" / home).exists()
    ]


def check_files(root: Path) -> list[Broken]:
    """Length, of tests too; a module docstring."""
    broken = [
        Broken(where, lines, f"{lines} lines; at most {MOST_LINES}: a file tells one story")
        for where, lines in lengths(root)
        if lines > MOST_LINES
    ]
    for path, _, _ in python_files(root):
        where, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        if text.strip() and ast.get_docstring(ast.parse(text)) is None:
            broken.append(Broken(where, 1, "no module docstring: what it is for"))
    return broken


def lengths(root: Path) -> list[tuple[str, int]]:
    """(file, its lines) of the product's Python and of the tests'."""
    paths = [*(root / "tests").rglob("*.py"), *(path for path, _, _ in python_files(root))]
    return [(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8").count("\n")) for path in sorted(paths)]


def check_words(root: Path) -> list[Broken]:
    """Paths of one machine, and words of how the product was made, in anything that is shipped."""
    broken = []
    files = [root / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "pyproject.toml")]
    files += [
        path for folder in ("gspo_mega", "tools", "launch", "configs", "docs") for path in (root / folder).rglob("*")
    ]
    for path in sorted(files):
        if not path.is_file() or path.suffix in (".pyc", ".png"):  # a picture has no words
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if (found := _WORDS.search(line)) is not None:
                broken.append(
                    Broken(
                        path.relative_to(root).as_posix(), number, f"{found.group()!r} does not belong in the product"
                    )
                )
    return broken


def check_tests(root: Path) -> list[Broken]:
    """Test files have unique names, because their folders are no packages. None prepares its process for transformers
    as only a server's process is prepared: it would hide a fault from which no rank and no tool is kept.
    """
    broken, seen = [], {}
    for path in sorted((root / "tests").rglob("*.py")):
        where = path.relative_to(root).as_posix()
        if path.name == "__init__.py":
            broken.append(Broken(where, 1, "test folders are no packages"))
        elif path.name != "conftest.py" and seen.setdefault(path.name, where) != where:
            broken.append(Broken(where, 1, f"the same name as {seen[path.name]}"))
        text = path.read_text()
        if (
            "sglang_hooks.activate" in text
            and not re.search(r"\bsglang_(?:layers|attention|quantization)\b", text)
            and path.parent.name != "structure"
        ):
            line = text[: text.index("sglang_hooks.activate")].count("\n") + 1
            broken.append(Broken(where, line, "activate() belongs to servers, and to tests of SGLang's own layers"))
    return broken


def check_top_level(entries: set[str]) -> list[Broken]:
    return [Broken(entry, 1, "the top level is fixed") for entry in sorted(entries - TOP_LEVEL)]


def _is_inside(name: str, thing: str) -> bool:
    return name == thing or name.startswith(thing + ".")


def _for_types_alone(tree: ast.Module) -> set[str]:
    """Dotted names that are imported under `if TYPE_CHECKING:` only."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for inner in ast.walk(node):
                if isinstance(inner, ast.Import):
                    found |= {alias.name for alias in inner.names}
                elif isinstance(inner, ast.ImportFrom):
                    found |= {f"{inner.module}.{alias.name}" for alias in inner.names}
    return found


def _used_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Dotted names that a module imports, and `os.x`, `torch.x.y` reached through an imported module."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield "." * node.level + (node.module or ""), node.lineno
                continue
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}", node.lineno
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            root, _, rest = dotted.partition(".")
            if root in modules and re.fullmatch(r"[\w.]+", rest):
                yield f"{modules[root]}.{rest}", node.lineno


def _catches_all(expression: ast.expr | None) -> bool:
    if expression is None:
        return True
    names = expression.elts if isinstance(expression, ast.Tuple) else [expression]
    return any(isinstance(name, ast.Name) and name.id in ("Exception", "BaseException") for name in names)


def _does_nothing(statement: ast.stmt) -> bool:
    return isinstance(statement, (ast.Pass, ast.Continue)) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )
