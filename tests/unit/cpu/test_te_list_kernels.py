"""Adam, norms and scaling over lists of tensors, and the padding of experts' rows, against plain torch."""

import pytest
import torch

from gspo_mega.cpu import te_optimizer, te_rows
from gspo_mega.cpu.te_extension import DType

HYPER = dict(lr=1e-2, beta1=0.9, beta2=0.95, epsilon=1e-6)
NOOP = torch.zeros(1, dtype=torch.int32)


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step(lists, number: int, *, mode: int = 1, decay: float = 0.1, kernel=te_optimizer.multi_tensor_adam) -> None:
    kernel(2048, NOOP, lists, *HYPER.values(), number, mode, 1, decay)


@pytest.mark.parametrize(("mode", "theirs"), [(1, torch.optim.AdamW), (0, torch.optim.Adam)])
def test_adam_is_torchs(mode, theirs):
    """The two order their roundings differently: 20 steps of some 1e-7 of the weights each."""
    values = [numbers(7, 5, seed=0), numbers(11, seed=1)]
    mine, parameters = [v.clone() for v in values], [torch.nn.Parameter(v.clone()) for v in values]
    first, second = ([torch.zeros_like(v) for v in values] for _ in range(2))
    betas = (HYPER["beta1"], HYPER["beta2"])
    optimizer = theirs(parameters, lr=HYPER["lr"], betas=betas, eps=HYPER["epsilon"], weight_decay=0.1)
    for number in range(1, 21):
        gradients = [numbers(*v.shape, seed=10 * number + i) for i, v in enumerate(values)]
        step([gradients, mine, first, second], number, mode=mode)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    for got, want, before in zip(mine, parameters, values, strict=True):
        assert (got - want).abs().max() < 2e-6 < (got - before).abs().max()


def test_bf16_parameters_follow_their_fp32_copies():
    whole, moments = [numbers(9, seed=0)], [torch.zeros(9)]
    parameter, first, second = [whole[0].bfloat16()], [moments[0].clone()], [moments[0].clone()]
    alone, alone_first, alone_second = [whole[0].clone()], [moments[0].clone()], [moments[0].clone()]
    for number in range(1, 4):
        gradients = [numbers(9, seed=number)]
        step([gradients, parameter, first, second, whole], number)
        step([gradients, alone, alone_first, alone_second], number)
    assert torch.equal(whole[0], alone[0]) and torch.equal(parameter[0], whole[0].bfloat16())


def test_remainders_are_fp32_to_the_bit():
    values = torch.cat([numbers(4096, seed=0), torch.tensor([0.0, -0.0, 1e-30, -1.00390625, 1.01171875, 3e38])])
    parameter, remainder = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    te_optimizer.split(values, parameter, remainder)
    assert torch.equal(te_optimizer.joined(parameter, remainder), values)
    halves = (values.view(torch.int32) & 0xFFFF) == 0x8000
    assert halves.sum() >= 2 and torch.equal(parameter[~halves], values.bfloat16()[~halves])
    # Halves go away from zero here, to the even number in torch.
    assert (parameter[halves].float().abs() > values[halves].abs()).all()

    whole, first, second, first_too, second_too = values.clone(), *(torch.zeros_like(values) for _ in range(4))
    for number in range(1, 4):
        gradients = [numbers(values.numel(), seed=number)]
        step([gradients, [whole], [first], [second]], number)
        lists = [gradients, [parameter], [first_too], [second_too], [remainder]]
        step(lists, number, kernel=te_optimizer.multi_tensor_adam_param_remainder)
        assert torch.equal(te_optimizer.joined(parameter, remainder), whole) and torch.equal(second, second_too)
    assert not torch.equal(whole, values)


def test_norms_of_all_and_of_each():
    tensors = [numbers(7, 5, seed=0).bfloat16(), numbers(11, seed=1)]
    wanted = torch.stack([t.double().norm() for t in tensors])
    whole, each = te_optimizer.multi_tensor_l2norm(2048, NOOP, [tensors], True)
    assert (
        whole.shape == (1,) and torch.allclose(whole.double(), wanted.norm()) and torch.allclose(each.double(), wanted)
    )
    assert te_optimizer.multi_tensor_l2norm(2048, NOOP, [tensors])[1].numel() == 0
    halved, _ = te_optimizer.multi_tensor_unscale_l2norm(2048, NOOP, [tensors], torch.tensor([0.5]))
    assert torch.allclose(halved, whole / 2)


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), None])
def test_scaling_says_if_an_input_is_not_finite(bad):
    source, flag = [numbers(5, seed=0), numbers(3, seed=1)], torch.zeros(1, dtype=torch.int32)
    if bad is not None:
        source[1][2] = bad
    target = [torch.zeros(5, dtype=torch.bfloat16), torch.zeros(3)]
    te_optimizer.multi_tensor_scale(2048, flag, [source, target], 0.3)
    assert flag.item() == (bad is not None)
    assert torch.equal(target[0], (source[0] * 0.3).bfloat16())
    again = [torch.zeros(5), torch.zeros(3)]
    te_optimizer.multi_tensor_scale_tensor(2048, flag, [source, again], torch.tensor([0.3]))
    assert torch.equal(again[0], source[0] * 0.3)


def test_rows_are_padded_and_come_back():
    rows, padded = torch.arange(1.0, 15.0).reshape(7, 2), torch.full((12, 2), float("nan"))
    te_rows.fused_multi_row_padding(rows, padded, [3, 0, 4], [4, 4, 4])
    assert torch.equal(padded[:3], rows[:3]) and torch.equal(padded[8:], rows[3:]) and not padded[3:8].any()
    back = torch.zeros(7, 2)
    te_rows.fused_multi_row_unpadding(padded, back, [4, 4, 4], [3, 0, 4])
    assert torch.equal(back, rows)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_parameters_follow_their_fp32_copies(dtype):
    """The copy is stepped as without FP8; the data is the copy times its scale; the largest value only grows."""
    whole, data = [numbers(64, seed=0)], [torch.zeros(64, dtype=torch.uint8)]
    moments, alone_moments = ([torch.zeros(64)], [torch.zeros(64)]), ([torch.zeros(64)], [torch.zeros(64)])
    alone, scale, inverse = [whole[0].clone()], [torch.tensor([256.0])], [torch.zeros(1)]
    largest = [torch.tensor([0.5])]
    tag = DType.kFloat8E4M3 if dtype == torch.float8_e4m3fn else DType.kFloat8E5M2
    for number in range(1, 4):
        gradients = [numbers(64, seed=number)]
        lists = [gradients, data, *moments, whole, scale, largest, inverse]
        te_optimizer.multi_tensor_adam_fp8(2048, NOOP, lists, *HYPER.values(), number, 1, 1, 0.1, tag)
        step([gradients, alone, *alone_moments], number)
        want = (whole[0] * 256.0).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
        assert torch.equal(whole[0], alone[0]) and torch.equal(data[0], want.view(torch.uint8))
        assert largest[0].item() >= whole[0].abs().max() and inverse[0].item() == 1 / 256
    assert all(torch.equal(a[0], b[0]) for a, b in zip(moments, alone_moments, strict=True))
    largest[0].fill_(1e3)
    te_optimizer.multi_tensor_adam_fp8(2048, NOOP, lists, *HYPER.values(), 4, 1, 1, 0.1, tag)
    assert largest[0].item() == 1e3
