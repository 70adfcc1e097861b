"""Programs of Slurm that answer from files, and a folder put before them in PATH where the n-th call of all fails
once.
"""

from __future__ import annotations

import os
from pathlib import Path

# noclobber is atomic: calls that come at one time still get numbers of their own. Without a process of its own: there
# are many.
_SHIM = """#!/bin/sh
set -C
number=1
until true 2>/dev/null > {folder}/call.$number; do number=$((number + 1)); done
set +C
program=${{0##*/}}
echo "$program $*" > {folder}/call.$number
read -r fail < {folder}/fail
if [ "$number" = "$fail" ]; then
  echo "$program: error: Unable to contact slurm controller (connect failure)" >&2
  exit 1
fi
exec {programs}/$program "$@"
"""


class FailingCalls:
    """`path`: PATH with the shims first. `fail(n)`: from now on the n-th call fails, and calls are counted anew."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder = folder / "shims"
        self.folder.mkdir()
        for program in programs.iterdir():
            if os.access(program, os.X_OK):
                shim = self.folder / program.name
                shim.write_text(_SHIM.format(folder=self.folder, programs=programs))
                shim.chmod(0o755)
        self.path = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
        self.fail(0)

    def fail(self, number: int) -> None:
        for call in self.folder.glob("call.*"):
            call.unlink()
        (self.folder / "fail").write_text(f"{number}\n")

    @property
    def calls(self) -> list[str]:
        """What was called, in order."""
        found = {int(call.name.split(".")[1]): call for call in self.folder.glob("call.*")}
        return [found[number].read_text().strip() for number in sorted(found)]
