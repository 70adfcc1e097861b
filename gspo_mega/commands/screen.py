"""Lines for the user of a run, shown where its command was started, and never at the run's cost.

Owns the standard descriptors and what their loss means. A reader that is gone (`| head`), a terminal that was closed, a
full disk behind `> file` or a pager that stands still loses lines and nothing else: they are in the attempt's logs as
well. For commands that run something; one that is there to be read, as `inspect`, prints as any program does.
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

# In supervisor.log, with the launcher's own lines.
logger = logging.getLogger("gspo_mega.launcher.screen")

# More are kept for a reader that stands still than a day of steps makes.
_MOST_LINES = 100_000
# So long the end of a command waits for a reader that stands still.
_DRAIN_SECONDS = 10.0
# After these nobody will read any more; a full disk may have room again.
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ECONNRESET)


class Screen:
    """Shows lines on a stream, in order, from a thread of its own. A context manager; call it with a line. Never raises
    OSError.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        """`stream`: standard output by default."""
        self._stream = sys.stdout if stream is None else stream
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_LINES)
        self._is_gone = self._is_told = False
        self._thread = threading.Thread(target=self._show_all, name="screen", daemon=True)

    def __enter__(self) -> Screen:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            self._lines.put(None, timeout=_DRAIN_SECONDS)
            self._thread.join(_DRAIN_SECONDS)
        except queue.Full:
            logger.warning("the reader of the output stands still; what it did not read is lost to it")

    def __call__(self, line: str) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            return  # its reader has stood still for all of them; the attempt's logs have this one

    def _show_all(self) -> None:
        while (line := self._lines.get()) is not None:
            if self._is_gone:
                continue
            try:
                write_line(self._stream, line)
            except OSError as error:
                self._is_gone = error.errno in _GONE
                if not self._is_told:
                    logger.warning(
                        "output cannot be written: %s; the run goes on, and its lines are in console.log",
                        error.strerror,
                    )
                self._is_told = True
            except ValueError:  # the stream was closed
                self._is_gone = True


def write_line(stream: TextIO | None, line: str) -> None:
    """Past Python's buffer, which would keep what could not be written and fail with it once more at exit. Raises
    OSError.
    """
    if stream is None:
        return
    try:
        descriptor = stream.fileno()
    except OSError:  # no file behind it, as under a test
        stream.write(line + "\n")
        return
    stream.flush()
    data = memoryview((line + "\n").encode(stream.encoding or "utf-8", "backslashreplace"))
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # somebody has set the terminal so; it is ready some time
            select.select([], [descriptor], [], 1.0)


def tell_error(text: object) -> None:
    """An error's text on standard error; where that is lost too, the exit code has to do."""
    try:
        write_line(sys.stderr, str(text))
    except (OSError, ValueError):
        return


def fill_standard_descriptors() -> None:
    """Have descriptors 0, 1 and 2 open, on nothing where they were closed (`>&-`).

    The next file that is opened would else be standard output: a lock or a record, with lines for the user in it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is given, which is this one.
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115  as long as the process


def drop_standard_output() -> None:
    """What could not be written is not tried once more at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
