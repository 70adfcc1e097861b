"""The rules of the source tree, as functions from a tree to the places that break them. Standard library only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# A package imports from itself and from what is named here. Top-level modules count as packages.
_BASE = {
    *("", "errors", "records", "token_columns", "episode_records", "episode_check", "rollout_batch"),
    *("run_folder", "durable", "proxies", "printable", "guarded_files", "bounded_http"),
    *("kill_points", "process_death", "beats", "descriptors", "line_process", "importing", "background"),
}
_LEAVES = {"algorithm", "data", "journal", "reward", "metrics", "plan", "quantization", "batch_invariant"}
_BELOW_ENGINE = _BASE | {"config", "model", "parameter_names"} | _LEAVES
_BELOW_BATCHES = _BELOW_ENGINE | {"engine", "weights", "checkpoint", "rollout", "episodes"}
_BELOW_RUNTIME = _BELOW_BATCHES | {"batches"}
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "records": set(),
    "token_columns": set(),
    "episode_records": {"records", "token_columns"},
    "episode_check": {"episode_records"},
    "rollout_batch": {"records", "episode_records"},
    "kill_points": {""},
    "descriptors": {""},
    "sglang_release": {""},
    "process_death": {""},
    "importing": {""},
    "beats": {""},
    "background": {""},
    "proxies": {""},
    "guarded_files": {""},
    "bounded_http": {"proxies"},
    "printable": {""},
    "line_process": {""},
    "durable": {"", "kill_points"},
    "run_folder": {"errors", "durable", "guarded_files"},
    "config": _BASE,
    "doctor": {"", "descriptors", "durable", "sglang_release", "guarded_files"},
    "model": _BASE | {"config"},
    "parameter_names": {"errors", "model"},
    **{leaf: _BASE | {"config", "model"} for leaf in _LEAVES},
    "engine": _BELOW_ENGINE,
    "weights": _BELOW_ENGINE | {"engine"},
    "checkpoint": _BELOW_ENGINE | {"engine", "weights"},
    "episodes": _BELOW_ENGINE,  # which declares what it needs of a sampler, and never imports rollout
    "rollout": _BELOW_ENGINE | {"episodes", "sglang_release"},
    "simulate": _BASE | {"config", "model", "plan", "journal", "rollout"},  # of rollout, what is pure
    "launcher": _BELOW_RUNTIME | {"doctor", "sglang_release"},  # of the doctor, the comparison of two Pythons
    "batches": _BELOW_BATCHES,
    "runtime": _BELOW_RUNTIME,
    "report": _BELOW_RUNTIME | {"launcher"},  # of the launcher, the records that it leaves in a run's folder
    "certify": _BELOW_RUNTIME | {"launcher", "runtime"},
    "budget": _BELOW_RUNTIME | {"launcher", "runtime", "certify"},
    "compare": _BELOW_RUNTIME | {"launcher", "runtime", "certify"},
    "commands": _BELOW_RUNTIME
    | {"launcher", "runtime", "certify", "budget", "compare", "doctor", "simulate", "report"},
    "__main__": {"commands"},
    "tools": _BELOW_RUNTIME | {"launcher", "runtime", "certify"},
}

# What a single file may import beyond its package's layer.
BEYOND = {
    "doctor/all_reduce_probe.py": {"runtime"},  # the ranks' rendezvous, in a process of its own
    "metrics/sink_loading.py": {"reward"},  # how a user's name becomes code
    "launcher/stack_request.py": {"runtime"},  # how often ranks look for a request
}

# What may be imported (or touched) only in these packages or files; the empty set means nowhere.
HOMES: dict[str, set[str]] = {
    "megatron": {"engine", "checkpoint"},
    "transformer_engine": {"engine", "checkpoint"},
    "apex": {"engine", "checkpoint"},
    "megatron.training": set(),
    "megatron.core.parallel_state": {"engine/process_groups.py"},
    "megatron.core.mpu": set(),
    "torch.distributed": {
        *("engine", "weights", "checkpoint", "runtime", "certify", "budget"),
        "doctor/all_reduce_probe.py",
    },
    "sglang": {"rollout"},
    "wandb": {"metrics/wandb_sink.py"},
    "pyarrow": {"data/table_files.py"},
    "aiohttp": {
        "rollout",
        "episodes/endpoint.py",
        "episodes/adapters/openenv.py",
        "report/live_page.py",
        "reward/remote.py",
    },
    "requests": set(),
    "httpx": set(),
    "http": {
        "rollout",
        "bounded_http.py",
        "metrics/prometheus.py",
        "episodes/endpoint.py",
        "episodes/adapters/openenv.py",
        "report/live_page.py",
    },
    "urllib.request": {"rollout", "launcher/alert_calls.py"},
    "pickle": {"checkpoint/safe_pickle.py"},  # which reads what others wrote so, by a list of names
    "os.environ": {
        "launcher",
        "runtime/worker.py",
        "weights/link.py",
        "engine/cpu/backend.py",
        "engine/cpu/te_loading.py",
        "rollout/server/server_entry.py",
        "rollout/server/running.py",
        "rollout/server/cpu_server.py",
        "reward/guarded_process.py",
        "reward/remote.py",  # the keys of services
        "reward/reasoning_gym_worker.py",  # for itself, before it begins
        "reward/sandbox/sandbox_server.py",  # for itself and what it runs
        "episodes/agent_worker.py",
        "episodes/owned_processes.py",
        "runtime/gpu_variables.py",
        "proxies.py",
    },
    "os.getenv": set(),
    "os.putenv": set(),
}
WITHOUT = {
    **dict.fromkeys(("config", "model", "plan"), ("torch", "numpy", "transformers")),
    "simulate": ("torch", "transformers"),
    "episodes": ("torch",),  # a worker of episodes starts in a fraction of torch's time
    "episode_records": ("torch",),
    "rollout_batch": ("torch",),
}
WITH_PRINT = {"commands", "tools"}
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
    """(file, its package, its place inside gspo_mega or tools) of the product's Python."""
    for path in sorted((root / "gspo_mega").rglob("*.py")):
        inside = path.relative_to(root / "gspo_mega")
        package = inside.parts[0] if len(inside.parts) > 1 else inside.stem
        yield path, "" if package == "__init__" else package, inside.as_posix()
    for path in sorted((root / "tools").rglob("*.py")):
        yield path, "tools", path.relative_to(root).as_posix()


def check_imports(root: Path) -> list[Broken]:
    """Layers, homes of dangerous things, and packages that stay light."""
    broken = []
    for path, package, inside in python_files(root):
        where = path.relative_to(root).as_posix()
        if package and package not in LAYERS:
            broken.append(Broken(where, 1, f"{package} has no place in the layers"))
            continue
        for name, line in _used_names(ast.parse(path.read_text(encoding="utf-8"))):
            if name.startswith("."):
                broken.append(Broken(where, line, "relative import; write the whole name"))
            elif name == "gspo_mega" or name.startswith("gspo_mega."):
                target = ([*name.split("."), ""])[1]
                if (
                    target in LAYERS
                    and target != package
                    and target not in LAYERS.get(package, _BASE) | BEYOND.get(inside, set())
                ):
                    broken.append(Broken(where, line, f"{package} may not import {target}"))
            for thing, homes in HOMES.items():
                if _is_inside(name, thing) and package not in homes and inside not in homes:
                    broken.append(Broken(where, line, f"{thing} belongs in {', '.join(sorted(homes)) or 'no file'}"))
            for heavy in WITHOUT.get(package, ()):
                if _is_inside(name, heavy):
                    broken.append(Broken(where, line, f"{package} works without {heavy}"))
    return broken


def check_calls(root: Path) -> list[Broken]:
    """`print` outside commands and tools, and errors that are swallowed."""
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
                broken.append(Broken(where, node.lineno, "print belongs in commands and tools"))
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
        if "cpu_server.activate" in text and "sglang_cpu_" not in text and path.parent.name != "structure":
            line = text[: text.index("cpu_server.activate")].count("\n") + 1
            broken.append(Broken(where, line, "activate() belongs to servers, and to tests of SGLang's own layers"))
    return broken


def check_top_level(entries: set[str]) -> list[Broken]:
    return [Broken(entry, 1, "the top level is fixed") for entry in sorted(entries - TOP_LEVEL)]


def _is_inside(name: str, thing: str) -> bool:
    return name == thing or name.startswith(thing + ".")


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
