"""The output of one attempt: rank 0's console.log goes to the user, the launcher's log lines to supervisor.log.

Owns no process. `cli/screen.py` writes to the terminal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gspo_mega.base.guarded_files import open_regular


class ConsoleTail:
    """Pass on the lines that rank 0 appends to console.log, each one once and whole."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._offset = 0

    def pump(self) -> None:
        try:
            with open_regular(self._path) as file:
                file.seek(self._offset)
                new = file.read()
        except OSError:  # the file does not exist yet, or the disk does not answer: a later call reads it
            return
        whole, newline, _ = new.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        if newline:
            for line in whole.decode("utf-8", errors="replace").split("\n"):
                self._say(line)


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Send the launcher's log lines to `path`, an attempt's supervisor.log, and nowhere else."""
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
