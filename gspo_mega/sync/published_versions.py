"""The published versions of a run: folders `v<8 digits>` and `current.json`, which names the committed one.

Owns that folder's layout and which versions it keeps. `checkpoint/hf_export.py` writes a version's content.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from gspo_mega.base import durable
from gspo_mega.base.errors import PublishError
from gspo_mega.base.guarded_files import read_json_file
from gspo_mega.base.run_folder import CURRENT_WEIGHTS_NAME, weight_version_folder

_VERSION = re.compile(r"v(\d{8})")
_UNFINISHED = re.compile(r"v\d{8}\.(writing|replaced)|\.v\d{8}(\.\w+)?\.removed")


@dataclass(frozen=True)
class CommittedVersion:
    weight_version: int
    path: Path


class PublishedVersions:
    """The versions in one folder, visible to all nodes. Only rank 0 commits and prunes."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()

    def path(self, weight_version: int) -> Path:
        """The folder of a version, existing or not."""
        return weight_version_folder(self.folder, weight_version)

    def current(self) -> CommittedVersion | None:
        """The committed version, or None before the first. Raises PublishError if the file cannot be read."""
        file = self.folder / CURRENT_WEIGHTS_NAME
        try:
            value = read_json_file(file)
            return CommittedVersion(int(value["weight_version"]), Path(value["path"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PublishError(
                f"{file}: cannot be read ({error!r}); it must have weight_version and path of the committed weights"
            ) from error

    def commit(self, weight_version: int) -> None:
        """Make a complete version the current one, atomically. Raises PublishError if that fails."""
        path = self.path(weight_version)
        if not path.is_dir():
            raise PublishError(f"{path}: cannot be committed: there is no such folder")
        file = self.folder / CURRENT_WEIGHTS_NAME
        try:
            durable.atomic_write_json(file, {"weight_version": weight_version, "path": str(path)}, at="publish.commit")
        except OSError as error:
            raise PublishError(f"{file}: version {weight_version} cannot be committed: {error}") from error

    def prune(self, keep_last: int, held: Collection[int] = ()) -> list[Path]:
        """Remove all but the newest `keep_last` versions, and remains of unfinished writes; never the current version,
        nor those of `held`, which servers load.

        Returns the removed folders. Raises PublishError if a folder cannot be removed.
        """
        current = self.current()
        found = sorted(path for path in self.folder.iterdir() if _VERSION.fullmatch(path.name))
        kept = {self.path(version) for version in held} | ({current.path} if current is not None else set())
        old = [path for path in found[:-keep_last] if path not in kept]
        old += [path for path in self.folder.iterdir() if _UNFINISHED.fullmatch(path.name)]
        try:
            for path in old:
                durable.remove_tree(path, at="publish.prune")
        except OSError as error:
            raise PublishError(f"{self.folder}: an old version cannot be removed: {error}") from error
        return old
