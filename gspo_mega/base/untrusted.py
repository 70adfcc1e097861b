"""Foreign text on a terminal: of models, servers, data, files and errors. Nothing in it acts on the terminal.

A response can hold any character, also those with which a terminal is told to clear its screen, to set its title, to
copy to the clipboard, or to show a line in another order than it is written. They are shown as Python writes them.
Standard library only.

Reads files of folders that others may have filled: a run's, a model's, a user's data.

Owns what is opened: regular files only. A named pipe would be waited for without end, a device never ends, and a
folder is no file. A file that is read whole has a bound, and JSON that is too deep is an error like any other bad JSON.
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
"""Of a file that is read whole, as metrics and logs are."""
MOST_TEXT_BYTES = 64 * 1024**2
"""Of a file of a few lines, such as a command or a name."""
MOST_JSON_BYTES = 256 * 1024**2
"""Of a file that is one JSON value, such as a model's index or a tokenizer."""

_MORE_TEMPLATES = "additional_chat_templates"  # the one folder in a model's that transformers reads
_TEXTS = (".json", ".jinja", ".txt", ".model", ".py")

_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


_PIECE_BYTES = 16 * 2**20


class NoRegularFileError(OSError):
    """What bears a file's name is something else, too large, or cannot be read. `strerror` says what it is."""


def open_regular(path: str | os.PathLike[str], most_bytes: int | None = None) -> io.BufferedReader:
    """Open a regular file, or a link to one, for reading. Raises OSError: where there is none, NoRegularFileError.

    `most_bytes`: refuse a larger file; None for one that is read piece by piece.
    """
    try:
        # Non-blocking, or the call itself would wait for a pipe's other end.
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
        if _is_of_kernel(found):
            raise NoRegularFileError(errno.EINVAL, "is a file of the kernel, not one of a disk", os.fspath(path))
        if most_bytes is not None and found.st_size > most_bytes:
            size = f"has {found.st_size} bytes; at most {most_bytes} are read"
            raise NoRegularFileError(errno.EFBIG, size, os.fspath(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _is_of_kernel(found: os.stat_result) -> bool:
    """Whether this is one of /proc, which claim to be regular and may wait, never end, or change what is read."""
    try:
        return found.st_dev == os.stat("/proc").st_dev
    except OSError:
        return False


def read_bytes(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> bytes:
    """The whole of a regular file. Raises OSError."""
    pieces, size = [], 0
    with open_regular(path, most_bytes) as file:
        try:
            # In pieces: a read of the bound would take memory for all of it, and the file may grow meanwhile.
            while piece := file.read(_PIECE_BYTES):
                pieces.append(piece)
                size += len(piece)
                if size > most_bytes:
                    raise NoRegularFileError(errno.EFBIG, f"has more than {most_bytes} bytes", os.fspath(path))
        except NoRegularFileError:
            raise
        except OSError as error:  # Python leaves out the name
            raise NoRegularFileError(error.errno, f"cannot be read: {error.strerror}", os.fspath(path)) from None
    return b"".join(pieces)


def read_text(path: str | os.PathLike[str], most_bytes: int = MOST_TEXT_BYTES, errors: str = "strict") -> str:
    """The whole of a regular file as UTF-8, with its line ends as newlines. Raises OSError, and UnicodeDecodeError."""
    text = read_bytes(path, most_bytes).decode("utf-8", errors)
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def read_json_file(path: str | os.PathLike[str], most_bytes: int = MOST_JSON_BYTES) -> Any:
    """The JSON value of a regular file. Raises OSError, and ValueError with what is wrong, without the file's name."""
    return parse_json(read_text(path, most_bytes))


def parse_json(text: str | bytes) -> Any:
    """A JSON value that somebody else wrote. Raises ValueError, also where it is nested too deeply, or has a number of
    too many digits.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except MemoryError:
        raise ValueError("it does not fit into the memory") from None


def odd_file(folder: Path) -> str | None:
    """What in a model's folder that a library is to read is neither a file nor a folder, or a text of more than
    `MOST_JSON_BYTES`, with its path; None where there is nothing of the kind. The library would wait for it, or fill
    the memory with it.
    """
    for entry in (*_entries(folder), *_entries(folder / _MORE_TEMPLATES)):
        try:
            found = entry.stat()
        except OSError:  # a link to nothing, which no reader finds
            continue
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            kind = next((name for test, name in _KINDS if test(found.st_mode)), "something else")
            return f"{entry.path}: is {kind}, not a file"
        if stat.S_ISREG(found.st_mode) and _is_of_kernel(found):
            return f"{entry.path}: is a file of the kernel, not one of a disk"
        if found.st_size > MOST_JSON_BYTES and entry.name.endswith(_TEXTS):
            return f"{entry.path}: has {found.st_size} bytes; at most {MOST_JSON_BYTES} are read"
    return None


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Of a folder, by name; none of what is no folder or cannot be read, of which its reader says so."""
    try:
        return sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return []


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
