"""Ids of the Hugging Face hub in a configuration: each is replaced by its folder in this machine's cache.

The schema marks the keys (`section.py`). A path that exists is never taken for an id. An id that is not in the cache
stays as it is, and whoever reads it says so. The resolved configuration has the folder, whose name is the commit. A run
is continued with that folder only, so an id whose branch has moved in the cache is refused then, as any other path is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import FolderError
from gspo_mega.base.hub import find_model, find_rows, is_hub_id
from gspo_mega.config.schema import Config
from gspo_mega.config.schema.section import Section, hub_kind

Key = tuple[str | int, ...]


def resolve_hub_ids(config: Config, command: str | None) -> tuple[Config, list[tuple[str, str]]]:
    """The configuration with folders in place of ids, and (dotted key, problem) of each that cannot be had.

    `command`: None only plans, and downloads no weights.
    """
    problems: list[tuple[str, str]] = []
    for key, text, kind in _named(config):
        value = text.rstrip("/")
        if not _may_be_id(value):
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
    """(key, value, kind) of every key that may have an id and has a value."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        kind = hub_kind(field)
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
