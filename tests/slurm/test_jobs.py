"""launch/slurm/train.sbatch on a real Slurm: a job of real ranks and a real SGLang server, whose rank is killed and
which is signalled.

More of them are in `soak_nodes.py`; the same supervision with stand-ins in `test_supervision.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

from slurm_jobs import listening, variables

from gspo_mega.base.run_folder import read_json
from gspo_mega.launcher.attempt_state import read_state
from gspo_mega.metrics.writer import read_metrics
from gspo_mega.rollout.registration import read_secret


def test_a_job_whose_rank_is_killed_goes_on_and_near_its_time_limit_is_queued_again(submit, tmp_path):
    told = tmp_path / "told.jsonl"
    job = submit(
        "train.num_steps=6",
        "checkpoint.every_steps=1",
        "rollout.max_concurrent_requests=1",
        f"alerts.command=[bash, -c, 'cat >> {told}; echo >> {told}']",
        GSPO_PREFLIGHT="1",
    )
    assert "3 nodes" in job.submitted
    job.wait_for_line("doctor   nothing is wrong on 3 nodes")
    (server_node,) = job.nodes("servers")
    assert "gloo all-reduce" in (job.run.latest_attempt().logs_dir / f"doctor_node{server_node}.log").read_text()
    job.wait_for_line("step 1/6")
    attempt = job.run.latest_attempt()
    running = job.cluster.processes()

    # The key is in its 0600 file and nowhere else; nothing of ours listens beyond its node's own address.
    key = read_secret(attempt.api_key_file)
    assert attempt.api_key_file.stat().st_mode & 0o777 == 0o600
    ours = [(pid, command) for pid, command in running if not command.startswith("srun")]
    assert sum("gspo_mega.train.worker" in command for _, command in ours) >= 2
    assert not [command for _, command in running if key in command]
    ranks = [listening(pid) for pid, command in ours if "gspo_mega.train.worker" in command]
    assert {job.cluster.address(node) for node in job.nodes("ranks")} == set().union(*ranks), ranks
    servers = [listening(pid) for pid, command in ours if "rollout.server.entry" in command or "sglang" in command]
    # Zeros: torch's own store between the ranks of a server, which SGLang opens and which listens everywhere.
    own = job.cluster.address(server_node)
    assert own in set().union(*servers) <= {own, "127.0.0.1", "0" * 32}, servers

    # From the machine that submitted: a view that lasts as long as the job, and the ranks of both nodes say where they are.
    status = [sys.executable, "-m", "gspo_mega", "status", str(job.run.path)]
    view = subprocess.Popen([*status, "--watch"], stdout=subprocess.PIPE, text=True)
    stacks = subprocess.run([*status, "--stacks"], capture_output=True, text=True, check=True).stdout
    assert "rank 0, " in stacks and "rank 1, " in stacks and "stacks of all 2 ranks: " in stacks, stacks
    job.wait_for("its checkpoint", job.run.latest_checkpoint_file.exists)
    # The oldest of them: what a rank forks has its name and variables.
    second_rank = min(
        pid
        for pid, command in job.cluster.processes()
        if "gspo_mega.train.worker" in command and b"SLURM_PROCID=1\0" in variables(pid)
    )
    os.kill(second_rank, signal.SIGKILL)
    job.wait_for_line("warning  attempt 1 failed: started again from the checkpoint of step ")
    job.wait_for_line("resumed from step_")
    assert read_state(attempt).state == "failed" and "rank 1 on node" in read_state(attempt).error
    assert "restarted 1 times" not in job.log, "it went through the queue"

    second = job.run.latest_attempt()
    job.cluster.run("scancel", "--signal=USR1", "--batch", job.id)
    job.wait_for_line("queued again: SIGUSR1")
    assert read_state(second).state == "requeued"
    assert read_json(second.result_file)["stopped"].startswith("SIGUSR1")
    job.wait_for_line("resumed from step_", times=2)
    assert job.finish() == "COMPLETED", job.log
    shown, _ = view.communicate(timeout=120)
    rows = [row.split() for row in shown.splitlines() if row.startswith("step ")]
    assert view.returncode == 0 and rows[-1][1] == "6" and "state      finished" in shown, shown
    (alert,) = map(json.loads, filter(None, told.read_text().splitlines()))
    assert alert["cause"] == "failure" and "rank 1 on node" in alert["text"] and alert["restarts"] is True, alert
    # The line of a step comes before its checkpoint: one may be shown twice.
    assert sorted(set(job.steps())) == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in read_metrics(job.run.metrics_file)] == [1, 2, 3, 4, 5, 6]
    assert [a.number for a in job.run.attempts()] == [1, 2, 3]
    latest = job.run.latest_attempt()
    assert read_state(latest).state == "finished" and read_state(latest).slurm_job == job.id
    assert (job.run.huggingface_dir / "config.json").is_file()
    for path in job.run.path.rglob("*"):
        if path.is_file() and path.name != "api_key":
            assert key.encode() not in path.read_bytes(), path
    for name in (
        "plan.txt",
        "versions.txt",
        "config.resolved.yaml",
        "logs/rank_0.log",
        "logs/rank_1.log",
        "logs/server_0.log",
    ):
        assert (latest.path / name).stat().st_size > 0
