"""Gradients in bf16: what contradicts them is refused by name."""

import pytest
from config_refusals import refused


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["precision=fp32"], "optimizer.gradients_dtype: bf16 with `precision: fp32`: gradients have at least their"),
        (
            ["precision=fp8", "fp8.parameters=true"],
            "bf16 with `fp8.parameters: true`: what Megatron's buffers make of that was not compared; valid: fp32, or",
        ),
        (["precision=bf16", "optimizer.moments_dtype=bf16"], "valid: fp32, or moments_dtype: fp32"),
        (
            ["precision=bf16", "optimizer.cpu_offload_fraction=0.5"],
            "bf16 with cpu_offload_fraction 0.5: that Adam was not compared with such gradients",
        ),
    ],
)
def test_what_contradicts_gradients_in_bf16_is_refused(write, overrides, said):
    assert said in refused(write(), "optimizer.gradients_dtype=bf16", *overrides)
