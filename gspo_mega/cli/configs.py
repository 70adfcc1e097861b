"""List the configurations that come with the package, or print one to start from.

    gspo-mega configs                                     their names and what each is for
    gspo-mega configs qwen3_06b_1gpu > my_run.yaml        one of them; paths of model shapes become absolute
    gspo-mega plan my_run.yaml                            then change it, and see what it would take

A copy's first line names the JSON schema, from which an editor completes keys.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import textwrap
from importlib import metadata
from pathlib import Path

from gspo_mega.base.errors import ConfigError, FolderError

_IN_SOURCES = Path(__file__).resolve().parents[2] / "configs"
_INSTALLED = "share/gspo_mega/configs/schema.json"
_SCHEMA_LINE = "# yaml-language-server: $schema="
_MODELS = "configs/models/"
_WIDTH = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this one; without it, all are listed")


def run(args: argparse.Namespace) -> int:
    folder = shipped_folder()
    names = sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))
    if args.name is None:
        width = max(map(len, names))
        for name in names:
            what = textwrap.shorten(purpose(_read(folder, name)), _WIDTH - width, placeholder=" ...")
            print(f"{name:<{width}}  {what}")
        return 0
    wanted = args.name.removesuffix(".yaml")
    if wanted not in names:
        near = difflib.get_close_matches(wanted, names, 1)
        hint = f"did you mean {near[0]}?" if near else f"valid: {', '.join(names)}"
        raise ConfigError(f"gspo-mega configs: no configuration is named {args.name!r}; {hint}")
    print(independent(_read(folder, wanted), folder), end="")
    return 0


def shipped_folder() -> Path:
    """The folder of the configurations: the repository's, or that of an installed wheel. Raises FolderError."""
    if (_IN_SOURCES / "schema.json").is_file():
        return _IN_SOURCES
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files("gspo_mega") or ():
            if str(file).endswith(_INSTALLED):
                return Path(str(file.locate())).resolve().parent
    raise FolderError(f"gspo-mega configs: {_IN_SOURCES} is not there, and no installed wheel has its configurations")


def purpose(text: str) -> str:
    """The first paragraph of a configuration's comment, in one line."""
    lines = [line.removeprefix("#").strip() for line in text.splitlines()[1:] if not line.startswith(_SCHEMA_LINE)]
    first = next((index for index, line in enumerate(lines) if line), 0)
    end = next((index for index in range(first, len(lines)) if not lines[index] or "gspo-mega " in lines[index]), None)
    return " ".join(lines[first:end])


def independent(text: str, folder: Path) -> str:
    """The configuration for any working directory: with absolute paths to what comes with it."""
    first, _, rest = text.partition("\n")
    lines = [
        line if line.lstrip().startswith("#") else line.replace(_MODELS, f"{folder}/models/")
        for line in rest.split("\n")
    ]
    return "\n".join([f"{_SCHEMA_LINE}{folder / 'schema.json'}" if first.startswith(_SCHEMA_LINE) else first, *lines])


def _read(folder: Path, name: str) -> str:
    return (folder / f"{name}.yaml").read_text(encoding="utf-8")
