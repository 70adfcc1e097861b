"""SGLang's quantized linear layers and experts on a CPU: what they hold, what they multiply, and that they can be loaded
again; against rounding by search (`fp8_by_numpy.py`).
"""

from __future__ import annotations

import importlib.util
import types

import numpy as np
import pytest
import torch
from fp8_by_numpy import nearest_fp8

from gspo_mega.cpu import sglang_hooks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
    pytest.mark.skipif(sglang_hooks.has_gpu(), reason="the emulation is for machines without a GPU"),
]
sglang_hooks.activate()

QUANTIZATIONS = ("fp8", "fp8_block", "int8")
N, K, EXPERTS, WIDTH = 256, 384, 3, 128


def config(quantization: str, **changes):
    from gspo_mega.cpu.sglang_quantization import CpuFp8Config, CpuInt8Config

    if quantization == "int8":
        return CpuInt8Config({})
    if quantization == "fp8":
        return CpuFp8Config()
    raw = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return CpuFp8Config.from_config(raw | changes)


def linear_layer(quantization: str, dtype=torch.float32, **changes):
    """A layer of two parts of N / 2 rows, with random weights, as SGLang's model loader leaves it; its method; what was
    loaded."""
    from gspo_mega.cpu.sglang_quantization import CpuQuantizedLinear

    settings = config(quantization, **changes)
    method = CpuQuantizedLinear(settings, "int8" if quantization == "int8" else settings.served)
    layer = torch.nn.Module()
    layer.tp_group = None
    method.create_weights(layer, K, [N // 2, N // 2], K, N, dtype, weight_loader=lambda *_: None)
    torch.manual_seed(0)
    weight = (torch.randn(N, K) * torch.logspace(-3, 1, N)[:, None]).to(dtype)
    fill(layer, quantization, weight)
    method.process_weights_after_loading(layer)
    return layer, method, weight


def fill(layer, quantization: str, weight: torch.Tensor, name: str = "weight") -> None:
    """What loading does: the plain weight, or blocks and their scales."""
    if quantization != "fp8_block":
        getattr(layer, name).data.copy_(weight)
        return
    flat = weight.reshape(-1, weight.shape[-1]).float()
    values = rounded(flat, (128, 128))
    scales = flat.unfold(0, 128, 128).unfold(1, 128, 128).abs().amax((-1, -2)) / 448
    codes = values / scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    getattr(layer, name).data.copy_(codes.view(weight.shape).to(torch.float8_e4m3fn))
    target = getattr(layer, f"{name}_scale_inv").data
    target.copy_(scales.view(target.shape))


def rounded(x: torch.Tensor, block: tuple[int, int], to_int8: bool = False) -> torch.Tensor:
    """float64 values of [n, m] after e4m3, or INT8, with amax / largest of each block as scale; by loops. As SGLang's
    kernels do, FP8 multiplies by the reciprocal of the scale.
    """
    out = np.empty(x.shape)
    values = x.float().numpy()
    for i in range(0, x.shape[0], block[0]):
        for j in range(0, x.shape[1], block[1]):
            part = values[i : i + block[0], j : j + block[1]]
            scale = np.abs(part).max() / np.float32(127 if to_int8 else 448) or np.float32(1)
            if to_int8:  # halves away from zero
                scaled = (part * (np.float32(127) / np.abs(part).max())).astype(np.float64)
                codes = np.sign(scaled) * np.floor(np.abs(scaled) + 0.5)
            else:
                codes = nearest_fp8(part * (np.float32(1) / scale), "e4m3")
            out[i : i + block[0], j : j + block[1]] = codes.astype(np.float64) * np.float64(scale)
    return torch.from_numpy(out)


def by_hand(quantization: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    tokens = {"fp8": (1, x.shape[1]), "int8": (1, x.shape[1]), "fp8_block": (1, 128)}[quantization]
    channels = {"fp8": (1, K), "int8": (1, K), "fp8_block": (128, 128)}[quantization]
    to_int8 = quantization == "int8"
    return rounded(x, tokens, to_int8) @ rounded(weight, channels, to_int8).T


def sums_of_sizes(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What the rounding of float32 sums is relative to; the rounded operands are at most 1/8 above the plain ones."""
    return 1.3 * x.double().abs() @ weight.double().abs().T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_linear_layer_multiplies_rounded_operands(quantization, dtype):
    """Products of the rounded values, added in float32: at most K roundings of 2**-24 of the sum of their sizes, and one
    rounding of the result to the server's dtype."""
    layer, method, weight = linear_layer(quantization, dtype)
    x = (torch.randn(5, 7, K) * torch.logspace(-2, 2, 7)[:, None]).to(dtype)
    bias = torch.randn(N).to(dtype)
    output = method.apply(layer, x, bias)
    assert output.shape == (5, 7, N) and output.dtype == dtype
    flat = x.reshape(-1, K)
    exact = by_hand(quantization, flat, weight) + bias.double()
    sizes = sums_of_sizes(flat, weight) + bias.double().abs()
    allowed = sizes * K * 2**-24 + exact.abs() * (2**-8 if dtype == torch.bfloat16 else 2**-24)
    assert ((output.reshape(-1, N).double() - exact).abs() <= allowed).all()
    plain = (flat.double() @ weight.double().T + bias.double() - exact).abs() / sizes
    assert plain.max() > 1e-4, "rounding the operands changes the result, and by more than the tolerance"


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_no_token_has_no_output(quantization):
    layer, method, _ = linear_layer(quantization)
    assert method.apply(layer, torch.zeros(0, K)).shape == (0, N)


def test_a_linear_layer_holds_what_sglang_holds_on_a_gpu():
    for quantization, dtype, shape in (("fp8", torch.float8_e4m3fn, (1, N)), ("int8", torch.int8, (N, 1))):
        layer, _, _ = linear_layer(quantization, torch.bfloat16)
        assert (layer.weight.shape, layer.weight.dtype) == ((K, N), dtype)
        assert (layer.weight_scale.shape, layer.weight_scale.dtype) == (shape, torch.float32)
        assert set(dict(layer.named_parameters())) == {"weight", "weight_scale"}
    layer, _, _ = linear_layer("fp8_block")
    assert (layer.weight.shape, layer.weight.dtype) == ((N, K), torch.float8_e4m3fn)
    assert (layer.weight_scale_inv.shape, layer.weight_scale_inv.dtype) == ((2, 3), torch.float32)
    assert set(dict(layer.named_parameters())) == {"weight", "weight_scale_inv"}


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_layer_takes_new_weights(quantization):
    layer, method, weight = linear_layer(quantization)
    before = {name: value.data.clone().float() for name, value in layer.named_parameters()}
    method.restore_weights_before_loading(layer)
    fill(layer, quantization, 3 * weight + 1)
    method.process_weights_after_loading(layer)
    x = torch.randn(4, K)
    error = (method.apply(layer, x).double() - by_hand(quantization, x, 3 * weight + 1)).abs()
    assert (error <= sums_of_sizes(x, 3 * weight + 1) * (K + 1) * 2**-24).all()
    after = {name: value.data.float() for name, value in layer.named_parameters()}
    assert before.keys() == after.keys() and all((before[name] != after[name]).any() for name in before)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_what_was_not_loaded_is_refused(quantization):
    layer, method, weight = linear_layer(quantization)
    method.restore_weights_before_loading(layer)
    if quantization == "fp8_block":
        layer.weight_scale_inv.data[1, 2] = torch.nan
    else:
        layer.weight.data[: N // 2].copy_(weight[: N // 2])
    with pytest.raises(ValueError, match="no value was loaded for a part of it"):
        method.process_weights_after_loading(layer)


def test_scales_of_powers_of_two_round_tokens_by_powers_of_two():
    layer, method, weight = linear_layer("fp8_block", scale_fmt="ue8m0")
    x = torch.randn(6, K)
    groups = x.view(-1, 128)
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(1, keepdim=True) / 448)))
    codes = torch.from_numpy(nearest_fp8((groups / scale).numpy(), "e4m3"))
    exact = (codes * scale).view(x.shape).double() @ rounded(weight, (128, 128)).T
    assert torch.allclose(method.apply(layer, x).double(), exact, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(exact, by_hand("fp8_block", x, weight), rtol=1e-3, atol=1e-3)


def expert_layer(quantization: str):
    from gspo_mega.cpu.sglang_quantization import CpuQuantizedExperts

    settings = config(quantization)
    method = CpuQuantizedExperts(settings, "int8" if quantization == "int8" else settings.served)
    layer = torch.nn.Module()
    layer.moe_tp_size = 1
    layer.moe_runner_config = types.SimpleNamespace(
        is_gated=True, activation="silu", gemm1_alpha=None, apply_router_weight_on_input=False
    )
    method.create_weights(layer, EXPERTS, K, WIDTH, torch.float32)
    method.create_moe_runner(layer, layer.moe_runner_config)
    torch.manual_seed(1)
    w13, w2 = torch.randn(EXPERTS, 2 * WIDTH, K) / 20, torch.randn(EXPERTS, K, WIDTH) / 10
    w13 *= torch.tensor([1.0, 5.0, 0.1])[:, None, None]
    fill(layer, quantization, w13, "w13_weight")
    fill(layer, quantization, w2, "w2_weight")
    method.process_weights_after_loading(layer)
    return layer, method, w13, w2


def experts_by_hand(quantization: str, x, weights, experts, w13, w2) -> torch.Tensor:
    """Token by token, float64. With fp8 one amax for all tokens, before gate and up and before down."""
    to_int8 = quantization == "int8"

    def entering(rows):
        if quantization == "fp8":
            return rounded(rows.reshape(1, -1), (1, rows.numel())).view(rows.shape)
        return rounded(rows, (1, 128) if quantization == "fp8_block" else (1, rows.shape[1]), to_int8)

    def held(weight):
        n, k = weight.shape
        return rounded(weight, {"fp8": (n, k), "fp8_block": (128, 128), "int8": (1, k)}[quantization], to_int8)

    first, between = entering(x), []
    for token, chosen in enumerate(experts.tolist()):
        for expert in chosen:
            gate, up = (held(w13[expert]) @ first[token]).chunk(2)
            between.append(gate / (1 + torch.exp(-gate)) * up)
    second = entering(torch.stack(between).float()).view(*experts.shape, -1)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, chosen in enumerate(experts.tolist()):
        for slot, expert in enumerate(chosen):
            out[token] += weights[token, slot].double() * (held(w2[expert]) @ second[token, slot])
    return out


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_experts_multiply_rounded_operands(quantization):
    """A value on the edge between two codes may fall to either side after the first product's rounding (2**-24 of it):
    such a step of one code of one value is allowed in one token, not more."""
    layer, method, w13, w2 = expert_layer(quantization)
    x, weights = torch.randn(9, K), torch.rand(9, 2)
    experts = torch.tensor([[0, 1], [1, 2], [2, 0]] * 3)
    output = method.apply(layer, types.SimpleNamespace(hidden_states=x, topk_output=(weights, experts, None)))
    exact = experts_by_hand(quantization, x, weights, experts, w13, w2)
    wrong = (output.hidden_states.double() - exact).abs().amax(1) / exact.abs().amax(1)
    assert (wrong > 1e-5).sum() <= 1 and wrong.max() < 1e-2, wrong
    plain = torch.stack(
        [
            sum(
                w * (w2[e] @ (torch.nn.functional.silu(w13[e][:WIDTH] @ row) * (w13[e][WIDTH:] @ row)))
                for w, e in zip(weights[t], experts[t], strict=True)
            )
            for t, row in enumerate(x)
        ]
    )
    assert ((plain - exact).abs().amax(1) / exact.abs().amax(1)).min() > 1e-3


def test_experts_of_another_rank_add_nothing():
    layer, method, *_ = expert_layer("fp8_block")
    x, weights = torch.randn(3, K), torch.rand(3, 2)

    def run(experts):
        answer = method.apply(layer, types.SimpleNamespace(hidden_states=x, topk_output=(weights, experts, None)))
        return answer.hidden_states

    both, first = run(torch.tensor([[0, 1]] * 3)), run(torch.tensor([[0, -1]] * 3))
    second = run(torch.tensor([[-1, 1]] * 3))
    assert torch.allclose(both, first + second, rtol=1e-5, atol=1e-5)
    assert (run(torch.full((3, 2), -1)) == 0).all()


def test_experts_hold_what_sglang_holds_on_a_gpu_and_take_new_weights():
    shapes = {
        "fp8": {"w13_weight_scale": (EXPERTS,), "w2_weight_scale": (EXPERTS,)},
        "int8": {"w13_weight_scale": (EXPERTS, 2 * WIDTH, 1), "w2_weight_scale": (EXPERTS, K, 1)},
        "fp8_block": {"w13_weight_scale_inv": (EXPERTS, 2, 3), "w2_weight_scale_inv": (EXPERTS, 3, 1)},
    }
    for quantization, scales in shapes.items():
        layer, method, w13, w2 = expert_layer(quantization)
        found = {name: tuple(value.shape) for name, value in layer.named_parameters()}
        weights = {"w13_weight": (EXPERTS, 2 * WIDTH, K), "w2_weight": (EXPERTS, K, WIDTH)}
        assert found == weights | scales
        kind = torch.int8 if quantization == "int8" else torch.float8_e4m3fn
        assert layer.w13_weight.dtype == layer.w2_weight.dtype == kind
        old = layer.w13_operand.clone()
        method.restore_weights_before_loading(layer)
        fill(layer, quantization, -w13, "w13_weight")
        fill(layer, quantization, w2, "w2_weight")
        method.process_weights_after_loading(layer)
        assert torch.equal(layer.w13_operand, -old)
        assert {name: tuple(value.shape) for name, value in layer.named_parameters()} == weights | scales


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_an_expert_without_its_scale_is_refused(quantization):
    layer, method, _, w2 = expert_layer(quantization)
    method.restore_weights_before_loading(layer)
    fill(layer, quantization, w2, "w2_weight")
    if quantization == "fp8_block":
        layer.w13_weight_scale_inv.data[1] = torch.nan
    with pytest.raises(ValueError, match="w13_weight.*: no value was loaded"):
        method.process_weights_after_loading(layer)


def test_forms_that_are_not_emulated_are_refused_by_name():
    with pytest.raises(ValueError, match="FP8 weights in blocks of None have no emulation"):
        _ = config("fp8_block", weight_block_size=None).served
    from sglang.srt.layers.linear import LinearBase

    from gspo_mega.cpu.sglang_quantization import CpuInt8Config

    with pytest.raises(ValueError, match="INT8 checkpoints have no emulation"):
        CpuInt8Config({"quant_method": "w8a8_int8"}).get_quant_method(LinearBase.__new__(LinearBase), "x")
