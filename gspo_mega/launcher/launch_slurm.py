"""From a loaded configuration to the supervised steps of the Slurm job that this process is the batch script of.

What `launch.py` is to one machine: plan, run folder, records of the attempt, then `slurm_job.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from gspo_mega.config import Config, LoadedConfig, render_config
from gspo_mega.errors import PlanError
from gspo_mega.launcher.launch import log_to
from gspo_mega.launcher.places import free_port
from gspo_mega.launcher.prepare import hold, new_attempt
from gspo_mega.launcher.slurm import Allocation, read_allocation, seconds_left
from gspo_mega.launcher.slurm_job import SlurmJob
from gspo_mega.launcher.slurm_site import Site
from gspo_mega.launcher.slurm_size import JobSize, job_size
from gspo_mega.launcher.slurm_steps import Steps
from gspo_mega.launcher.state import StateKeeper
from gspo_mega.launcher.versions import versions_text
from gspo_mega.plan import plan_run, render_report
from gspo_mega.run_folder import RunFolder, atomic_write_text


def launch_slurm(loaded: LoadedConfig, command: Literal["train", "sft"], say: Callable[[str], None]) -> int:
    """Run `command` on the nodes of this job; returns the exit code.

    Call from the main thread of the batch script. Raises a GspoMegaError with its exit code: ConfigError, ModelError,
    PlanError before anything starts, RankError for what failed after.
    """
    site = Site.read(os.environ)
    size = job_size(loaded, site, command)
    report = render_report(plan_run(loaded, "gpu" if site.gpus_per_node else "cpu"))
    allocation = read_allocation(os.environ, size.num_trainer_nodes, size.num_rollout_nodes)
    left = _check_time(allocation.job_id, site)
    loaded = replace(loaded, config=_reached_from(loaded, allocation))
    config = loaded.config
    say(report)
    folder = RunFolder(Path(config.run.dir) / config.run.name)
    with hold(folder):
        attempt = new_attempt(folder, loaded, command)
        atomic_write_text(attempt.config_file, render_config(config))
        atomic_write_text(attempt.plan_file, report + "\n")
        atomic_write_text(attempt.versions_file, versions_text())
        with log_to(attempt.supervisor_log), StateKeeper(attempt, allocation.job_id) as state:
            say(f"\nrun      {folder.path}, attempt {attempt.number}; logs in {attempt.logs_dir}")
            say(f"job      {allocation.job_id}, restarted {allocation.num_restarts} times; {describe_nodes(allocation, size)}")
            steps = Steps(allocation, size, site, attempt, config.server.tensor)
            job = SlurmJob(attempt, allocation, steps, state, say, site.signal_seconds, left)
            here = allocation.trainer_nodes[0].address
            doctors = steps.doctors(free_port(here), config.precision == "fp8", size.num_servers * config.rollout.max_concurrent_requests) if site.preflight else []
            return job.run(command, size.num_servers, free_port(here), doctors)


def _reached_from(loaded: LoadedConfig, allocation: Allocation) -> Config:
    """The configuration with rank 0's own address as `server.host`: rank 0 asks by it which of its addresses servers reach.

    Every server is told its own node's address when it is started.
    """
    config = loaded.config
    return config.model_copy(update={"server": config.server.model_copy(update={"host": allocation.trainer_nodes[0].address})})


def _check_time(job_id: str, site: Site) -> float | None:
    """Seconds until the time limit, None without one. That they are enough for a step, only trying shows: see SlurmJob."""
    left = seconds_left(job_id)
    if left is not None and left <= site.signal_seconds:
        raise PlanError(
            f"job {job_id} has {left:.0f} s, and saves and stops {site.signal_seconds} s before its end (GSPO_SIGNAL_SECONDS): it would be"
            " queued again for ever without a step; give it more time (--time in GSPO_SBATCH, launch/slurm/site.sh)"
        )
    return left


def describe_nodes(allocation: Allocation, size: JobSize) -> str:
    trainers, rollouts = ([node.name for node in nodes] for nodes in (allocation.trainer_nodes, allocation.rollout_nodes))
    if size.num_servers == 0:
        return f"ranks on {' '.join(trainers)}, no servers: it trains on recorded rollouts"
    if trainers == rollouts:
        return f"ranks and servers on {' '.join(trainers)}"
    return f"ranks on {' '.join(trainers)}, servers on {' '.join(rollouts)}"
