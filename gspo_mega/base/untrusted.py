"""Input that somebody else made: files in folders that others may have filled, and text that goes to a terminal.

Files (of a run, a model, a user's data): only regular files are opened. Reading a named pipe would wait for ever, a
device never ends, and a folder is not a file. A file that is read whole has a bound on its size, and JSON that is
nested too deeply is an error like any other bad JSON.

Text (from models, servers, data, files and errors): nothing in it may act on the terminal. A response can contain any
characters, including those that tell a terminal to clear its screen, to set its title, to copy to the clipboard, or to
show a line in another order than it is written in. They are shown as escapes, as Python writes them.

Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MOST_BYTES = 1024**3
"""The limit for a file that is read whole, as metrics and logs are."""
MOST_TEXT_BYTES = 64 * 1024**2
"""The limit for a file of a few lines, such as a command or a name."""
MOST_JSON_BYTES = 256 * 1024**2
"""The limit for a file that is one JSON value, such as a model's index or a tokenizer."""

_PIECE_BYTES = 16 * 2**20
_TEMPLATES_FOLDER = "additional_chat_templates"  # the only folder inside a model's folder that transformers reads
_TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".py")
_ALL_BUT_NEWLINES_AND_TABS = re.compile("[^\n\t]+")

_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class NoRegularFileError(OSError):
    """The path is not a regular file, or the file is too large or cannot be read. `strerror` says which."""


def open_regular(path: str | os.PathLike[str], most_bytes: int | None = None) -> io.BufferedReader:
    """Open a regular file, or a link to one, for reading.

    Raises OSError: a NoRegularFileError if the path is something else, or a file larger than `most_bytes`. Leave
    `most_bytes` out for a file that is read piece by piece.
    """
    try:
        # Non-blocking, because the call itself would otherwise wait for the other end of a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket cannot be opened
            raise NoRegularFileError(error.errno, "is a socket or a device, not a file", os.fspath(path)) from None
        if error.errno == errno.ELOOP:
            raise NoRegularFileError(error.errno, "is a link that leads to itself", os.fspath(path)) from None
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            kind = next((name for test, name in _KINDS if test(found.st_mode)), "something else")
            number = errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.EINVAL
            raise NoRegularFileError(number, f"is {kind}, not a file", os.fspath(path))
        if _belongs_to_kernel(found):
            raise NoRegularFileError(errno.EINVAL, "is a file of the kernel, not a file on a disk", os.fspath(path))
        if most_bytes is not None and found.st_size > most_bytes:
            size = f"has {found.st_size} bytes; at most {most_bytes} are read"
            raise NoRegularFileError(errno.EFBIG, size, os.fspath(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _belongs_to_kernel(found: os.stat_result) -> bool:
    """Whether this is a file of /proc. Those claim to be regular, but reading one may wait, never end, or act."""
    try:
        return found.st_dev == os.stat("/proc").st_dev
    except OSError:
        return False


def read_bytes(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file. Raises OSError."""
    pieces, size = [], 0
    with open_regular(path, most_bytes) as file:
        try:
            # In pieces, because one read up to the limit would allocate all of that memory, and the file may grow.
            while piece := file.read(_PIECE_BYTES):
                pieces.append(piece)
                size += len(piece)
                if size > most_bytes:
                    raise NoRegularFileError(errno.EFBIG, f"has more than {most_bytes} bytes", os.fspath(path))
        except NoRegularFileError:
            raise
        except OSError as error:  # Python's own error leaves out the file's name
            raise NoRegularFileError(error.errno, f"cannot be read: {error.strerror}", os.fspath(path)) from None
    return b"".join(pieces)


def read_text(path: str | os.PathLike[str], most_bytes: int = MOST_TEXT_BYTES, errors: str = "strict") -> str:
    """Return the text of a regular file in UTF-8, with line ends as newlines. Raises OSError and UnicodeDecodeError."""
    text = read_bytes(path, most_bytes).decode("utf-8", errors)
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def read_json_file(path: str | os.PathLike[str], most_bytes: int = MOST_JSON_BYTES) -> Any:
    """Return the JSON value of a regular file.

    Raises OSError, and ValueError whose text says what is wrong without the file's name.
    """
    return parse_json(read_text(path, most_bytes))


def parse_json(text: str | bytes) -> Any:
    """Return a JSON value that somebody else wrote.

    Raises ValueError, also if it is nested too deeply or has a number of too many digits.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except MemoryError:
        raise ValueError("it does not fit into the memory") from None


def find_unreadable_entry(folder: Path) -> str | None:
    """Return what a library could not safely read in a model's folder, as a path and a reason; None if all is well.

    That is an entry that is neither a file nor a folder, or a text of more than `MOST_JSON_BYTES`. The library would
    wait for the one, or fill the memory with the other.
    """
    for entry in (*_entries(folder), *_entries(folder / _TEMPLATES_FOLDER)):
        try:
            found = entry.stat()
        except OSError:  # a link to nothing: no reader finds it
            continue
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            kind = next((name for test, name in _KINDS if test(found.st_mode)), "something else")
            return f"{entry.path}: is {kind}, not a file"
        if stat.S_ISREG(found.st_mode) and _belongs_to_kernel(found):
            return f"{entry.path}: is a file of the kernel, not a file on a disk"
        if found.st_size > MOST_JSON_BYTES and entry.name.endswith(_TEXT_SUFFIXES):
            return f"{entry.path}: has {found.st_size} bytes; at most {MOST_JSON_BYTES} are read"
    return None


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder by name. If it is not a folder or cannot be read, there are none; the library that
    reads it will say so.
    """
    try:
        return sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return []


def printable(text: str) -> str:
    """Return `text` with every character escaped (`\\x1b`) that is not printable, except newlines and tabs.

    Escaped are control characters, marks that change the direction of writing or that nobody sees, and halves of
    characters. JSON remains JSON of the same value.
    """
    return _ALL_BUT_NEWLINES_AND_TABS.sub(
        lambda found: found[0] if found[0].isprintable() else _escaped(found[0]), text
    )


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() else "\\u007f" if c == "\x7f" else repr(c)[1:-1] for c in text)


class PrintableStream:
    """A text stream to which only printable text is written.

    `foreign` is the stream itself, for a program that draws on the terminal and makes its own texts printable.
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
    """Inside this context, everything that writes to standard output or error, such as `print`, writes printable text.

    It may be nested.
    """
    before = sys.stdout, sys.stderr
    for name, stream in zip(("stdout", "stderr"), before, strict=True):
        if stream is not None and not isinstance(stream, PrintableStream):
            setattr(sys, name, PrintableStream(stream))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
