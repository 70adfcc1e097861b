"""Where the files and folders are that a configuration reads.

The schema marks the keys (`section.py`). `find_inputs` makes a file usable from any working directory: a relative path
that is not there is looked for next to the YAML file. `resolve_hub_ids` replaces ids of the Hugging Face hub by their
folders in this machine's cache. A path that exists is never taken for an id. An id that is not in the cache
stays as it is, and whoever reads it says so. The resolved configuration has the folder, whose name is the commit. A run
is continued with that folder only, so an id whose branch has moved in the cache is refused then, as any other path is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import FolderError
from gspo_mega.base.hub import find_model, find_rows, is_hub_id
from gspo_mega.config.schema import Config
from gspo_mega.config.schema.section import Section, input_kind

Key = tuple[str | int, ...]


def find_inputs(config: Config, file: Path, is_in_file: Callable[[Key], bool]) -> tuple[Config, list[str]]:
    """Return the configuration with the paths of its inputs, and a notice of each that is not in the working directory.

    A relative path starts in the working directory. If nothing is there and the value is in the YAML `file` itself
    (`is_in_file` of its key), it starts in the file's folder, or else in the folder above, where shipped configurations
    have their shapes. A path that is in none of them stays as it is. `~/` is the home folder, also in `run.dir`.
    """
    notices = []
    for key, text, _ in [*_named(config), (("run", "dir"), config.run.dir, "output")]:
        if text.startswith("~/"):
            config = _with(config, key, str(Path(text).expanduser()))
        elif key != ("run", "dir") and not Path(text).is_absolute() and not Path(text).exists() and is_in_file(key):
            folder = file.absolute().parent
            found = next((p for p in (folder / text, folder.parent / text) if p.exists()), None)
            if found is not None:
                config = _with(config, key, str(found))
                notices.append(f"{'.'.join(map(str, key))}: {text} is not in {Path.cwd()}; {found} is read")
    return config, notices


def resolve_hub_ids(config: Config, command: str | None) -> tuple[Config, list[tuple[str, str]]]:
    """The configuration with folders in place of ids, and (dotted key, problem) of each that cannot be had.

    `command`: None only plans, and downloads no weights.
    """
    problems: list[tuple[str, str]] = []
    for key, text, kind in _named(config):
        value = text.rstrip("/")
        if kind == "local" or not _may_be_id(value):
            continue
        try:
            if kind == "model":
                # A revision is one of this model, and of no other that the configuration names.
                revision = config.model.revision if key == ("model", "path") else None
                found = find_model(value, revision, needs_weights=command is not None)
            else:
                found = find_rows(value, config.data.revision)
        except FolderError as error:
            problems.append((".".join(map(str, key)), str(error)))
            continue
        if found is not None:
            config = _with(config, key, str(found))
    return config, problems


def _may_be_id(value: str) -> bool:
    return is_hub_id("/".join(value.split("/")[:2])) and not Path(value).exists()


def _named(section: Section, key: Key = ()) -> Iterator[tuple[Key, str, str]]:
    """(key, value, kind) of every key that names an input and has a value."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        kind = input_kind(field)
        if kind is not None and isinstance(value, str):
            yield (*key, name), value, kind
        elif isinstance(value, Section):
            yield from _named(value, (*key, name))
        elif isinstance(value, tuple):
            for place, one in enumerate(value):
                if isinstance(one, Section):
                    yield from _named(one, (*key, name, place))


def _with(section: Any, key: Key, value: str) -> Any:
    """`section`, or a tuple of sections, with another value of a key inside."""
    if not key:
        return value
    if isinstance(key[0], int):
        return tuple(_with(one, key[1:], value) if place == key[0] else one for place, one in enumerate(section))
    return section.model_copy(update={key[0]: _with(getattr(section, key[0]), key[1:], value)})
