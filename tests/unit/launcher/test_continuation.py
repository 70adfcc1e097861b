"""`gspo-mega plan --continue`: what it takes to continue a run with other values, or why it cannot be continued so."""

import json

import pytest

from gspo_mega.base.errors import CheckpointError, ConfigError
from gspo_mega.base.run_folder import RunFolder, atomic_write_json, atomic_write_text
from gspo_mega.cli.main import main
from gspo_mega.config import load_config
from gspo_mega.launcher.attempt_state import StateKeeper
from gspo_mega.launcher.continuation import plan_continuation, render_continuation
from gspo_mega.launcher.prepare import new_attempt

MIB = 2**20
# Two ranks with an expert-parallel size of 2.
LAYOUT = {"world": 2, "tensor": 1, "pipeline": 1, "context": 1, "data": 2, "expert": 2, "expert_tensor": 1}


@pytest.fixture
def run(tmp_path):
    """run(*overrides): the folder of a run with those values, and a checkpoint of 6 MiB after its second step."""

    def made(*overrides: str, slurm_job: str | None = None) -> str:
        shape = "model.path=configs/models/quickstart_moe.json"
        given = [shape, f"run.dir={tmp_path}", "run.name=demo", *overrides]
        (tmp_path / "demo").mkdir()
        folder = RunFolder(tmp_path / "demo")
        attempt = new_attempt(folder, load_config("configs/quickstart.yaml", given, "train"), "train")
        with StateKeeper(attempt, slurm_job):
            pass
        checkpoint = folder.checkpoints_dir / "step_00000002"
        checkpoint.mkdir(parents=True)
        state = {"step": 2, "num_optimizer_steps": 8}
        files = {"megatron/__0_0.distcp": [5 * MIB, "0"], "rng/rank_00000.safetensors": [MIB, "0"]}
        record = {"format_version": 2, "state": state, "layout": LAYOUT, "files": files}
        atomic_write_json(checkpoint / "state.json", record)
        atomic_write_text(folder.latest_checkpoint_file, "step_00000002")
        folder.metrics_file.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)))
        return str(folder.path)

    return made


def test_another_layout(run):
    folder = run()
    found = plan_continuation(folder, ["cluster.ranks_per_node=4", "batch.micro_batch_tokens=512"], "cpu")
    assert found.problems == () and found.is_other_layout
    assert found.changed["cluster.ranks_per_node"] == (2, 4)
    assert found.saved.folder_bytes == {"megatron": 5 * MIB, "rng": MIB}
    text = render_continuation(found)
    assert "layout   world 2 data 2 expert 2 -> world 4 data 4 expert 2\n" in text
    assert "all 4 ranks read the 6 MiB once together, 1.5 MiB each\n" in text
    assert "training of the 1 steps since step_00000002: done again" in text
    assert "random states of ranks: a fresh start's. Nothing draws from them" in text
    assert text.endswith(f"\ncommand  gspo-mega train {folder} cluster.ranks_per_node=4 batch.micro_batch_tokens=512")


def test_the_bytes_that_ranks_read_are_those_of_weights_and_moments(run):
    """Without experts' or tensor ranks each of two ranks reads all weights, and half of 12 bytes per parameter."""
    found = plan_continuation(run("model.path=configs/models/certify_dense.json", "parallel={}"), [], "cpu")
    (state, _), *_ = found.now[1].states
    text = render_continuation(found)
    weights, part = state.parameters * 4 / MIB, state.optimized * 12 / MIB
    assert state.optimized == pytest.approx(state.parameters / 2, rel=0.01)
    assert f"policy, the fullest rank: weights {weights:.3g} MiB, its part of the optimizer {part:.3g} MiB" in text
    assert "lost     training of" in text


def test_the_same_layout_loses_nothing_of_the_state(run):
    found = plan_continuation(run(), ["train.num_steps=100"], "cpu")
    text = render_continuation(found)
    assert not found.is_other_layout and "random states" not in text and "as it was saved" in text


def test_every_reason_is_named_and_there_is_no_command(run):
    found = plan_continuation(run(), ["optimizer.distributed=false", "batch.group_size=6", "optimizer.lr=1.0"], "cpu")
    assert [problem.partition(":")[0] for problem in found.problems] == [
        *("batch.group_size", "optimizer.distributed", "optimizer.lr")
    ]
    text = render_continuation(found)
    assert "optimizer.distributed: now false, the run has true" in text and "command" not in text


def test_numbers_of_nodes_that_would_do_are_named(run):
    found = plan_continuation(
        run(), ["cluster={num_nodes: 3, ranks_per_node: 1}", "parallel={tensor: 2, expert: 2}"], "cpu"
    )
    assert found.now is None
    assert found.problems[-1] == "cluster.num_nodes: with the other keys as they are, valid: 2, 4, 6"


def test_a_run_of_a_slurm_job_is_submitted_again_where_it_was(run, tmp_path, monkeypatch):
    folder = run(slurm_job="7")
    started = (RunFolder(folder).latest_attempt().started_in_file).read_text().strip()
    found = plan_continuation(folder, ["cluster.num_nodes=2"], "cpu")
    expected = f"cd {started} && launch/slurm/train.sbatch {folder}/config.resolved.yaml cluster.num_nodes=2"
    assert found.command.replace(RunFolder(folder).config_file.name, "config.resolved.yaml") == expected


def test_only_folders_of_runs_with_a_checkpoint(run, tmp_path):
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        plan_continuation("configs/quickstart.yaml", [], "cpu")
    folder = run()
    RunFolder(folder).latest_checkpoint_file.unlink()
    with pytest.raises(CheckpointError, match="has no checkpoint to continue"):
        plan_continuation(folder, [], "cpu")


def test_the_command(run, capsys):
    folder = run()
    assert main(["plan", "--continue", folder, "cluster.ranks_per_node=4", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith(f"run      {folder}, step_00000002 of 6 MiB\n")
    assert main(["plan", "--continue", folder, "batch.group_size=6", "--device", "cpu"]) == 2
