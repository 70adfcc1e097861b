"""What a run was started with: the project's commit and the versions of the packages it stands on, as text."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

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


def versions_text() -> str:
    """A line a package of this process's environment, `-` for one that is not there."""
    lines = [f"python {platform.python_version()}", f"commit {_commit()}"]
    return "\n".join([*lines, *(f"{package} {_version(package)}" for package in PACKAGES)]) + "\n"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def _commit() -> str:
    """The commit of the sources this process runs, marked when they differ from it; `-` where they are no
    repository.
    """
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "-"
    return done.stdout.strip() or "-"
