"""The rows of a data source, however they are kept: JSONL, Parquet, or a folder that `datasets` saved (`save_to_disk`).

`open_rows` chooses the reader of a path; `RowFile` is what the readers have in common. `JsonlFile` is in `rows.py`;
`TableFile` is here. A table's row is what the same row of a JSONL file would be: JSON values only. Rows are read when
they are asked for: Parquet by row group, of which some stay in memory as Arrow arrays; Arrow files are mapped into
memory. The package pyarrow is an optional extra (`parquet`).
"""

from __future__ import annotations

import bisect
import hashlib
import importlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from gspo_mega.base.errors import DataError
from gspo_mega.base.hub import missing_hint
from gspo_mega.base.untrusted import open_regular, read_json_file
from gspo_mega.data.rows import MOST_LEVELS, Enough, JsonlFile, Row, RowProblems, nests_deeper
from gspo_mega.data.rows import check_first_rows as check_first_lines

PARQUET_SUFFIX = ".parquet"
# Decoded row groups of this many bytes stay in memory, and the last one in any case.
_KEPT_BYTES = 512 * 1024**2
_ROWS_AT_ONCE = 1024
_VALID = "valid: texts, numbers, booleans, and lists and structs of these"


class RowFile(Protocol):
    """The rows of a file. `file[k]` is row k, counted from 0. `fingerprint`: SHA-256 of the bytes of the file, or of
    the folder's data files in order, hexadecimal. `is_whole`: whether it has all rows. Opening it checks every row;
    from then on, replacing the file (rename) does no harm.
    """

    path: Path
    fingerprint: str
    is_whole: bool

    def __len__(self) -> int: ...
    def __getitem__(self, row: int) -> Row:
        """Raises DataError if the file was written over since it was opened."""
        ...

    def line(self, row: int) -> str:
        """`file:line` of a row, or `file:row N`, for messages."""
        ...


def open_rows(path: str | Path, check: Callable[[Row], str | None], enough: Enough = lambda num_rows: False) -> RowFile:
    """Open and check the rows of `path`. `check(row)` says in words what is wrong with a row, or None. `enough(n)`:
    whether n rows suffice; the file ends there then, and `is_whole` is false. Raises DataError as `JsonlFile`.
    """
    _refuse_other_forms(Path(path))
    return TableFile(path, check, enough) if is_table(Path(path)) else JsonlFile(path, check, enough)


def check_first_rows(path: str | Path, check: Callable[[Row], str | None], num_rows: int) -> None:
    """Check the file and its first `num_rows` rows as `open_rows` does, without reading further. Raises DataError."""
    _refuse_other_forms(Path(path))
    (check_first_table_rows if is_table(Path(path)) else check_first_lines)(path, check, num_rows)


def is_table(path: Path) -> bool:
    """Whether a path is read as a table: a Parquet file by its name, or a folder."""
    return path.suffix == PARQUET_SUFFIX or path.is_dir()


# How files begin that are neither JSONL nor Parquet under the name of one, and what they are.
_OTHER_BEGINNINGS = {
    b"\x1f\x8b": "compressed with gzip; decompress it (gunzip)",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; decompress it (unzstd)",
    b"PK\x03\x04": "a zip archive or a spreadsheet; unpack it, or export its rows",
    b"PAR1": "a Parquet file; its name has to end in .parquet",
    b"ARROW1": "an Arrow file; write it with `datasets`' save_to_disk, or as Parquet",
    b"\xff\xfe": "UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as UTF-8",
}
_DELIMITERS = {".csv": ",", ".tsv": "\\t"}


def _refuse_other_forms(path: Path) -> None:
    """Raise DataError for a file of a form that is not read, and say what would make rows of it."""
    if path.suffix == PARQUET_SUFFIX or not path.is_file():
        return
    with open_regular(path) as file:
        beginning = file.read(4096).lstrip(b"\xef\xbb\xbf \r\n\t")
    for start, what in _OTHER_BEGINNINGS.items():
        if beginning.startswith(start):
            raise DataError(f"{path}: {what}")
    jsonl = path.with_suffix(".jsonl").name
    if path.suffix.lower() in _DELIMITERS and not beginning.startswith(b"{"):
        table = f"csv.DictReader(sys.stdin, delimiter='{_DELIMITERS[path.suffix.lower()]}')"
        raise DataError(
            f"{path}: a table of text; expected is one JSON object per line, or Parquet. This writes it: python -c"
            f' "import csv, json, sys; [print(json.dumps(row)) for row in {table}]" < {path.name} > {jsonl}'
        )
    if path.suffix.lower() == ".json" and beginning.startswith(b"["):
        raise DataError(
            f"{path}: a JSON array; expected is one JSON object per line. This writes it: python -c"
            f' "import json, sys; [print(json.dumps(row)) for row in json.load(sys.stdin)]" < {path.name} > {jsonl}'
        )


class TableFile:
    """The rows of a Parquet file, of a folder of such files in the order of their names, or of a saved data set.

    Attributes:
        path: as given.
        fingerprint: SHA-256 of the bytes of all data files in order, hexadecimal; empty unless `is_whole`.
        is_whole: whether all rows were read; `enough` may have ended the reading early, and the file ends there then.

    Raises DataError as `JsonlFile`, with `file:row N: what` per problem; also if pyarrow is missing or a column holds
    what JSON cannot.
    """

    def __init__(
        self, path: str | Path, check: Callable[[Row], str | None], enough: Enough = lambda num_rows: False
    ) -> None:
        """`check(row)` says in words what is wrong with a row, or None."""
        self.path = Path(path)
        self.is_whole = True
        self._parts = _parts_of(self.path)
        self._starts = [0, *accumulate(part.num_rows for part in self._parts)]
        if not self._starts[-1]:
            raise DataError(f"{path}: no rows")
        self._num_rows = self._starts[-1]
        problems = RowProblems("rows")
        for number, (where, row) in enumerate(_rows(self._parts), start=1):
            problem = _problem_of(row) or check(row)
            if problem is not None:
                problems.add(where, problem)
            if enough(number):
                self._num_rows, self.is_whole = number, False
                break
        if shown := problems.lines(len(self), is_whole=self.is_whole):
            raise DataError("\n".join(shown))
        self.fingerprint = _fingerprint([part.file for part in self._parts]) if self.is_whole else ""

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: int) -> Row:
        """Row `row`. Raises DataError if the file was written over since it was opened."""
        part, within = self._place(row)
        try:
            return part.row(within)
        except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of these
            raise DataError(f"{self.line(row)}: the file was written over while it was being read: {error}") from error

    def line(self, row: int) -> str:
        """`file:row N` of a row, N from 1 in its file, for messages."""
        part, within = self._place(row)
        return f"{part.file}:row {within + 1}"

    def _place(self, row: int) -> tuple[_Part, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        number = bisect.bisect_right(self._starts, row) - 1
        return self._parts[number], row - self._starts[number]


def check_first_table_rows(path: str | Path, check: Callable[[Row], str | None], num_rows: int) -> None:
    """Check the table and its first `num_rows` rows as `TableFile` does, without reading further. Raises DataError."""
    problems, seen, is_whole = RowProblems("rows"), 0, True
    for where, row in _rows(_parts_of(Path(path))):
        seen += 1
        if (problem := _problem_of(row) or check(row)) is not None:
            problems.add(where, problem)
        if seen == num_rows or problems.are_enough:
            is_whole = False
            break
    if shown := problems.lines(seen, is_whole=is_whole):
        raise DataError("\n".join(shown))
    if not seen:
        raise DataError(f"{path}: no rows")


def _rows(parts: list[_Part]) -> Iterator[tuple[str, Row]]:
    """(`file:row N`, row) of every row, in order."""
    for part in parts:
        number = 0
        batches = _opened(part.file, part.batches)
        while (batch := _opened(part.file, lambda batches=batches: next(batches, None))) is not None:
            for row in _opened(part.file, batch.to_pylist):
                number += 1
                yield f"{part.file}:row {number}", row


def _problem_of(row: Row) -> str | None:
    for name, value in row.items():
        if _holds_nan_or_infinity(value):
            return f"{name!r}: NaN or infinite is no JSON number; leave the value out (null)"
    return f"nested more than {MOST_LEVELS} levels deep" if nests_deeper(row) else None


def _holds_nan_or_infinity(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(_holds_nan_or_infinity(part) for part in inner)


def _fingerprint(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        with open_regular(path) as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


class _Part(Protocol):
    """One data file."""

    file: Path
    num_rows: int

    def batches(self) -> Iterator[Any]:
        """All rows in order, as Arrow record batches of at most `_ROWS_AT_ONCE`."""
        ...

    def row(self, number: int) -> Row: ...


def _parts_of(path: Path) -> list[_Part]:
    _pyarrow(path)
    if not path.is_dir():
        return [_ParquetPart(path, _KeptRowGroups())]
    names = sorted(one.name for one in path.iterdir())
    if "dataset_dict.json" in names:
        splits = ", ".join(name for name in names if (path / name / "state.json").is_file())
        raise DataError(f"{path}: a data set of several splits; name one of its folders: {splits}")
    if "state.json" in names:
        return [_ArrowPart(file) for file in _saved_files(path)]
    files = [path / name for name in names if name.endswith(PARQUET_SUFFIX)]
    if not files:
        raise DataError(
            f"{path}: this is a folder without data; valid: a JSONL file, a Parquet file, a folder of Parquet files, or"
            " one that `datasets` saved (save_to_disk)"
        )
    kept = _KeptRowGroups()
    return [_ParquetPart(file, kept) for file in files]


def _saved_files(path: Path) -> list[Path]:
    """The Arrow files of a saved data set, in the order of its rows."""
    state = path / "state.json"
    try:
        found = read_json_file(state)
        files = [path / one["filename"] for one in found["_data_files"]]
        indices = found.get("_indices_data_files") or found.get("_indices_files")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{state}: not the state of a saved data set: {error!r}") from error
    if indices:
        raise DataError(f"{state}: its rows are chosen by indices; save it anew with `flatten_indices()`")
    return files


class _ParquetPart:
    def __init__(self, file: Path, kept: _KeptRowGroups) -> None:
        self.file, self._kept = file, kept
        self._parquet = _opened(file, lambda: _pyarrow(file, ".parquet").ParquetFile(open_regular(file)))
        metadata = self._parquet.metadata
        groups = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        self._starts = [0, *accumulate(groups)]
        self.num_rows = self._starts[-1]
        _check_columns(file, self._parquet.schema_arrow)

    def batches(self) -> Iterator[Any]:
        return self._parquet.iter_batches(batch_size=_ROWS_AT_ONCE, use_threads=False)

    def row(self, number: int) -> Row:
        group = bisect.bisect_right(self._starts, number) - 1
        table = self._kept.get((self.file, group), lambda: self._parquet.read_row_group(group, use_threads=False))
        return table.slice(number - self._starts[group], 1).to_pylist()[0]


class _KeptRowGroups:
    """A cache of decoded row groups, which drops those that were not used for longest."""

    def __init__(self) -> None:
        self._tables: OrderedDict[tuple[Path, int], Any] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: tuple[Path, int], read: Callable[[], Any]) -> Any:
        if key not in self._tables:
            self._tables[key] = table = read()
            self._num_bytes += table.nbytes
            while self._num_bytes > _KEPT_BYTES and len(self._tables) > 1:
                self._num_bytes -= self._tables.popitem(last=False)[1].nbytes
        self._tables.move_to_end(key)
        return self._tables[key]


class _ArrowPart:
    def __init__(self, file: Path) -> None:
        self.file = file
        self._table = _opened(file, self._mapped)
        self.num_rows = self._table.num_rows
        _check_columns(file, self._table.schema)

    def _mapped(self) -> Any:
        pyarrow = _pyarrow(self.file)
        ipc = _pyarrow(self.file, ".ipc")
        mapped = pyarrow.memory_map(str(self.file), "rb")
        is_stream = mapped.read(6) != b"ARROW1"
        mapped.seek(0)
        return (ipc.open_stream if is_stream else ipc.open_file)(mapped).read_all()

    def batches(self) -> Iterator[Any]:
        return iter(self._table.to_batches(max_chunksize=_ROWS_AT_ONCE))

    def row(self, number: int) -> Row:
        return self._table.slice(number, 1).to_pylist()[0]


def _pyarrow(path: Path, module: str = "") -> Any:
    try:
        return importlib.import_module(f"pyarrow{module}")
    except ImportError as error:
        raise DataError(
            f"{path}: Parquet files and saved data sets are read with the package pyarrow, which is not installed"
            f" ({error}); install it (pip install 'gspo_mega[parquet]'), or write the rows as JSONL"
        ) from error


def _opened(file: Path, opened: Callable[[], Any]) -> Any:
    try:
        return opened()
    except FileNotFoundError:
        raise DataError(
            f"{file}: no such file (relative paths start in {Path.cwd()}){missing_hint(file, 'dataset')}"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read: {str(error).splitlines()[0]}") from None


def _check_columns(file: Path, schema: Any) -> None:
    types = _pyarrow(file, ".types")
    problems = [
        f"{file}: column {field.name!r} is {field.type}, which is not a JSON type; {_VALID}. Remove or cast it"
        for field in schema
        if not _is_json(field.type, types)
    ]
    if problems:
        raise DataError("\n".join(problems))


def _is_json(kind: Any, types: Any) -> bool:
    plain = ("is_string", "is_large_string", "is_string_view", "is_integer", "is_floating", "is_boolean", "is_null")
    if any(getattr(types, name)(kind) for name in plain):
        return True
    if types.is_dictionary(kind):
        return _is_json(kind.value_type, types)
    if types.is_struct(kind):
        return all(_is_json(kind.field(number).type, types) for number in range(kind.num_fields))
    lists = ("is_list", "is_large_list", "is_fixed_size_list", "is_list_view", "is_large_list_view")
    return any(getattr(types, name)(kind) for name in lists) and _is_json(kind.value_type, types)
