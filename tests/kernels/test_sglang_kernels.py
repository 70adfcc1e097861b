"""SGLang's Triton kernels, interpreted on a CPU, against what stands in their place there."""

import importlib.util

import pytest
from interpreter import check, outcomes

SCRIPT = "sglang_kernels.py"
FP32, BF16 = 2**-24, 2**-8  # half a unit in the last place of 1
# How many additions in another order, or roundings of bf16, may differ.
BOUNDS = {
    "decode, a key per head": 70 * FP32,
    "decode, shared keys": 70 * FP32,
    "decode, sinks": 70 * FP32,
    "decode, sliding window": 70 * FP32,
    "decode, bf16": 2 * BF16,
    "decode, FP8 cache, a key per head": 70 * FP32,
    "decode, FP8 cache, shared keys": 13 * FP32,
    "decode, latents": 288 * FP32,
    "prefill, shared keys": 57 * FP32,
    "prefill, sinks": 57 * FP32,
    "prefill, sliding window": 57 * FP32,
    "prefill, bf16": 2 * BF16,
    "experts' blocks": 0.0,
    "experts, fp32": 64 * FP32,
    "experts, bf16": 2 * BF16,
    "experts with gpt-oss's biases": 64 * FP32,
    "experts, FP8 per tensor": 64 * FP32,
    "experts, FP8 in blocks": 256 * FP32,
    "experts, INT8": 64 * FP32,
    "experts' rows, there and back": 0.0,
    "FP8 per group of a token": 0.0,
    "FP8 per group, powers of two": 0.0,
    "FP8 per token": 0.0,
    "FP8 per tensor": 0.0,
    "FP8 by a given scale": 0.0,
    "INT8 per token": 0.0,
    "product of FP8 in blocks": 256 * FP32,
    "product of FP8 per token and channel": 256 * FP32,
    "adapters, A": 48 * FP32,
    "adapters, B": 16 * FP32,
    "adapters, B of q, k and v": 16 * FP32,
    "adapters, B of gate and up": 16 * FP32,
    "adapters in chunks": 48 * FP32,
}
CONTROLS = ("control: a window with one key less", "control: no sinks", "control: a scale that is divided by")

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("triton", "sglang")
]


def test_every_case_has_a_bound():
    assert outcomes(SCRIPT).keys() == BOUNDS.keys() | set(CONTROLS)


@pytest.mark.parametrize("name", BOUNDS)
def test_what_stands_in_is_the_kernel(name):
    check(SCRIPT, BOUNDS, name)


@pytest.mark.parametrize("name", CONTROLS)
def test_a_fault_is_seen(name):
    outcome = outcomes(SCRIPT)[name]
    assert not outcome.error and outcome.difference > 1e-3
