"""One adapter beside one linear layer on one rank: its product, its merge and its gradients, with numbers by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from one_layer import ONE_LAYER
from te_process import in_te_process

from gspo_mega.config.schema import Lora
from gspo_mega.engine.adapters import Adapter, _grouped_adapters
from gspo_mega.models.low_rank import adapted

ONE = SimpleNamespace(rank=0, size=1, group=None)
GROUPS: object = SimpleNamespace(tensor=ONE, expert_tensor=ONE)


@pytest.fixture
def gate_and_up() -> Adapter:
    """Of W [gate; up], two rows, with alpha / rank = 3: A of gate (1, 2), of up (3, 4); B 5 and 6."""
    adapter = build(["gate_proj", "up_proj"])
    with torch.no_grad():
        adapter.a["gate"].copy_(torch.tensor([[1.0, 2]]))
        adapter.a["up"].copy_(torch.tensor([[3.0, 4]]))
        adapter.b.copy_(torch.tensor([[5.0], [6]]))
    return adapter


def build(targets, dtype=torch.float32) -> Adapter:
    settings = Lora(rank=1, alpha=3.0, targets=tuple(targets))
    ((parameter, entries),) = adapted(ONE_LAYER, targets).items()
    assert parameter == "decoder.layers.0.mlp.linear_fc1.weight"
    linear = torch.nn.Linear(2, 2, bias=False, dtype=dtype)
    vars(linear)["config"] = SimpleNamespace(sequence_parallel=True)
    return Adapter(ONE_LAYER, GROUPS, settings, entries, linear)  # type: ignore[arg-type]


def test_each_fused_matrix_meets_its_own_a(gate_and_up):
    found = gate_and_up(torch.tensor([[1.0, 1], [0, 1]]))
    assert found.tolist() == [[3 * 5 * 3, 3 * 6 * 7], [3 * 5 * 2, 3 * 6 * 4]]
    merged = gate_and_up.merged(torch.tensor([[1.0, 0], [0, 1]]))
    assert merged.tolist() == [[1 + 15, 30], [54, 1 + 72]]
    gate_and_up.is_on = False
    weight = torch.ones(2, 2)
    assert gate_and_up.merged(weight) is weight


def test_gradients_stay_in_their_blocks(gate_and_up):
    gate_and_up(torch.tensor([[1.0, 1]]))[0, 0].backward()  # gate's output alone
    assert gate_and_up.a["gate"].grad.tolist() == [[15, 15]] and gate_and_up.a["up"].grad.tolist() == [[0, 0]]
    assert gate_and_up.b.grad.tolist() == [[9], [0]]


def test_the_rows_of_a_matrix_without_adapter_take_no_part():
    adapter = build(["up_proj"])
    with torch.no_grad():
        adapter.a["up"].fill_(1)
        adapter.b.fill_(1)  # the row of gate too, which nothing sets in a run
    assert adapter.roles == ("up",)
    found = adapter(torch.tensor([[1.0, 1]]))
    assert found.tolist() == [[0, 6]]
    found.sum().backward()
    assert adapter.b.grad.tolist() == [[0], [6]]


def test_a_sum_in_bf16_is_rounded_once():
    """1 + 2**-9 is half way to the next bf16 number above 1 and goes back to 1; 3 x 2**-9 apart, it is not lost."""
    adapter = build(["up_proj"], torch.bfloat16)
    with torch.no_grad():
        adapter.a["up"].fill_(2**-9)
        adapter.b.fill_(1 / 3)
    weight = torch.ones(2, 2, dtype=torch.bfloat16)
    assert torch.equal(adapter.merged(weight), weight)
    assert adapter(torch.ones(1, 2, dtype=torch.bfloat16))[0, 1] > 0


@in_te_process
def test_experts_adapters_are_multiplied_together():
    """Numbers by hand for three experts with two rows, none and one: values, and every gradient."""
    adapters = [build(["gate_proj", "up_proj"]) for _ in range(3)]
    for expert, adapter in enumerate(adapters):
        with torch.no_grad():
            adapter.a["gate"].copy_(torch.tensor([[1.0, 2]]) * (expert + 1))
            adapter.a["up"].copy_(torch.tensor([[3.0, 4]]))
            adapter.b.copy_(torch.tensor([[5.0], [6]]))
    inputs = torch.tensor([[1.0, 1], [0, 1], [1, 1]], requires_grad=True)
    found = _grouped_adapters(adapters, inputs, [2, 0, 1])
    assert found.tolist() == [[3 * 5 * 3, 3 * 6 * 7], [3 * 5 * 2, 3 * 6 * 4], [3 * 5 * 9, 3 * 6 * 7]]
    found[[0, 2]].sum().backward()
    gate_and_up = [[[15, 15], [18, 18]], [[0, 0], [0, 0]], [[15, 15], [18, 18]]]
    assert [[adapter.a[role].grad[0].tolist() for role in ("gate", "up")] for adapter in adapters] == gate_and_up
    assert [adapter.b.grad.flatten().tolist() for adapter in adapters] == [[9, 21], [0, 0], [27, 21]]
    assert inputs.grad.tolist() == [[15 + 54, 30 + 72], [0, 0], [45 + 54, 90 + 72]]


@in_te_process
def test_experts_adapters_equal_each_expert_s_own():
    """In bf16, to the bit, with frozen inputs and experts that get no row."""
    generator = torch.Generator().manual_seed(1)
    adapters = [build(["gate_proj", "up_proj"], torch.bfloat16) for _ in range(4)]
    for half in (half for adapter in adapters for half in adapter.parameters()):
        half.data.copy_(torch.randn(half.shape, generator=generator))
    splits, inputs = [3, 0, 2, 0], torch.randn(5, 2, generator=generator, dtype=torch.float32).bfloat16()
    together = _grouped_adapters(adapters, inputs, splits)
    together.float().square().sum().backward()
    gradients = [half.grad.clone() for adapter in adapters for half in adapter.parameters()]
    for half in (half for adapter in adapters for half in adapter.parameters()):
        half.grad = None
    alone = torch.cat([adapter(part) for adapter, part in zip(adapters, inputs.split(splits))])
    alone.float().square().sum().backward()
    assert torch.equal(together, alone)
    one_by_one = [half.grad for adapter in adapters for half in adapter.parameters()]
    assert all(torch.allclose(got, want, rtol=2**-6) for got, want in zip(gradients, one_by_one, strict=True))
