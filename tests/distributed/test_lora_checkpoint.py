"""A run with adapters continues to the bit, in another layout to rounding, and never on other weights."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from family_models import make_family_folder
from layout_models import make_folder

from gspo_mega.base.errors import CheckpointError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.checkpoint.tensor_sources import MegatronSource

LORA = dict(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "up_proj", "down_proj"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("lora") / "dense", moe=False, layers=2)


def test_a_run_continues_to_the_bit_and_in_another_layout(rank_pools, folder, tmp_path):
    two, four = rank_pools(2), rank_pools(4)
    common = dict(folder=str(folder), lora=LORA, precision="bf16")
    straight = two.run(
        "checkpoint_jobs:run", run_dir=str(tmp_path / "a"), parallel={}, plan=["start", *["train"] * 3], **common
    )[0]
    RunFolder(tmp_path / "b").new_attempt()
    again = dict(run_dir=str(tmp_path / "b"), parallel={}, machines=str(tmp_path / "machines"), **common)
    saved = ["start", "train", "save", "copy", "train", "train"]
    assert_same(two.run("checkpoint_jobs:run", plan=saved, **again)[0], straight)
    for act in ("load", "go on from copies"):
        resumed = two.run("checkpoint_jobs:run", plan=["start", act, "train", "train"], **again)[0]
        assert_same(resumed, straight)
    size = sum(
        file.stat().st_size for file in (tmp_path / "b" / "checkpoints" / "step_00000001" / "megatron").iterdir()
    )
    model = (folder / "model.safetensors").stat().st_size
    assert size < model / 2, "a checkpoint holds the adapters alone"
    other = four.run(
        "checkpoint_jobs:run",
        run_dir=str(tmp_path / "b"),
        parallel=dict(tensor=2, pipeline=2),
        plan=["start", "load"],
        **common,
    )[0]
    first = two.run("checkpoint_jobs:run", run_dir=str(tmp_path / "c"), parallel={}, plan=["start", "train"], **common)[
        0
    ]
    assert_same(other, first)
    with pytest.raises(CheckpointError, match="holds the adapters of a run with `lora`, and none of the model's own"):
        MegatronSource(tmp_path / "b" / "checkpoints" / "step_00000001" / "megatron", folder)
    moved = shutil.copytree(folder, tmp_path / "moved")
    with (moved / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\0\0\0\1")
    text = two.run(
        "checkpoint_jobs:refused",
        run_dir=str(tmp_path / "b"),
        parallel={},
        plan=["start", "load"],
        **{**common, "folder": str(moved)},
    )[0]
    assert "holds adapters for other weights" in text and "the folder was written again" in text
    text = two.run(
        "checkpoint_jobs:refused",
        run_dir=str(tmp_path / "b"),
        parallel={},
        plan=["start", "load"],
        **{**common, "lora": {**LORA, "rank": 2}},
    )[0]
    assert "holds the model" in text and "'rank': 4" in text and "'rank': 2" in text


def test_adapters_of_a_delta_nets_projections_are_found_in_another_layout(rank_pools, tmp_path):
    """Megatron fuses them by sections, of which each tensor rank has a part."""
    folder = make_family_folder(tmp_path / "delta", "qwen3_5")
    common = dict(folder=str(folder), lora=LORA | dict(targets=("in_proj_qkv", "in_proj_b", "in_proj_a", "out_proj")))
    ranks, steps = rank_pools(2), ["start", "train", "save"]
    saved = ranks.run("checkpoint_jobs:run", run_dir=str(tmp_path), parallel=dict(tensor=2), plan=steps, **common)[0]
    found = ranks.run("checkpoint_jobs:run", run_dir=str(tmp_path), parallel={}, plan=["start", "load"], **common)[0]
    assert_same(found, saved)


def assert_same(got, want):
    for name, value in want["weights"].items():
        assert np.array_equal(got["weights"][name], value), name
