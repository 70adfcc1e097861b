import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_mega.base.errors import DataError
from gspo_mega.data.stream import PromptStream, epoch_order


class Rows:
    """A source whose item k is `name:k`; rows in `left_out` are too long."""

    def __init__(self, name, num_rows, left_out=(), fingerprint="f"):
        self.name, self.path, self.fingerprint = name, f"{name}.jsonl", fingerprint
        self._num_rows, self._left_out = num_rows, set(left_out)

    def __len__(self):
        return self._num_rows

    def item(self, row):
        return None if row in self._left_out else f"{self.name}:{row}"


def take(stream, count):
    return [stream.next() for _ in range(count)]


def stream_of(sizes=(5, 3), weights=None, seed=7, shuffle=True):
    sources = [Rows(f"s{k}", size) for k, size in enumerate(sizes)]
    return PromptStream(sources, weights or [1.0] * len(sizes), seed=seed, shuffle=shuffle)


@given(st.integers(1, 300), st.integers(0, 2**31 - 1), st.integers(0, 50))
def test_an_epochs_order_is_a_permutation(num_rows, seed, epoch):
    order = epoch_order(num_rows, seed=seed, source="a", epoch=epoch)
    assert order.dtype == np.int64 and sorted(order.tolist()) == list(range(num_rows))


def test_the_order_is_fixed_for_all_time():
    """A checkpoint of an older release continues in this one only if these numbers never change."""
    assert epoch_order(10, seed=1, source="data", epoch=0).tolist() == ORDER_OF_TEN


ORDER_OF_TEN = [4, 7, 5, 1, 0, 6, 8, 2, 9, 3]


def test_orders_differ_by_seed_source_and_epoch():
    orders = [
        tuple(epoch_order(50, seed=seed, source=source, epoch=epoch))
        for seed in (1, 2)
        for source in ("a", "b")
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == 8


def test_the_order_has_no_trend():
    """Positions of the first half's rows, over many orders: their mean is that of a random permutation."""
    means = [np.argsort(epoch_order(100, seed=seed, source="a", epoch=0))[:50].mean() for seed in range(400)]
    # Standard deviation of one mean: sqrt(100^2/12 / 50 / 2) = 2.9, of 400 of them 0.145.
    assert abs(np.mean(means) - 49.5) < 0.6


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_comes_once_an_epoch(shuffle):
    stream = stream_of(sizes=(7,), shuffle=shuffle)
    epochs = [take(stream, 7) for _ in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 7 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == (3 if shuffle else 1)
    if not shuffle:
        assert epochs[0] == [f"s0:{k}" for k in range(7)]


@given(st.lists(st.sampled_from([0.25, 0.5, 1.0, 1.5, 3.0, 10.0]), min_size=1, max_size=5), st.integers(1, 200))
def test_sources_keep_to_their_shares(weights, count):
    drawn = Counter(item.split(":")[0] for item in take(stream_of(sizes=[11] * len(weights), weights=weights), count))
    for k, weight in enumerate(weights):
        assert abs(drawn[f"s{k}"] - count * weight / sum(weights)) < len(weights)


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    weights=st.lists(st.sampled_from([0.3, 1.0, 2.5]), min_size=3, max_size=3),
    before=st.integers(0, 40),
    after=st.integers(1, 40),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_a_stream_continues_exactly_where_it_was_saved(sizes, weights, before, after, shuffle, data):
    left_out = [data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1)) for size in sizes]

    def build():
        sources = [Rows(f"s{k}", size, out) for k, (size, out) in enumerate(zip(sizes, left_out))]
        return PromptStream(sources, weights[: len(sizes)], seed=3, shuffle=shuffle)

    stream = build()
    take(stream, before)
    state = json.loads(json.dumps(stream.state_dict()))
    expected = take(stream, after)
    resumed = build()
    take(resumed, data.draw(st.integers(0, 5)))
    resumed.load_state_dict(state)
    assert take(resumed, after) == expected
    assert resumed.state_dict() == stream.state_dict()


def test_rows_left_out_are_skipped_and_use_up_no_share():
    sources = [Rows("long", 10, left_out=range(9)), Rows("short", 10)]
    drawn = take(PromptStream(sources, [1.0, 1.0], seed=1, shuffle=True), 100)
    assert Counter(drawn)["long:9"] == 50 and len(set(drawn)) == 11


def test_a_source_that_leaves_out_everything_is_an_error():
    with pytest.raises(DataError, match="a.jsonl: all 4 rows"):
        PromptStream([Rows("a", 4, left_out=range(4))], [1.0], seed=1, shuffle=True).next()


def test_other_weights_count_from_here_on():
    state_of = stream_of(sizes=(50, 50), weights=[9.0, 1.0])
    take(state_of, 1000)
    resumed = stream_of(sizes=(50, 50), weights=[1.0, 9.0])
    resumed.load_state_dict(state_of.state_dict())
    drawn = Counter(item.split(":")[0] for item in take(resumed, 100))
    assert 8 <= drawn["s0"] <= 12


@pytest.mark.parametrize(
    ("now", "text"),
    [
        (
            PromptStream([Rows("a", 5)], [1.0], seed=1, shuffle=True),
            "a.jsonl: changed since the run was saved: it had 4 rows and has 5 now",
        ),
        (
            PromptStream([Rows("a", 4, fingerprint="g")], [1.0], seed=1, shuffle=True),
            "a.jsonl: changed .* their content is not",
        ),
        (PromptStream([Rows("b", 4)], [1.0], seed=1, shuffle=True), r"sources were \['a'\] and are now \['b'\]"),
        (PromptStream([Rows("a", 4), Rows("b", 4)], [1.0, 1.0], seed=1, shuffle=True), "sources were"),
        (PromptStream([Rows("a", 4)], [1.0], seed=2, shuffle=True), "seed was 1 and is now 2"),
        (PromptStream([Rows("a", 4)], [1.0], seed=1, shuffle=False), "shuffle was True and is now False"),
    ],
)
def test_a_stream_refuses_to_continue_on_other_data(now, text):
    then = PromptStream([Rows("a", 4)], [1.0], seed=1, shuffle=True)
    take(then, 2)
    before = now.state_dict()
    with pytest.raises(DataError, match=text):
        now.load_state_dict(then.state_dict())
    assert now.state_dict() == before


def test_sources_and_weights_must_match():
    for sources, weights in [([], []), ([Rows("a", 1)], [1.0, 2.0]), ([Rows("a", 1)], [0.0])]:
        with pytest.raises(ValueError, match="positive weights"):
            PromptStream(sources, weights, seed=1, shuffle=True)
    with pytest.raises(ValueError, match="one name"):
        PromptStream([Rows("a", 1), Rows("a", 1)], [1.0, 1.0], seed=1, shuffle=True)


def test_a_million_rows_cost_less_than_a_second():
    stream = PromptStream([Rows("a", 1_000_000)], [1.0], seed=1, shuffle=True)
    assert len(set(take(stream, 1000))) == 1000
