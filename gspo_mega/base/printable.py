"""Foreign text on a terminal: of models, servers, data, files and errors. Nothing in it acts on the terminal.

A response can hold any character, also those with which a terminal is told to clear its screen, to set its title, to
copy to the clipboard, or to show a line in another order than it is written. They are shown as Python writes them.
Standard library only.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any

_BETWEEN = re.compile("[^\n\t]+")


def printable(text: str) -> str:
    """`text` with its newlines and tabs, and every other character that is not printable written out (`\\x1b`): control
    characters, marks that change the direction of writing or that nobody sees, halves of characters. JSON remains JSON
    of the same value.
    """
    return _BETWEEN.sub(lambda found: found[0] if found[0].isprintable() else _written_out(found[0]), text)


def _written_out(text: str) -> str:
    return "".join(c if c.isprintable() else "\\u007f" if c == "\x7f" else repr(c)[1:-1] for c in text)


class PrintableStream:
    """A text stream to which nothing but printable text is written. `foreign`: the stream itself, for a program that
    draws on the terminal and makes its texts printable on its own.
    """

    def __init__(self, stream: Any) -> None:
        self.foreign = stream

    def write(self, text: str) -> int:
        self.foreign.write(printable(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.foreign, name)


@contextlib.contextmanager
def printable_output() -> Iterator[None]:
    """Inside of this, `print` and everything else that writes to standard output or error writes printable text. It may
    be nested.
    """
    before = sys.stdout, sys.stderr
    for name, stream in zip(("stdout", "stderr"), before, strict=True):
        if stream is not None and not isinstance(stream, PrintableStream):
            setattr(sys, name, PrintableStream(stream))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
