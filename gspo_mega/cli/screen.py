"""Show a run's lines on the terminal of its command without ever holding up the run.

A reader that is gone (`| head`), a closed terminal, a full disk (`> file`) or a stopped pager loses lines and nothing
else: the attempt's logs have them too. Commands that run something show their lines with `Screen`; a command that only
prints, such as `inspect`, uses `print`. The functions after it open missing standard descriptors and drop a standard
output that cannot be written.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import select
import sys
import threading
from typing import Any, TextIO

from gspo_mega.base.untrusted import printable

# A logger below the launcher's, so that its lines go to supervisor.log too.
logger = logging.getLogger("gspo_mega.launcher.screen")

# Lines that are kept for a reader that does not read: more than a day of steps prints.
_MOST_LINES = 100_000
# How long a command waits at its end for a reader that does not read.
_DRAIN_SECONDS = 10.0
# Errors that mean that the reader is gone for good; a full disk may have room again.
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ECONNRESET)


class Screen:
    """Shows lines on a stream, in order, from a separate thread.

    Use it as a context manager and call it with each line. A call never waits and never raises OSError.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        """`stream`: standard output by default."""
        self._stream = sys.stdout if stream is None else stream
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_LINES)
        self._is_gone = self._is_reported = False
        self._thread = threading.Thread(target=self._show_all, name="screen", daemon=True)

    def __enter__(self) -> Screen:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            self._lines.put(None, timeout=_DRAIN_SECONDS)
            self._thread.join(_DRAIN_SECONDS)
        except queue.Full:
            logger.warning("the reader of the output does not read; the lines left for it are not shown")

    def __call__(self, line: str) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            return  # the reader does not read; the attempt's logs have this line

    def _show_all(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(printable(line) + "\n")

    def _write(self, text: str) -> None:
        """Write a text that is printable, but for the escapes that belong in it. Raises nothing."""
        if self._is_gone:
            return
        try:
            write_text(self._stream, text)
        except OSError as error:
            self._is_gone = error.errno in _GONE
            if not self._is_reported:
                logger.warning(
                    "output cannot be written: %s; the run goes on, and its lines are in console.log",
                    error.strerror,
                )
            self._is_reported = True
        except ValueError:  # the stream was closed
            self._is_gone = True


def write_line(stream: TextIO | None, line: str) -> None:
    """Write a line, made printable, as `write_text` does."""
    write_text(stream, printable(line) + "\n")


def write_text(stream: TextIO | None, text: str) -> None:
    """Write a text directly to the stream's file; nothing is written if `stream` is None. Python's buffer would keep a
    text that failed, and fail again at exit. Raises OSError.
    """
    if stream is None:
        return
    try:
        descriptor = stream.fileno()
    except OSError:  # a stream without a file, as in a test
        stream.write(text)
        return
    stream.flush()
    data = memoryview(text.encode(stream.encoding or "utf-8", "backslashreplace"))
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # another program made the terminal non-blocking
            select.select([], [descriptor], [], 1.0)


def show_error(text: object) -> None:
    """Write an error's text to standard error. If that cannot be written either, only the exit code tells the user."""
    try:
        write_line(sys.stderr, str(text))
    except (OSError, ValueError):
        return


def fill_standard_descriptors() -> None:
    """Open those of the descriptors 0, 1 and 2 on /dev/null that were closed (`>&-`).

    Otherwise the next file to be opened, such as a lock, would become standard output and receive the user's lines.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The kernel assigns the lowest free number, which is this one.
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115  stays open until the process ends


def drop_standard_output() -> None:
    """Point standard output at /dev/null, so that Python does not try to write the rest again at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
