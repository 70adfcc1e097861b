"""A sentence about a run, and the figures it is made of: sums, and means over the last steps, which are named."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from gspo_mega.report.run_record import RunRecord, Series

Level = Literal["good", "note", "warning"]


class Verdict(NamedTuple):
    """`metric`: the curve that shows it."""

    level: Level
    topic: str
    text: str
    metric: str | None = None


class Recent(NamedTuple):
    """The mean of a metric over its last values, which are those of the steps from `first` to `last`."""

    mean: float
    first: int
    last: int


def present(series: Series) -> list[float]:
    return [value for value in series if value is not None]


def total(record: RunRecord, metric: str) -> float:
    return math.fsum(present(record.series.get(metric, [])))


def recent(record: RunRecord, metric: str) -> Recent | None:
    """Over the last tenth, at least 3 values."""
    series = record.series.get(metric, [])
    having = [(step, value) for step, value in zip(record.steps, series) if value is not None]
    last = having[-max(3, len(having) // 10) :]
    if not last:
        return None
    return Recent(math.fsum(value for _, value in last) / len(last), last[0][0], last[-1][0])


def said_of(first: int, last: int) -> str:
    """Which steps a mean is over."""
    return f"step {last}" if first == last else f"mean of steps {first} to {last}"
