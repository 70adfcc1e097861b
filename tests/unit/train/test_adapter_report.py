"""The metrics of adapters, with numbers by hand: two matrices of one layer, and a copy that another rank counts."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_layer import ONE_LAYER

from gspo_mega.config.schema import Lora
from gspo_mega.engine.adapters import Adapter
from gspo_mega.metrics.catalogue import find_metric
from gspo_mega.models.low_rank import adapted
from gspo_mega.train.reports import adapter_metrics

LORA = Lora(rank=1, alpha=3.0, targets=("gate_proj", "up_proj"))
ONE = SimpleNamespace(rank=0, size=1, group=None)


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield SimpleNamespace(rank=0, size=1, group=dist.group.WORLD)
    dist.destroy_process_group()


def engine_of(world: Any, lora: Lora | None, copy_rank: int = 0) -> Any:
    """A policy of one layer with alpha / rank = 3: A of gate (1, 2), of up (3, 4); B 5 and 6. `copy_rank`: of this rank
    among those that hold the same adapters.
    """
    ((_, entries),) = adapted(ONE_LAYER, LORA.targets).items()
    linear = torch.nn.Linear(2, 2, bias=False)
    vars(linear)["config"] = SimpleNamespace(sequence_parallel=False)
    groups: Any = SimpleNamespace(
        tensor=ONE,
        expert_tensor=ONE,
        expert_data=ONE,
        data_context=SimpleNamespace(rank=copy_rank, size=2, group=None),
        host=world,
    )
    adapter = Adapter(ONE_LAYER, groups, LORA, entries, linear)
    with torch.no_grad():
        adapter.a["gate"].copy_(torch.tensor([[1.0, 2]]))
        adapter.a["up"].copy_(torch.tensor([[3.0, 4]]))
        adapter.b.copy_(torch.tensor([[5.0], [6]]))
    chunk = SimpleNamespace(low_rank=lambda: [adapter])
    return SimpleNamespace(config=SimpleNamespace(lora=lora), chunks=[chunk], groups=groups, spec=ONE_LAYER)


def test_the_norm_is_that_of_what_is_added_to_the_weights(world):
    found = adapter_metrics(engine_of(world, LORA))
    # 3 x 5 x (1, 2) = (15, 30) and 3 x 6 x (3, 4) = (54, 72); no row of one matrix meets the A of the other.
    assert found["lora/norm"] == pytest.approx(math.sqrt(15**2 + 30**2 + 54**2 + 72**2))
    assert found["lora/num_parameters"] == 6  # two A of two numbers, two B of one
    assert all(find_metric(name).name == name for name in found)


def test_a_copy_is_counted_by_the_rank_that_is_first(world):
    assert adapter_metrics(engine_of(world, LORA, copy_rank=1))["lora/norm"] == 0.0


def test_a_policy_without_adapters_has_no_such_metrics(world):
    assert adapter_metrics(engine_of(world, None)) == {}
