"""Ranks that go on from copies in memory end where undisturbed ones do, to the bit; a copy that is lost, damaged or of
something else is never used.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from layout_models import make_folder
from test_checkpoint import LAYOUTS

from gspo_mega.base.run_folder import RunFolder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("copies-models")
    return {
        (moe, seed): str(make_folder(root / f"{moe}{seed}", moe=moe, layers=2, seed=seed))
        for moe in (False, True)
        for seed in (5, 9)
    }


def held(machines: Path, rank: int) -> list[Path]:
    """The whole copies in the memory of a rank's machine."""
    return sorted(machines.glob(f"machine_{rank}/gspo_mega-*/*/rank_*.step_*"))


def names(machines: Path, rank: int) -> list[str]:
    return [file.name.rpartition(".")[0] for file in held(machines, rank)]


@pytest.mark.parametrize("name", ["dense-DP2 in padded buckets", "dense-PP2", "moe-EP2"])
def test_a_lost_machine_is_replaced_from_its_neighbour_and_the_end_is_the_same(rank_pools, models, tmp_path, name):
    moe, parallel, distributed, bucket_size = LAYOUTS[name]
    optimizer = dict(lr=1e-3, warmup_steps=2, schedule="cosine", min_lr=1e-4, distributed=distributed)
    optimizer["overlap"] = bucket_size is not None
    run = tmp_path / "run"
    RunFolder(run).new_attempt()
    common = dict(parallel=parallel, optimizer=optimizer, bucket_size=bucket_size, run_dir=str(run))
    common |= dict(folder=models[moe, 5], precision="bf16")
    pool, job = rank_pools(2), "checkpoint_jobs:run"
    # Training goes on beside the copy of step 2, and the state that it copies is that of step 2.
    straight = pool.run(job, plan=["start", "draw", "train", "train", "train", "train", "save"], **common)[0]
    saved = RunFolder(run).checkpoint_dir(4)
    settings_of_megatron = (saved / "megatron/common.pt").read_bytes()
    shutil.rmtree(saved)
    machines = tmp_path / "machines"
    copied = pool.run(
        job,
        plan=["start", "draw", "train", "save", "start", "load", "copy", "train", "copy", "train"],
        machines=str(machines),
        **common,
    )[0]
    assert copied["warnings"] == []
    figures = copied["figures"]
    assert 0 < figures["time/checkpoint/peer_pause_seconds"] <= figures["time/checkpoint/peer_seconds"]
    assert figures["checkpoint/peer_bytes"] <= max(file.stat().st_size for file in held(machines, 0))
    for rank in (0, 1):
        assert names(machines, rank) == [
            f"rank_{one:05d}.{place}.step_{step:08d}"
            for one, place in sorted([(rank, "own"), (1 - rank, "peer")])
            for step in (1, 2)
        ]
    shutil.rmtree(machines / "machine_1")
    resumed = pool.run(
        job,
        plan=["start", "go on from copies", "train", "train", "save"],
        machines=str(machines),
        weights_from=models[moe, 9],
        **common,
    )[0]
    assert resumed["warnings"] == ["step 2, of rank 1 from the neighbour's"]
    assert [resumed[key] for key in ("step", "lr", "random")] == [straight[key] for key in ("step", "lr", "random")]
    for weight, want in straight["weights"].items():
        assert np.array_equal(resumed["weights"][weight], want), weight
    assert (saved / "megatron/common.pt").read_bytes() == settings_of_megatron
    assert names(machines, 0) == ["rank_00000.own.step_00000002", "rank_00001.peer.step_00000002"], "older ones went"


def test_what_is_damaged_or_of_something_else_is_not_used(rank_pools, models, tmp_path):
    run, kept, machines = tmp_path / "run", tmp_path / "kept", tmp_path / "machines"
    RunFolder(run).new_attempt()
    common = dict(folder=models[False, 5], parallel={}, optimizer=dict(lr=1e-3), run_dir=str(run))
    pool, job = rank_pools(2), "checkpoint_jobs:run"
    plan = ["start", "train", "copy", "train", "copy"]
    pool.run(job, plan=plan, machines=str(machines), **common)
    shutil.copytree(machines, kept)

    def restored(disturb=lambda: None, **changes) -> tuple[int, str]:
        shutil.rmtree(machines)
        shutil.copytree(kept, machines)
        disturb()
        arguments = {**common, **changes}
        found = pool.run(job, plan=["start", "go on from copies"], machines=str(machines), **arguments)[0]
        return found["step"], found["warnings"][-1]

    def damage(pattern: str) -> None:
        for file in machines.glob(f"machine_*/gspo_mega-*/*/{pattern}"):
            with file.open("r+b") as opened:
                opened.seek(-100, os.SEEK_END)
                byte = opened.read(1)
                opened.seek(-1, os.SEEK_CUR)
                opened.write(bytes([byte[0] ^ 1]))

    def lose(pattern: str) -> None:
        for file in machines.glob(f"machine_*/gspo_mega-*/*/{pattern}"):
            file.unlink()

    assert restored() == (2, "step 2")
    step, text = restored(lambda: damage("rank_00001.own.step_00000002.*"))
    assert step == 2 and "from the neighbour's (rank 1: its own copy of step 2 has another checksum)" in text
    step, text = restored(lambda: lose("rank_00001.*.step_00000002.*"))
    assert step == 1, "the newest step that every rank has"
    step, text = restored(lambda: (lose("rank_00001.own.*"), damage("rank_00001.peer.*")))
    assert step == 0 and text.endswith("rank 1: neither its own copy nor its neighbour's is there"), text
    assert held(machines, 0) == held(machines, 1) == [], "what cannot be used goes"
    step, text = restored(lambda: lose("rank_00000.*"))
    assert step == 0 and text == "rank 0: neither its own copy nor its neighbour's is there"
    step, text = restored(optimizer=dict(lr=2e-3))
    assert step == 0 and "of another layout, model or configuration" in text
    shutil.rmtree(run)
    RunFolder(run).new_attempt()
    step, text = restored()
    assert step == 0 and "is of another run in a folder of this name" in text


def test_without_room_the_run_goes_on_and_says_so_once(rank_pools, models, tmp_path):
    run, machines = tmp_path / "run", tmp_path / "machines"
    RunFolder(run).new_attempt()
    common = dict(folder=models[False, 5], parallel={}, optimizer=dict(lr=1e-3), run_dir=str(run))
    fault = "fault point=copy.begin.before,hit=2,do=disk_full,rank=1"
    plan = ["start", "train", "copy", "train", fault, "copy", "train", "copy"]
    found = rank_pools(2).run("checkpoint_jobs:run", plan=plan, machines=str(machines), **common)[0]
    (line,) = found["warnings"]
    assert line == ("warning  no copy in memory of step 2: rank 1: No space left on device; those of step 1 stay")
    assert found["figures"]["checkpoint/peer_bytes"] > 0
    assert {name[-8:] for name in names(machines, 0)} == {"00000001", "00000003"}
