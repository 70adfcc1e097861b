"""The trainer's state away from the device and back between steps: training is the same to the bit, and it was away."""

from __future__ import annotations

import pytest
from layout_models import make_folder

CASES = {
    "fp32-not-distributed": (1, False, {}, dict(optimizer=dict(lr=1e-3, distributed=False))),
    "bf16-overlap": (2, False, {}, dict(precision="bf16", optimizer=dict(lr=1e-3, overlap=True))),
    "adapters-bf16": (1, False, {}, dict(precision="bf16", optimizer=dict(lr=1e-2), lora=dict(rank=4, alpha=8))),
    "EP2-bf16": (2, True, dict(expert=2, expert_tensor=1), dict(precision="bf16", optimizer=dict(lr=1e-3))),
}


@pytest.mark.parametrize("name", CASES)
def test_training_with_its_state_away_between_steps_is_the_same_to_the_bit(rank_pools, tmp_path, name):
    world, moe, parallel, sections = CASES[name]
    folder = str(make_folder(tmp_path / "model", moe=moe))
    for result in rank_pools(world).run("device_memory_jobs:moved", folder=folder, parallel=parallel, **sections):
        assert not result["changed"] and not result["published"] and all(result["reference"])
        assert result["left"] == [0, 0, 0], "nothing was left on the device"
        assert result["blocks"] <= 3 < result["copies"], "a part has one block, which no rounding makes larger"
        for (rest, parameters, again), (first, others, none) in zip(result["freed"], result["taken"], strict=True):
            assert rest > parameters > 0 and again == 0
            assert (first, others, none) == (parameters, rest, 0)


@pytest.mark.parametrize("granularity", ["none", "full"])
def test_nothing_of_a_pass_is_kept_until_the_next(rank_pools, tmp_path, granularity):
    """Megatron's dispatcher of tokens would keep each layer's last graph, its input and that input's gradient."""
    folder = str(make_folder(tmp_path / "model", moe=True))
    sections = dict(recompute=dict(granularity=granularity))
    parallel = dict(expert=2, expert_tensor=1)
    for found in rank_pools(2).run(
        "device_memory_jobs:kept_between_passes", folder=folder, parallel=parallel, **sections
    ):
        assert found["seen"] >= 8 and (found["left"], found["gradients"], found["noted"]) == (0, 0, [])
