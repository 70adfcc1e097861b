"""A run that measures held-out prompts beside training, killed while it does: the measurement is that of its step.
The configuration and the module of its reward and its group filter are in a folder of their own.
"""

import json
import os
import shutil
import signal

from run_support import REPOSITORY, Command, small_overrides

from gspo_mega.base.run_folder import RunFolder
from gspo_mega.metrics.writer import read_metrics
from gspo_mega.report.run_record import read_lines

NUM_STEPS = 3


def test_steps_are_trained_while_one_is_measured_and_a_kill_loses_neither(tmp_path, quickstart_files, monkeypatch):
    gate, run = tmp_path / "gate", RunFolder(tmp_path / "runs" / "run")
    task = tmp_path / "task"
    task.mkdir()
    shutil.copy(REPOSITORY / "configs/quickstart.yaml", task / "task.yaml")
    own = (REPOSITORY / "tests/integration/run_support.py").read_text()
    (task / "task_functions.py").write_text(f"{own}\n\ndef keeps(group):\n    return True\n")
    monkeypatch.setenv("GSPO_TEST_GATE", str(gate))
    overrides = [
        *small_overrides(quickstart_files, tmp_path / "runs", "run"),
        *(f"train.num_steps={NUM_STEPS}", "cluster.ranks_per_node=1", "parallel.expert=1", "server.num_servers=2"),
        *("eval.num_prompts=2", "eval.every_steps=2", "eval.blocking=false", "checkpoint.every_steps=1"),
        *(
            "eval.reward=task_functions:gated",
            "reward.deadline_seconds=900",
            "rollout.group_filter=task_functions:keeps",
            "rollout.filter_constant_groups=false",
        ),
        "reward.environment=[GSPO_TEST_MARKER, GSPO_TEST_GATE]",
        "reward.num_workers=3",  # two of them stand still
    ]
    train = Command(tmp_path, "train", str(task / "task.yaml"), *overrides)
    try:
        # The weights before training are measured now, and cannot be until the gate is open.
        train.wait_for("a step's checkpoint", run.latest_checkpoint_file.exists)
        (line,) = [one for one in read_metrics(run.metrics_file) if one["step"] == 1]
        assert not any(name.startswith("eval/") for name in line)
        state = json.loads((run.checkpoint_dir(1) / "state.json").read_text())["state"]
        assert [(one["step"], one["weight_version"]) for one in state["summary"]["evaluations_due"]] == [(0, 0)]
        os.kill(train.rank(0), signal.SIGKILL)
        gate.touch()
        assert train.finish() == 0, train.out + train.err
    finally:
        train.end()
    assert "the weights of step 0 are measured now, because the run ended before it could do so" in train.out
    assert f"rollout.group_filter.function: {task}/task_functions.py is read (run.modules_dir)" in train.out
    # Of version 0, which no server started from any more: the sampler takes no token that a server says is of another.
    assert "held-out accuracy before training: 0.000 +- 0.000 (measured in " in train.out
    attempt = run.latest_attempt()
    assert attempt is not None and attempt.number == 2
    lines = read_lines(run.metrics_file)
    assert [(one["step"], one.get("eval/num_samples")) for one in lines] == [(0, 2), (1, None), (2, 2), (3, 2)]
    assert (lines[2]["eval/measured_step"], lines[2]["eval/beside/num_servers"]) == (2, 1)
    result = json.loads(attempt.result_file.read_text())
    assert result["accuracy_before"] == result["accuracy_after"] == [0.0, 0.0]
