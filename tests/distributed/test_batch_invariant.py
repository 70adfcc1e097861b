"""`engine.batch_invariant`: packing and data parallelism change no bit of a log-prob, and gradients are those of the
plain layers.
"""

from __future__ import annotations

import numpy as np
import pytest
from layout_models import make_folder
from te_noise import relative

from gspo_mega.algorithm.correction import SUM_NAMES

ON = dict(engine=dict(batch_invariant=True))


@pytest.fixture(scope="module")
def computed(rank_pools, tmp_path_factory):
    folder = str(make_folder(tmp_path_factory.mktemp("models") / "dense", moe=False, per_token=3))

    def compute(ranks: int = 1, **sections) -> dict:
        settings = dict(lr=1e-3, distributed=False)
        pool = rank_pools(ranks)
        return pool.run("layout_jobs:run_layout", folder=folder, parallel={}, optimizer=settings, **sections)[0]

    return compute


def sums(result: dict) -> np.ndarray:
    """[sequences, 3] float64: of d, its square and its size, over a sequence's tokens. d is exact, being a difference
    of float32 numbers; the other statistics contain float64 exponentials, which torch rounds by their place in a pack.
    """
    return result["mismatch"][
        :, [SUM_NAMES.index(name) for name in ("log_ratio", "log_ratio_squared", "abs_log_ratio")]
    ]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_packs_and_ranks_change_no_bit_of_a_log_prob(computed, precision):
    one = computed(precision=precision, per_pack=1, **ON)
    for other in (dict(per_pack=12), dict(ranks=2, per_pack=3)):
        again = computed(precision=precision, **other, **ON)
        assert np.array_equal(sums(again), sums(one)), other
    # The numbers tell log-probs apart: the plain layers' are others.
    assert not np.array_equal(sums(computed(precision=precision, per_pack=1)), sums(one))


def test_gradients_are_those_of_the_plain_layers(computed):
    want, got = computed(precision="fp32"), computed(precision="fp32", **ON)
    assert want["gradient"].keys() == got["gradient"].keys()
    for name, gradient in want["gradient"].items():
        assert relative(got["gradient"][name], gradient) < 1e-5, name
    assert np.abs(got["log_s"] - want["log_s"]).max() < 1e-5
