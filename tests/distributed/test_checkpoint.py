"""Resumed equals uninterrupted, to the bit; what cannot be resumed is refused; a torn checkpoint is never latest."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from layout_models import make_folder

LAYOUTS = {
    "dense-DP2": (False, dict(), True),
    "dense-TP2+SP": (False, dict(tensor=2), False),
    "dense-PP2": (False, dict(pipeline=2), True),
    "moe-EP2": (True, dict(expert=2), True),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoint-models")
    return {moe: (make_folder(root / f"a{moe}", moe=moe, layers=2), make_folder(root / f"b{moe}", moe=moe, layers=2, seed=9)) for moe in (False, True)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_resumed_equals_uninterrupted(rank_pools, models, tmp_path, name):
    moe, parallel, distributed = LAYOUTS[name]
    folder, other = models[moe]
    optimizer = dict(lr=1e-3, warmup_steps=2, schedule="cosine", min_lr=1e-4, distributed=distributed)
    pool = rank_pools(2)
    common = dict(folder=str(folder), parallel=parallel, optimizer=optimizer)
    straight = pool.run("checkpoint_jobs:run", run_dir=str(tmp_path / "a"), plan=["start", "train", "train", "save", "train", "train"], **common)[0]
    pool.run("checkpoint_jobs:run", run_dir=str(tmp_path / "b"), plan=["start", "train", "train", "save"], **common)
    resumed = pool.run(
        "checkpoint_jobs:run", run_dir=str(tmp_path / "b"), plan=["start", "load", "train", "train"], weights_from=str(other), **common
    )[0]
    assert resumed["step"] == straight["step"] == 4
    assert resumed["lr"] == straight["lr"]
    assert resumed["random"] == straight["random"]
    for weight, want in straight["weights"].items():
        assert np.array_equal(resumed["weights"][weight], want), weight


def test_only_complete_checkpoints_count_and_old_ones_go(rank_pools, models, tmp_path):
    folder, _ = models[False]
    pool = rank_pools(2)
    common = dict(folder=str(folder), parallel={}, optimizer=dict(lr=1e-3))
    plan = ["start", "train", "save", "train", "save", "train", "save"]
    pool.run("checkpoint_jobs:run", run_dir=str(tmp_path), plan=plan, **common)
    checkpoints = tmp_path / "checkpoints"
    assert sorted(p.name for p in checkpoints.iterdir()) == ["latest", "step_00000002", "step_00000003"]
    assert (checkpoints / "latest").read_text().strip() == "step_00000003"

    # A save that was cut off leaves its draft; the next save is not disturbed by it.
    shutil.copytree(checkpoints / "step_00000003", checkpoints / "step_00000004.part")
    pool.run("checkpoint_jobs:run", run_dir=str(tmp_path), plan=["start", "load", "train", "save"], **common)
    assert sorted(p.name for p in checkpoints.iterdir()) == ["latest", "step_00000003", "step_00000004"]

    (checkpoints / "step_00000004" / "state.json").unlink()
    (text, _) = pool.run("checkpoint_jobs:refused", run_dir=str(tmp_path), plan=["start", "load"], **common)
    assert text.startswith("CheckpointError") and "step_00000004" in text and "step_00000003" in text


def test_another_model_is_refused_before_anything_is_loaded(rank_pools, models, tmp_path):
    pool = rank_pools(2)
    common = dict(run_dir=str(tmp_path), parallel={}, optimizer=dict(lr=1e-3))
    pool.run("checkpoint_jobs:run", folder=str(models[False][0]), plan=["start", "train", "save"], **common)
    texts = pool.run("checkpoint_jobs:refused", folder=str(models[True][0]), plan=["start", "load"], **common)
    assert all(t.startswith("CheckpointError") and "holds the model" in t for t in texts)


def test_expert_parallel_optimizer_state_is_refused_without_expert_parallel(rank_pools, models, tmp_path):
    pool = rank_pools(2)
    common = dict(run_dir=str(tmp_path), folder=str(models[True][0]), optimizer=dict(lr=1e-3))
    pool.run("checkpoint_jobs:run", parallel=dict(expert=2), plan=["start", "train", "save"], **common)
    texts = pool.run("checkpoint_jobs:refused", parallel={}, plan=["start", "load"], **common)
    assert all("parallel.expert 2" in t and "parallel.expert 1" in t for t in texts)


def test_damaged_files_are_named(rank_pools, models, tmp_path):
    pool = rank_pools(2)
    common = dict(run_dir=str(tmp_path), folder=str(models[False][0]), parallel={}, optimizer=dict(lr=1e-3))
    pool.run("checkpoint_jobs:run", plan=["start", "train", "save"], **common)
    victim = next((tmp_path / "checkpoints" / "step_00000001" / "megatron").glob("*.distcp"))
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    texts = pool.run("checkpoint_jobs:refused", plan=["start", "load"], **common)
    assert all(t.startswith("CheckpointError") and "step_00000001" in t for t in texts), texts
