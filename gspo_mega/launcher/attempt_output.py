"""Where the lines of one attempt go: rank 0's console.log to the user, the launcher's own to supervisor.log.

Owns no process. What is shown on a screen, and how, is `commands/screen.py`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class ConsoleTail:
    """Hands on the lines that rank 0 appends to console.log, each once, whole lines only."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._offset = 0

    def pump(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except OSError:  # not there yet; or the disk does not answer, and a later look shows more
            return
        whole, newline, _ = new.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        if newline:
            for line in whole.decode("utf-8", errors="replace").split("\n"):
                self._say(line)


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """The launcher's log lines of one attempt go to its supervisor.log, and nowhere else."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    launcher = logging.getLogger("gspo_mega.launcher")
    launcher.addHandler(handler)
    launcher.setLevel(logging.INFO)
    launcher.propagate = False
    try:
        yield
    finally:
        launcher.removeHandler(handler)
        handler.close()
