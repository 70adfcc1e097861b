"""From a loaded configuration to a supervised attempt on this machine: plan, run folder, servers, ranks.

Owns the list of processes that a command needs and their command lines. Under Slurm, srun starts the same two commands.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from gspo_mega.base import proxies
from gspo_mega.base.errors import GspoMegaError, PlanError
from gspo_mega.base.run_folder import Attempt, RunFolder, atomic_write_json
from gspo_mega.config import LoadedConfig
from gspo_mega.config.schema import ModelReward
from gspo_mega.launcher import server_python
from gspo_mega.launcher.alerts import Alerts
from gspo_mega.launcher.attempt_output import log_to
from gspo_mega.launcher.attempt_state import StateKeeper
from gspo_mega.launcher.children import ChildSpec
from gspo_mega.launcher.gpus_and_ports import rank_environments, reward_gpus, share_gpus, visible_gpus
from gspo_mega.launcher.inputs import check_run_folder, check_users_functions, check_what_is_read, is_replay
from gspo_mega.launcher.lease import Lease, hold
from gspo_mega.launcher.prepare import new_attempt
from gspo_mega.launcher.received_signals import stack_signals, stop_signals
from gspo_mega.launcher.restarts import Restarts
from gspo_mega.launcher.supervisor import STOP_GRACE_SECONDS, Supervisor
from gspo_mega.plan import plan_run, refuse_what_does_not_fit, render_report
from gspo_mega.plan.estimate import estimate
from gspo_mega.plan.server_places import reward_servers
from gspo_mega.plan.stop_deadlines import MARGIN
from gspo_mega.plan.watchdog_bounds import patience
from gspo_mega.rollout.server.reward_server import make_reward_folder

Command = Literal["train", "sft", "eval", "certify", "budget", "compare", "reward_model"]
WORKER_COMMAND = (sys.executable, "-m", "gspo_mega.train.worker")


def launch(
    loaded: LoadedConfig,
    command: Command,
    say: Callable[[str], None],
    *,
    worker_command: Sequence[str] = WORKER_COMMAND,
    serve_command: Sequence[str] | None = None,
    stop_grace_seconds: float = STOP_GRACE_SECONDS,
    work: Mapping[str, Any] | None = None,
    with_servers: bool = True,
) -> int:
    """Run `command` with the ranks and servers of the configuration; returns the exit code.

    `say` shows a line to the user. `worker_command`, `serve_command`: the commands of a rank and of a server without
    their arguments; the default server is `gspo-mega serve` in the Python of `server.python`. `work`: what the ranks
    find as JSON in the attempt's `work_file`. Call from the main thread. Raises a GspoMegaError with its exit code:
    ConfigError, ModelError, PlanError before anything starts, RankError for a later failure.
    """
    config = loaded.config
    for key, value, here in (
        ("cluster.num_nodes", config.cluster.num_nodes, 1),
        ("cluster.num_rollout_nodes", config.cluster.num_rollout_nodes, 0),
        ("server.num_nodes", config.server.num_nodes, 1),
    ):
        if value != here:
            raise PlanError(
                f"{loaded.where(key)}: {key}: {value}: `gspo-mega {command}` runs on one machine."
                " For several, submit a Slurm job: launch/slurm/train.sbatch CONFIG"
            )
    proxies.keep_direct([config.server.host])
    gpus = visible_gpus(os.environ)
    plan = plan_run(loaded, "gpu" if gpus else "cpu")
    tools = []
    if command not in ("certify", "compare", "reward_model"):  # these neither sample nor score
        tools = check_users_functions(loaded)
    replays = is_replay(loaded, command)
    samples = with_servers and command != "certify" and not replays
    num_servers = config.server.num_servers if samples else 0
    scorers = reward_servers(config) if samples else []
    rest, scorer_gpus = reward_gpus(gpus, [model.tensor for model, _ in scorers])
    rank_gpus, server_gpus = share_gpus(
        rest, config.cluster.ranks_per_node, num_servers, config.server.tensor, config.cluster.colocated
    )
    serve, serve_variables = (
        (list(serve_command or ()), {})
        if serve_command or not (num_servers or scorers)
        else server_python.serve_command(loaded)
    )
    if gpus and num_servers and not serve_command:
        server_python.check_same_software(loaded, serve[0], serve_variables)
    figures = estimate(plan, loaded.where)
    say(render_report(plan, figures))
    if command in ("train", "sft"):
        refuse_what_does_not_fit(plan, figures, loaded.where)
    if command in ("train", "sft", "eval") and worker_command is WORKER_COMMAND:  # the ranks that read it
        check_run_folder(loaded)
        for notice in check_what_is_read(loaded, command, tools, replays=replays):
            say(f"notice   {notice}")
    folder = RunFolder(Path(config.run.dir) / config.run.name)

    def run_attempt(attempt: Attempt, signals: list[int], lease: Lease) -> int:
        say(f"\nrun      {folder.path}, attempt {attempt.number}; logs in {attempt.logs_dir}")
        ranks = _ranks(config.cluster.ranks_per_node, rank_gpus, attempt, command, worker_command)
        servers = _servers(server_gpus, attempt, serve, serve_variables)
        servers += _scorers(scorers, scorer_gpus, attempt, serve, serve_variables)
        grace_seconds = max(stop_grace_seconds, MARGIN * figures.stop_seconds)
        return Supervisor(
            attempt,
            [*servers, *ranks],
            say,
            grace_seconds,
            patience(config, figures),
            signals,
            lease.raise_if_lost,
            for_stacks,
        ).run()

    with hold(folder, say) as lease, stop_signals() as signals, stack_signals() as for_stacks:
        restarts = Restarts.begin(folder, Restarts.allowed(command, config.train))
        while True:
            attempt = new_attempt(folder, loaded, command, say)
            alerts = Alerts(config, attempt, say)
            if work is not None:
                atomic_write_json(attempt.work_file, work)
            decision = None
            try:
                with log_to(attempt.supervisor_log), StateKeeper(attempt) as state:
                    try:
                        code = run_attempt(attempt, signals, lease)
                    except GspoMegaError as error:
                        if not signals and attempt.stop_reason() is None:
                            decision = restarts.settle(attempt, error)
                        raise
                    state.tell("finished" if code == 0 else "stopped")
                    return code
            except GspoMegaError as error:
                if decision is None or not decision.again:
                    alerts.failed(error, restarts=False)
                    raise
                alerts.failed(error, restarts=True, why=decision.why)
                say(f"\n{error}\n\n{decision.why}")
            finally:
                alerts.close()


def _ranks(
    num_ranks: int, gpus: list[str], attempt: Attempt, command: str, worker_command: Sequence[str]
) -> list[ChildSpec]:
    arguments = ["--config", str(attempt.run_folder.config_file), "--attempt", str(attempt.path), "--command", command]
    return [
        ChildSpec("rank", rank, [*worker_command, *arguments], attempt.rank_log(rank), environment)
        for rank, environment in enumerate(rank_environments(num_ranks, gpus))
    ]


def _servers(
    gpus: list[list[str]], attempt: Attempt, serve_command: Sequence[str], variables: Mapping[str, str]
) -> list[ChildSpec]:
    specs = []
    for index, share in enumerate(gpus):
        arguments = [str(attempt.run_folder.config_file), "--attempt", str(attempt.path), "--index", str(index)]
        environment = {**variables, **({"CUDA_VISIBLE_DEVICES": ",".join(share)} if share else {})}
        specs.append(ChildSpec("server", index, [*serve_command, *arguments], attempt.server_log(index), environment))
    return specs


def _scorers(
    scorers: Sequence[tuple[ModelReward, int]],
    gpus: list[list[str]],
    attempt: Attempt,
    serve_command: Sequence[str],
    variables: Mapping[str, str],
) -> list[ChildSpec]:
    """The servers of reward models: (entry, number in it) and GPUs of each."""
    specs = []
    for (model, index), share in zip(scorers, gpus, strict=True):
        mine = make_reward_folder(attempt, model.name)
        arguments = [str(attempt.run_folder.config_file), "--attempt", str(attempt.path), "--index", str(index)]
        command = [*serve_command, *arguments, "--reward-model", model.name]
        environment = {**variables, **({"CUDA_VISIBLE_DEVICES": ",".join(share)} if share else {})}
        specs.append(ChildSpec("reward server", index, command, mine.server_log(index), environment, of=model.name))
    return specs
