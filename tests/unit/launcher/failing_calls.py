"""Programs of Slurm that answer from files, and a folder put before them in PATH where the n-th call of all fails once."""

from __future__ import annotations

import os
from pathlib import Path

# mkdir is atomic: calls that come at one time still get numbers of their own.
_SHIM = """#!/bin/sh
here={folder}
number=1
until mkdir "$here/call.$number" 2>/dev/null; do number=$((number + 1)); done
echo "$(basename "$0") $*" > "$here/call.$number/what"
if [ "$number" = "$(cat "$here/fail")" ]; then
  echo "$(basename "$0"): error: Unable to contact slurm controller (connect failure)" >&2
  exit 1
fi
exec {programs}/"$(basename "$0")" "$@"
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
            for file in call.iterdir():
                file.unlink()
            call.rmdir()
        (self.folder / "fail").write_text(str(number))

    @property
    def calls(self) -> list[str]:
        """What was called, in order."""
        found = {int(call.name.split(".")[1]): call / "what" for call in self.folder.glob("call.*")}
        return [found[number].read_text().strip() for number in sorted(found) if found[number].exists()]
