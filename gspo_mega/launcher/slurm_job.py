"""The supervisor of a Slurm job: runs as its batch script on the first trainer node and watches the job's steps.

Owns what a signal, an ended step and a lost node mean. What the steps are is `slurm_steps.py`'s, what Slurm is asked
`slurm.py`'s.

    USR1 (time limit; preemption: see site.sh)     the step is finished or given up, checkpoint, queued again
    TERM, INT, HUP, a stop file                    the same, and not queued again
    a trainer node lost, or all servers' nodes     queued again, from the last checkpoint
    some of the servers' nodes lost                the run goes on with the others
    a rank or a server failed                      the run failed: the first error is the last line

What asked first for the end decides whether the job is queued again: nothing that comes later changes that.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from gspo_mega.errors import RankError
from gspo_mega.launcher.children import Child, ChildSpec, Family
from gspo_mega.launcher.failure import describe_failure
from gspo_mega.launcher.slurm import (
    Allocation,
    NoAnswerError,
    Node,
    job_runs,
    lost_nodes,
    requeue,
    seconds_left,
    silent_nodes,
    slurmd_timeout_seconds,
)
from gspo_mega.launcher.slurm_preflight import preflight
from gspo_mega.launcher.slurm_steps import Steps
from gspo_mega.launcher.state import StateKeeper, read_state
from gspo_mega.launcher.supervisor import ConsoleTail, signals_taken
from gspo_mega.rollout.registration import read_registrations
from gspo_mega.run_folder import EXIT_STOPPED, Attempt

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_POLL_SECONDS = 0.2
_SETTLE_SECONDS = 1.0
# Slurm is asked for the job's nodes and time so often.
_LOOK_SECONDS = 15.0
# So long a run goes on without an answer: steps do not need Slurm's controller, which may be restarted or moved.
_NO_ANSWER_SECONDS = 600.0
_ASK_AGAIN_SECONDS = 5.0
# Slurm looks at time limits twice a minute. A signal that is later than this was sent before there was a supervisor to hear it.
_LATE_SECONDS = 60.0
# A server ends its own group within 2 s of being told.
_SERVERS_GRACE_SECONDS = 5.0
_END_GRACE_SECONDS = 3.0
# Kept of the time that Slurm leaves after USR1, to queue the job again whatever the ranks do.
_RESERVE_SECONDS = 20.0
_REQUEUE_SECONDS = 120.0
# Slurm may send the signal of the time limit so much too early. Still earlier it is sent by hand, or for preemption.
_EARLY_SECONDS = 60.0


class SlurmJob:
    """One attempt's steps. `say` shows a line in the job's log; `signal_seconds`: time from USR1 to the limit; `seconds_left`: to the
    limit, None without one."""

    def __init__(
        self, attempt: Attempt, allocation: Allocation, steps: Steps, state: StateKeeper, say: Callable[[str], None], signal_seconds: float,
        seconds_left: float | None,
    ) -> None:  # fmt: skip
        self._attempt, self._allocation, self._steps, self._state, self._say = attempt, allocation, steps, state, say
        self._signal_seconds = signal_seconds
        self._grace_seconds = max(signal_seconds - _RESERVE_SECONDS, signal_seconds / 2)
        self._seconds = None if seconds_left is None else seconds_left - signal_seconds
        self._began, self._began_with = time.monotonic(), self._latest_checkpoint()
        self._console = ConsoleTail(attempt.console_log, say)
        self._signals: list[int] = []
        self._stop_deadline: float | None = None
        self._time_is_up = False
        self._requeue_because: str | None = None
        self._lost: set[Node] = set()
        self._servers: dict[int, Child] = {}
        self._watch: Child | None = None
        self._no_answer_since: float | None = None
        self._look_again = time.monotonic() + _LOOK_SECONDS

    def run(self, command: str, num_servers: int, master_port: int, doctors: Sequence[tuple[Node, ChildSpec]]) -> int:
        """Start the steps, the doctors' first, and stay until they are over. Returns 0, or 75 when stopped; when the job is queued again, as
        soon as Slurm ends it. Raises RankError whose text is one line; call from the main thread."""
        with signals_taken(_SIGNALS, self._signals):
            family = Family()
            try:
                if doctors:
                    preflight(family, doctors, self._say)
                self._servers = {index: family.start(self._steps.server(index)) for index in range(num_servers)}
                ranks = family.start(self._steps.ranks(command, master_port))
                for child in (*self._servers.values(), ranks):
                    logger.info("%s: %s", child.name, " ".join(child.spec.command))
                code = self._until_over(ranks, family)
            finally:
                self._end_servers()
                family.close(_END_GRACE_SECONDS)
                self._console.pump()
            if self._requeue_because is not None and self._still_runs():
                return self._queue_again()
            self._state.tell("finished" if code == 0 else "stopped")
            return code

    def _until_over(self, ranks: Child, family: Family) -> int:
        while True:
            self._console.pump()
            self._keep_watch(family)
            if self._hear():
                return self._ended_by_slurm()
            if self._ended_servers():
                time.sleep(_SETTLE_SECONDS)
                with self._answer_or_later():
                    if not job_runs(self._allocation.job_id):
                        return self._ended_by_slurm()
                    self._drop_lost_servers()
            if ranks.exit_code is not None:
                with self._answer_or_later():
                    return self._ranks_over(ranks)
            if self.look():
                return EXIT_STOPPED
            if self._stop_deadline is not None and time.monotonic() > self._stop_deadline:
                self._say("The ranks did not stop in time; the steps since the last checkpoint are lost.")
                return EXIT_STOPPED
            time.sleep(_POLL_SECONDS)

    def look(self) -> bool:
        """Ask Slurm every so often. Returns whether it gave a trainer node up: the ranks that are left may wait for that in a collective,
        for half an hour. Raises NoAnswerError once Slurm has been silent for long."""
        if time.monotonic() < self._look_again:
            return False
        self._look_again = time.monotonic() + _LOOK_SECONDS
        with self._answer_or_later():
            return self._look()
        return False

    def _look(self) -> bool:
        if not job_runs(self._allocation.job_id):
            return False
        left = seconds_left(self._allocation.job_id)
        if left is not None and left < self._signal_seconds - min(_LATE_SECONDS, self._signal_seconds / 2):
            self._stop(f"{left:.0f} s are left, and no signal came", again=True)
        lost = lost_nodes(self._allocation.job_id, self._allocation.trainer_nodes)
        if lost:
            self._blame(lost)
        return bool(lost)

    @contextmanager
    def _answer_or_later(self) -> Iterator[None]:
        """Around questions to Slurm that are asked again later: without an answer the block is left, with one warning for all of them.
        Raises NoAnswerError when Slurm has not answered for `_NO_ANSWER_SECONDS`."""
        try:
            yield
        except NoAnswerError as error:
            now = time.monotonic()
            if self._no_answer_since is None:
                self._no_answer_since = now
                self._say(f"warning  Slurm does not answer; the run goes on for {_NO_ANSWER_SECONDS / 60:.0f} min without ({error})")
            elif now - self._no_answer_since > _NO_ANSWER_SECONDS:
                raise
        else:
            if self._no_answer_since is not None:
                self._no_answer_since = None
                self._say("Slurm answers again.")

    def _insist(self, question: Callable[[], _T]) -> _T:
        while True:
            with self._answer_or_later():
                return question()
            time.sleep(_ASK_AGAIN_SECONDS)

    # --- ends ----------------------------------------------------------------------------------------------

    def _ranks_over(self, ranks: Child) -> int:
        if ranks.exit_code == 0:
            self._requeue_because = None  # done before it could be stopped
            return 0
        if ranks.exit_code == EXIT_STOPPED:
            return EXIT_STOPPED
        time.sleep(_SETTLE_SECONDS)
        if not job_runs(self._allocation.job_id):
            return self._ended_by_slurm()
        if not self._because_of_nodes(self._allocation.nodes) and self._requeue_because is None:
            self._fail([ranks, *self._ended_servers()])
        return EXIT_STOPPED

    def _ended_by_slurm(self) -> int:
        self._requeue_because = None
        self._say("Slurm ends this job.")
        return EXIT_STOPPED

    def _drop_lost_servers(self) -> None:
        ended = self._ended_servers()
        self._lost |= set(lost_nodes(self._allocation.job_id, self._allocation.nodes))
        for child in ended:
            index = child.spec.index
            node = self._steps.server_node(index)
            if node not in self._lost:
                # Whatever its code: `serve` restarts its server as often as the configuration allows.
                self._fail([child])
            del self._servers[index]
            self._withdraw(index, node)
            self._say(f"warning  node {node.name} is lost, and server-{index} with it; {len(self._servers)} servers are left")
        if not self._servers:
            self._stop("all servers are lost", again=True)

    def _withdraw(self, index: int, node: Node) -> None:
        """Its one writer is gone with the node: say in its place that the server is no more."""
        for registration in read_registrations(self._attempt.servers_dir):
            if registration.server_id == f"server-{index}":
                replace(registration, state="stopped", error=f"node {node.name} is lost").write(self._attempt.servers_dir)

    def _because_of_nodes(self, nodes: Sequence[Node]) -> bool:
        """Whether ranks failed for the loss of one of `nodes`, which they do before Slurm knows of it."""
        lost = lost_nodes(self._allocation.job_id, nodes)
        if not lost and (silent := silent_nodes([node for node in nodes if node not in self._lost])):
            names = ", ".join(node.name for node in silent)
            self._say(f"warning  {names} does not answer; waiting for Slurm's word")
            deadline = time.monotonic() + slurmd_timeout_seconds() + 30
            while not (lost := lost_nodes(self._allocation.job_id, silent)) and time.monotonic() < deadline:
                time.sleep(1.0)
            lost = lost or silent
        # Of those that were known as lost already the run did without, but for ranks' nodes.
        if not (set(lost) - self._lost or set(lost) & set(self._allocation.trainer_nodes)):
            return False
        self._blame(lost)
        return True

    def _blame(self, lost: Sequence[Node]) -> None:
        """End for the loss of nodes: the job is queued again, unless the run was to end."""
        reason = f"lost node {', '.join(node.name for node in lost)}"
        if self._stop_deadline is not None or self._attempt.stop_reason() is not None:
            self._say(f"{reason} before the ranks had stopped; the steps since the last checkpoint are lost.")
        else:
            self._requeue_because = reason

    def _ended_servers(self) -> list[Child]:
        return [child for child in self._servers.values() if child.exit_code is not None]

    def _fail(self, failed: list[Child]) -> None:
        """Raise the run's error: all of it in the log, and its first line once more, as the last line of all."""
        self._console.pump()
        error = describe_failure(failed, self._attempt)
        lines = str(error).splitlines()
        self._say(str(error))
        # Of a traceback the end says what happened, where the beginning says which rank.
        what = [line for line in lines if line.strip() and not line.startswith(("(", " "))][-1] if "Traceback" in str(error) else ""
        summary = RankError(f"error: {lines[0].rstrip(':')}{': ' * bool(what)}{what} (logs: {self._attempt.logs_dir})")
        summary.exit_code = error.exit_code
        raise summary

    # --- stops ---------------------------------------------------------------------------------------------

    def _hear(self) -> bool:
        """Make a stop of the signals that came. Returns whether they came with the job's end, which leaves no time for one."""
        while self._signals:
            number = self._signals.pop(0)
            name = signal.Signals(number).name
            if number == signal.SIGUSR1:
                self._stop(f"{name}: the time limit is near", again=True)
            elif self._is_ended():
                return True
            else:
                self._stop(name, again=False)
        return False

    def _is_ended(self) -> bool:
        with self._answer_or_later():
            return not job_runs(self._allocation.job_id)
        return False

    def _stop(self, reason: str, again: bool) -> None:
        if self._stop_deadline is None:
            # A stop file that is there before ours was made by hand, or by the run.
            self._requeue_because = reason if again and self._attempt.stop_reason() is None else None
            self._attempt.request_stop(reason)
            self._stop_deadline = time.monotonic() + self._grace_seconds
            self._time_is_up = self._seconds is not None and time.monotonic() - self._began > self._seconds - _EARLY_SECONDS
            self._state.tell("stopping", note=reason)
            self._say(f"{reason}: stopping after a checkpoint, within {self._grace_seconds:.0f} s")

    def _still_runs(self) -> bool:
        # A cancellation whose signal came before the question is in the answer; one that comes after it is heard here.
        self._signals.clear()
        return self._insist(lambda: job_runs(self._allocation.job_id)) and signal.SIGTERM not in self._signals

    def _queue_again(self) -> int:
        """Returns when Slurm ends this process."""
        without_progress = self._time_is_up and self._latest_checkpoint() == self._began_with
        if without_progress and self._last_was_without_progress():
            raise RankError(
                f"error: for the second time in a row job {self._allocation.job_id} came to its time limit without a new checkpoint, {self._seconds:.0f} s after"
                f" its start, and is not queued again: they are too few for a start and a step; give it more (--time in GSPO_SBATCH), or, where the ranks"
                f" did not stop in time, more for that (GSPO_SIGNAL_SECONDS, {self._signal_seconds:.0f}); both in launch/slurm/site.sh"
            )
        self._state.tell("requeued", note=self._requeue_because, without_progress=without_progress)
        self._say(f"queued again: {self._requeue_because}")
        self._insist(lambda: requeue(self._allocation.job_id))
        deadline = time.monotonic() + _REQUEUE_SECONDS
        while time.monotonic() < deadline:
            if signal.SIGTERM in self._signals:
                return EXIT_STOPPED
            time.sleep(_POLL_SECONDS)
        raise RankError(f"Slurm took the requeue of job {self._allocation.job_id} and did not end it within {_REQUEUE_SECONDS:.0f} s")

    def _latest_checkpoint(self) -> str | None:
        try:
            return self._attempt.run_folder.latest_checkpoint_file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def _last_was_without_progress(self) -> bool:
        """Of this very job: it came back to the same limit."""
        before = self._attempt.run_folder.attempt(self._attempt.number - 1) if self._attempt.number > 1 else None
        state = None if before is None else read_state(before)
        return state is not None and state.without_progress and state.slurm_job == self._allocation.job_id

    def _end_servers(self) -> None:
        for child in self._servers.values():
            if child.exit_code is None:
                child.send_signal(signal.SIGUSR1)  # srun hands this one on
        deadline = time.monotonic() + _SERVERS_GRACE_SECONDS
        while time.monotonic() < deadline and any(child.exit_code is None for child in self._servers.values()):
            time.sleep(_POLL_SECONDS)

    # --- the batch node ------------------------------------------------------------------------------------

    def _keep_watch(self, family: Family) -> None:
        """Have a step on another node look after this one; on the next when that one is lost."""
        if self._watch is not None and self._watch.exit_code is None:
            return
        if self._watch is not None:
            with self._answer_or_later():
                self._lost |= set(lost_nodes(self._allocation.job_id, self._allocation.nodes))
            if self._no_answer_since is not None:
                return
        here = self._allocation.trainer_nodes[0]
        others = [node for node in reversed(self._allocation.nodes) if node != here and node not in self._lost]
        if others:
            self._watch = family.start(self._steps.watch(others[0]))
