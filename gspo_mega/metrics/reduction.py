"""From the numbers of a step's trajectories, groups or optimizer steps to one value, by the catalogue's reduction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from gspo_mega.metrics.catalogue import find_metric

_REDUCTIONS: dict[str, Callable[[np.ndarray], Any]] = {
    "mean": np.mean,
    "sum": np.sum,
    "min": np.min,
    "max": np.max,
    "sd": np.std,
    "ratio": np.mean,
    "value": lambda values: values.item(),
}


def reduced(numbers: Mapping[str, ArrayLike]) -> dict[str, float]:
    """One value of each metric from its numbers, [n] and not empty, by the metric's `reduction` in the catalogue.

    `ratio` takes one truth value per unit and gives the share that is true; `sd` is the population's; `value` takes a
    single number. Raises ValueError for a name that the catalogue lacks, a `quantile`, or several numbers of a `value`.
    """
    metrics = {}
    for name, values in numbers.items():
        reduction = find_metric(name).reduction
        if reduction not in _REDUCTIONS:
            raise ValueError(f"metric {name} is a {reduction}; it is not reduced from plain numbers")
        metrics[name] = float(_REDUCTIONS[reduction](np.asarray(values)))
    return metrics
