"""Messages between ranks: what goes in comes out, and nothing else can."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gspo_mega.train.scatter import decode, encode

ARRAYS = hnp.arrays(
    dtype=st.sampled_from([np.float32, np.float64, np.int32, np.int64, np.uint8]),
    shape=hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4),
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text().filter(lambda key: key != "__array__"), inner, max_size=4)
    ),
    max_leaves=12,
)


def same(a, b) -> bool:
    if isinstance(a, np.ndarray):
        return (
            isinstance(b, np.ndarray)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(VALUES)
def test_round_trip(value):
    assert same(value, decode(encode(value)))


def test_many_arrays_keep_their_places():
    value = {"b": [np.arange(i) for i in range(12)], "a": {"x": np.ones((2, 3))}}
    back = decode(encode(value))
    assert [len(a) for a in back["b"]] == list(range(12))
    assert back["a"]["x"].shape == (2, 3)


def test_arrays_are_writable_and_aligned_views_of_the_message():
    message = encode({"odd": np.zeros(3, np.uint8), "next": np.arange(4.0)[::2]})
    back = decode(message)
    back["odd"][0] = 1
    assert all(np.shares_memory(one, message) and one.flags.aligned for one in back.values())
    assert back["next"].tolist() == [0.0, 2.0]


def test_objects_are_refused():
    with pytest.raises(TypeError):
        encode({"x": object()})
