"""Tables of finished runs, one row each, and the statistics of arms over their seeds. What a study measures is its own.

Owns the CSV file that a row is appended to, on disk at once, and what can be seen between arms of so many runs.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Protocol, TypeVar

Row = TypeVar("Row")


class Started(Protocol):
    """A row of which the seed and its cold start are known."""

    @property
    def seed(self) -> int: ...
    @property
    def cold_start(self) -> str: ...


class Compared(Started, Protocol):
    """A finished run as arms are compared by."""

    @property
    def arm(self) -> str: ...
    @property
    def outcome(self) -> str: ...


Of = TypeVar("Of", bound=Compared)

_TYPES = {"int": int, "float": float, "str": str}


def read_table(path: Path, kind: type[Row]) -> list[Row]:
    """The rows of the file, each a dataclass `kind` of ints, floats and strings; none where there is no file. Raises
    ValueError for another header, or a row cut short.
    """
    if not path.exists():
        return []
    described: Any = kind
    columns = tuple(field.name for field in fields(described))
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != columns:
            raise ValueError(f"{path}: not the columns of this study")
        rows = []
        for line in reader:
            if None in line or None in line.values():
                raise ValueError(f"{path}:{reader.line_num}: {len(columns)} columns expected")
            rows.append(kind(**{one.name: _TYPES[str(one.type)](line[one.name]) for one in fields(described)}))
        return rows


def append_row(path: Path, row: Any) -> None:
    """Append one row, and the header to a new file; on disk when it returns. Floats have six digits."""
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if file.tell() == 0:
            writer.writerow(field.name for field in fields(row))
        writer.writerow([format(value, ".6g") if isinstance(value, float) else value for value in astuple(row)])
        file.flush()
        os.fsync(file.fileno())


def t_quantile(p: float, freedom: int) -> float:
    """The p quantile (1/2 <= p < 1) of Student's t with `freedom` degrees of freedom."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)

    def below(t: float, num_parts: int = 2000) -> float:
        width = t / num_parts
        heights = [(1 + (i * width) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(num_parts + 1)]
        return 0.5 + scale * width / 3 * (
            heights[0] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2]) + heights[-1]
        )

    low, high = 0.0, 1.0
    while below(high) < p:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < p else (low, middle)
    return (low + high) / 2


def pooled_spread(groups: Iterable[Sequence[float]]) -> tuple[float, int]:
    """The standard deviation within groups (arms over their seeds) and its degrees of freedom. Raises ValueError where
    no group has two values.
    """
    several = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in several)
    if freedom == 0:
        raise ValueError("no arm has two seeds: their spread is unknown")
    squares = sum((len(group) - 1) * stdev(group) ** 2 for group in several)
    return math.sqrt(squares / freedom), freedom


def start_effects(rows: Sequence[Of], value: Callable[[Of], float]) -> dict[str, float]:
    """What each cold start adds to where its runs end: the mean over arms of their runs from it, less the mean of that
    over all cold starts. Of the arms that have runs from every cold start and no collapse; 0 with one cold start. With
    the effects taken off, arms are compared within cold starts, and each cold start but one costs a degree of freedom.
    Raises ValueError where no arm has runs from all of several cold starts.
    """
    starts = list(dict.fromkeys(row.cold_start for row in rows))
    arms: dict[str, list[Of]] = {}
    for row in rows:
        arms.setdefault(row.arm, []).append(row)
    means = [
        [fmean(value(row) for row in arm if row.cold_start == start) for start in starts]
        for arm in arms.values()
        if {row.cold_start for row in arm} == set(starts) and all(row.outcome == "trained" for row in arm)
    ]
    if len(starts) == 1:
        return {starts[0]: 0.0}
    if not means:
        raise ValueError("no arm has runs from every cold start: they cannot be told from the arms")
    by_start = [fmean(of_start) for of_start in zip(*means, strict=True)]
    return {start: mean - fmean(by_start) for start, mean in zip(starts, by_start, strict=True)}


def compared_spread(rows: Sequence[Of], value: Callable[[Of], float]) -> tuple[float, int]:
    """`pooled_spread` of arms without a collapse, of values without their `start_effects`. Raises ValueError where no
    degree of freedom is left.
    """
    effects = start_effects(rows, value)
    arms: dict[str, list[Of]] = {}
    for row in rows:
        arms.setdefault(row.arm, []).append(row)
    good = [arm for arm in arms.values() if all(row.outcome == "trained" for row in arm)]
    spread, freedom = pooled_spread([value(row) - effects[row.cold_start] for row in arm] for arm in good)
    left = freedom - (len(effects) - 1)
    if left < 1:
        raise ValueError("no degree of freedom is left between runs: their spread is unknown")
    return spread * math.sqrt(freedom / left), left


def smallest_detectable(
    spread: float, freedom: int, num_runs: Sequence[int], power: float = 0.8, level: float = 0.05
) -> float:
    """The smallest true difference that a two-sided t-test at `level` finds with probability `power`:
    (t(1 - level/2) + t(power)) spread sqrt(sum of 1/n), n the number of runs of each arm that takes part. Two arms are
    compared by their means. Two losses have four arms: each is the difference of an arm to its anchor.
    """
    error = spread * math.sqrt(sum(1 / number for number in num_runs))
    return (t_quantile(1 - level / 2, freedom) + t_quantile(power, freedom)) * error


def of_other_starts(rows: Iterable[Started], seeds: Iterable[int], checksum: str) -> str:
    """Those of `seeds` that have rows of another cold start, in words; empty where none has."""
    wanted = set(seeds)
    found = sorted({(row.seed, row.cold_start) for row in rows if row.seed in wanted and row.cold_start != checksum})
    return ", ".join(f"seed {seed} of {start}" for seed, start in found)
