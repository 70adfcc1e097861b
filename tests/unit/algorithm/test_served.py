"""What SGLang holds after it has quantized, and what enters its products: by hand, on numbers whose scales are exact."""

from __future__ import annotations

import pytest
import torch

from gspo_mega.algorithm.fp8 import from_fp8
from gspo_mega.algorithm.rounding import rounded_expert_inputs, rounded_linear_inputs, served_experts, served_linear


def test_a_channel_of_a_linear_layer_has_its_own_scale():
    """Rows with amax 448, 4480 and 0: scales 1, 10 and 1. 300 lies between 288 and 320 and is nearer to 288."""
    weight = torch.tensor([[448.0, 300.0], [-4480.0, 3000.0], [0.0, 0.0]])
    data, scale = served_linear(weight, "fp8")
    assert data.dtype == torch.float8_e4m3fn and data.shape == (2, 3) and scale.tolist() == [[1.0, 10.0, 1.0]]
    assert from_fp8(data).t().tolist() == [[448.0, 288.0], [-448.0, 288.0], [0.0, 0.0]]
    data, scale = served_linear(torch.tensor([[127.0, 1.5, -0.5], [254.0, 3.0, 0.0]]), "int8")
    assert data.t().tolist() == [[127, 2, -1], [127, 2, 0]] and scale.tolist() == [[1.0], [2.0]]


def test_an_expert_has_one_scale_in_fp8_and_one_a_row_in_int8():
    weight = torch.tensor([[[448.0, 2.0], [4.0, 1.0]], [[44.8, 0.0], [0.0, 0.0]]])
    data, scale = served_experts(weight, "fp8")
    assert data.shape == weight.shape and scale.shape == (2,)
    assert scale[0] == 1 and scale[1] == torch.tensor(44.8) / 448
    assert from_fp8(data)[0].tolist() == weight[0].tolist() and from_fp8(data)[1, 0, 0] == 448
    data, scale = served_experts(weight, "int8")
    assert data.shape == weight.shape and scale.shape == (2, 2, 1) and data[0, 1].tolist() == [127, 32]


def test_a_token_has_its_own_scale_and_a_call_of_experts_one():
    x = torch.tensor([[448.0, 300.0], [4.48, 3.0]])
    alone = rounded_linear_inputs(x, "fp8")
    assert alone[0].tolist() == [448.0, 288.0] and torch.allclose(alone[1], torch.tensor([4.48, 2.88]))
    together = rounded_expert_inputs(x, "fp8")
    assert together.tolist() == [[448.0, 288.0], [4.5, 3.0]], "the second token's values by the first one's scale"
    assert torch.equal(rounded_expert_inputs(x, "int8"), rounded_linear_inputs(x, "int8"))


def test_a_value_is_multiplied_by_the_reciprocal_of_its_scale():
    """175 / (196 / 448) is 400, in the middle of 384 and 416, of which 384 is even. In float32 the reciprocal of
    196 / 448 is a little too large, so the product is above the middle.
    """
    weight = torch.tensor([[196.0, 175.0]])
    data, scale = served_linear(weight, "fp8")
    assert scale.item() == 196 / 448 and from_fp8(data).flatten().tolist() == [448.0, 416.0]
    assert rounded_linear_inputs(weight, "fp8")[0, 1] == 416 * 196 / 448
    assert from_fp8(served_experts(weight[None], "fp8")[0]).flatten().tolist() == [448.0, 416.0]


def test_128_values_of_a_token_have_a_scale():
    x = torch.full((1, 256), 3.0)
    x[0, 0], x[0, 128] = 448.0, 4.48
    rounded = rounded_linear_inputs(x, "fp8_block")
    assert rounded[0, 1] == 3.0 and torch.isclose(rounded[0, 129], torch.tensor(2.88))
    assert torch.equal(rounded_expert_inputs(x, "fp8_block"), rounded)
    powers = rounded_linear_inputs(x, "fp8_block", power_of_two=True)
    assert powers[0, 129] == 3.0, "the scale of 4.48 / 448 = 0.01 is 2 ** -6, and 3 * 64 = 192 is a value"
    with pytest.raises(ValueError, match="100 is not a multiple of 128"):
        rounded_linear_inputs(torch.zeros(1, 100), "fp8_block")


@pytest.mark.parametrize("quantization", ["fp8", "fp8_block", "int8"])
def test_no_token_and_other_dtypes(quantization):
    assert rounded_expert_inputs(torch.zeros(0, 128), quantization).shape == (0, 128)
    assert rounded_linear_inputs(torch.zeros(0, 128), quantization, power_of_two=True).shape == (0, 128)
    x = torch.randn(3, 128).to(torch.bfloat16)
    assert rounded_linear_inputs(x, quantization).dtype == torch.float32
    assert torch.equal(rounded_linear_inputs(x, quantization), rounded_linear_inputs(x.float(), quantization))
