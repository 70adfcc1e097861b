"""The stop of an attempt in a Slurm job: its reason, its deadline, and whether the job is requeued after it.

`Stop` decides what a signal means. The first stop request decides whether the job is requeued; later requests do not
change that. This module starts and ends no step.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from gspo_mega.base.errors import RankError
from gspo_mega.base.run_folder import EXIT_STOPPED, Attempt
from gspo_mega.base.untrusted import read_text
from gspo_mega.launcher.attempt_state import StateKeeper, read_state
from gspo_mega.launcher.slurm.scontrol import Answers, SlurmNode, job_runs, requeue
from gspo_mega.plan.estimate import grace_seconds

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_POLL_SECONDS = 0.2
# A stop signal may belong to a cancellation. Slurm's controller knows; it is asked this many times before giving up.
_ENDED_QUESTIONS = 3
_ENDED_PAUSE_SECONDS = 1.0
_REQUEUE_SECONDS = 120.0
# Slurm may send the signal of the time limit this much too early. An even earlier one comes from a person or a
# preemption.
_EARLY_SECONDS = 60.0


class Stop:
    """The stop of one attempt of job `job_id`. `signals`: the list that `collect_signals` fills. `signal_seconds`: the
    time from USR1 to the time limit; `seconds_left`: the time from now to the limit, None without a limit.
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
        """Whether a signal, a stop file or Slurm requested the stop."""
        return self._deadline is not None or self._attempt.stop_reason() is not None

    @property
    def is_over(self) -> bool:
        """Whether the time that the ranks have to stop is over."""
        return self._deadline is not None and time.monotonic() > self._deadline

    @property
    def queues_again(self) -> bool:
        return self._again_because is not None

    @property
    def has_new_checkpoint(self) -> bool:
        """Whether the run saved a checkpoint in this attempt."""
        return self._latest_checkpoint() != self._began_with

    def request(self, reason: str, again: bool) -> None:
        """Request that the ranks stop; `again`: requeue the job afterwards. Only the first request counts."""
        if self._deadline is None:
            # If a stop file exists already, a person or the run made it.
            self._again_because = reason if again and self._attempt.stop_reason() is None else None
            self._attempt.request_stop(reason)
            self._deadline = time.monotonic() + self._grace_seconds
            self._time_is_up = (
                self._seconds is not None and time.monotonic() - self._began > self._seconds - _EARLY_SECONDS
            )
            self._state.tell("stopping", note=reason)
            self._say(f"{reason}: stopping after a checkpoint, within {self._grace_seconds:.0f} s")

    def blame(self, lost: Sequence[SlurmNode]) -> None:
        """Record lost nodes as the reason for the ranks' end: the job is requeued, unless a stop was requested
        before.
        """
        reason = f"lost node {', '.join(node.name for node in lost)}"
        if self.is_asked_for:
            self._say(f"{reason} before the ranks had stopped; the steps since the last checkpoint are lost.")
        else:
            self._again_because = reason

    def cancel_requeue(self) -> None:
        """Cancel the requeue: the run is finished, or Slurm ends the job."""
        self._again_because = None

    def handle_signals(self) -> bool:
        """Turn received signals into a stop request. Returns whether Slurm is ending the job, so that there is no time
        for a stop.
        """
        while self._signals:
            number = self._signals.pop(0)
            name = signal.Signals(number).name
            if number == signal.SIGUSR1:
                self.request(f"{name}: the time limit is near", again=True)
            elif self._is_job_ended():
                return True
            else:
                self.request(name, again=False)
        return False

    def _is_job_ended(self) -> bool:
        for _ in range(_ENDED_QUESTIONS):
            with self._answers.or_later():
                return not job_runs(self._job_id)
            time.sleep(_ENDED_PAUSE_SECONDS)
        return False

    # --- requeue -------------------------------------------------------------------------------------------

    def still_runs(self) -> bool:
        """Whether the job may be requeued, because nobody has cancelled it."""
        # Slurm's answer covers a cancellation before the question. A later one arrives as a signal.
        self._signals.clear()
        runs = self._answers.insist(lambda: job_runs(self._job_id), unless=self._is_terminated)
        return bool(runs) and not self._is_terminated()

    def queue_again(self) -> int:
        """Requeue the job; returns the exit code once Slurm ends this process. Raises RankError if a requeue cannot
        help or does not end the job.
        """
        without_progress = self._time_is_up and self._latest_checkpoint() == self._began_with
        if without_progress and self._last_was_without_progress():
            raise RankError(
                f"error: job {self._job_id} reached its time limit twice in a row without a new checkpoint;"
                f" {self._seconds:.0f} s are too few for a start and a step. Raise --time of GSPO_SBATCH in"
                f" launch/slurm/site.sh, or GSPO_SIGNAL_SECONDS (now {self._signal_seconds:.0f}) if the"
                " ranks did not stop in time"
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
            f"Slurm accepted the requeue of job {self._job_id} but did not end it within {_REQUEUE_SECONDS:.0f} s"
        )

    def _is_terminated(self) -> bool:
        return signal.SIGTERM in self._signals

    def _latest_checkpoint(self) -> str | None:
        try:
            return read_text(self._attempt.run_folder.latest_checkpoint_file)
        except FileNotFoundError:
            return None

    def _last_was_without_progress(self) -> bool:
        """Whether the previous attempt was of this job and ended at the time limit without a new checkpoint."""
        before = self._attempt.run_folder.attempt(self._attempt.number - 1) if self._attempt.number > 1 else None
        state = None if before is None else read_state(before)
        return state is not None and state.without_progress and state.slurm_job == self._job_id
