"""The supervisor of a Slurm job: from a loaded configuration to supervised steps, in the job's batch script.

`launch_slurm` does for a job what `launcher/local.py` does for one machine: plan, run folder, attempts (`_Attempts`).
`SlurmJob` runs on the first trainer node, watches the steps of one attempt, and reacts to ended steps and lost nodes:

    USR1 (time limit; preemption: see site.sh)     the ranks save a checkpoint and end; the job is requeued
    TERM, INT, HUP, a stop file                    the same without a requeue
    nodes are free that the run lost earlier       the same, if it shrinks (`train.on_lost_node`): on more nodes
    USR2                                           all ranks write their stacks; nothing else changes
    a trainer node or all servers' nodes lost      the job is requeued and continues from the last checkpoint
    all servers' nodes of a reward model lost      the same
    some servers lost or given up                  the run continues with the others
    a rank or the last server fails or hangs       the attempt fails: the log ends with its first error, and another
                                                   attempt may begin on the same nodes

Signals are handled in `stop.py`, the steps and the servers in `steps.py`, the calls of Slurm in `scontrol.py`.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NoReturn

from gspo_mega.base import network
from gspo_mega.base.errors import GspoMegaError, PlanError, RankError, StuckError
from gspo_mega.base.run_folder import EXIT_STOPPED, Attempt, RunFolder, atomic_write_text
from gspo_mega.base.versions import compare_records
from gspo_mega.checkpoint.memory_files import copies_removed
from gspo_mega.config import Config, LoadedConfig, render_config
from gspo_mega.launcher.alerts import AlertSender
from gspo_mega.launcher.attempt_state import StateKeeper, closing_line, describe_failure, one_line
from gspo_mega.launcher.children import Child, ChildSpec, ConsoleTail, ProcessFamily, collect_signals, log_to
from gspo_mega.launcher.lease import hold
from gspo_mega.launcher.prepare import free_port, new_attempt, versions_text
from gspo_mega.launcher.restarts import Decision, Restarts
from gspo_mega.launcher.slurm.scontrol import (
    Allocation,
    Answers,
    LostNodes,
    SlurmNode,
    could_start,
    free_trainer_nodes,
    job_runs,
    read_allocation,
    seconds_left,
)
from gspo_mega.launcher.slurm.size import JobSize, Site, job_size, node_options, with_signal_time, words_of
from gspo_mega.launcher.slurm.steps import AttemptSteps, Starts, StepServers, end_all, preflight
from gspo_mega.launcher.slurm.stop import SIGNALS, Stop
from gspo_mega.launcher.standby import Standbys, has_standbys
from gspo_mega.launcher.watchdog import RankWatchdog, ServerFailures, StacksOnSignal
from gspo_mega.plan import estimate, plan_run, refuse_what_does_not_fit, render_report
from gspo_mega.plan.fewer_nodes import fit_to_nodes, layout_name, nodes_to_grow, shrinks
from gspo_mega.plan.watchdog_bounds import Patience, patience
from gspo_mega.rollout.server.reward_server import reward_folder

logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.2
_SETTLE_SECONDS = 1.0
# Slurm is asked about the job's nodes and time at this interval.
_ASK_SECONDS = 15.0
# Slurm checks time limits twice a minute. If a signal is later than this, it was sent before the supervisor started.
_LATE_SECONDS = 60.0
_END_GRACE_SECONDS = 3.0
# Shortest interval between two starts of the watch over the batch node.
_WATCH_AGAIN_SECONDS = 5.0


def launch_slurm(loaded: LoadedConfig, command: Literal["train", "sft"], say: Callable[[str], None]) -> int:
    """Run `command` on the nodes of this Slurm job; returns the exit code.

    Call from the main thread of the batch script. Raises a GspoMegaError with its exit code: ConfigError, ModelError,
    PlanError before anything starts, RankError for a later failure.
    """
    site = (
        Site.read(os.environ)
        .with_server_python(loaded.config.server.python)
        .with_preflight_seconds(loaded.config.cluster.preflight_seconds)
    )
    device = "gpu" if site.gpus_per_node else "cpu"
    whole, missing, answers = loaded, 0, Answers(say)
    if shrinks(loaded.config):
        rollouts = job_size(whole, site, command).num_rollout_nodes
        nodes = answers.demand(lambda: free_trainer_nodes(os.environ, rollouts))
        loaded, missing = fit_to_nodes(whole, nodes, device), nodes_to_grow(whole, nodes, device)
    size = job_size(loaded, site, command)
    plan = plan_run(loaded, device)
    figures = estimate(plan, loaded.where)
    refuse_what_does_not_fit(plan, figures, loaded.where)
    report, site = render_report(plan, figures), with_signal_time(site, figures)
    if loaded is not whole:
        wanted, used = whole.config.cluster.num_nodes, loaded.config.cluster.num_nodes
        say(f"warning  {used} of {wanted} trainer nodes (train.on_lost_node: shrink): {layout_name(plan.layout)}")
    allocation = answers.demand(lambda: read_allocation(os.environ, size.num_trainer_nodes, size.num_rollout_nodes))
    network.set_no_proxy(name for node in allocation.nodes for name in (node.name, node.address))
    _check_time(allocation.job_id, site, answers)
    say(report)
    folder = RunFolder(Path(loaded.config.run.dir) / loaded.config.run.name)
    with hold(folder, say) as lease, copies_removed(folder.path):
        context = JobContext(
            allocation,
            site.signal_seconds,
            say,
            answers,
            site.preflight_seconds,
            patience(loaded.config, figures),
            check_lease=lease.raise_if_lost,
            by_nccl=bool(site.gpus_per_node) and loaded.config.publish.method == "distributed",
            more_nodes=(
                ()
                if missing == 0
                else (*words_of(os.environ, "GSPO_SBATCH"), *node_options(site, missing, size.ranks_per_node))
            ),
            has_standbys=has_standbys(loaded.config, command),
        )
        with (
            collect_signals(SIGNALS, context.signals),
            collect_signals([signal.SIGUSR2], context.stack_signals),
            context.standbys,
        ):
            return _Attempts(loaded, command, size, site, context, folder, report, whole).run()


def _check_time(job_id: str, site: Site, answers: Answers) -> None:
    """Raises PlanError if the job would have to stop at once. (`Stop` finds out whether its time suffices for a
    step.)
    """
    left = answers.demand(lambda: seconds_left(job_id))
    if left is not None and left <= site.signal_seconds:
        raise PlanError(
            f"job {job_id} has {left:.0f} s left but must stop {site.signal_seconds} s before its time limit"
            " (GSPO_SIGNAL_SECONDS), so it would never finish a step. Raise --time of GSPO_SBATCH in"
            " launch/slurm/site.sh"
        )


class _Attempts:
    """The attempts of one start of the job: the first one, and after failures further ones on the same nodes."""

    def __init__(
        self,
        loaded: LoadedConfig,
        command: Literal["train", "sft"],
        size: JobSize,
        site: Site,
        context: JobContext,
        folder: RunFolder,
        report: str,
        whole: LoadedConfig,
    ) -> None:
        """`loaded`: the configuration on the nodes of this job. `whole`: the one that the user gave, with all nodes."""
        self._loaded, self._command, self._size, self._site = loaded, command, size, site
        self._whole = whole
        self._context, self._folder, self._report = context, folder, report
        begin = Restarts.carry_on if context.allocation.num_restarts else Restarts.begin
        allowed = Restarts.allowed(command, loaded.config.train)
        self._restarts = begin(folder, allowed, loaded.config.checkpoint.peer_copies > 0)
        self._decision: Decision | None = None  # on the failure of the current attempt

    def run(self) -> int:
        """The exit code of the last attempt. Raises its RankError."""
        is_first = True
        while True:
            attempt = new_attempt(self._folder, self._whole, self._command, self._context.say)
            alerts = AlertSender(self._loaded.config, attempt, self._context.say)
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
        steps = AttemptSteps(allocation, self._size, site, attempt, server.tensor // server.num_nodes)
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
            # Doctors run only before the first attempt: a failed rank changes nothing that they check.
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
                    self._decision = self._restarts.decide_and_record(attempt, error)
                raise


def _in_job(config: Config, address: str, servers: Sequence[int]) -> Config:
    """The configuration for the attempt's ranks and servers, with as many servers as the remaining nodes hold.

    `server.host` becomes rank 0's own `address`, from which rank 0 finds the address that servers can reach. Each
    server gets the address of its own node when it starts.
    """
    server, cluster = config.server, config.cluster
    if servers and len(servers) < server.num_servers:
        server = server.model_copy(update={"num_servers": len(servers)})
        cluster = cluster.model_copy(
            update={"num_rollout_nodes": min(cluster.num_rollout_nodes, len(servers) * server.num_nodes)}
        )
    return config.model_copy(update={"server": server.model_copy(update={"host": address}), "cluster": cluster})


def describe_nodes(allocation: Allocation, size: JobSize) -> str:
    trainers, rollouts = (
        [node.name for node in nodes] for nodes in (allocation.trainer_nodes, allocation.rollout_nodes)
    )
    if size.num_servers == 0:
        return f"ranks on {' '.join(trainers)}, no servers: the run trains on recorded rollouts"
    if trainers == rollouts:
        return f"ranks and servers on {' '.join(trainers)}"
    return f"ranks on {' '.join(trainers)}, servers on {' '.join(rollouts)}"


class AttemptError(RankError):
    """An attempt's ranks or servers failed, and no lost node is the reason. The text is one line, the first error."""


@dataclass
class JobContext:
    """What outlives an attempt: the nodes and which of them are lost, Slurm's silence, signals not yet handled.

    `signal_seconds`: time from USR1 to the limit. `say` shows a line in the job's log. `preflight_seconds`: time limit
    of a doctor. `patience`: how long ranks may be stuck; None disables the watchdog. `check_lease` raises FolderError
    once another supervisor has the run folder. `by_nccl`: ranks publish to the servers through NCCL. `more_nodes`:
    options of sbatch for the nodes with which a run that has shrunk would go on on more of them; empty if it has not.
    `has_standbys`: the step of the ranks gets a standby (`train.standby_processes`). Close `standbys` at the end.
    """

    allocation: Allocation
    signal_seconds: float
    say: Callable[[str], None]
    answers: Answers
    preflight_seconds: float
    patience: Patience | None = None
    check_lease: Callable[[], None] = lambda: None
    by_nccl: bool = False
    more_nodes: tuple[str, ...] = ()
    signals: list[int] = field(default_factory=list)
    stack_signals: list[int] = field(default_factory=list)
    has_standbys: bool = False
    nodes: LostNodes = field(init=False)
    standbys: Standbys = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = LostNodes(self.allocation, self.say)
        self.standbys = Standbys(self.say)


class SlurmJob:
    """Runs and watches the steps of one attempt."""

    def __init__(
        self, attempt: Attempt, context: JobContext, steps: AttemptSteps, state: StateKeeper, seconds_left: float | None
    ) -> None:
        """`seconds_left`: seconds until the job's time limit, None without a limit."""
        self._attempt, self._steps, self._state, self._say = attempt, steps, state, context.say
        self._allocation, self._answers, self._nodes = context.allocation, context.answers, context.nodes
        self._signal_seconds, self._preflight_seconds = context.signal_seconds, context.preflight_seconds
        self.stop = Stop(
            attempt,
            self._allocation.job_id,
            state,
            self._answers,
            context.signals,
            self._say,
            self._signal_seconds,
            seconds_left,
        )
        self._check_lease, self._by_nccl = context.check_lease, context.by_nccl
        self._standbys, self._has_standbys = context.standbys, context.has_standbys
        self._watch_standbys: Callable[[], None] = lambda: None
        self._console = ConsoleTail(attempt.console_log, self._say)
        self._watchdog = None if context.patience is None else RankWatchdog(attempt, steps.num_ranks, context.patience)
        self._stacks = StacksOnSignal(attempt, steps.num_ranks, context.stack_signals, context.say)
        self._failures: ServerFailures | None = None
        self._watch: Child | None = None
        self._next_watch = 0.0
        self._next_question = time.monotonic() + _ASK_SECONDS
        self._more_nodes, self._nodes_were_free = context.more_nodes, False

    def run(
        self,
        command: str,
        servers: Sequence[int],
        master_port: int,
        doctors: Sequence[tuple[SlurmNode, ChildSpec]],
        rewards: Mapping[str, Sequence[int]] | None = None,
    ) -> int:
        """Start the steps, the doctors first, and watch until they are over. `servers`: indices of the servers to
        start; `rewards`: those of each reward model.

        Returns 0, or 75 after a stop; for a requeued job it returns once Slurm ends the job. Raises AttemptError for a
        failure, or RankError for one that another attempt would not mend, each with a text of one line. Call from the
        main thread.
        """
        if self.stop.handle_signals():
            return self._ended_by_slurm()
        family = ProcessFamily()
        starts = Starts(family, self._attempt, self._say)
        fleets: list[StepServers] = []
        try:
            if doctors:
                preflight(
                    starts,
                    self._answers,
                    self._allocation.job_id,
                    doctors,
                    self._preflight_seconds,
                    self._say,
                    lambda: compare_records(self._attempt.software_dir, self._by_nccl),
                )
            fleets.append(StepServers(self._attempt, self._steps, self._nodes, starts, self._say, servers))
            own = self._steps.reward_servers()
            for name, indices in (rewards or {}).items():
                folder, of = reward_folder(self._attempt, name), f" of reward model {name}"
                fleets.append(StepServers(folder, own[name], self._nodes, starts, self._say, indices, of))
                if not indices:
                    self.stop.request(f"all servers{of} are lost", again=True)
            scorers = [(reward_folder(self._attempt, name), f" of reward model {name}") for name in rewards or {}]
            self._failures = ServerFailures([(self._attempt, ""), *scorers], self._say)
            spec = self._steps.ranks(command, master_port, self._has_standbys)
            (ranks,) = self._standbys.start(family, self._attempt, [spec])
            self._watch_standbys = lambda: self._standbys.watch(family, self._attempt, [spec])
            for child in (*(child for fleet in fleets for child in fleet.children), ranks):
                logger.info("%s: %s", child.name, " ".join(child.spec.command))
            code = self._until_over(ranks, fleets, starts)
        finally:
            end_all(fleets)
            family.close(_END_GRACE_SECONDS)
            self._console.pump()
        if self.stop.queues_again and self.stop.still_runs():
            return self.stop.queue_again()
        self._state.tell("finished" if code == 0 else "stopped")
        if code != 0 and self._attempt.result_file.exists():
            self._say(closing_line(self._attempt))
        return code

    def _until_over(self, ranks: Child, fleets: Sequence[StepServers], starts: Starts) -> int:
        while True:
            self._console.pump()
            if self._failures is not None:
                self._failures.show_new()
            self._check_lease()
            self._watch_standbys()
            self._stacks.poll()
            self._keep_batch_node_watched(starts)
            if self.stop.handle_signals():
                return self._ended_by_slurm()
            if any(fleet.ended for fleet in fleets):
                time.sleep(_SETTLE_SECONDS)
                with self._answers.or_later():
                    if not job_runs(self._allocation.job_id):
                        return self._ended_by_slurm()
                    for fleet in fleets:
                        if fleet.ended:
                            self._drop_ended(fleet)
            if ranks.exit_code is not None:
                with self._answers.or_later():
                    if (code := self._ranks_over(ranks)) is not None:
                        return code
                    if (again := starts.restart(ranks)) is None:
                        self._fail([ranks, *(child for fleet in fleets for child in fleet.ended)])
                    else:
                        ranks = again
            if self.check_nodes() or self._are_stuck():
                return EXIT_STOPPED
            if self.stop.is_over:
                self._say("The ranks did not stop in time; the steps since the last checkpoint are lost.")
                return EXIT_STOPPED
            time.sleep(_POLL_SECONDS)

    def check_nodes(self) -> bool:
        """Ask Slurm, at intervals, about lost nodes and the time limit. Returns whether Slurm gave up a trainer node:
        the remaining ranks may wait for it in a collective for half an hour. Raises NoAnswerError once Slurm has been
        silent for too long.
        """
        if time.monotonic() < self._next_question:
            return False
        self._next_question = time.monotonic() + _ASK_SECONDS
        with self._answers.or_later():
            return self._has_lost_trainers()
        return False

    def _has_lost_trainers(self) -> bool:
        if not job_runs(self._allocation.job_id):
            return False
        left = seconds_left(self._allocation.job_id)
        if left is not None and left < self._signal_seconds - min(_LATE_SECONDS, self._signal_seconds / 2):
            self.stop.request(f"{left:.0f} s are left and no signal arrived", again=True)
        lost = self._nodes.lost_trainers()
        if lost:
            self.stop.blame(lost)
        elif self._more_nodes and self.stop.has_new_checkpoint:
            self._grow()
        return bool(lost)

    def _grow(self) -> None:
        """Stop the run after its step, to be queued again with more nodes, once enough have been free twice in a
        row.
        """
        if not could_start(self._more_nodes, os.environ):
            self._nodes_were_free = False
        elif not self._nodes_were_free:
            self._nodes_were_free = True
        else:
            self.stop.request("nodes are free again, and the run has fewer than it asks for", again=True)

    # --- ends ----------------------------------------------------------------------------------------------

    def _ranks_over(self, ranks: Child) -> int | None:
        """The exit code if the ranks ended without a failure of their own; None if they failed or never began."""
        if ranks.exit_code == 0:
            self.stop.cancel_requeue()  # the run finished before it could be stopped
            return 0
        if ranks.exit_code == EXIT_STOPPED:
            return EXIT_STOPPED
        time.sleep(_SETTLE_SECONDS)
        if not job_runs(self._allocation.job_id):
            return self._ended_by_slurm()
        if lost := self._nodes.explain_failure():
            self.stop.blame(lost)
            return EXIT_STOPPED
        return EXIT_STOPPED if self.stop.queues_again else None

    def _are_stuck(self) -> bool:
        """Whether ranks are stuck for a reason that requeues the job: a stop, or a lost node that Slurm had not noticed
        yet. Raises AttemptError if they are stuck for any other reason.
        """
        error = self._watchdog.check() if self._watchdog is not None else None
        if error is not None:
            with self._answers.or_later():
                if lost := self._nodes.explain_failure():
                    self.stop.blame(lost)
                elif not self.stop.queues_again:
                    self._fail_with(StuckError(f"{error}\n\n{self._stacks.request_and_wait()}"))
                return True
        return False

    def _ended_by_slurm(self) -> int:
        self.stop.cancel_requeue()
        self._say("Slurm ends this job.")
        return EXIT_STOPPED

    def _drop_ended(self, fleet: StepServers) -> None:
        fleet.drop_ended()
        if len(fleet) == 0 and not fleet.has_left:
            if fleet.gave_up is not None and not self.stop.is_asked_for:
                self._fail([fleet.gave_up])
            self.stop.request(f"all servers{fleet.of} are lost", again=True)

    def _fail(self, failed: list[Child]) -> NoReturn:
        """Raise the attempt's error. The job's log gets its full text, and ends with its first line."""
        self._console.pump()
        self._fail_with(describe_failure(failed, self._attempt))

    def _fail_with(self, error: RankError) -> NoReturn:
        self._say(str(error))
        summary = AttemptError(f"error: {one_line(error)} (logs: {self._attempt.logs_dir})")
        summary.exit_code = error.exit_code
        raise summary from error

    # --- the batch node ------------------------------------------------------------------------------------

    def _keep_batch_node_watched(self, starts: Starts) -> None:
        """Keep a step running on another node that watches this node. If that node is lost, choose the next one."""
        if (self._watch is not None and self._watch.exit_code is None) or time.monotonic() < self._next_watch:
            return
        self._next_watch = time.monotonic() + _WATCH_AGAIN_SECONDS
        if self._watch is not None:
            with self._answers.or_later():
                self._nodes.update()
            if self._answers.are_missing:
                return
        here = self._allocation.trainer_nodes[0]
        others = [node for node in reversed(self._allocation.nodes) if node != here and node not in self._nodes.known]
        if others:
            self._watch = starts.start(self._steps.watch(others[0]))
