"""FP8 scales of recipe `delayed` that one layout saved and another reads, against numbers that are written out here."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from gspo_mega.checkpoint.fp8_scales import by_tensor, read_scales

QKV, EXPERTS = "self_attention.linear_qkv", "mlp.experts.linear_fc1"
FLAGS = torch.tensor([True, True, True])
# Two pipeline stages of one layer each; in each stage two expert ranks with two of four experts.
SAVED = dict(world=4, tensor=1, pipeline=2, context=1, data=2, expert=2, expert_tensor=1)


def saved_by(rank: int) -> dict[str, torch.Tensor]:
    """What the rank saved: one scale per linear layer and expert (of three), and two values of history."""
    layer, own = divmod(rank, 2)
    state = {"flags": FLAGS}
    for module, slots in ((QKV, 1), (EXPERTS, 2)):
        name = f"decoder.layers.{layer}.{module}/scaling_fwd"
        shared = torch.arange(3.0 * slots) + 100 * (layer + 1)
        state[f"{name}/scale"] = shared
        # The first row is the rank's own: in turns each rank has the larger number.
        latest = (torch.arange(3 * slots) + own) % 2 * 5.0
        state[f"{name}/amax_history"] = torch.stack([latest, shared + 1000])
    return state


@pytest.fixture
def folder(tmp_path):
    for rank in range(4):
        save_file(saved_by(rank), tmp_path / f"rank_{rank:05d}.safetensors")
    return tmp_path


def read(folder, layers, rank, **here):
    sizes = dict(SAVED, **here)
    modules = [f"decoder.layers.{layer}.{module}" for layer in layers for module in (QKV, EXPERTS)]
    expert_rank = rank % sizes["expert"]
    return read_scales(folder, modules, SAVED, sizes, rank=rank, expert_rank=expert_rank, num_experts=4)


def test_a_rank_of_the_same_layout_reads_its_own_file(folder):
    assert {name: value.tolist() for name, value in read(folder, [1], 3).items()} == {
        name: value.tolist() for name, value in saved_by(3).items()
    }


def test_one_stage_of_four_expert_ranks_has_every_layer_and_the_largest_of_the_latest_values(folder):
    for rank in range(4):  # experts 0, 1, 2, 3, whose local numbers were 0, 1, 0, 1
        found = read(folder, [0, 1], rank, pipeline=1, expert=4, data=4)
        assert len(found) == 1 + 2 * 2 * 2 and torch.equal(found["flags"], FLAGS)
        start = 100.0 + 3 * (rank % 2)
        scales = {name: value.tolist() for name, value in found.items() if name.endswith("scale")}
        assert scales == {
            f"decoder.layers.0.{QKV}/scaling_fwd/scale": [100, 101, 102],
            f"decoder.layers.0.{EXPERTS}/scaling_fwd/scale": [start, start + 1, start + 2],
            f"decoder.layers.1.{QKV}/scaling_fwd/scale": [200, 201, 202],
            f"decoder.layers.1.{EXPERTS}/scaling_fwd/scale": [start + 100, start + 101, start + 102],
        }
        for name, value in found.items():
            if name.endswith("amax_history"):
                assert value[0].tolist() == [5.0] * 3
                assert value[1].tolist() == [one + 1000 for one in scales[name.replace("amax_history", "scale")]]


def test_a_rank_without_expert_ranks_has_all_experts_with_the_values_that_they_had(folder):
    found = read(folder, [1], 1, world=2, expert=1, data=1)
    assert found[f"decoder.layers.1.{EXPERTS}/scaling_fwd/scale"].tolist() == [*range(200, 206), *range(200, 206)]
    numbered = dict(by_tensor(found, expert_rank=0, num_local_experts=4))
    assert numbered["decoder.layers.1.mlp.experts.3.linear_fc1/scaling_fwd/scale"].tolist() == [203, 204, 205]
    then = dict(by_tensor(saved_by(3), expert_rank=1, num_local_experts=2))  # which had experts 2 and 3
    assert all(torch.equal(numbered[name], value) for name, value in then.items() if name.endswith("/scale"))


def test_stages_that_are_cut_elsewhere_read_what_they_have(folder):
    """The sizes of the groups are the same, but the first stage has no layer, or both."""
    assert [*read(folder, [], 0)] in ([], ["flags"])
    assert {name.split(".")[2] for name in read(folder, [0, 1], 1) if "." in name} == {"0", "1"}


def test_experts_that_are_modules_of_their_own(tmp_path):
    """Two ranks had two of four experts each."""
    saved = dict(SAVED, world=2, pipeline=1)
    name = "decoder.layers.0.mlp.experts.local_experts.{}.linear_fc1"
    for rank in range(2):
        state = {f"{name.format(slot)}/scaling_bwd/scale": torch.tensor([10.0 + slot]) for slot in range(2)}
        save_file(state, tmp_path / f"rank_{rank:05d}.safetensors")
    modules = [name.format(expert) for expert in range(4)]
    found = read_scales(tmp_path, modules, saved, dict(saved, expert=1), rank=0, expert_rank=0, num_experts=4)
    assert [found[f"{module}/scaling_bwd/scale"].item() for module in modules] == [10, 11, 10, 11]
    (numbered, _) = by_tensor(state, expert_rank=1, num_local_experts=2)
    assert numbered[0] == "decoder.layers.0.mlp.experts.2.linear_fc1/scaling_bwd/scale"


def test_what_an_earlier_version_saved_is_read_in_the_same_layout_only(tmp_path):
    old = {"flags": FLAGS, f"0.decoder.layers.0.{QKV}/scaling_fwd/scale": torch.ones(3)}
    for rank in range(4):
        save_file(old, tmp_path / f"rank_{rank:05d}.safetensors")
    assert read(tmp_path, [1], 3).keys() == old.keys()
    assert read(tmp_path, [0, 1], 3, pipeline=1) == {}


def test_nothing_saved_is_nothing_read(tmp_path):
    assert read(tmp_path / "fp8", [0], 0) == read(tmp_path / "fp8", [0], 0, pipeline=1) == {}
