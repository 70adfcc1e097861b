"""Merging the columns of several ranks: each by its own reduction, and the table covers what the losses report."""

from __future__ import annotations

import numpy as np
import pytest

from gspo_mega.algorithm.terms import COLUMNS, CORRECTION_WEIGHT, ENTROPY_SUM, LOG_S, MISMATCH_MAXIMA, merge_columns


def part(rows, **columns):
    return np.array(rows), {name: np.array(values, dtype=np.float64) for name, values in columns.items()}


def test_sums_add_maxima_take_the_largest_and_the_rest_is_the_same():
    first = part([2, 0], entropy_sum=[1.0, 2.0], mismatch_maxima=[[1.0], [-3.0]], log_s=[0.5, 0.25])
    second = part([0, 2], entropy_sum=[4.0, 8.0], mismatch_maxima=[[-1.0], [0.5]], log_s=[0.25, 0.5])
    merged = merge_columns([first, second], 3)
    assert merged[ENTROPY_SUM.name].tolist() == [6.0, 0.0, 9.0]
    assert merged[MISMATCH_MAXIMA.name].tolist() == [[-1.0], [-np.inf], [1.0]]
    assert merged[LOG_S.name].tolist() == [0.25, 0.0, 0.5]


def test_a_name_says_nothing_about_the_reduction():
    """A weight of a name that ends like a sum's would be doubled by a reduction that follows names."""
    merged = merge_columns([part([0], correction_weight=[0.5])] * 2, 1)
    assert merged[CORRECTION_WEIGHT.name].tolist() == [0.5]
    assert all(column.reduction in ("sum", "max", "same") for column in COLUMNS.values())


def test_a_column_without_an_entry_is_an_error():
    with pytest.raises(KeyError, match="surprise_sum"):
        merge_columns([part([0], surprise_sum=[1.0])], 1)
