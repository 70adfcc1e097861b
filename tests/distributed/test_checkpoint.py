"""Resumed equals uninterrupted, to the bit; what cannot be resumed is refused; a torn checkpoint is never latest."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from family_models import make_family_folder
from layout_models import make_folder

# (experts, layout, distributed optimizer, elements of an overlapped bucket)
LAYOUTS = {
    "dense-DP2": (False, dict(), True, None),
    "dense-DP2 in padded buckets": (False, dict(), True, 20_000),
    "dense-TP2+SP": (False, dict(tensor=2), False, None),
    "dense-PP2": (False, dict(pipeline=2), True, None),
    "moe-EP2": (True, dict(expert=2), True, None),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoint-models")
    return {
        moe: (
            make_folder(root / f"a{moe}", moe=moe, layers=2),
            make_folder(root / f"b{moe}", moe=moe, layers=2, seed=9),
        )
        for moe in (False, True)
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_resumed_equals_uninterrupted(rank_pools, models, tmp_path, name):
    moe, parallel, distributed, bucket_size = LAYOUTS[name]
    folder, other = models[moe]
    optimizer = dict(lr=1e-3, warmup_steps=2, schedule="cosine", min_lr=1e-4, distributed=distributed)
    optimizer["overlap"] = bucket_size is not None
    pool = rank_pools(2)
    common = dict(folder=str(folder), parallel=parallel, optimizer=optimizer, bucket_size=bucket_size)
    straight = pool.run(
        "checkpoint_jobs:run",
        run_dir=str(tmp_path / "a"),
        plan=["start", "train", "train", "save", "train", "train"],
        **common,
    )[0]
    pool.run("checkpoint_jobs:run", run_dir=str(tmp_path / "b"), plan=["start", "train", "train", "save"], **common)
    resumed = pool.run(
        "checkpoint_jobs:run",
        run_dir=str(tmp_path / "b"),
        plan=["start", "load", "train", "train"],
        weights_from=str(other),
        **common,
    )[0]
    assert resumed["step"] == straight["step"] == 4
    assert resumed["lr"] == straight["lr"]
    assert resumed["random"] == straight["random"]
    for weight, want in straight["weights"].items():
        assert np.array_equal(resumed["weights"][weight], want), weight


@pytest.mark.parametrize(
    ("variant", "parallel"),
    [
        ("gpt_oss", dict(pipeline=2)),
        ("olmo3", dict()),
        ("qwen3_next", dict(tensor=2, expert=2)),
        ("qwen3_5", dict(tensor=2)),
    ],
)
def test_layers_of_several_kinds_are_resumed_too(rank_pools, tmp_path, variant, parallel):
    """Windows of some layers, which the record of the model has, and gated delta nets."""
    folder, other = (str(make_family_folder(tmp_path / f"{seed}", variant, seed=seed)) for seed in (5, 9))
    common = dict(folder=folder, run_dir=str(tmp_path), parallel=parallel, optimizer=dict(lr=1e-3))
    pool = rank_pools(2)
    straight = pool.run("checkpoint_jobs:run", plan=["start", "train", "save", "train"], **common)[0]
    resumed = pool.run("checkpoint_jobs:run", plan=["start", "load", "train"], weights_from=other, **common)[0]
    assert resumed["step"] == straight["step"] == 2
    assert [
        name for name, want in straight["weights"].items() if not np.array_equal(resumed["weights"][name], want)
    ] == []


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
    back = pool.run("checkpoint_jobs:run", run_dir=str(tmp_path), plan=["start", "load"], **common)[0]
    assert (
        back["step"] == 3 and "step_00000004 is damaged and passed over: state.json is missing" in back["warnings"][0]
    )
    assert sorted(p.name for p in checkpoints.iterdir()) == ["latest", "step_00000003", "step_00000004.damaged"]
    assert (checkpoints / "latest").read_text().strip() == "step_00000003"


def test_written_beside_training_it_is_the_state_at_its_start(rank_pools, models, tmp_path):
    folder, other = models[False]
    pool = rank_pools(2)
    common = dict(folder=str(folder), parallel={}, optimizer=dict(lr=1e-3))
    straight = pool.run(
        "checkpoint_jobs:run", run_dir=str(tmp_path / "a"), plan=["start", "train", "train", "train"], **common
    )[0]
    beside = dict(run_dir=str(tmp_path / "b"), checkpoint=dict(asynchronous=True), **common)
    went_on = pool.run("checkpoint_jobs:run", plan=["start", "train", "save", "train", "train", "commit"], **beside)[0]
    resumed = pool.run(
        "checkpoint_jobs:run", plan=["start", "load", "train", "train"], weights_from=str(other), **beside
    )[0]
    for weight, want in straight["weights"].items():
        assert np.array_equal(went_on["weights"][weight], want) and np.array_equal(resumed["weights"][weight], want), (
            weight
        )


@pytest.mark.parametrize("distributed", [True, False])
def test_a_save_beside_training_copies_each_tensor_once(rank_pools, models, tmp_path, distributed):
    """Bytes of rank 0. Megatron copies views of larger buffers on its own; a second copy would double the memory."""
    common = dict(folder=str(models[False][0]), parallel={}, optimizer=dict(lr=1e-3, distributed=distributed))
    copies = rank_pools(2).run(
        "checkpoint_jobs:run",
        run_dir=str(tmp_path),
        plan=["start", "train", "save, copies counted"],
        checkpoint=dict(asynchronous=True),
        **common,
    )[0]["copies"]
    assert copies["shared"] == 0, "training would change what is being written"
    assert 0 < copies["copied"] <= copies["staged"], copies


EP2 = dict(expert=2)


@pytest.mark.parametrize(
    ("moe", "before", "parallel", "distributed"),
    [
        (False, {}, dict(tensor=2), True),
        (False, {}, dict(pipeline=2, last_stage_layers=1), True),
        (False, {}, dict(context=2), True),
        # Megatron's optimizer has a part of its own for experts only above an expert-parallel size of 1.
        (True, EP2, {}, True),
        (True, {}, EP2, True),
        (True, EP2, {}, False),
        (True, {}, EP2, False),
    ],
    ids=str,
)
def test_saved_by_data_parallel_ranks_and_resumed_in_another_layout(
    rank_pools, tmp_path, moe, before, parallel, distributed
):
    folder, other = (make_folder(tmp_path / f"m{seed}", moe=moe, layers=3, seed=seed) for seed in (3, 9))
    pool = rank_pools(2)
    common = dict(run_dir=str(tmp_path), folder=str(folder), optimizer=dict(lr=1e-3, distributed=distributed))
    saved = pool.run("checkpoint_jobs:run", parallel=before, plan=["start", "train", "train", "save"], **common)[0]
    straight = pool.run("checkpoint_jobs:run", parallel=before, plan=["start", "load", "train"], **common)[0]
    loaded = pool.run(
        "checkpoint_jobs:run", parallel=parallel, plan=["start", "load"], weights_from=str(other), **common
    )[0]
    resumed = pool.run(
        "checkpoint_jobs:run", parallel=parallel, plan=["start", "load", "train"], weights_from=str(other), **common
    )[0]
    assert (loaded["step"], resumed["step"]) == (2, 3)
    for weight, want in saved["weights"].items():
        assert np.array_equal(loaded["weights"][weight], want), weight
        moved, expected = resumed["weights"][weight] - want, straight["weights"][weight] - want
        # Adam's moments came along: without them the first update has another size and direction altogether.
        assert np.linalg.norm(moved - expected) <= 1e-3 * np.linalg.norm(expected) + 1e-9, weight


def test_another_model_is_refused_before_anything_is_loaded(rank_pools, models, tmp_path):
    pool = rank_pools(2)
    common = dict(run_dir=str(tmp_path), parallel={}, optimizer=dict(lr=1e-3))
    pool.run("checkpoint_jobs:run", folder=str(models[False][0]), plan=["start", "train", "save"], **common)
    texts = pool.run("checkpoint_jobs:refused", folder=str(models[True][0]), plan=["start", "load"], **common)
    assert all(t.startswith("CheckpointError") and "holds the model" in t for t in texts)


def test_damaged_files_are_named_and_the_checkpoint_before_is_taken(rank_pools, models, tmp_path):
    pool = rank_pools(2)
    common = dict(run_dir=str(tmp_path), folder=str(models[False][0]), parallel={}, optimizer=dict(lr=1e-3))
    first = pool.run("checkpoint_jobs:run", plan=["start", "train", "save", "train", "save"], **common)[0]
    victim = next((tmp_path / "checkpoints" / "step_00000002" / "megatron").glob("*.distcp"))
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    back = pool.run("checkpoint_jobs:run", plan=["start", "load", "train"], **common)[0]
    assert back["step"] == 2 and f"{victim.name} has" in back["warnings"][0]
    assert all(np.array_equal(back["weights"][weight], want) for weight, want in first["weights"].items())

    victim = tmp_path / "checkpoints" / "step_00000001" / "rng" / "rank_00001.safetensors"
    damaged = bytearray(victim.read_bytes())
    damaged[-1] ^= 1
    victim.write_bytes(damaged)
    texts = pool.run("checkpoint_jobs:refused", plan=["start", "load"], **common)
    assert all(
        t.startswith("CheckpointError")
        and "no checkpoint is whole" in t
        and "rank_00001.safetensors has other bytes" in t
        for t in texts
    ), texts


def test_a_newer_format_is_refused_and_stays(rank_pools, models, tmp_path):
    pool = rank_pools(2)
    common = dict(run_dir=str(tmp_path), folder=str(models[False][0]), parallel={}, optimizer=dict(lr=1e-3))
    pool.run("checkpoint_jobs:run", plan=["start", "train", "save"], **common)
    record = tmp_path / "checkpoints" / "step_00000001" / "state.json"
    record.write_text(record.read_text().replace('"format_version": 2', '"format_version": 3'))
    texts = pool.run("checkpoint_jobs:refused", plan=["start", "load"], **common)
    assert all("newer gspo_mega (checkpoint format 3; this one reads up to 2)" in t for t in texts), texts
    assert record.exists()


@pytest.mark.parametrize(
    "fault",
    [
        "point=save.folder.before,do=denied",
        "point=save.tensors.before,do=disk_full,rank=1",
        "point=save.state.write.before,do=disk_full",
        "point=save.latest.write.before,do=disk_full",
    ],
)
def test_a_disk_that_refuses_is_every_ranks_error_and_harms_nothing(rank_pools, models, tmp_path, fault):
    pool = rank_pools(2)
    common = dict(run_dir=str(tmp_path), folder=str(models[False][0]), parallel={}, optimizer=dict(lr=1e-3))
    saved = pool.run("checkpoint_jobs:run", plan=["start", "train", "save"], **common)[0]
    texts = pool.run("checkpoint_jobs:refused", plan=["start", "load", "train", f"fault {fault}", "save"], **common)
    reason = "Permission denied" if "denied" in fault else "No space left"
    assert all(t.startswith("CheckpointError") and "cannot be written" in t and reason in t for t in texts), texts
    back = pool.run("checkpoint_jobs:run", plan=["start", "load"], **common)[0]
    assert back["step"] == 1 and not back["warnings"]
    assert all(np.array_equal(back["weights"][weight], want) for weight, want in saved["weights"].items())


def test_a_save_that_would_not_fit_is_refused_before_anything_is_written(rank_pools, models, tmp_path):
    pool = rank_pools(2)
    common = dict(run_dir=str(tmp_path), folder=str(models[False][0]), parallel={}, optimizer=dict(lr=1e-3))
    texts = pool.run("checkpoint_jobs:refused", plan=["start", "train", "save", "train", "save without room"], **common)
    assert all(
        "cannot be written" in t and "it needs 0.02 GiB, and 0.02 GiB are free there. Nothing was written" in t
        for t in texts
    ), texts
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_00000001"]
