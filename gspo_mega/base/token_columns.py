"""One value for each token, as an array: what records hold of a response for as long as a batch lives.

Owns how few bytes that takes. A column reads and compares as the list of its values, which are never changed: token ids
take 4 bytes, log-probs 4 where float32 has their exact value and 8 otherwise, and a column of one value (a mask, the
version of the weights) none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np

_T = TypeVar("_T", int, float)


class Column(Sequence[_T], Generic[_T]):
    """A sequence of Python numbers over `array`, [tokens]. Slices share its memory."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __len__(self) -> int:
        return self.array.shape[0]

    @overload
    def __getitem__(self, place: int) -> _T: ...

    @overload
    def __getitem__(self, place: slice) -> Column[_T]: ...

    def __getitem__(self, place: int | slice) -> _T | Column[_T]:
        return Column(self.array[place]) if isinstance(place, slice) else self.array[place].item()

    def __iter__(self) -> Iterator[_T]:
        return iter(self.array.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype) if copy else np.asarray(self.array, dtype)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Column):
            return np.array_equal(self.array, other.array)
        return self.array.tolist() == list(other) if isinstance(other, (list, tuple)) else NotImplemented

    def __add__(self, other: Sequence[_T]) -> list[_T]:
        """As of lists: a new list."""
        return [*self, *other] if isinstance(other, (list, Column)) else NotImplemented

    def __radd__(self, other: list[_T]) -> list[_T]:
        return [*other, *self] if isinstance(other, list) else NotImplemented

    __hash__ = None  # pyright: ignore[reportAssignmentType]: as of a list

    def __repr__(self) -> str:
        return repr(self.array.tolist())


def ints(values: Iterable[int]) -> Column[int]:
    """Raises OverflowError for a value beyond int32."""
    if isinstance(values, Column):
        return values
    array = np.asarray(values if isinstance(values, (list, tuple, np.ndarray)) else list(values), np.int32)
    return Column(_narrowest(array))


def floats(values: Iterable[float]) -> Column[float]:
    """The float64 values to the bit."""
    if isinstance(values, Column):
        return values
    array = np.asarray(values if isinstance(values, (list, tuple, np.ndarray)) else list(values), np.float64)
    with np.errstate(over="ignore"):
        short = array.astype(np.float32)
    # Compared as bits: 0.0 equals -0.0, and no NaN equals itself.
    is_exact = np.array_equal(short.astype(np.float64).view(np.int64), array.view(np.int64))
    return Column(short if is_exact else np.array(array))


def constant(value: int, num: int) -> Column[int]:
    """`num` times the value."""
    return Column(np.broadcast_to(np.int32(value), (num,)))


def joined(parts: Sequence[Sequence[_T]]) -> Sequence[_T]:
    """One behind the other; a single part as it is."""
    filled = [part for part in parts if len(part)] or list(parts[:1])
    if len(filled) == 1:
        return filled[0]
    return Column(_narrowest(np.concatenate([np.asarray(part) for part in filled])))


def _narrowest(array: np.ndarray) -> np.ndarray:
    if array.shape[0] and array.dtype.kind == "i" and (array == array[0]).all():
        return np.broadcast_to(array[0].copy(), array.shape)
    return np.array(array)


def distinct(values: Sequence[int]) -> set[int]:
    """The values that occur."""
    if isinstance(values, Column):
        return set(values[:1] if values.array.strides == (0,) else np.unique(values.array).tolist())
    return set(values)
