"""Transformer Engine's Triton kernels, interpreted on a CPU, against the functions that stand in their place."""

import importlib.util

import pytest
from interpreter import check, outcomes

from gspo_mega.config.precision import wheel_folder

SCRIPT = "te_kernels.py"
BOUNDS = {
    "row map": 0.0,
    "permute": 0.0,
    "unpermute": 0.0,
    "unpermute backward, rows": 0.0,
    "unpermute backward, weights": 80 * 2**-24,  # a sum over the width, whose blocks a GPU's autotuner chooses
    "chunk map": 0.0,
    "chunks": 0.0,
}

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(not (wheel_folder() / "transformer_engine").is_dir(), reason="no Transformer Engine here"),
]


def test_every_case_has_a_bound():
    assert outcomes(SCRIPT).keys() == BOUNDS.keys()


@pytest.mark.parametrize("name", BOUNDS)
def test_the_function_is_the_kernel(name):
    check(SCRIPT, BOUNDS, name)
