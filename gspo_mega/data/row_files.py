"""The rows of a data source, however they are kept: JSONL, Parquet, or a folder that `datasets` saved.

Owns which reader a path gets. What the readers have in common is `RowFile`; `jsonl.py` and `table_files.py` read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from gspo_mega.data.jsonl import Enough, JsonlFile, Row
from gspo_mega.data.jsonl import check_first_rows as check_first_lines
from gspo_mega.data.table_files import TableFile, check_first_table_rows, is_table


class RowFile(Protocol):
    """`file[k]` is row k, zero-based. `fingerprint`: SHA-256 of the bytes of the file, or of the folder's data files in
    their order, hexadecimal. Opened, it has checked every row that it has; replacing the file (rename) does no harm
    from then on. `is_whole`: it has all rows of the file.
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
    """`check(row)` says in words what is wrong with a row, or None. `enough(n)`: whether n rows suffice, so that the
    file ends there (`is_whole` is false then). Raises DataError as `JsonlFile`.
    """
    return TableFile(path, check, enough) if is_table(Path(path)) else JsonlFile(path, check, enough)


def check_first_rows(path: str | Path, check: Callable[[Row], str | None], num_rows: int) -> None:
    """Check the file and its first `num_rows` rows as `open_rows` does, without reading further. Raises DataError."""
    (check_first_table_rows if is_table(Path(path)) else check_first_lines)(path, check, num_rows)
