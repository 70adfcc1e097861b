"""Moves Python modules of this project and rewrites everything that names them: imports, dotted names in strings and
documentation, paths of files.

    python tools/move_modules.py STAGE [--table tools/moves.txt]
    python tools/move_modules.py texts FILE ...     only what these files say, for pages of a branch that has no code

Each line of the table is `room/file: old.module ...`. These modules, written without the leading `gspo_mega.`, become
that file. Stages keep `git log --follow` useful, because a file that only moves keeps its history:

    rooms    every module moves to the room of its line and keeps its file name
    merge    the modules of a line become one file, in the order of the line
    names    classes and functions get the names of tools/renames.txt

To carry over a branch that was begun before the move, run the stages on it with a commit after each, then merge it. A
module that is not there is skipped. The script stops, and changes nothing, if merging modules would give one name two
meanings; `RENAMED` says what such a name becomes. Standard library only.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "gspo_mega"
# Stands after the package's name in what is written already: one move's source may be another's target.
DONE = "\x00"
TEXTS = ("*.md", "*.py", "*.sh", "*.toml", "*.yaml", "*.yml", "*.json", "*.txt", "*.cfg", "*.sbatch", "run")
SKIPPED = ("tools/moves.txt", "tools/move_modules.py", "CHANGELOG.md")

# (module of the table, name) -> the name that it gets where modules are merged.
RENAMED: dict[tuple[str, str], str] = {
    ("agents.wire_messages", "_FIELDS"): "_MESSAGE_FIELDS",
    ("base.sglang_release", "_release"): "_parsed_release",
    ("checkpoint.quantized", "is_quantized"): "is_fp8_parameter",
    ("cli.inspect_tree", "_row"): "_turn_row",
    ("cli.inspect_tree", "_versions"): "_turn_versions",
    ("cli.status_facts", "_reward_models"): "_reward_model_facts",
    ("cli.status_facts", "_servers"): "_server_facts",
    ("cli.status_facts", "_state"): "_state_fact",
    ("cli.status_facts", "_text"): "_text_fact",
    ("cpu.sglang_cpu_invariant", "layers_forward"): "invariant_layers_forward",
    ("cpu.te_activations", "_result"): "_activation_result",
    ("launcher.reward_trial", "_tried"): "_reward_tried",
    ("report.difference_causes", "_described"): "_cause_described",
    ("rollout.server.drain", "_POLL_SECONDS"): "_DRAIN_POLL_SECONDS",
    ("train.publish_pause", "_POLL_SECONDS"): "_OPEN_REQUESTS_POLL_SECONDS",
    ("train.rank_log", "logger"): "console_logger",
    ("train.routing_report", "_total"): "_routing_total",
    ("verify.mismatch.advice", "_blocks"): "_block_advice",
    ("verify.simulate.fit_rates", "_SKIPPED"): "_SKIPPED_STEPS",
}


def read_table(path: Path) -> dict[str, list[str]]:
    """{target module: source modules}, all with the package's name."""
    table: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            target, sources = line.split(":")
            table[f"{PACKAGE}.{target.strip().replace('/', '.')}"] = [f"{PACKAGE}.{name}" for name in sources.split()]
    return table


def stage_of_rooms(table: dict[str, list[str]]) -> dict[str, str]:
    """Every module to the room of its line, under its own file name."""
    moved = {}
    for target, sources in table.items():
        for source in sources:
            room = target.rpartition(".")[0]
            stem = source.rpartition(".")[2]
            moved[source] = target if len(sources) == 1 and target.endswith("__init__") else f"{room}.{stem}"
    return {old: new for old, new in moved.items() if old not in PACKAGES}


# What a package of before the move is called in texts that name no module of it.
ROOMS = {
    "batch_invariant": "cpu",
    "batches": "train",
    "budget": "verify.mismatch",
    "certify": "verify.certify",
    "commands": "cli",
    "compare": "verify.compare",
    "doctor": "launcher",
    "engine.cpu": "cpu",
    "episodes": "agents",
    "journal": "data.journal",
    "model": "models",
    "quantization": "algorithm",
    "reward": "rewards",
    "runtime": "train",
    "simulate": "verify.simulate",
    "weights": "checkpoint",
}
# Packages whose own file is a module of the table: (old package) -> (package that it becomes).
PACKAGES = {"gspo_mega.config.schema": "gspo_mega.config.schema", "gspo_mega.engine.cpu": "gspo_mega.cpu.backend"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["rooms", "merge", "names", "texts"])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--table", type=Path, default=ROOT / "tools/moves.txt")
    arguments = parser.parse_args()
    table = read_table(arguments.table)
    rooms = stage_of_rooms(table)
    if arguments.stage == "names":
        rename(ROOT / "tools/renames.txt")
        return 0
    if arguments.stage == "texts":
        at_once = {old: target for target, sources in table.items() for old in sources}
        for file in arguments.files:
            text = rewrite_text(file.read_text(), file.resolve(), at_once)
            file.write_text(text.replace(DONE, ""))
        return 0
    if arguments.stage == "rooms":
        moves = {old: new for old, new in rooms.items() if old != new and file_of(old).exists()}
        for old, new in moves.items():
            target = file_of(new)
            target.parent.mkdir(parents=True, exist_ok=True)
            for folder in [target.parent, *target.parent.parents]:
                if folder == ROOT / PACKAGE:
                    break
                (folder / "__init__.py").touch()
            subprocess.run(["git", "mv", str(file_of(old)), str(target)], check=True, cwd=ROOT)
        rewrite_tree({**moves, **{old: new for old, new in PACKAGES.items() if old != new}}, {})
        return 0
    merged = {}
    for target, sources in table.items():
        present = [rooms.get(source, source) for source in sources if source not in PACKAGES]
        present = [source for source in present if file_of(source).exists()]
        if present and present != [target]:
            merged[target] = present
    merge_all(merged)
    return 0


def rename(path: Path) -> None:
    """Classes and functions that get another name, from lines of `room/file old new`."""
    renamed = {}
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            file, old, new = line.split()
            module = f"{PACKAGE}.{file.replace('/', '.')}"
            if re.search(rf"^(?:class|def|async def) {old}\b", file_of(module).read_text(), re.MULTILINE):
                renamed[module, old] = new
    rewrite_tree({module: module for module, _ in renamed}, renamed)


def file_of(module: str) -> Path:
    return (ROOT / module.replace(".", "/")).with_suffix(".py")


# --- merging ----------------------------------------------------------------------------------------------------------


class Source:
    """One module that is merged: its parts, and what its names mean."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.text = file_of(module).read_text()
        self.tree = ast.parse(self.text)
        self.defined = defined_names(self.tree)
        self.docstring = ast.get_docstring(self.tree, clean=False) or ""

    def definition(self, name: str) -> str:
        for node in self.tree.body:
            if name in names_of_statement(node):
                return ast.unparse(node)
        return ""


def defined_names(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in tree.body:
        found |= names_of_statement(node)
    return found


def names_of_statement(node: ast.stmt) -> set[str]:
    """Names that a statement at the top of a module defines, without those that it imports."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.Assign):
        stored = [n for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
        return {n.id for n in stored if isinstance(n.ctx, ast.Store)}
    if isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        return {node.target.id} if isinstance(node.target, ast.Name) else set()
    if isinstance(node, (ast.If, ast.Try, ast.With, ast.For)):
        return {
            name
            for part in ast.iter_child_nodes(node)
            if isinstance(part, ast.stmt)
            for name in names_of_statement(part)
        }
    return set()


def merge_all(merged: dict[str, list[str]]) -> None:
    target_of = {source: target for target, sources in merged.items() for source in sources}
    sources = {module: Source(module) for module in target_of}
    renamed: dict[tuple[str, str], str] = {}
    problems: list[str] = []
    for target, modules in merged.items():
        meaning: dict[str, Source] = {}
        for module in modules:
            source = sources[module]
            for name in sorted(source.defined):
                wanted = RENAMED.get((short(module), name))
                if wanted is not None:
                    renamed[module, name] = wanted
                elif name in meaning and meaning[name].definition(name) != source.definition(name):
                    problems.append(f"{short(target)}: {name} of {short(meaning[name].module)} and {short(module)}")
                final = wanted or name
                meaning.setdefault(final, source)
        # Imported names that mean something else in the merged file.
        bound: dict[str, tuple[str, str]] = {}
        for module in modules:
            for name, origin in imported_names(sources[module].tree).items():
                base, attribute = origin
                if target_of.get(base) == target or target_of.get(f"{base}.{attribute}") == target:
                    continue
                origin = (target_of.get(base, base), attribute)
                if name in bound and not is_same_origin(bound[name], origin):
                    problems.append(f"{short(target)}: {name} imported as {bound[name]} and {origin} ({short(module)})")
                bound[name] = origin
                if name in meaning:
                    problems.append(
                        f"{short(target)}: {name} imported by {short(module)} from {base}, defined by"
                        f" {short(meaning[name].module)}"
                    )
        for module in modules:
            used = {n.id for n in ast.walk(sources[module].tree) if isinstance(n, ast.Name)}
            for name in (set(meaning) - sources[module].defined) & set(dir(builtins)) & used:
                problems.append(f"{short(target)}: {name} is built in for {short(module)}")
    if problems:
        sys.exit("\n".join(sorted(set(problems))))
    texts = {}
    for target, modules in merged.items():
        texts[target] = merged_text(target, [sources[m] for m in ordered(modules, sources)], target_of, renamed)
    old = [str(file_of(module)) for module in target_of]
    subprocess.run(["git", "rm", "-qf", *old], check=True, cwd=ROOT)
    for target in merged:
        file_of(target).parent.mkdir(exist_ok=True)
        file_of(target).write_text(texts[target])
    subprocess.run(["git", "add", *(str(file_of(target)) for target in merged)], check=True, cwd=ROOT)
    rewrite_tree(target_of, renamed, skipped={file_of(target) for target in merged})


def is_same_origin(first: tuple[str, str], second: tuple[str, str]) -> bool:
    """A package hands on names of its modules."""
    bases = sorted((first[0], second[0]), key=len)
    return first[1] == second[1] and (bases[0] == bases[1] or bases[1].startswith(bases[0] + "."))


def short(module: str) -> str:
    return module.removeprefix(f"{PACKAGE}.")


def imported_names(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """{local name: (module, attribute or '')} of the imports at the top of a module."""
    found = {}
    for node in tree.body:
        nodes = getattr(node, "body", []) if is_type_checking(node) else [node]
        for statement in nodes:
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    found[alias.asname or alias.name] = (statement.module or "", alias.name)
            elif isinstance(statement, ast.Import):
                for alias in statement.names:
                    found[alias.asname or alias.name.split(".")[0]] = (
                        (alias.name, "") if alias.asname else (alias.name.split(".")[0], "")
                    )
    return found


def is_type_checking(node: ast.stmt) -> bool:
    """Whether this is `if TYPE_CHECKING:` with nothing but imports in it."""
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
        and all(isinstance(part, (ast.Import, ast.ImportFrom)) for part in node.body)
    )


def ordered(modules: list[str], sources: dict[str, Source]) -> list[str]:
    """As listed, but each module after those that it imports when it is loaded."""
    needs = {}
    for module in modules:
        origins = imported_names(sources[module].tree).values()
        needs[module] = {m for base, attribute in origins for m in (base, f"{base}.{attribute}") if m in modules}
    done: list[str] = []
    rest = list(modules)
    while rest:
        ready = next((m for m in rest if needs[m] <= {*done, m}), rest[0])
        done.append(ready)
        rest.remove(ready)
    return done


def merged_text(
    target: str, sources: list[Source], target_of: dict[str, str], renamed: dict[tuple[str, str], str]
) -> str:
    imports: list[str] = []
    checking: list[str] = []
    bodies: list[str] = []
    seen: set[str] = set()
    docstring = sources[-1].docstring if len(sources) > 1 else sources[0].docstring
    more = [source.docstring.strip() for source in sources[:-1] if source.docstring.strip()]
    for source in sources:
        text = rewrite_python(source.text, source.module, target, target_of, renamed)
        lines = text.splitlines(keepends=True)
        tree = ast.parse(text.replace(DONE, ""))
        position = 0
        parts: list[str] = []
        earlier = set(seen)
        for node in tree.body:
            start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            before, statement = "".join(lines[position : start - 1]), "".join(lines[start - 1 : node.end_lineno])
            position = node.end_lineno or 0
            if node is tree.body[0] and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                continue
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                imports.append(before.strip("\n") + ("\n" if before.strip() else "") + statement)
            elif is_type_checking(node):
                checking.extend(ast.unparse(part) for part in getattr(node, "body", ()))
            else:
                names = names_of_statement(node)
                if names and names <= earlier and not isinstance(node, ast.AugAssign):
                    continue  # the same definition in an earlier module
                seen |= names
                parts.append(before + statement)
        parts.append("".join(lines[position:]))
        bodies.append("".join(parts).strip("\n"))
    head = '"""' + docstring.rstrip()
    if more:
        head += "\n\n" + "\n\n".join(more)
    head = head.rstrip() + ("\n" if "\n" in head else "") + '"""\n\nfrom __future__ import annotations\n\n'
    text = head + "".join(statement if statement.endswith("\n") else statement + "\n" for statement in imports)
    if checking:
        text += "\nif TYPE_CHECKING:\n" + "".join(f"    {line}\n" for line in dict.fromkeys(checking))
    return text + "\n\n" + "\n\n\n".join(body for body in bodies if body.strip()) + "\n"


# --- rewriting --------------------------------------------------------------------------------------------------------


def rewrite_tree(
    target_of: dict[str, str], renamed: dict[tuple[str, str], str], skipped: set[Path] | None = None
) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *TEXTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    for name in sorted({name for name in listed if name}):
        path = ROOT / name
        if name in SKIPPED or not path.is_file() or path.is_symlink():
            continue
        text = before = path.read_text(encoding="utf-8", errors="surrogateescape")
        if path.suffix == ".py" and path not in (skipped or ()):
            with contextlib.suppress(SyntaxError):  # a file that is wrong on purpose
                text = rewrite_python(text, module_of(path), module_of(path), target_of, renamed)
        text = rewrite_text(text, path, target_of)
        text = rename_in_text(text, path, renamed)
        text = text.replace(DONE, "")
        if text != before:
            path.write_text(text, encoding="utf-8", errors="surrogateescape")


def module_of(path: Path) -> str:
    module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    return module.removesuffix(".__init__")


def rewrite_text(text: str, path: Path, target_of: dict[str, str]) -> str:
    """Dotted names, paths, and file names in backticks."""
    target_of = {old: new for old, new in target_of.items() if old not in PACKAGES}
    if not target_of:
        return text
    dotted = sorted(target_of, key=len, reverse=True)
    pattern = re.compile(r"(?<![\w./])(" + "|".join(map(re.escape, dotted)) + r")(?![\w])")
    text = pattern.sub(lambda found: done(target_of[found[1]].removesuffix(".__init__")), text)
    files = {f"{old.replace('.', '/')}.py": f"{new.replace('.', '/')}.py" for old, new in target_of.items()}
    pattern = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, sorted(files, key=len, reverse=True))) + r")(?!\w)")
    text = pattern.sub(lambda found: done(files[found[1]]), text)
    if path.suffix != ".py" and path.suffix != ".md":
        return text
    if any(old.split(".")[1] in ROOMS for old in target_of):
        rooms = "|".join(re.escape(room) for room in sorted(ROOMS, key=len, reverse=True))
        pattern = re.compile(rf"(?<![\w./])({PACKAGE}\.)({rooms})(?!\w)")
        text = pattern.sub(lambda found: found[1] + ROOMS[found[2]], text)
        pattern = re.compile(rf"(?<![\w.])({PACKAGE}/)({rooms.replace(chr(92) + '.', '/')})(?![\w.])")
        text = pattern.sub(lambda found: found[1] + ROOMS[found[2].replace("/", ".")].replace(".", "/"), text)
    # `room/file.py` and `file.py`, as docstrings and pages write them.
    here = path.parent.relative_to(ROOT).as_posix().replace("/", ".") if PACKAGE in path.parts else ""
    named: dict[str, str] = {}
    for old, new in target_of.items():
        inside, stem = short(old).replace(".", "/") + ".py", old.rpartition(".")[2] + ".py"
        goal = short(new).replace(".", "/") + ".py"
        named[inside] = goal
        same_room = new.rpartition(".")[0] == here
        named[stem] = new.rpartition(".")[2] + ".py" if same_room else goal
        if old.rpartition(".")[0] == new.rpartition(".")[0] and not same_room:
            named[stem] = new.rpartition(".")[2] + ".py"
    pattern = re.compile(r"`(" + "|".join(map(re.escape, sorted(named, key=len, reverse=True))) + r")`")
    text = pattern.sub(lambda found: f"`{named[found[1]]}`", text)
    quoted = [name for name in named if "/" in name]
    pattern = re.compile(r"([\"'])(" + "|".join(map(re.escape, sorted(quoted, key=len, reverse=True))) + r")\1")
    return pattern.sub(lambda found: f"{found[1]}{named[found[2]]}{found[1]}", text)


def rename_in_text(text: str, path: Path, renamed: dict[tuple[str, str], str]) -> str:
    """`file.py::Old` anywhere; `Old` in backticks where the file defines it or imports the new name."""
    for (module, old), new in renamed.items():
        text = re.sub(rf"({re.escape(short(module).replace('.', '/'))}\.py::){old}\b", rf"\g<1>{new}", text)
        if path.suffix == ".py" and (path == file_of(module) or re.search(rf"^from .*\b{new}\b", text, re.MULTILINE)):
            text = re.sub(rf"`{old}\b", f"`{new}", text)
    return text


def done(name: str) -> str:
    return name.replace(PACKAGE, PACKAGE + DONE, 1)


class Edit:
    def __init__(self, text: str) -> None:
        self.lines = text.splitlines(keepends=True)
        self.offsets = [0]
        for line in self.lines:
            self.offsets.append(self.offsets[-1] + len(line.encode()))
        self.data = text.encode()
        self.changes: list[tuple[int, int, bytes]] = []

    def place(self, line: int, column: int) -> int:
        return self.offsets[line - 1] + column

    def replace(self, node: ast.AST, new: str) -> None:
        start = self.place(node.lineno, node.col_offset)  # type: ignore[attr-defined]
        end = self.place(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
        self.changes.append((start, end, new.encode()))

    def result(self) -> str:
        data = self.data
        for start, end, new in sorted(set(self.changes), reverse=True):
            data = data[:start] + new + data[end:]
        return data.decode()


def rewrite_python(
    text: str, module: str, target: str, target_of: dict[str, str], renamed: dict[tuple[str, str], str]
) -> str:
    """The text of `module`, which becomes `target`, with the imports of `target_of` and the names of `renamed`."""
    tree = ast.parse(text)
    edit = Edit(text)
    names: dict[str, str] = {name: new for (where, name), new in renamed.items() if where == module}
    attributes: dict[str, tuple[str | None, str]] = {}  # local name of a module -> (its new local name, old module)
    bound = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {
        a.arg for a in ast.walk(tree) if isinstance(a, ast.arg)
    }
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE and not node.level:
            lines: dict[str, list[str]] = defaultdict(list)
            changed = False
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                local = alias.asname or alias.name
                if whole in target_of:  # a module
                    changed = True
                    new = target_of[whole]
                    if new == target:
                        attributes[local] = (None, whole)
                        continue
                    parent, _, stem = new.removesuffix(".__init__").rpartition(".")
                    if alias.asname:
                        lines[parent].append(f"{stem} as {alias.asname}")
                        attributes[local] = (alias.asname, whole)
                    elif stem in bound - {local} and stem != local:
                        lines[parent].append(f"{stem} as {local}")
                        attributes[local] = (local, whole)
                    else:
                        lines[parent].append(stem)
                        attributes[local] = (stem, whole)
                elif node.module in target_of:
                    new = target_of[node.module]
                    name = renamed.get((node.module, alias.name), alias.name)
                    changed = changed or new != node.module or name != alias.name
                    if new == target:
                        if local != name:
                            names[local] = name
                        changed = True
                        continue
                    asname = alias.asname
                    if name != alias.name and asname is None:
                        names[local] = name
                    lines[new.removesuffix(".__init__")].append(name + (f" as {asname}" if asname else ""))
                else:
                    lines[node.module or ""].append(alias.name + (f" as {alias.asname}" if alias.asname else ""))
            if changed:
                indent = " " * node.col_offset
                statement = f"\n{indent}".join(
                    f"from {done(m)} import {', '.join(sorted(n))}" for m, n in lines.items()
                )
                if not statement:
                    blocks = [getattr(parents[node], field, None) for field in ("body", "orelse", "finalbody")]
                    body = next((block for block in blocks if block and node in block), [node])
                    statement = "pass" if len(body) == 1 and not isinstance(parents[node], ast.Module) else ""
                edit.replace(node, statement)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in target_of:
                    edit.replace(alias, done(target_of[alias.name]) + (f" as {alias.asname}" if alias.asname else ""))
                    if alias.asname:
                        attributes[alias.asname] = (alias.asname, alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in attributes:
            local, old = attributes[node.value.id]
            name = renamed.get((old, node.attr), node.attr)
            if local is None:
                edit.replace(node, name)
            elif local != node.value.id or name != node.attr:
                edit.replace(node.value, local)
                if name != node.attr:
                    end = edit.place(node.end_lineno or 0, node.end_col_offset or 0)
                    edit.changes.append((end - len(node.attr.encode()), end, name.encode()))
        elif isinstance(node, ast.Name):
            if node.id in names:
                edit.replace(node, names[node.id])
            elif node.id in attributes and not isinstance(parents[node], ast.Attribute):
                local, old = attributes[node.id]
                if local is None:
                    print(f"by hand: {module}:{node.lineno}: the module {old} is used as an object", file=sys.stderr)
                elif local != node.id:
                    edit.replace(node, local)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name in names:
            if isinstance(parents[node], ast.Module):
                line = edit.lines[node.lineno - 1]
                word = re.search(rf"\b{node.name}\b", line)
                assert word is not None
                start = edit.place(node.lineno, len(line[: word.start()].encode()))
                edit.changes.append((start, start + len(node.name.encode()), names[node.name].encode()))
        elif isinstance(node, ast.Global):
            for name in node.names:
                if name in names:
                    print(f"by hand: {module}:{node.lineno}: global {name}", file=sys.stderr)
    return edit.result()


if __name__ == "__main__":
    sys.exit(main())
