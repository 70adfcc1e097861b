"""The software of a run as text: the project's commit and the versions of the packages that it uses."""

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
    """One line per package of this process's environment, with `-` for a missing one."""
    lines = [f"python {platform.python_version()}", f"commit {_commit()}"]
    return "\n".join([*lines, *(f"{package} {_version(package)}" for package in PACKAGES)]) + "\n"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def _commit() -> str:
    """The commit of this process's sources, marked when they differ from it; `-` outside a repository."""
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
