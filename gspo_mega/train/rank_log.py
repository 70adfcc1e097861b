"""A rank's log and its lines for the user. A disk that refuses a line does not end the rank; the line is lost.

Owns standard output and error of a rank, and console.log.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from gspo_mega.base.printable import printable
from gspo_mega.base.run_folder import Attempt

logger = logging.getLogger("gspo_mega.console")


class _LossyFile(io.RawIOBase):
    """A file object over a descriptor; text that the disk refuses is lost."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError:
            return len(data)


def redirect_output(log: Path) -> None:
    """Redirect standard output and error, of this process and its libraries, to the rank's log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout, sys.stderr = _text(1), _text(2)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )


def _text(descriptor: int) -> io.TextIOWrapper:
    buffer = io.BufferedWriter(_LossyFile(descriptor))
    return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def console(attempt: Attempt) -> Callable[[str], None]:
    """A function that shows the user a line: it writes to console.log, which the supervisor shows, and to the log."""

    def show(line: str) -> None:
        try:
            with attempt.console_log.open("a", encoding="utf-8") as file:
                file.write(printable(line) + "\n")
        except OSError as error:
            logger.warning("%s cannot be written: %s", attempt.console_log, error.strerror)
        logger.info("%s", line)

    return show
