"""Plain and grouped products of the CPU kernels against fp64, in the three layouts that Transformer Engine uses."""

import pytest
import torch

from gspo_mega.cpu import te_layers
from gspo_mega.cpu.te_extension import DType

# 40 products of unit normals are summed in fp32 (errors of some 1e-6 each way) and rounded once.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
TAGS = {torch.float32: DType.kFloat32, torch.bfloat16: DType.kBFloat16}


def numbers(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert ((got.double() - want).abs() <= TOLERANCES[got.dtype] * want.abs().clamp(min=1.0)).all()


def gemm(a, layout, b, out=None, dtype=None, bias=None, grad=False, accumulate=False, **more):
    dtype = TAGS[dtype] if dtype is not None else None
    return te_layers.generic_gemm(
        *(a, layout[0] == "T", b, layout[1] == "T", out, None, dtype, bias, DType.kBFloat16, False, None, grad),
        *(torch.empty(0), 0, accumulate, True),
        **more,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_three_layouts_of_a_linear_layer(dtype):
    """TN: y = x w'; NN: the gradient by x; NT: the gradient by w. Leading dimensions count as rows."""
    x, w = numbers(3, 5, 40, seed=0, dtype=dtype), numbers(24, 40, seed=1, dtype=dtype)
    dy = numbers(3, 5, 24, seed=2, dtype=dtype)
    close(gemm(w, "TN", x, dtype=dtype)[0], x.double() @ w.double().t())
    close(gemm(w, "NN", dy, dtype=dtype)[0], dy.double() @ w.double())
    flat = dy.double().flatten(0, 1).t() @ x.double().flatten(0, 1)
    close(gemm(x.flatten(0, 1), "NT", dy.flatten(0, 1), dtype=torch.float32)[0], flat)


def test_the_result_is_of_the_operands_dtype_unless_told():
    x = numbers(4, 40, seed=0, dtype=torch.bfloat16)
    assert (
        gemm(x, "TN", x)[0].dtype == torch.bfloat16 and gemm(x, "TN", x, dtype=torch.float32)[0].dtype == torch.float32
    )


def test_bias_is_added_before_rounding_and_its_gradient_is_the_sum_of_rows():
    x, w = (numbers(6, 40, seed=s, dtype=torch.bfloat16) for s in (0, 1))
    bias = numbers(6, seed=2, dtype=torch.bfloat16)
    close(gemm(w, "TN", x, dtype=torch.bfloat16, bias=bias)[0], x.double() @ w.double().t() + bias.double())
    result, gradient, gelu, extra = gemm(x, "NT", w, dtype=torch.float32, bias=bias, grad=True)
    close(result, w.double().t() @ x.double())
    close(gradient, w.double().sum(0))
    assert gelu is None and extra is None and gradient.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulation_is_in_fp32(dtype):
    x, w = (numbers(6, 40, seed=s, dtype=torch.bfloat16) for s in (0, 1))
    out = numbers(6, 6, seed=2, dtype=dtype)
    before = out.double()
    assert gemm(w, "TN", x, out=out, accumulate=True, beta=1.0)[0] is out
    close(out, before + x.double() @ w.double().t())
    gemm(w, "TN", x, out=out, alpha=0.5)
    close(out, 0.5 * (x.double() @ w.double().t()))
    before = out.double()
    gemm(w, "TN", x, out=out, accumulate=True, beta=2.0)
    close(out, 2.0 * before + x.double() @ w.double().t())


def test_without_rows_there_is_an_empty_result_and_no_gradient():
    w, nothing = torch.ones(6, 40), torch.ones(0, 40)
    assert gemm(w, "TN", nothing)[0].shape == (0, 6)
    assert torch.equal(gemm(nothing, "NT", torch.ones(0, 6), dtype=torch.float32)[0], torch.zeros(6, 40))


@pytest.mark.parametrize("more", [dict(comm_overlap=object()), dict(extra_output=torch.empty(1))])
def test_what_is_not_written_is_refused(more):
    with pytest.raises(NotImplementedError, match="generic_gemm"):
        gemm(torch.ones(2, 2), "TN", torch.ones(2, 2), **more)


def grouped(a, layout, b, out, splits, bias=(), single=False, grad=False, accumulate=False):
    empty = [torch.empty(0)] * len(a)
    return te_layers.te_general_grouped_gemm(
        *(a, layout[0] == "T", b, layout[1] == "T", out, DType.kBFloat16, splits, bias or empty, DType.kBFloat16),
        *(single, empty, grad, [], 0, accumulate, True, 1),
    )


SPLITS = [3, 0, 5]


def test_a_grouped_product_fills_its_rows_of_one_output():
    x, weights = (
        numbers(8, 40, seed=0, dtype=torch.bfloat16),
        [numbers(24, 40, seed=s, dtype=torch.bfloat16) for s in (1, 2, 3)],
    )
    biases = [numbers(24, seed=s, dtype=torch.bfloat16) for s in (4, 5, 6)]
    out = torch.full((8, 24), float("nan"), dtype=torch.bfloat16)
    grouped(weights, "TN", list(x.split(SPLITS)), [out], SPLITS, biases, single=True)
    parts = zip(x.double().split(SPLITS), weights, biases, strict=True)
    close(out, torch.cat([part @ w.double().t() + bias.double() for part, w, bias in parts]))


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_grouped_product_leaves_no_trace_of_an_expert_without_tokens(accumulate):
    x, dy = numbers(8, 40, seed=0, dtype=torch.bfloat16), numbers(8, 24, seed=1, dtype=torch.bfloat16)
    outs, before = [torch.full((24, 40), 7.0) for _ in SPLITS], 7.0 if accumulate else 0.0
    gradients = [torch.full((24,), float("nan")) for _ in SPLITS]
    parts = list(x.split(SPLITS)), list(dy.split(SPLITS))
    returned = grouped(parts[0], "NT", parts[1], outs, SPLITS, gradients, grad=True, accumulate=accumulate)
    for out, gradient, x_part, dy_part in zip(outs, returned, *parts, strict=True):
        close(out, before + dy_part.double().t() @ x_part.double())
        close(gradient, dy_part.double().sum(0))
    assert (outs[1] == before).all()
