"""Columns hold the values of lists to the bit, in few bytes."""

import math
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_mega.base.records import Column, constant_column, distinct_values, float_column, int_column, join_columns

INTS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)
FLOATS = st.lists(st.floats() | st.floats(width=32) | st.sampled_from([0.0, -0.0, math.nan, -math.inf]), max_size=20)


def bits(values) -> list[bytes]:
    return [struct.pack("<d", value) for value in values]


@given(FLOATS, FLOATS)
def test_log_probs_are_the_same_bits_alone_and_joined(first, second):
    one, other = float_column(first), float_column(second)
    assert bits(one) == bits(first) and bits(np.asarray(one, np.float64)) == bits(first)
    assert bits(join_columns([one, other])) == bits(first + second)
    assert bits(join_columns([first, other])) == bits(first + second)
    assert bits(float_column(np.asarray(one, np.float64))) == bits(first)


@given(INTS, INTS, st.slices(20))
def test_ints_read_and_compare_as_their_list(first, second, part):
    one = int_column(first)
    assert one == first and one == tuple(first) and first == one and list(one) == first and len(one) == len(first)
    assert one[part] == first[part] and [one[place] for place in range(len(first))] == first
    assert (one == second) is (first == second) and (one == int_column(second)) is (first == second)
    assert distinct_values(one) == distinct_values(first) == set(first)
    assert join_columns([one, int_column(second)]) == first + second == join_columns([first, int_column(second)])
    assert type(one + second) is type(first + one) is list
    assert one + second == first + int_column(second) == one + int_column(second) == first + second
    assert pickle.loads(pickle.dumps(one)) == first and all(type(value) is int for value in one)


def test_what_a_token_costs():
    """Of a response as a server sends it: its log-probs are float32, and one version sampled it."""
    ids = int_column(range(1000))
    log_probs = float_column(np.linspace(-1, 0, 1000).astype(np.float32).astype(float).tolist())
    assert ids.array.nbytes == log_probs.array.nbytes == 4000
    versions = join_columns([constant_column(7, 600), constant_column(7, 400)])
    assert isinstance(versions, Column) and versions.array.strides == (0,) and len(versions) == 1000
    assert float_column([0.1]).array.dtype == np.float64


def test_a_value_beyond_int32_is_refused():
    with pytest.raises(OverflowError):
        int_column([2**31])
    assert Column(np.zeros(2)) != "00" and Column(np.zeros(2)) != [0.0]
