"""From a loaded configuration to the supervised steps of the Slurm job that this process is the batch script of.

What `launch_local.py` is to one machine: plan, run folder, records of the attempt, then `job_supervisor.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from gspo_mega.config import Config, LoadedConfig, render_config
from gspo_mega.errors import PlanError
from gspo_mega.launcher.attempt_output import log_to
from gspo_mega.launcher.attempt_state import StateKeeper
from gspo_mega.launcher.gpus_and_ports import free_port
from gspo_mega.launcher.lease import hold
from gspo_mega.launcher.prepare import new_attempt
from gspo_mega.launcher.received_signals import signals_taken
from gspo_mega.launcher.restarts import Restarts, furthest
from gspo_mega.launcher.slurm.controller_outage import Answers
from gspo_mega.launcher.slurm.job_size import JobSize, job_size, told_in_time
from gspo_mega.launcher.slurm.job_supervisor import AttemptError, SlurmJob, Standing
from gspo_mega.launcher.slurm.scontrol import Allocation, read_allocation, seconds_left
from gspo_mega.launcher.slurm.site_settings import Site
from gspo_mega.launcher.slurm.step_commands import Steps
from gspo_mega.launcher.slurm.stop_request import SIGNALS
from gspo_mega.launcher.software_versions import versions_text
from gspo_mega.plan import estimate, plan_run, render_report
from gspo_mega.plan.watchdog_bounds import patience
from gspo_mega.run_folder import Attempt, RunFolder, atomic_write_text


def launch_slurm(loaded: LoadedConfig, command: Literal["train", "sft"], say: Callable[[str], None]) -> int:
    """Run `command` on the nodes of this job; returns the exit code.

    Call from the main thread of the batch script. Raises a GspoMegaError with its exit code: ConfigError, ModelError,
    PlanError before anything starts, RankError for what failed after.
    """
    site = Site.read(os.environ).with_server_python(loaded.config.server.python)
    size = job_size(loaded, site, command)
    plan = plan_run(loaded, "gpu" if site.gpus_per_node else "cpu")
    figures = estimate(plan, loaded.where)
    report, site = render_report(plan, figures), told_in_time(site, figures)
    answers = Answers(say)
    allocation = answers.demand(lambda: read_allocation(os.environ, size.num_trainer_nodes, size.num_rollout_nodes))
    _check_time(allocation.job_id, site, answers)
    say(report)
    folder = RunFolder(Path(loaded.config.run.dir) / loaded.config.run.name)
    with hold(folder, say) as lease:
        standing = Standing(
            allocation,
            site.signal_seconds,
            say,
            answers,
            site.preflight_seconds,
            patience(loaded.config, figures),
            check_lease=lease.raise_if_lost,
        )
        with signals_taken(SIGNALS, standing.signals):
            return _Attempts(loaded, command, size, site, standing, folder, report).run()


class _Attempts:
    """The attempts of one start of the job: the first one, and those after a failure, on the same nodes and without the
    queue.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        command: Literal["train", "sft"],
        size: JobSize,
        site: Site,
        standing: Standing,
        folder: RunFolder,
        report: str,
    ) -> None:
        self._loaded, self._command, self._size, self._site = loaded, command, size, site
        self._standing, self._folder, self._report = standing, folder, report
        train = loaded.config.train
        max_restarts = train.max_restarts if train is not None and command == "train" else 0
        begin = Restarts.carry_on if standing.allocation.num_restarts else Restarts.begin
        self._restarts = begin(folder, max_restarts)

    def run(self) -> int:
        """The exit code of the last attempt. Raises RankError, the last attempt's."""
        is_first = True
        while True:
            attempt = new_attempt(self._folder, self._loaded, self._command, self._standing.say)
            try:
                return self._attempt(attempt, is_first)
            except AttemptError as error:
                if attempt.stop_reason() is not None:
                    raise  # it was to end
                decision = self._restarts.decide(error, furthest(self._folder), time.time())
                self._standing.say(f"warning  attempt {attempt.number} failed: {decision.why}")
                if not self._restarts.record(attempt, decision):
                    raise
                is_first = False

    def _attempt(self, attempt: Attempt, is_first: bool) -> int:
        standing, site, allocation, say = self._standing, self._site, self._standing.allocation, self._standing.say
        job_id, here = allocation.job_id, allocation.trainer_nodes[0].address
        steps = Steps(allocation, self._size, site, attempt, self._loaded.config.server.tensor)
        servers = [
            index for index in range(self._size.num_servers) if steps.server_node(index) not in standing.nodes.known
        ]
        config = _in_job(self._loaded.config, here, servers)
        atomic_write_text(attempt.config_file, render_config(config))
        atomic_write_text(attempt.plan_file, self._report + "\n")
        atomic_write_text(attempt.versions_file, versions_text())
        with log_to(attempt.supervisor_log), StateKeeper(attempt, job_id) as state:
            say(f"\nrun      {self._folder.path}, attempt {attempt.number}; logs in {attempt.logs_dir}")
            say(
                f"job      {job_id}, restarted {allocation.num_restarts} times;"
                f" {describe_nodes(allocation, self._size)}"
            )
            left = standing.answers.demand(lambda: seconds_left(job_id))
            # Before the first attempt alone: what it looks at does not change with a failed rank.
            requests = self._size.num_servers * config.rollout.max_concurrent_requests
            doctors = (
                steps.doctors(free_port(here), config.precision == "fp8", requests)
                if site.preflight and is_first
                else []
            )
            return SlurmJob(attempt, standing, steps, state, left).run(self._command, servers, free_port(here), doctors)


def _in_job(config: Config, address: str, servers: Sequence[int]) -> Config:
    """What the attempt's ranks and servers read: rank 0's own `address` as `server.host`, by which it asks which of its
    addresses servers reach (every server is told its own node's when it is started), and as many servers as there are
    nodes left for.
    """
    server, cluster = config.server, config.cluster
    if servers and len(servers) < server.num_servers:
        server = server.model_copy(update={"num_servers": len(servers)})
        cluster = cluster.model_copy(update={"num_rollout_nodes": min(cluster.num_rollout_nodes, len(servers))})
    return config.model_copy(update={"server": server.model_copy(update={"host": address}), "cluster": cluster})


def _check_time(job_id: str, site: Site, answers: Answers) -> None:
    """Is there time before the limit? That it is enough for a step, only trying shows: see `Stop`. Raises PlanError."""
    left = answers.demand(lambda: seconds_left(job_id))
    if left is not None and left <= site.signal_seconds:
        raise PlanError(
            f"job {job_id} has {left:.0f} s, and saves and stops {site.signal_seconds} s before its end"
            " (GSPO_SIGNAL_SECONDS): it would be queued again for ever without a step; give it more time (--time in"
            " GSPO_SBATCH, launch/slurm/site.sh)"
        )


def describe_nodes(allocation: Allocation, size: JobSize) -> str:
    trainers, rollouts = (
        [node.name for node in nodes] for nodes in (allocation.trainer_nodes, allocation.rollout_nodes)
    )
    if size.num_servers == 0:
        return f"ranks on {' '.join(trainers)}, no servers: it trains on recorded rollouts"
    if trainers == rollouts:
        return f"ranks and servers on {' '.join(trainers)}"
    return f"ranks on {' '.join(trainers)}, servers on {' '.join(rollouts)}"
