"""The versions of the weights on disk (`publish.method: disk`).

`PublishedVersions` is their folder: `v<8 digits>` has the weights of a version, `v<8 digits>.delta` what changed in one
(`delta.py`), and `current.json` names the committed version from which a server may start. That is the newest one
with all weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from gspo_mega.base import atomic_io
from gspo_mega.base.errors import PublishError
from gspo_mega.base.run_folder import CURRENT_WEIGHTS_NAME, weight_version_folder
from gspo_mega.base.untrusted import read_json_file

_VERSION = re.compile(r"v(\d{8})")
DELTA_SUFFIX = ".delta"
_DELTA = re.compile(r"v\d{8}\.delta")
_UNFINISHED = re.compile(r"v\d{8}(\.delta)?\.(writing|replaced)|\.v\d{8}(\.\w+)*\.removed")


@dataclass(frozen=True)
class CommittedVersion:
    """The version that `current.json` names, and its folder."""

    weight_version: int
    path: Path


class PublishedVersions:
    """The versions in one folder that all nodes see. Only rank 0 commits and prunes."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()

    def path(self, weight_version: int) -> Path:
        """Return the folder of a version, whether it exists or not."""
        return weight_version_folder(self.folder, weight_version)

    def delta_path(self, weight_version: int) -> Path:
        """Return the folder of what changed in a version. No server starts from it, so it is never the current one."""
        path = self.path(weight_version)
        return path.with_name(path.name + DELTA_SUFFIX)

    def current(self) -> CommittedVersion | None:
        """Return the committed version, or None before the first. Raises PublishError if the file cannot be read."""
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
            atomic_io.atomic_write_json(
                file, {"weight_version": weight_version, "path": str(path)}, at="publish.commit"
            )
        except OSError as error:
            raise PublishError(f"{file}: version {weight_version} cannot be committed: {error}") from error

    def prune(self, keep_last: int, held: Collection[int] = ()) -> list[Path]:
        """Remove all but the newest `keep_last` versions, and the remains of unfinished writes.

        The current version and those of `held`, which servers are loading, always stay. Of the folders with changes the
        newest `keep_last` stay, too. Returns the removed folders.
        Raises PublishError if a folder cannot be removed.
        """
        current = self.current()
        found = sorted(path for path in self.folder.iterdir() if _VERSION.fullmatch(path.name))
        kept = {self.path(version) for version in held} | ({current.path} if current is not None else set())
        old = [path for path in found[:-keep_last] if path not in kept]
        deltas = sorted(path for path in self.folder.iterdir() if _DELTA.fullmatch(path.name))
        old += deltas[:-keep_last]
        old += [path for path in self.folder.iterdir() if _UNFINISHED.fullmatch(path.name)]
        try:
            for path in old:
                atomic_io.remove_tree(path, at="publish.prune")
        except OSError as error:
            raise PublishError(f"{self.folder}: an old version cannot be removed: {error}") from error
        return old
