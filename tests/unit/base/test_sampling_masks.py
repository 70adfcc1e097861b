"""The sets of token ids that the sampler kept: their code, and what is cut out of and joined from it."""

from __future__ import annotations

import numpy as np
import pytest

from gspo_mega.base.sampling_masks import SamplingMasks


def sets_of(masks: SamplingMasks) -> list[list[int]]:
    return [part.tolist() for part in np.split(masks.ids(), np.cumsum(masks.counts)[:-1])] if len(masks) else []


def test_the_code_by_hand():
    """5, then 130 - 5 = 125; 300 is 0b10_0101100: its low seven bits with the top bit, then 2."""
    masks = SamplingMasks.of([[130, 5], [], [300]])
    assert masks.counts.tolist() == [2, 0, 1]
    assert masks.codes.tolist() == [5, 125, 0b1010_1100, 2]
    assert sets_of(masks) == [[5, 130], [], [300]]


def random_sets(rng: np.random.Generator, num: int, vocab: int) -> list[list[int]]:
    return [
        rng.choice(vocab, size=rng.integers(0, 30), replace=False).tolist() if rng.random() < 0.8 else []
        for _ in range(num)
    ]


@pytest.mark.parametrize("vocab", [40, 200, 150_000, 2**31 - 1])
def test_sets_come_back_and_can_be_cut_and_joined(vocab):
    rng = np.random.default_rng(vocab)
    if vocab > 10**6:
        sets = [rng.integers(0, vocab, 5).tolist() for _ in range(20)] + [[0, vocab - 1], [], [vocab - 1]]
    else:
        sets = random_sets(rng, 50, vocab)
    masks, wanted = SamplingMasks.of(sets), [sorted(one) for one in sets]
    assert sets_of(masks) == wanted
    for start, end in [(0, len(sets)), (3, 17), (5, 5), (19, 23), (0, 1)]:
        assert sets_of(masks.between(start, end)) == wanted[start:end]
        assert SamplingMasks.join([masks.between(0, start), masks.between(start, len(sets))]) == masks
    kept = rng.random(len(sets)) < 0.5
    assert sets_of(masks.where(kept)) == [one if keep else [] for one, keep in zip(wanted, kept, strict=True)]
    places = rng.permutation(len(sets))[:9]
    counts, ids = masks.at(places)
    assert counts.tolist() == [len(wanted[p]) for p in places]
    assert ids.tolist() == [token for p in places for token in wanted[p]]


def test_empty_ones():
    none = SamplingMasks.none(3)
    assert len(none) == 3 and none.ids().size == 0 and none.at(np.array([2, 0]))[0].tolist() == [0, 0]
    assert SamplingMasks.join([none, SamplingMasks.of([[4]])]) == SamplingMasks.of([[], [], [], [4]])
    assert len(SamplingMasks.join([])) == 0 and none != SamplingMasks.none(2)
    assert none.between(1, 3) == SamplingMasks.none(2)


def test_twenty_ids_of_a_large_vocabulary_take_about_forty_bytes():
    rng = np.random.default_rng(1)
    masks = SamplingMasks.of([rng.choice(150_000, 20, replace=False).tolist() for _ in range(100)])
    assert 30 * 100 < masks.num_bytes < 46 * 100


@pytest.mark.parametrize("bad", [[[3, 3]], [[-1, 4]]])
def test_what_is_no_set_is_refused(bad):
    with pytest.raises(ValueError, match="negative id, or one id twice"):
        SamplingMasks.of(bad)


@pytest.mark.parametrize(
    "counts, codes, match",
    [([2], [5], "the sets have 2"), ([1], [0x85], "within an id"), ([1], [0x80] * 9 + [1], "nine")],
)
def test_a_damaged_code_is_refused(counts, codes, match):
    with pytest.raises(ValueError, match=match):
        SamplingMasks(np.array(counts, np.int32), np.array(codes, np.uint8)).ids()
