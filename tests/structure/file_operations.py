"""Saves, the journal and publishes change the disk only through `base/atomic_io.py`, under the name of an operation. Standard
library only.
"""

from __future__ import annotations

import ast
from pathlib import Path

from house import Broken

# Folders whose writes a crash may interrupt. Conversions are apart: they are written to a temporary
# place and continued by their own rules.
FOLDERS = ("checkpoint", "data/journal", "sync")
APART = {
    "checkpoint/convert.py",
    "checkpoint/torch_dist.py",
}

# Functions of other files that are apart for the same reason.
APART_FUNCTIONS = {"write_safetensors"}

# Functions that change the disk, by the last part of what is called; `os.` ones by their whole name.
_OS = {
    f"os.{name}"
    for name in (
        "open",
        "write",
        "rename",
        "renames",
        "replace",
        "remove",
        "unlink",
        "rmdir",
        "removedirs",
        "mkdir",
        "makedirs",
        "link",
        "symlink",
        "truncate",
        "ftruncate",
        "fsync",
        "fdatasync",
        "sync",
        "chmod",
        "fchmod",
        "utime",
        "mkfifo",
    )
}
_METHODS = {
    "unlink",
    "rename",
    "rmdir",
    "mkdir",
    "touch",
    "write_text",
    "write_bytes",
    "symlink_to",
    "hardlink_to",
    "chmod",
}
_WRITERS = {"save_file", "torch.save", "dist_checkpointing.save", "np.save", "numpy.save", "json.dump"}
_READING_SHUTIL = {"shutil.disk_usage", "shutil.which"}
# Functions of `base/atomic_io.py` whose name argument is optional elsewhere, and required here.
_NAMED = {"write_whole", "atomic_write_text", "atomic_write_json", "sync"}


def check_file_operations(root: Path) -> list[Broken]:
    """Disk operations outside a `atomic_io.operation(...)`, and uses of `base/atomic_io.py` without a name."""
    broken = []
    for folder in FOLDERS:
        for path in sorted((root / "gspo_mega" / folder).rglob("*.py")):
            if path.relative_to(root / "gspo_mega").as_posix() not in APART:
                where = path.relative_to(root).as_posix()
                broken += [
                    Broken(where, line, rule)
                    for line, rule in _outside(ast.parse(path.read_text(encoding="utf-8")), False)
                ]
    return broken


def _outside(node: ast.AST, inside: bool) -> list[tuple[int, str]]:
    """(line, rule) of what is below `node`; `inside`: under a `with atomic_io.operation(...)`."""
    found = []
    if isinstance(node, ast.FunctionDef) and node.name in APART_FUNCTIONS:
        return found
    if isinstance(node, ast.With):
        inside = inside or any(_called(item.context_expr) == "atomic_io.operation" for item in node.items)
    if isinstance(node, ast.Call):
        name, last = _called(node), _called(node).rpartition(".")[2]
        if _changes_the_disk(node) and not inside:
            found.append((node.lineno, f"{name} changes the disk outside a atomic_io.operation"))
        if (
            last in _NAMED
            and (name == last or name.startswith("atomic_io."))
            and not any(key.arg == "at" for key in node.keywords)
        ):
            found.append((node.lineno, f"{name} without at=, the operation's name in failpoints"))
    for child in ast.iter_child_nodes(node):
        # A function that is defined in the block runs later, perhaps outside it.
        deeper = inside and not isinstance(child, (ast.FunctionDef, ast.Lambda))
        found += _outside(child, deeper)
    return found


def _called(node: ast.expr) -> str:
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def _changes_the_disk(call: ast.Call) -> bool:
    name, last = _called(call), _called(call).rpartition(".")[2]
    if name == "open" or (last == "open" and name != "os.open"):
        mode = next((key.value for key in call.keywords if key.arg == "mode"), None)
        # open(path, mode), path.open(mode)
        mode = mode or next(iter(call.args[1:2] if name == "open" else call.args[:1]), None)
        return mode is not None and not (isinstance(mode, ast.Constant) and str(mode.value).strip("bt") == "r")
    if name.startswith("shutil."):
        return name not in _READING_SHUTIL
    if (
        name.startswith("tempfile.")
        or name in _OS
        or name in _WRITERS
        or (last in _METHODS and not name.startswith("atomic_io."))
    ):
        return True
    # Path.replace has one argument, str.replace two.
    return last == "replace" and name != "dataclasses.replace" and len(call.args) + len(call.keywords) == 1
