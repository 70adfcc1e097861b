"""The supervisor of a Slurm job: runs in its batch script on the first trainer node and watches one attempt's steps.

Owns the reaction to ended steps and lost nodes. Signals are the business of `stop_request.py`, the set of servers of
`server_steps.py`, the steps of `step_commands.py`, the calls of Slurm of `scontrol.py`.

    USR1 (time limit; preemption: see site.sh)     the ranks save a checkpoint and end; the job is requeued
    TERM, INT, HUP, a stop file                    the same without a requeue
    USR2                                           all ranks write their stacks; nothing else changes
    a trainer node or all servers' nodes lost      the job is requeued and continues from the last checkpoint
    all servers' nodes of a reward model lost      the same
    some servers lost or given up                  the run continues with the others
    a rank or the last server fails or hangs       the attempt fails: its first error is the log's last line, and
                                                   `launch_job.py` may begin another attempt on the same nodes
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from gspo_mega.base.errors import RankError, StuckError
from gspo_mega.base.run_folder import EXIT_STOPPED, Attempt
from gspo_mega.base.two_pythons import compare_records
from gspo_mega.launcher.attempt_output import ConsoleTail
from gspo_mega.launcher.attempt_state import StateKeeper
from gspo_mega.launcher.children import Child, ChildSpec, Family
from gspo_mega.launcher.failure import describe_failure, one_line
from gspo_mega.launcher.server_failures import ServerFailures
from gspo_mega.launcher.slurm.controller_outage import Answers
from gspo_mega.launcher.slurm.lost_nodes import LostNodes
from gspo_mega.launcher.slurm.node_preflight import preflight
from gspo_mega.launcher.slurm.scontrol import Allocation, Node, job_runs, seconds_left
from gspo_mega.launcher.slurm.server_steps import Servers, end_all
from gspo_mega.launcher.slurm.step_commands import Steps
from gspo_mega.launcher.slurm.step_starts import Starts
from gspo_mega.launcher.slurm.stop_request import Stop
from gspo_mega.launcher.stack_request import StacksOnSignal
from gspo_mega.launcher.watchdog import Watchdog
from gspo_mega.plan.watchdog_bounds import Patience
from gspo_mega.rollout.server.reward_server import reward_folder

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_SETTLE_SECONDS = 1.0
# Interval of the questions to Slurm about the job's nodes and time.
_LOOK_SECONDS = 15.0
# Slurm checks time limits twice a minute. A signal that is later than this was sent before the supervisor started.
_LATE_SECONDS = 60.0
_END_GRACE_SECONDS = 3.0
# Shortest interval between two starts of the watch over the batch node.
_WATCH_AGAIN_SECONDS = 5.0


class AttemptError(RankError):
    """An attempt's ranks or servers failed, and no lost node is the reason. One line: the first error."""


@dataclass
class JobContext:
    """State that outlives an attempt: the nodes, which of them are lost, Slurm's silence, unprocessed signals.

    `signal_seconds`: time from USR1 to the limit. `say` shows a line in the job's log. `preflight_seconds`: time limit
    of a doctor. `patience`: how long ranks may be stuck; None disables the watchdog. `check_lease` raises FolderError
    once another supervisor has the run folder. `by_nccl`: ranks publish to the servers through NCCL.
    """

    allocation: Allocation
    signal_seconds: float
    say: Callable[[str], None]
    answers: Answers
    preflight_seconds: float
    patience: Patience | None = None
    check_lease: Callable[[], None] = lambda: None
    by_nccl: bool = False
    signals: list[int] = field(default_factory=list)
    stack_signals: list[int] = field(default_factory=list)
    nodes: LostNodes = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = LostNodes(self.allocation, self.say)


class SlurmJob:
    """One attempt's steps. `seconds_left`: until the job's time limit, None without one."""

    def __init__(
        self, attempt: Attempt, context: JobContext, steps: Steps, state: StateKeeper, seconds_left: float | None
    ) -> None:
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
        self._console = ConsoleTail(attempt.console_log, self._say)
        self._watchdog = None if context.patience is None else Watchdog(attempt, steps.num_ranks, context.patience)
        self._stacks = StacksOnSignal(attempt, steps.num_ranks, context.stack_signals, context.say)
        self._failures: ServerFailures | None = None
        self._watch: Child | None = None
        self._watch_again = 0.0
        self._look_again = time.monotonic() + _LOOK_SECONDS

    def run(
        self,
        command: str,
        servers: Sequence[int],
        master_port: int,
        doctors: Sequence[tuple[Node, ChildSpec]],
        rewards: Mapping[str, Sequence[int]] | None = None,
    ) -> int:
        """Start the steps, the doctors first, and watch until they are over. `servers`: indices of servers to start;
        `rewards`: those of each reward model.

        Returns 0, or 75 when stopped; for a requeued job, as soon as Slurm ends it. Raises AttemptError for a failure,
        RankError for one that another attempt would not mend, each with one line. Call from the main thread.
        """
        if self.stop.handle_signals():
            return self._ended_by_slurm()
        family = Family()
        starts = Starts(family, self._attempt, self._say)
        fleets: list[Servers] = []
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
            fleets.append(Servers(self._attempt, self._steps, self._nodes, starts, self._say, servers))
            own = self._steps.reward_servers()
            for name, indices in (rewards or {}).items():
                folder, of = reward_folder(self._attempt, name), f" of reward model {name}"
                fleets.append(Servers(folder, own[name], self._nodes, starts, self._say, indices, of))
                if not indices:
                    self.stop.ask(f"all servers{of} are lost", again=True)
            scorers = [(reward_folder(self._attempt, name), f" of reward model {name}") for name in rewards or {}]
            self._failures = ServerFailures([(self._attempt, ""), *scorers], self._say)
            ranks = starts.start(self._steps.ranks(command, master_port))
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
        return code

    def _until_over(self, ranks: Child, fleets: Sequence[Servers], starts: Starts) -> int:
        while True:
            self._console.pump()
            if self._failures is not None:
                self._failures.look()
            self._check_lease()
            self._stacks.look()
            self._keep_watch(starts)
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
                    if (again := starts.again(ranks)) is None:
                        self._fail([ranks, *(child for fleet in fleets for child in fleet.ended)])
                    else:
                        ranks = again
            if self.look_for_lost_nodes() or self._are_stuck():
                return EXIT_STOPPED
            if self.stop.is_over:
                self._say("The ranks did not stop in time; the steps since the last checkpoint are lost.")
                return EXIT_STOPPED
            time.sleep(_POLL_SECONDS)

    def look_for_lost_nodes(self) -> bool:
        """Ask Slurm at intervals. Returns whether it gave up a trainer node: the remaining ranks may wait for that node
        in a collective for half an hour. Raises NoAnswerError once Slurm has been silent for too long.
        """
        if time.monotonic() < self._look_again:
            return False
        self._look_again = time.monotonic() + _LOOK_SECONDS
        with self._answers.or_later():
            return self._look()
        return False

    def _look(self) -> bool:
        if not job_runs(self._allocation.job_id):
            return False
        left = seconds_left(self._allocation.job_id)
        if left is not None and left < self._signal_seconds - min(_LATE_SECONDS, self._signal_seconds / 2):
            self.stop.ask(f"{left:.0f} s are left and no signal arrived", again=True)
        lost = self._nodes.trainers()
        if lost:
            self.stop.blame(lost)
        return bool(lost)

    # --- ends ----------------------------------------------------------------------------------------------

    def _ranks_over(self, ranks: Child) -> int | None:
        """The exit code where the ranks' end is not their failure; None where it is, or where they never began."""
        if ranks.exit_code == 0:
            self.stop.cancel_requeue()  # finished before it could be stopped
            return 0
        if ranks.exit_code == EXIT_STOPPED:
            return EXIT_STOPPED
        time.sleep(_SETTLE_SECONDS)
        if not job_runs(self._allocation.job_id):
            return self._ended_by_slurm()
        if lost := self._nodes.behind_failure():
            self.stop.blame(lost)
            return EXIT_STOPPED
        return EXIT_STOPPED if self.stop.queues_again else None

    def _are_stuck(self) -> bool:
        """Whether ranks are stuck for a reason that requeues the job: a stop, or a lost node that Slurm has not noticed
        yet. Raises AttemptError for any other reason.
        """
        error = self._watchdog.look() if self._watchdog is not None else None
        if error is not None:
            with self._answers.or_later():
                if lost := self._nodes.behind_failure():
                    self.stop.blame(lost)
                elif not self.stop.queues_again:
                    self._fail_with(StuckError(f"{error}\n\n{self._stacks.now()}"))
                return True
        return False

    def _ended_by_slurm(self) -> int:
        self.stop.cancel_requeue()
        self._say("Slurm ends this job.")
        return EXIT_STOPPED

    def _drop_ended(self, fleet: Servers) -> None:
        fleet.drop_ended()
        if len(fleet) == 0 and not fleet.has_left:
            if fleet.gave_up is not None and not self.stop.is_asked_for:
                self._fail([fleet.gave_up])
            self.stop.ask(f"all servers{fleet.of} are lost", again=True)

    def _fail(self, failed: list[Child]) -> NoReturn:
        """Raise the attempt's error. The log gets its full text, and ends with its first line."""
        self._console.pump()
        self._fail_with(describe_failure(failed, self._attempt))

    def _fail_with(self, error: RankError) -> NoReturn:
        self._say(str(error))
        summary = AttemptError(f"error: {one_line(error)} (logs: {self._attempt.logs_dir})")
        summary.exit_code = error.exit_code
        raise summary from error

    # --- the batch node ------------------------------------------------------------------------------------

    def _keep_watch(self, starts: Starts) -> None:
        """Keep a step on another node that watches this one; choose the next node when that one is lost."""
        if (self._watch is not None and self._watch.exit_code is None) or time.monotonic() < self._watch_again:
            return
        self._watch_again = time.monotonic() + _WATCH_AGAIN_SECONDS
        if self._watch is not None:
            with self._answers.or_later():
                self._nodes.learn()
            if self._answers.are_missing:
                return
        here = self._allocation.trainer_nodes[0]
        others = [node for node in reversed(self._allocation.nodes) if node != here and node not in self._nodes.known]
        if others:
            self._watch = starts.start(self._steps.watch(others[0]))
