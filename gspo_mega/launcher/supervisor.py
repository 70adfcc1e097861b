"""Watch the processes of one attempt until they finish, fail, or are asked to stop; then end all of them.

Owns the life of the children and the meaning of signals. `launch_local.py` chooses the children, `children.py` ends
them, `failure.py` names a failure.

Signals. The first SIGINT (Ctrl-C), SIGTERM, SIGHUP (a closed terminal) or SIGUSR1 becomes a stop request: the ranks
finish their current work, save a checkpoint and end. A second SIGINT or SIGTERM, or the end of the grace period, ends
everything at once. SIGHUP and SIGUSR1 do not count for that, because a closed terminal sends several signals. SIGUSR2
changes nothing: it asks all ranks for their stacks. Exit code
128 + the number of the first signal: 130 for Ctrl-C, 143 for SIGTERM. The same command continues the run.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence

from gspo_mega.base.errors import RankError, StuckError
from gspo_mega.base.run_folder import EXIT_STOPPED, Attempt
from gspo_mega.launcher.attempt_output import ConsoleTail
from gspo_mega.launcher.children import Child, ChildSpec, Family
from gspo_mega.launcher.failure import describe_failure
from gspo_mega.launcher.remaining_servers import RemainingServers
from gspo_mega.launcher.server_failures import ServerFailures
from gspo_mega.launcher.stack_request import StacksOnSignal
from gspo_mega.launcher.watchdog import Watchdog
from gspo_mega.plan.watchdog_bounds import Patience
from gspo_mega.rollout.server.reward_server import reward_folder

logger = logging.getLogger(__name__)

STOP_GRACE_SECONDS = 300.0
# A second one of these ends everything at once.
_INSISTING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_SECONDS = 0.1
# Time after a first failure in which the rank that caused it writes its record, if another rank was seen first.
_SETTLE_SECONDS = 0.7
# A server ends its process group within 2 s. Together with the settling the whole run ends well within 10 s.
_END_GRACE_SECONDS = 3.0


class Supervisor:
    """The supervisor of one attempt's processes. `say` shows a line to the user."""

    def __init__(
        self,
        attempt: Attempt,
        specs: Sequence[ChildSpec],
        say: Callable[[str], None],
        stop_grace_seconds: float = STOP_GRACE_SECONDS,
        patience: Patience | None = None,
        signals: list[int] | None = None,
        check: Callable[[], None] = lambda: None,
        stack_signals: list[int] | None = None,
    ) -> None:
        """`patience`: how long ranks may be stuck; None disables the watchdog. `signals`: the list of the caller's
        `stop_signals`. `check` is called repeatedly; an exception from it ends the run. `stack_signals`: the same of
        the caller's `stack_signals`.
        """
        self._attempt, self._specs, self._say, self._patience = attempt, specs, say, patience
        self._stop_grace_seconds = stop_grace_seconds
        self._console = ConsoleTail(attempt.console_log, say)
        self._children: list[Child] = []
        self._signals: list[int] = [] if signals is None else signals
        self._check = check
        self._stack_signals: list[int] = [] if stack_signals is None else stack_signals
        self._stop_deadline: float | None = None
        self._stop_is_requested = False

    def run(self) -> int:
        """Start everything, watch, end everything. Returns 0, or 128 + signal after a stop (75 when nobody signalled).

        Call from the main thread, inside `stop_signals`. Raises RankError with the text for the user and the exit code
        when something failed. However it ends, no process and no descendant is left.
        """
        family = Family()
        self._children = family.children
        try:
            for spec in self._specs:
                child = family.start(spec)
                logger.info("%s started as process %d: %s", child.name, child.pid, " ".join(spec.command))
            return self._watch(family)
        finally:
            family.close(_END_GRACE_SECONDS)
            for child in family.children:
                logger.info("%s %s", child.name, child.end_described)
            self._console.pump()

    def _watch(self, family: Family) -> int:
        ranks = [child for child in self._children if child.spec.kind == "rank"]
        pids = {child.spec.index: child.pid for child in ranks}
        watchdog = Watchdog(self._attempt, len(ranks), self._patience, pids) if self._patience is not None else None
        stacks = StacksOnSignal(self._attempt, len(ranks), self._stack_signals, self._say)
        models = dict.fromkeys(child.spec.of for child in self._children if child.spec.kind == "reward server")
        self._remaining_servers = [
            RemainingServers(self._attempt, self._children, self._say, of) for of in (None, *models)
        ]
        scorers = [(reward_folder(self._attempt, of), f" of reward model {of}") for of in models]
        failures = ServerFailures([(self._attempt, ""), *scorers], self._say)
        while True:
            self._console.pump()
            failures.look()
            family.reap()
            self._check()
            stacks.look()
            if self._must_end_now():
                return self._stop_code()
            if self._failed():
                self._settle()
                raise self._failure()
            if all(child.exit_code is not None for child in ranks):
                stopped = any(child.exit_code == EXIT_STOPPED for child in ranks)
                if stopped:
                    self._say("Stopped in order. The same command continues the run.")
                return self._stop_code() if stopped else 0
            if watchdog is not None and (stuck := watchdog.look()) is not None:
                logger.error("%s", stuck)
                raise StuckError(f"{stuck}\n\n{stacks.now()}")
            time.sleep(_POLL_SECONDS)

    # --- failure -------------------------------------------------------------------------------------------

    def _failed(self) -> list[Child]:
        """Ranks that ended unexpectedly, and all servers of the policy, or of a reward model, once none is left."""
        ranks = [
            child
            for child in self._children
            if child.spec.kind == "rank" and child.exit_code not in (None, 0, EXIT_STOPPED)
        ]
        # `gspo-mega serve` restarts a server; when it ends itself, it has given up.
        return [*ranks, *(child for servers in self._remaining_servers for child in servers.lost())]

    def _settle(self) -> None:
        deadline = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < deadline and any(child.exit_code is None for child in self._children):
            time.sleep(_POLL_SECONDS)

    def _failure(self) -> RankError:
        failed = self._failed()
        logger.error("failed: %s", ", ".join(f"{child.name} {child.end_described}" for child in failed))
        return describe_failure(failed, self._attempt)

    # --- stop ----------------------------------------------------------------------------------------------

    def _must_end_now(self) -> bool:
        """Turn the first signal into a stop request; True on the second, or when the grace period is over."""
        if not self._signals:
            return False
        name = signal.Signals(self._signals[0]).name
        if self._stop_deadline is None:
            logger.info("%s: stop requested", name)
            self._stop_deadline = time.monotonic() + self._stop_grace_seconds
            self._say(
                f"{name}: stopping after a checkpoint, within {self._stop_grace_seconds:.0f} s. A second signal ends"
                " the run now and loses the steps since the last checkpoint."
            )
        self._request_stop(name)
        if sum(number in _INSISTING_SIGNALS for number in self._signals) > 1:
            self._say("Ended at once. The same command continues the run from its last checkpoint.")
            return True
        if time.monotonic() > self._stop_deadline:
            self._say(
                f"The ranks did not stop within {self._stop_grace_seconds:.0f} s: ended."
                " The same command continues the run from its last checkpoint."
            )
            return True
        return False

    def _request_stop(self, name: str) -> None:
        """Write the stop request, again on each call until it succeeds: a full disk may have room again later."""
        if not self._stop_is_requested:
            try:
                self._attempt.request_stop(name)
                self._stop_is_requested = True
            except OSError as error:
                logger.warning("%s cannot be written: %s", self._attempt.stop_file, error.strerror)

    def _stop_code(self) -> int:
        return 128 + self._signals[0] if self._signals else EXIT_STOPPED
