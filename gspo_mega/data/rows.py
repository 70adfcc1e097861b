"""A JSONL file of rows, checked once and then read row by row; and the tests of JSON values that others use, too.

`JsonlFile` finds, counts and parses lines, and names what is wrong with them. The caller passes a check of what a row
must hold. Only byte offsets stay in memory, so a million rows cost some megabytes. An accepted row can be written and
read back unchanged: values that would make the tokenizer, the rollout journal or a scoring process fail much later
(NaN, half of a surrogate pair, very deep nesting) are refused here.

`is_plain`, `read_plain` and `nests_deeper` test the same of values that a policy or an agent writes, which may nest
deeper than a stack, hold half a character, or hold infinity. `copied` copies such a value.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from gspo_mega.base.errors import DataError
from gspo_mega.base.hub import missing_hint
from gspo_mega.base.untrusted import NoRegularFileError, open_regular

Row = dict[str, Any]
# Called after each row with the number of rows read so far. Returns whether to stop reading.
Enough = Callable[[int], bool]
# Python's JSON writer fails at some hundred levels, and at fewer if the call stack is deep already. So a deeper value
# could be read here but not be written elsewhere.
MOST_LEVELS = 64
# A systematic mistake is on every line; this many kinds of problems show it.
MAX_PROBLEMS_SHOWN = 10
NO_ROWS = "no rows; expected is one JSON object per line"
# The longest line. A file without line ends, such as a disk image, is no JSONL.
MOST_LINE_BYTES = 256 * 1024**2


class JsonlFile:
    """The rows of one JSONL file; blank lines are no rows. `file[k]` is row k, counted from 0.

    The file stays open, so replacing it (write another file, rename it) while a run reads it does no harm.

    Attributes:
        path: as given.
        fingerprint: SHA-256 of the file's bytes that were read, hexadecimal.
        is_whole: whether all rows were read; `enough` may have ended the reading early.

    Raises:
        DataError: the file is missing, unreadable or without rows, or lines are malformed: one line
            `file:line: what` per kind of problem, at most 10.
    """

    def __init__(
        self, path: str | Path, check: Callable[[Row], str | None], enough: Enough = lambda num_rows: False
    ) -> None:
        """`check(row)` says in words what is wrong with a row, or None."""
        self.path = Path(path)
        self.is_whole = True
        self._file = _opened(self.path)
        starts: list[int] = []
        lengths: list[int] = []
        lines: list[int] = []
        problems = RowProblems()
        digest = hashlib.sha256()
        start = 0
        for number, line in enumerate(_lines(self.path, self._file), start=1):
            digest.update(line)
            if line.strip():
                problem = _problem_of(line, check)
                if problem is not None:
                    problems.add(f"{path}:{number}", problem)
                starts.append(start)
                lengths.append(len(line))
                lines.append(number)
                if enough(len(starts)):
                    self.is_whole = False
                    break
            start += len(line)
        if shown := problems.lines(len(starts), is_whole=self.is_whole):
            raise DataError("\n".join(shown))
        if not starts:
            raise DataError(f"{path}: {NO_ROWS}")
        self.fingerprint = digest.hexdigest()
        self._starts = np.asarray(starts, dtype=np.int64)
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._lines = np.asarray(lines, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, row: int) -> Row:
        """Row `row`, parsed from disk. Raises DataError if the file was written over since it was opened."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        line = os.pread(self._file.fileno(), int(self._lengths[row]), int(self._starts[row]))
        try:
            value = parse_row(line)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise DataError(f"{self.line(row)}: the file was written over while it was being read")
        return value

    def line(self, row: int) -> str:
        """`file:line` of a row, for messages."""
        return f"{self.path}:{self._lines[row]}"


def check_first_rows(path: str | Path, check: Callable[[Row], str | None], num_rows: int) -> None:
    """Check the file and its first `num_rows` rows as `JsonlFile` does, without reading further. Raises DataError."""
    problems, seen, is_whole = RowProblems(), 0, True
    with _opened(Path(path)) as file:
        for number, line in enumerate(_lines(path, file), start=1):
            if line.strip():
                seen += 1
                if (problem := _problem_of(line, check)) is not None:
                    problems.add(f"{path}:{number}", problem)
            if seen == num_rows or problems.are_enough:
                is_whole = False
                break
    if shown := problems.lines(seen, is_whole=is_whole):
        raise DataError("\n".join(shown))
    if not seen:
        raise DataError(f"{path}: {NO_ROWS}")


def _opened(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except FileNotFoundError:
        raise DataError(
            f"{path}: no such file (relative paths start in {Path.cwd()}){missing_hint(path, 'dataset')}"
        ) from None
    except NoRegularFileError as error:
        if error.errno == errno.EISDIR:
            raise DataError(f"{path}: this is a folder; a JSONL file was expected") from None
        raise DataError(f"{path}: {error.strerror}; a JSONL file was expected") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _lines(path: str | Path, file: BinaryIO) -> Iterator[bytes]:
    """The lines of the file. Raises DataError at a line that is too long, which would fill the memory."""
    number = 1
    while line := file.readline(MOST_LINE_BYTES + 1):
        if len(line) > MOST_LINE_BYTES:
            raise DataError(
                f"{path}:{number}: has more than {MOST_LINE_BYTES} bytes; one JSON object per line was expected"
            )
        yield line
        number += 1


def _problem_of(line: bytes, check: Callable[[Row], str | None]) -> str | None:
    try:
        value = parse_row(line)
    except UnicodeDecodeError as error:
        return f"not UTF-8 (byte {error.start + 1} of the line)"
    except json.JSONDecodeError as error:
        if line.lstrip().startswith(b"["):
            return "looks like a JSON array over several lines; expected is one JSON object per line"
        end = ", the end of the line" if error.pos == len(error.doc) else ""
        return f"not JSON: {error.msg} at column {error.colno}{end}"
    except ValueError as error:  # `parse_row`'s own, and Python refuses integers of thousands of digits
        return f"not JSON: {error}"
    except RecursionError:
        return "not JSON: nested too deeply"
    if not isinstance(value, dict):
        return f"{type_name(value)} where a JSON object was expected"
    return check(value)


# The value of an answer, as a message quotes it.
_QUOTED_ANSWER = re.compile(r"""(?<=answer )(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""")


class RowProblems:
    """Collects what is wrong with the rows of a file. Rows with the same fault, such as a wrong key or a kind of answer
    that cannot be read, share one line, which says how many they are and names the first of them.
    """

    def __init__(self, what: str = "lines") -> None:
        self._what = what
        self._places: dict[str, list[str]] = {}  # by the problem without the answer's value
        self._first: dict[str, str] = {}
        self._num_not_shown = self._num = 0

    def add(self, place: str, problem: str) -> None:
        """Add a row's problem. `place`: `file:line`."""
        self._num += 1
        kind = _QUOTED_ANSWER.sub("", problem)
        if kind in self._places or not self.are_enough:
            self._places.setdefault(kind, []).append(place)
            self._first.setdefault(kind, problem)
        else:
            self._num_not_shown += 1

    @property
    def are_enough(self) -> bool:
        """Whether as many different faults are known as will be shown."""
        return len(self._places) >= MAX_PROBLEMS_SHOWN

    def lines(self, num_rows: int, *, is_whole: bool) -> list[str]:
        """The lines to show. `num_rows`: the number of rows that were checked, all there are if `is_whole`."""
        shown = []
        checked = f"{num_rows} {self._what}" if is_whole else f"the first {num_rows} {self._what}"
        for kind, places in self._places.items():
            also = [place.rpartition(":")[2].removeprefix("row ") for place in places[:5]]
            more = f"{', '.join(also)}{', ...' if len(places) > len(also) else ''}"
            equal = f" (so {len(places)} of {checked}: {more})" if len(places) > 1 else ""
            if len(places) == num_rows > 1:
                equal = f" (so in all {checked})" if is_whole else f" (so in all of {checked})"
            shown.append(f"{places[0]}: {self._first[kind]}{equal}")
        if self._num_not_shown:
            shown.append(f"... and {self._num_not_shown} more of {checked}")
        return shown


def parse_row(line: bytes) -> Any:
    """The JSON value of a line. A byte-order mark before it, which some editors write, is not data and is dropped.

    Raises ValueError (of which UnicodeDecodeError and json.JSONDecodeError are kinds) for what is not strict JSON of
    Unicode characters and finite numbers, at most `MOST_LEVELS` levels deep; RecursionError for what is far deeper.
    """
    # With its line end the column of an error at the end would be counted from the next line.
    value = json.loads(line.decode("utf-8-sig").rstrip(" \t\r\n"), parse_constant=_no_constant, parse_float=_finite)
    if line.count(b"{") + line.count(b"[") > MOST_LEVELS and nests_deeper(value):
        raise ValueError(f"nested more than {MOST_LEVELS} levels deep")
    # UTF-8 itself has no surrogates: only an escape can bring one.
    if b"\\u" in line:
        _refuse_surrogates(value)
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number; leave the key out, or give null")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is larger than a 64-bit float can hold")
    return value


def _refuse_surrogates(value: Any) -> None:
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            found = f"\\u{ord(value[error.start]):04x}"
            raise ValueError(f"a text has {found}, half of a surrogate pair without the other: no character") from None
    for part in (
        (*value.keys(), *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        _refuse_surrogates(part)


def type_name(value: Any) -> str:
    """JSON's name for the type of a parsed value, with its article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    return {str: "a string", list: "an array", dict: "an object"}[type(value)]


def nests_deeper(value: Any, levels: int = MOST_LEVELS) -> bool:
    """Whether lists and objects lie in each other more than `levels` times."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return False
    return levels == 0 or any(
        nests_deeper(inner, levels - 1) for inner in value if isinstance(inner, (dict, list, tuple))
    )


def is_plain(value: Any) -> bool:
    """Whether the value can be written as JSON in UTF-8 and read again unchanged."""
    return not nests_deeper(value) and _has_plain_leaves(value)


def _has_plain_leaves(value: Any) -> bool:
    if isinstance(value, str):
        return not any("\ud800" <= letter <= "\udfff" for letter in value)
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(_has_plain_leaves(key) and _has_plain_leaves(inner) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_has_plain_leaves, value))
    return True


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def read_plain(text: str, at: int = 0) -> tuple[Any, int] | None:
    """(The JSON value that begins at `at`, where it ends); None if there is none or it is not plain."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None
    return (value, end) if is_plain(value) else None


def copied(value: Any) -> Any:
    """A deep copy. Of a JSON value it takes a tenth of the time of `copy.deepcopy`, which copies other types."""
    kind = type(value)
    if kind is str or value is None or kind is int or kind is float or kind is bool:
        return value
    if kind is dict:
        return {key: copied(inner) for key, inner in value.items()}
    return [copied(inner) for inner in value] if kind is list else copy.deepcopy(value)
