"""Run a command on one machine: from a loaded configuration to a supervised attempt.

`launch` plans, checks, takes the run folder and starts the servers and the ranks. `Supervisor` then watches these
processes until they finish, fail or are asked to stop, and ends all of them. `RemainingServers` tells it which servers
are gone. Under Slurm, srun starts the same two commands (`slurm/steps.py`).

Signals: the first SIGINT (Ctrl-C), SIGTERM, SIGHUP (a closed terminal) or SIGUSR1 becomes a stop request: the ranks
finish their current work, save a checkpoint and end. A second SIGINT or SIGTERM, or the end of the grace period, ends
everything at once. SIGHUP and SIGUSR1 do not count as a second signal, because a closed terminal sends several. SIGUSR2
only asks all ranks for their stacks. The exit code after a stop is 128 + the number of the first signal: 130 for
Ctrl-C, 143 for SIGTERM. The same command continues the run.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from gspo_mega.base import network
from gspo_mega.base.errors import GspoMegaError, PlanError, RankError, StuckError
from gspo_mega.base.run_folder import EXIT_STOPPED, Attempt, DamagedFileError, RunFolder, atomic_write_json, read_json
from gspo_mega.checkpoint.memory_files import copies_removed
from gspo_mega.config import LoadedConfig
from gspo_mega.config.derived import command_name
from gspo_mega.config.schema import ModelReward
from gspo_mega.launcher import server_python
from gspo_mega.launcher.alerts import AlertSender
from gspo_mega.launcher.attempt_state import StateKeeper, closing_line, describe_failure, what_now
from gspo_mega.launcher.children import (
    Child,
    ChildSpec,
    ConsoleTail,
    ProcessFamily,
    StandbySpec,
    ignored_interrupt_notice,
    log_to,
    stack_signals,
    stop_signals,
)
from gspo_mega.launcher.inputs import (
    check_all_inputs,
    check_run_folder,
    check_users_functions,
    check_what_is_read,
    is_replay,
)
from gspo_mega.launcher.kept_servers import KeptServers, keeps_servers, refuse_in_job
from gspo_mega.launcher.lease import Lease, hold, refuse_if_held
from gspo_mega.launcher.prepare import (
    check_same_run,
    new_attempt,
    rank_environments,
    reward_gpus,
    share_gpus,
    visible_gpus,
)
from gspo_mega.launcher.restarts import Restarts
from gspo_mega.launcher.standby import Standbys, has_standbys
from gspo_mega.launcher.watchdog import RankWatchdog, ServerFailures, StacksOnSignal
from gspo_mega.plan import plan_run, refuse_what_does_not_fit, render_report
from gspo_mega.plan.estimate import MARGIN, Estimate, estimate
from gspo_mega.plan.resolve import Plan
from gspo_mega.plan.servers import reward_servers
from gspo_mega.plan.watchdog_bounds import Patience, patience
from gspo_mega.rollout.registration import Registration
from gspo_mega.rollout.server.reward_server import make_reward_folder, reward_folder

logger = logging.getLogger(__name__)
STOP_GRACE_SECONDS = 300.0
# A second signal of these ends everything at once.
_INSISTING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_SECONDS = 0.1
# After the first failure seen, the rank that caused it gets this long to write its record.
_SETTLE_SECONDS = 0.7
# A server ends its process group within 2 s. With _SETTLE_SECONDS the whole run ends well within 10 s.
_END_GRACE_SECONDS = 3.0
Command = Literal["train", "sft", "eval", "certify", "budget", "compare", "reward_model"]
WORKER_COMMAND = (sys.executable, "-m", "gspo_mega.train.worker")
STANDBY_COMMAND = (sys.executable, "-m", "gspo_mega.train.standby")


def dry_run(
    loaded: LoadedConfig, command: Literal["train", "sft"], say: Callable[[str], None], *, in_job: bool = False
) -> int:
    """Check what a start of `command` checks and start nothing. `in_job`: the start would be on a Slurm job's nodes, as
    it always is for several, so this machine's GPUs do not count.

    Shows the plan, notices, what was read, and what a start would do; of what is refused only the reason. Returns 0, or
    raises what `launch` would. Not checked are what only a start can: whether a process of another machine that holds
    the run's folder is alive, whether the checkpoint is whole, the job's nodes.
    """
    config = loaded.config
    if in_job:
        refuse_in_job(loaded)
    is_here = not in_job and (config.cluster.num_nodes, config.cluster.num_rollout_nodes, config.server.num_nodes) == (
        1,
        0,
        1,
    )
    gpus = visible_gpus(os.environ) if is_here else []
    plan = plan_run(loaded, ("gpu" if gpus else "cpu") if is_here else None)
    if is_here and not is_replay(loaded, command):
        scorers = reward_servers(config.reward)
        others, _ = reward_gpus(gpus, [model.tensor for model, _ in scorers])
        cluster, servers = config.cluster, config.server
        share_gpus(others, cluster.ranks_per_node, servers.num_servers, servers.tensor, cluster.colocated)
        server_python.serve_command(loaded)
    figures = estimate(plan, loaded.where)
    _refuse_what_does_not_fit(loaded, plan, figures, say)
    check_run_folder(loaded)
    folder = RunFolder(Path(config.run.dir) / config.run.name)
    held = refuse_if_held(folder)
    check_same_run(folder, loaded, command)
    read: list[str] = []
    notices = check_all_inputs(loaded, command, read)
    if held is not None:
        notices = [*notices, held]
    say(render_report(plan, figures))
    for notice in notices:
        say(f"notice   {notice}")
    for number, line in enumerate(read):
        say(f"{'read' if number == 0 else '':<8} {line}")
    start = "would start"
    if folder.latest_checkpoint_file.exists():
        start = "would continue from its last whole checkpoint"
    say(f"\ndry run  {folder.path} {start}; nothing was started")
    return 0


def _refuse_what_does_not_fit(loaded: LoadedConfig, plan: Plan, figures: Estimate, say: Callable[[str], None]) -> None:
    """Raise PlanError for what does not fit, after the lines of the plan that show it."""
    try:
        refuse_what_does_not_fit(plan, figures, loaded.where)
    except PlanError:
        say(render_report(plan, figures, only=("model", "ranks", "server", "state", "memory")))
        raise


def launch(
    loaded: LoadedConfig,
    command: Command,
    say: Callable[[str], None],
    *,
    worker_command: Sequence[str] = WORKER_COMMAND,
    serve_command: Sequence[str] | None = None,
    standby_command: Sequence[str] = STANDBY_COMMAND,
    stop_grace_seconds: float = STOP_GRACE_SECONDS,
    work: Mapping[str, Any] | None = None,
    with_servers: bool = True,
) -> int:
    """Run `command` with the ranks and servers of the configuration; returns the exit code.

    `say` shows a line to the user. `worker_command`, `serve_command`, `standby_command`: the commands of a rank, of a
    server and of a rank's standby without their arguments; the default server is `gspo-mega serve` in the Python of
    `server.python`. `work` is written as JSON to the attempt's `work_file`, for the ranks. Without `with_servers` no
    server starts. Call from the main thread. Raises a GspoMegaError with its exit code: ConfigError, ModelError,
    PlanError before anything starts, RankError for a later failure.
    """
    config = loaded.config
    for key, value, here in (
        ("cluster.num_nodes", config.cluster.num_nodes, 1),
        ("cluster.num_rollout_nodes", config.cluster.num_rollout_nodes, 0),
        ("server.num_nodes", config.server.num_nodes, 1),
    ):
        if value != here:
            raise PlanError(
                f"{loaded.where(key)}: {key}: {value}: `gspo-mega {command_name(command)}` runs on one machine."
                " For several, submit a Slurm job: launch/slurm/train.sbatch CONFIG"
            )
    network.set_no_proxy([config.server.host])
    gpus = visible_gpus(os.environ)
    plan = plan_run(loaded, "gpu" if gpus else "cpu")
    tools = []
    if command not in ("certify", "compare", "reward_model"):  # these neither sample nor score
        tools = check_users_functions(loaded)
    replays = is_replay(loaded, command)
    samples = with_servers and command != "certify" and not replays
    num_servers = config.server.num_servers if samples else 0
    scorers = reward_servers(config.reward) if samples else []
    other_gpus, scorer_gpus = reward_gpus(gpus, [model.tensor for model, _ in scorers])
    rank_gpus, server_gpus = share_gpus(
        other_gpus, config.cluster.ranks_per_node, num_servers, config.server.tensor, config.cluster.colocated
    )
    serve, serve_variables = (
        (list(serve_command or ()), {})
        if serve_command or not (num_servers or scorers)
        else server_python.serve_command(loaded)
    )
    if gpus and num_servers and not serve_command:
        server_python.check_same_software(loaded, serve[0], serve_variables)
    figures = estimate(plan, loaded.where)
    if command in ("train", "sft"):
        _refuse_what_does_not_fit(loaded, plan, figures, say)
    notices = []
    if command in ("train", "sft", "eval") and worker_command is WORKER_COMMAND:
        # Only the product's own ranks read these inputs.
        check_run_folder(loaded)
        notices = check_what_is_read(loaded, command, tools, replays=replays)
    say(render_report(plan, figures))
    for notice in notices:
        say(f"notice   {notice}")
    folder = RunFolder(Path(config.run.dir) / config.run.name)

    def run_attempt(attempt: Attempt, signals: list[int], lease: Lease) -> int:
        say(f"\nrun      {folder.path}, attempt {attempt.number}; logs in {attempt.logs_dir}")
        if (ignored := ignored_interrupt_notice(folder.latest_attempt_link / attempt.stop_file.name)) is not None:
            say(f"notice   {ignored}")
        standby = standby_command if has_standbys(config, command) else None
        ranks = _ranks(config.cluster.ranks_per_node, rank_gpus, attempt, command, worker_command, standby)
        keeps = keeps_servers(config, command)
        servers = _servers(server_gpus, attempt, serve, serve_variables, keeps)
        servers += _reward_servers(scorers, scorer_gpus, attempt, serve, serve_variables, keeps)
        grace_seconds = max(stop_grace_seconds, MARGIN * figures.stop_seconds)
        return Supervisor(
            attempt,
            [*servers, *ranks],
            say,
            grace_seconds,
            patience(config, figures),
            signals,
            lease.raise_if_lost,
            stack_requests,
            standbys,
            kept,
        ).run()

    with (
        hold(folder, say) as lease,
        stop_signals() as signals,
        stack_signals() as stack_requests,
        copies_removed(folder.path),
        KeptServers(say) as kept,
        Standbys(say) as standbys,
    ):
        restarts = Restarts.begin(folder, Restarts.allowed(command, config.train), config.checkpoint.peer_copies > 0)
        while True:
            attempt = new_attempt(folder, loaded, command, say)
            alerts = AlertSender(config, attempt, say)
            if work is not None:
                atomic_write_json(attempt.work_file, work)
            decision = None
            try:
                with log_to(attempt.supervisor_log), StateKeeper(attempt) as state:
                    try:
                        code = run_attempt(attempt, signals, lease)
                    except GspoMegaError as error:
                        if not signals and attempt.stop_reason() is None:
                            decision = restarts.decide_and_record(attempt, error)
                        raise
                    state.tell("finished" if code == 0 else "stopped")
                    return code
            except GspoMegaError as error:
                if decision is None or not decision.again:
                    alerts.failed(error, restarts=False)
                    # Of one line, such as a user's error, the cause is already the last thing that is said.
                    if decision is not None and command == "train" and "\n" in str(error):
                        error.add_note(what_now(attempt, decision.why, error))
                    raise
                alerts.failed(error, restarts=True, why=decision.why)
                say(f"\n{error}\n\n{decision.why}")
            finally:
                alerts.close()


def _ranks(
    num_ranks: int,
    gpus: list[str],
    attempt: Attempt,
    command: str,
    worker_command: Sequence[str],
    standby_command: Sequence[str] | None,
) -> list[ChildSpec]:
    arguments = ["--config", str(attempt.run_folder.config_file), "--attempt", str(attempt.path), "--command", command]

    def standby(rank: int) -> StandbySpec | None:
        if standby_command is None:
            return None
        return StandbySpec([*standby_command, *arguments], arguments, attempt.standby_log(rank), [rank])

    return [
        ChildSpec(
            "rank", rank, [*worker_command, *arguments], attempt.rank_log(rank), environment, standby=standby(rank)
        )
        for rank, environment in enumerate(rank_environments(num_ranks, gpus))
    ]


def _servers(
    gpus: list[list[str]],
    attempt: Attempt,
    serve_command: Sequence[str],
    variables: Mapping[str, str],
    keeps: bool = False,
) -> list[ChildSpec]:
    """`keeps`: they may outlive the attempt."""
    specs = []
    for index, share in enumerate(gpus):
        command = [*serve_command, *_serve_arguments(attempt, index, keeps)]
        environment = {**variables, **({"CUDA_VISIBLE_DEVICES": ",".join(share)} if share else {})}
        log = attempt.server_log(index)
        specs.append(ChildSpec("server", index, command, log, environment, takes_orders=keeps))
    return specs


def _serve_arguments(attempt: Attempt, index: int, keeps: bool) -> list[str]:
    arguments = [str(attempt.run_folder.config_file), "--attempt", str(attempt.path), "--index", str(index)]
    return [*arguments, "--next-attempts"] if keeps else arguments


def _reward_servers(
    scorers: Sequence[tuple[ModelReward, int]],
    gpus: list[list[str]],
    attempt: Attempt,
    serve_command: Sequence[str],
    variables: Mapping[str, str],
    keeps: bool = False,
) -> list[ChildSpec]:
    """The servers of reward models. `scorers`: (the model's entry, the server's index in it); `gpus`: those of each.
    `keeps`: they may outlive the attempt.
    """
    specs = []
    for (model, index), share in zip(scorers, gpus, strict=True):
        folder = make_reward_folder(attempt, model.name)
        command = [*serve_command, *_serve_arguments(attempt, index, keeps), "--reward-model", model.name]
        environment = {**variables, **({"CUDA_VISIBLE_DEVICES": ",".join(share)} if share else {})}
        log = folder.server_log(index)
        specs.append(ChildSpec("reward server", index, command, log, environment, of=model.name, takes_orders=keeps))
    return specs


class Supervisor:
    """Starts the processes of one attempt, watches them, and ends them. `say` shows a line to the user."""

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
        standbys: Standbys | None = None,
        kept: KeptServers | None = None,
    ) -> None:
        """`patience`: how long ranks may be stuck; None disables the watchdog. `signals`, `stack_signals`: the lists
        that the caller's contexts of these names fill. `check` is called repeatedly; an exception from it ends the run.
        `standbys`, `kept`: prepared processes, and servers, which outlive this attempt.
        """
        self._attempt, self._specs, self._say, self._patience = attempt, specs, say, patience
        self._stop_grace_seconds = stop_grace_seconds
        self._console = ConsoleTail(attempt.console_log, say)
        self._children: list[Child] = []
        self._signals: list[int] = [] if signals is None else signals
        self._check = check
        self._standbys = Standbys(say) if standbys is None else standbys
        self._kept = KeptServers(say) if kept is None else kept
        self._stack_signals: list[int] = [] if stack_signals is None else stack_signals
        self._stop_deadline: float | None = None
        self._stop_is_requested = False
        self._rank_specs = [spec for spec in specs if spec.kind == "rank"]

    def run(self) -> int:
        """Start everything, watch, end everything. Returns 0, or after a stop 128 + the signal (75 without a signal).

        Call from the main thread, inside `stop_signals`. If something failed, raises RankError with the text for the
        user and the exit code. However this returns, no process and no descendant is left, but for those that outlive
        the attempt.
        """
        family = ProcessFamily()
        try:
            others = [spec for spec in self._specs if spec.kind != "rank"]
            children = self._kept.begin(family, self._attempt, others)
            children += self._standbys.start(family, self._attempt, self._rank_specs)
            children += self._kept.take_over(family, self._attempt)
            for child in children:
                logger.info("%s runs as process %d: %s", child.name, child.pid, " ".join(child.spec.command))
            self._children = family.children
            return self._watch(family)
        except GspoMegaError as error:
            self._kept.keep(family, self._attempt, error)
            raise
        finally:
            family.close(_END_GRACE_SECONDS)
            for child in family.children:
                logger.info("%s %s", child.name, child.end_described)
            self._console.pump()

    def _watch(self, family: ProcessFamily) -> int:
        ranks = [child for child in self._children if child.spec.kind == "rank"]
        pids = {child.spec.index: child.pid for child in ranks}
        watchdog = RankWatchdog(self._attempt, len(ranks), self._patience, pids) if self._patience is not None else None
        stacks = StacksOnSignal(self._attempt, len(ranks), self._stack_signals, self._say)
        models = dict.fromkeys(child.spec.of for child in self._children if child.spec.kind == "reward server")
        self._remaining_servers = [
            RemainingServers(self._attempt, self._children, self._say, of) for of in (None, *models)
        ]
        scorers = [(reward_folder(self._attempt, of), f" of reward model {of}") for of in models]
        failures = ServerFailures([(self._attempt, ""), *scorers], self._say)
        while True:
            self._console.pump()
            failures.show_new()
            family.reap()
            self._check()
            self._standbys.watch(family, self._attempt, self._rank_specs)
            stacks.poll()
            if self._must_end_now():
                return self._stop_code()
            if self._failed():
                self._wait_for_other_ends()
                raise self._failure()
            if all(child.exit_code is not None for child in ranks):
                stopped = any(child.exit_code == EXIT_STOPPED for child in ranks)
                if stopped:
                    self._console.pump()  # what the ranks said last
                    self._say(closing_line(self._attempt))
                return self._stop_code() if stopped else 0
            if watchdog is not None and (stuck := watchdog.check()) is not None:
                logger.error("%s", stuck)
                raise StuckError(f"{stuck}\n\n{stacks.request_and_wait()}")
            time.sleep(_POLL_SECONDS)

    # --- failure -------------------------------------------------------------------------------------------

    def _failed(self) -> list[Child]:
        """Ranks that ended unexpectedly, and the servers of the policy or of a reward model once none of them is
        left.
        """
        ranks = [
            child
            for child in self._children
            if child.spec.kind == "rank" and child.exit_code not in (None, 0, EXIT_STOPPED)
        ]
        # `gspo-mega serve` restarts a server; when it ends itself, it has given up.
        return [*ranks, *(child for servers in self._remaining_servers for child in servers.lost())]

    def _wait_for_other_ends(self) -> None:
        """Let other processes end for a moment, so that the one that caused the failure has written its record."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < deadline and any(child.exit_code is None for child in self._children):
            time.sleep(_POLL_SECONDS)

    def _failure(self) -> RankError:
        failed = self._failed()
        logger.error("failed: %s", ", ".join(f"{child.name} {child.end_described}" for child in failed))
        return describe_failure(failed, self._attempt)

    # --- stop ----------------------------------------------------------------------------------------------

    def _must_end_now(self) -> bool:
        """Turn the first signal into a stop request. Returns True after a second signal or the grace period."""
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
            self._say(closing_line(self._attempt, "Ended at once"))
            return True
        if time.monotonic() > self._stop_deadline:
            seconds = f"{self._stop_grace_seconds:.0f} s"
            self._say(closing_line(self._attempt, f"The ranks did not stop within {seconds}: ended"))
            return True
        return False

    def _request_stop(self, name: str) -> None:
        """Write the stop request. Each call tries until one succeeds, because a full disk may get room again."""
        if not self._stop_is_requested:
            try:
                self._attempt.request_stop(name)
                self._stop_is_requested = True
            except OSError as error:
                logger.warning("%s cannot be written: %s", self._attempt.stop_file, error.strerror)

    def _stop_code(self) -> int:
        return 128 + self._signals[0] if self._signals else EXIT_STOPPED


class RemainingServers:
    """The launcher's own servers in one attempt: which have left or are lost, and whether all servers have failed.

    The policy's servers are one such set; those of each reward model are another. `gspo-mega serve` restarts its
    server; once its process ends or registers `failed`, it has given up. A server that was asked to end registers
    `stopped` and exits with 0: it has left, and nothing failed. Each server is reported once: to the user, and through
    its registration to the pool if the server did not register its failure itself.

    The launcher ends the run only when every server of the attempt has failed, including those that joined. Otherwise
    one serves or may join, and the pool decides by `rollout.no_server_deadline_seconds`.
    """

    def __init__(
        self, attempt: Attempt, children: Iterable[Child], say: Callable[[str], None], of: str | None = None
    ) -> None:
        """`children`: the processes of the attempt, of which the policy's servers count; with `of`, the servers of the
        reward model of that name, which register in a folder of their own.
        """
        self._attempt, self._say = attempt if of is None else reward_folder(attempt, of), say
        wanted = ("server", "") if of is None else ("reward server", of)
        self._servers = [child for child in children if (child.spec.kind, child.spec.of) == wanted]
        self._failed: list[Child] = []
        self._left: list[Child] = []
        self._all_failed = False

    def lost(self) -> list[Child]:
        """Report each server that is gone since the last call. Once all servers have failed, including those that
        joined, returns the launcher's own in the order of their loss; before that, or without own servers, an empty
        list.
        """
        for child in self._servers:
            if child in self._failed or child in self._left:
                continue
            if self._has_left(child):
                self._left.append(child)
                self._report(child, f"{child.name} has left, as it was asked to")
            elif (why := self._end_of(child)) is not None:
                self._failed.append(child)
                self._report(child, f"{child.name} is given up: {why.strip().splitlines()[0]}", logging.WARNING)
        if self._failed and len(self._failed) == len(self._servers) and not self._all_failed:
            self._all_failed = not self._others_may_serve()
        # This is final: the run is ending, and a server that joins now is too late.
        return list(self._failed) if self._all_failed else []

    def _others_may_serve(self) -> bool:
        """Whether a server has joined that is not registered as `failed`. A server without a state may serve."""
        own = {self._attempt.server_file(f"server-{child.spec.index}") for child in self._servers}
        joined = [path for path in self._attempt.servers_dir.glob("[!.]*.json") if path not in own]
        return any(_read(path).get("state") != "failed" for path in joined)

    def _has_left(self, child: Child) -> bool:
        return child.exit_code == 0 and self._record(child).get("state") == "stopped"

    def _end_of(self, child: Child) -> str | None:
        """Why this server has ended for good; None while it has not."""
        record = self._record(child)
        if record.get("state") == "failed":
            return str(record.get("error"))
        if child.exit_code is None:
            return None
        # It did not end as asked, whatever its exit code. It wrote no registration of its failure, and the pool would
        # wait for it; so this process writes one.
        why = f"its process {child.end_described}"
        server_id = f"server-{child.spec.index}"
        registration = Registration(
            server_id,
            record.get("address", ""),
            child.pid,
            "failed",
            record.get("generation", 0),
            None,
            time.time(),
            error=why,
        )
        try:
            registration.write(self._attempt.servers_dir)
        except OSError as error:
            logger.warning("%s cannot be registered as failed: %s", server_id, error.strerror)
        return why

    def _record(self, child: Child) -> dict:
        """The server's registration; empty if it has none, or none that can be read now."""
        return _read(self._attempt.server_file(f"server-{child.spec.index}"))

    def _report(self, child: Child, what: str, level: int = logging.INFO) -> None:
        num_left, total = len(self._servers) - len(self._failed) - len(self._left), len(self._servers)
        left = {0: f"no server of {total} is left", 1: f"1 of {total} servers is left"}.get(
            num_left, f"{num_left} of {total} servers are left"
        )
        text = f"{what}; {left} (log: {child.spec.log})"
        logger.log(level, "%s", text)
        self._say(f"warning  {text}" if level == logging.WARNING else text)


def _read(registration: Path) -> dict:
    """The JSON of a registration; empty while it is missing or cannot be read. A shared file system may fail for a
    moment, which must not end the run.
    """
    try:
        return read_json(registration) or {}
    except (OSError, DamagedFileError) as error:
        logger.warning("%s cannot be read: %s", registration, error)
        return {}
