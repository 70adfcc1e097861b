"""From a loaded configuration to the supervised steps of a Slurm job, in the process of its batch script.

Does for a job what `launcher/launch_local.py` does for one machine: plan, run folder, records of the attempt. The steps
are run by `job_supervisor.py`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from gspo_mega.base import proxies
from gspo_mega.base.errors import GspoMegaError, PlanError
from gspo_mega.base.run_folder import Attempt, RunFolder, atomic_write_text
from gspo_mega.config import Config, LoadedConfig, render_config
from gspo_mega.launcher.alerts import Alerts
from gspo_mega.launcher.attempt_output import log_to
from gspo_mega.launcher.attempt_state import StateKeeper
from gspo_mega.launcher.gpus_and_ports import free_port
from gspo_mega.launcher.lease import hold
from gspo_mega.launcher.prepare import new_attempt
from gspo_mega.launcher.received_signals import signals_taken
from gspo_mega.launcher.restarts import Decision, Restarts
from gspo_mega.launcher.slurm.controller_outage import Answers
from gspo_mega.launcher.slurm.job_size import JobSize, job_size, with_signal_time
from gspo_mega.launcher.slurm.job_supervisor import AttemptError, JobContext, SlurmJob
from gspo_mega.launcher.slurm.scontrol import Allocation, read_allocation, seconds_left
from gspo_mega.launcher.slurm.site_settings import Site
from gspo_mega.launcher.slurm.step_commands import Steps
from gspo_mega.launcher.slurm.stop_request import SIGNALS
from gspo_mega.launcher.software_versions import versions_text
from gspo_mega.plan import estimate, plan_run, refuse_what_does_not_fit, render_report
from gspo_mega.plan.watchdog_bounds import patience


def launch_slurm(loaded: LoadedConfig, command: Literal["train", "sft"], say: Callable[[str], None]) -> int:
    """Run `command` on the nodes of this Slurm job; returns the exit code.

    Call from the main thread of the batch script. Raises a GspoMegaError with its exit code: ConfigError, ModelError,
    PlanError before anything starts, RankError for what failed after.
    """
    site = (
        Site.read(os.environ)
        .with_server_python(loaded.config.server.python)
        .with_preflight_seconds(loaded.config.cluster.preflight_seconds)
    )
    size = job_size(loaded, site, command)
    plan = plan_run(loaded, "gpu" if site.gpus_per_node else "cpu")
    figures = estimate(plan, loaded.where)
    refuse_what_does_not_fit(plan, figures, loaded.where)
    report, site = render_report(plan, figures), with_signal_time(site, figures)
    answers = Answers(say)
    allocation = answers.demand(lambda: read_allocation(os.environ, size.num_trainer_nodes, size.num_rollout_nodes))
    proxies.keep_direct(name for node in allocation.nodes for name in (node.name, node.address))
    _check_time(allocation.job_id, site, answers)
    say(report)
    folder = RunFolder(Path(loaded.config.run.dir) / loaded.config.run.name)
    with hold(folder, say) as lease:
        context = JobContext(
            allocation,
            site.signal_seconds,
            say,
            answers,
            site.preflight_seconds,
            patience(loaded.config, figures),
            check_lease=lease.raise_if_lost,
            by_nccl=bool(site.gpus_per_node) and loaded.config.publish.method == "distributed",
        )
        with signals_taken(SIGNALS, context.signals), signals_taken([signal.SIGUSR2], context.stack_signals):
            return _Attempts(loaded, command, size, site, context, folder, report).run()


class _Attempts:
    """The attempts of one start of the job: the first attempt, and those after a failure on the same nodes."""

    def __init__(
        self,
        loaded: LoadedConfig,
        command: Literal["train", "sft"],
        size: JobSize,
        site: Site,
        context: JobContext,
        folder: RunFolder,
        report: str,
    ) -> None:
        self._loaded, self._command, self._size, self._site = loaded, command, size, site
        self._context, self._folder, self._report = context, folder, report
        begin = Restarts.carry_on if context.allocation.num_restarts else Restarts.begin
        self._restarts = begin(folder, Restarts.allowed(command, loaded.config.train))
        self._decision: Decision | None = None  # on the failure of the current attempt

    def run(self) -> int:
        """The exit code of the last attempt. Raises its RankError."""
        is_first = True
        while True:
            attempt = new_attempt(self._folder, self._loaded, self._command, self._context.say)
            alerts = Alerts(self._loaded.config, attempt, self._context.say)
            self._decision = None
            try:
                return self._attempt(attempt, is_first)
            except AttemptError as error:
                decision = self._decision
                if decision is None:
                    alerts.failed(error, restarts=False)
                    raise  # a stop was requested
                self._context.say(f"warning  attempt {attempt.number} failed: {decision.why}")
                alerts.failed(error, restarts=decision.again, why=decision.why)
                if not decision.again:
                    raise
                is_first = False
            except GspoMegaError as error:
                alerts.failed(error, restarts=False)
                raise
            finally:
                alerts.close()

    def _attempt(self, attempt: Attempt, is_first: bool) -> int:
        context, site, allocation, say = self._context, self._site, self._context.allocation, self._context.say
        job_id, here = allocation.job_id, allocation.trainer_nodes[0].address
        server = self._loaded.config.server
        steps = Steps(allocation, self._size, site, attempt, server.tensor // server.num_nodes)
        lost = context.nodes.known
        servers = [n for n in range(self._size.num_servers) if lost.isdisjoint(steps.server_nodes(n))]
        rewards = {
            name: [n for n in own.indices if lost.isdisjoint(own.server_nodes(n))]
            for name, own in steps.reward_servers().items()
        }
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
            left = context.answers.demand(lambda: seconds_left(job_id))
            # Before the first attempt only: a failed rank changes nothing that a doctor checks.
            requests = self._size.num_servers * config.rollout.max_concurrent_requests
            doctors = (
                steps.doctors(free_port(here), config.precision == "fp8", requests)
                if site.preflight and is_first
                else []
            )
            job = SlurmJob(attempt, context, steps, state, left)
            try:
                return job.run(self._command, servers, free_port(here), doctors, rewards)
            except AttemptError as error:
                if attempt.stop_reason() is None:
                    self._decision = self._restarts.settle(attempt, error)
                raise


def _in_job(config: Config, address: str, servers: Sequence[int]) -> Config:
    """The configuration of the attempt's ranks and servers, with the number of servers that the remaining nodes hold.

    `server.host` becomes rank 0's own `address`, from which it finds the address that servers reach; each server gets
    the address of its own node when it starts.
    """
    server, cluster = config.server, config.cluster
    if servers and len(servers) < server.num_servers:
        server = server.model_copy(update={"num_servers": len(servers)})
        cluster = cluster.model_copy(
            update={"num_rollout_nodes": min(cluster.num_rollout_nodes, len(servers) * server.num_nodes)}
        )
    return config.model_copy(update={"server": server.model_copy(update={"host": address}), "cluster": cluster})


def _check_time(job_id: str, site: Site, answers: Answers) -> None:
    """Raises PlanError where the job has no time before its limit; `Stop` finds out whether it suffices for a step."""
    left = answers.demand(lambda: seconds_left(job_id))
    if left is not None and left <= site.signal_seconds:
        raise PlanError(
            f"job {job_id} has {left:.0f} s left but must stop {site.signal_seconds} s before its time limit"
            " (GSPO_SIGNAL_SECONDS), so it would never finish a step. Raise --time of GSPO_SBATCH in"
            " launch/slurm/site.sh"
        )


def describe_nodes(allocation: Allocation, size: JobSize) -> str:
    trainers, rollouts = (
        [node.name for node in nodes] for nodes in (allocation.trainer_nodes, allocation.rollout_nodes)
    )
    if size.num_servers == 0:
        return f"ranks on {' '.join(trainers)}, no servers: the run trains on recorded rollouts"
    if trainers == rollouts:
        return f"ranks and servers on {' '.join(trainers)}"
    return f"ranks on {' '.join(trainers)}, servers on {' '.join(rollouts)}"
