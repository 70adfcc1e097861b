"""What the studies share: the product's commands run into logs, and the versions and commit that a row names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


class Failed(Exception):
    """A command failed; the text names its log."""


def product(command: str) -> list[str]:
    return [sys.executable, "-m", "gspo_mega", command]


def call(command: list[str], log: Path, good: tuple[int, ...] = (0,)) -> int:
    """Run a command into a log, and end it with this process. Returns its exit code. Raises Failed for no good one."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=REPOSITORY, env=environment)
        try:
            code = child.wait()
        finally:
            while child.poll() is None:  # the first signal asks a run to stop in order, the second ends it
                child.send_signal(signal.SIGTERM)
                time.sleep(1.0)
    if code not in good:
        raise Failed(f"exit code {code}: {' '.join(command[:6])} ...; see {log}\n{log.read_text()[-2000:]}")
    return code


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def commit(repository: Path = REPOSITORY) -> str:
    """The commit that a run was made of, with `-dirty` where a tracked file differs from it; `-` without a repository.
    The studies' own rows (docs/studies/*_runs.csv), which they append to, do not count.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True).stdout.strip()

    described = git("describe", "--always", "--abbrev=12")
    rows = ":(exclude,top,glob)docs/studies/*_runs.csv"
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", rows)
    return (described or "-") + ("-dirty" if changed else "")
