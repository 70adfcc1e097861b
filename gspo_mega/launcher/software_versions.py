"""The software of a run: the project's commit and the versions of the packages that it uses."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

from gspo_mega.config.layer_library import wheel_folder

PACKAGES = (
    "gspo_mega",
    "torch",
    "megatron-core",
    "transformer-engine",
    "sglang",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pydantic",
    "aiohttp",
)
_GIT_SECONDS = 30.0


def versions_text() -> str:
    """One line per package of this process's environment, with `-` for a missing one."""
    lines = [f"python {platform.python_version()}", f"commit {commit() or '-'}"]
    return "\n".join([*lines, *(f"{package} {version or '-'}" for package, version in versions().items())]) + "\n"


def versions() -> dict[str, str | None]:
    """The version of each package in this process's environment; None where it is missing."""
    return {package: _version(package) for package in PACKAGES}


def commit(folder: Path | None = None) -> str | None:
    """The commit of this process's sources, `-dirty` behind it where they differ from it; None where they are no part
    of a repository, as an installed package is. `folder`: another package's, with an `__init__.py`.
    """
    folder = folder or Path(__file__).parents[1]
    # An environment may lie inside somebody's repository, whose commit says nothing of what is installed there.
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=40")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        pass
    if package == "transformer-engine":  # without a GPU it lies where no import path leads
        for found in metadata.distributions(name=package, path=[str(wheel_folder())]):
            return found.version
    return None


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
