"""Whether an attempt is to end, until when, and whether its job is queued again after it.

Owns what a signal means and the first reason that counts: what asked first for the end decides whether the job is
queued again, and nothing that comes later changes that. Starts and ends no step.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from gspo_mega.errors import RankError
from gspo_mega.launcher.attempt_state import StateKeeper, read_state
from gspo_mega.launcher.slurm.controller_outage import Answers
from gspo_mega.launcher.slurm.scontrol import Node, job_runs, requeue
from gspo_mega.plan.stop_deadlines import grace_seconds
from gspo_mega.run_folder import EXIT_STOPPED, Attempt

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_POLL_SECONDS = 0.2
# A signal that says the end may be a cancellation, which Slurm's controller knows of. It is asked so often at once.
_ENDED_QUESTIONS = 3
_ENDED_PAUSE_SECONDS = 1.0
_REQUEUE_SECONDS = 120.0
# Slurm may send the signal of the time limit so much too early. Still earlier it is sent by hand, or for preemption.
_EARLY_SECONDS = 60.0


class Stop:
    """The end of one attempt of job `job_id`. `signals`: filled as they come, by `signals_taken`. `signal_seconds`:
    from USR1 to the time limit; `seconds_left`: to the limit, None without one. `is_over`: the ranks had their time.
    """

    def __init__(
        self,
        attempt: Attempt,
        job_id: str,
        state: StateKeeper,
        answers: Answers,
        signals: list[int],
        say: Callable[[str], None],
        signal_seconds: float,
        seconds_left: float | None,
    ) -> None:
        self._attempt, self._job_id, self._state, self._answers, self._signals, self._say = (
            attempt,
            job_id,
            state,
            answers,
            signals,
            say,
        )
        self._signal_seconds = signal_seconds
        self._grace_seconds = grace_seconds(signal_seconds)
        self._seconds = None if seconds_left is None else seconds_left - signal_seconds
        self._began, self._began_with = time.monotonic(), self._latest_checkpoint()
        self._deadline: float | None = None
        self._time_is_up = False
        self._again_because: str | None = None

    @property
    def is_asked_for(self) -> bool:
        """Whether somebody, or something, asked for the end: a signal, a stop file, Slurm."""
        return self._deadline is not None or self._attempt.stop_reason() is not None

    @property
    def is_over(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    @property
    def queues_again(self) -> bool:
        return self._again_because is not None

    def ask(self, reason: str, again: bool) -> None:
        """Ask the ranks to end; `again`: have the job queued again after it. The first one counts."""
        if self._deadline is None:
            # A stop file that is there before ours was made by hand, or by the run.
            self._again_because = reason if again and self._attempt.stop_reason() is None else None
            self._attempt.request_stop(reason)
            self._deadline = time.monotonic() + self._grace_seconds
            self._time_is_up = (
                self._seconds is not None and time.monotonic() - self._began > self._seconds - _EARLY_SECONDS
            )
            self._state.tell("stopping", note=reason)
            self._say(f"{reason}: stopping after a checkpoint, within {self._grace_seconds:.0f} s")

    def blame(self, lost: Sequence[Node]) -> None:
        """The ranks ended for the loss of nodes: the job is queued again, unless the run was to end."""
        reason = f"lost node {', '.join(node.name for node in lost)}"
        if self.is_asked_for:
            self._say(f"{reason} before the ranks had stopped; the steps since the last checkpoint are lost.")
        else:
            self._again_because = reason

    def forget(self) -> None:
        """The job is not queued again: the run is done, or Slurm ends it."""
        self._again_because = None

    def hear(self) -> bool:
        """Make a stop of the signals that came. Returns whether they came with the job's end, which leaves no time for
        one.
        """
        while self._signals:
            number = self._signals.pop(0)
            name = signal.Signals(number).name
            if number == signal.SIGUSR1:
                self.ask(f"{name}: the time limit is near", again=True)
            elif self._is_ended():
                return True
            else:
                self.ask(name, again=False)
        return False

    def _is_ended(self) -> bool:
        for _ in range(_ENDED_QUESTIONS):
            with self._answers.or_later():
                return not job_runs(self._job_id)
            time.sleep(_ENDED_PAUSE_SECONDS)
        return False

    # --- queued again --------------------------------------------------------------------------------------

    def still_runs(self) -> bool:
        """Whether the job may be queued again: it was not cancelled meanwhile."""
        # A cancellation whose signal came before the question is in the answer; one that comes after it is heard here.
        self._signals.clear()
        runs = self._answers.insist(lambda: job_runs(self._job_id), unless=self._is_terminated)
        return bool(runs) and not self._is_terminated()

    def queue_again(self) -> int:
        """Returns when Slurm ends this process. Raises RankError where that would lead nowhere."""
        without_progress = self._time_is_up and self._latest_checkpoint() == self._began_with
        if without_progress and self._last_was_without_progress():
            raise RankError(
                f"error: for the second time in a row job {self._job_id} came to its time limit without a new"
                f" checkpoint, {self._seconds:.0f} s after its start, and is not queued again: they are too few for a"
                " start and a step; give it more (--time in GSPO_SBATCH), or, where the ranks did not stop in time,"
                f" more for that (GSPO_SIGNAL_SECONDS, {self._signal_seconds:.0f}); both in launch/slurm/site.sh"
            )
        self._state.tell("requeued", note=self._again_because, without_progress=without_progress)
        self._say(f"queued again: {self._again_because}")
        self._answers.insist(lambda: requeue(self._job_id), unless=self._is_terminated)
        deadline = time.monotonic() + _REQUEUE_SECONDS
        while time.monotonic() < deadline:
            if self._is_terminated():
                return EXIT_STOPPED
            time.sleep(_POLL_SECONDS)
        raise RankError(
            f"Slurm took the requeue of job {self._job_id} and did not end it within {_REQUEUE_SECONDS:.0f} s"
        )

    def _is_terminated(self) -> bool:
        return signal.SIGTERM in self._signals

    def _latest_checkpoint(self) -> str | None:
        try:
            return self._attempt.run_folder.latest_checkpoint_file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def _last_was_without_progress(self) -> bool:
        """Of this very job: it came back to the same limit."""
        before = self._attempt.run_folder.attempt(self._attempt.number - 1) if self._attempt.number > 1 else None
        state = None if before is None else read_state(before)
        return state is not None and state.without_progress and state.slurm_job == self._job_id
