"""How large a Slurm job a configuration needs, as options for sbatch.

    python -m gspo_mega.launcher.slurm.size CONFIG [key=value ...]

Writes shell assignments for launch/slurm/train.sbatch, and refuses on the login node what cannot run. `Site` reads the
variables that launch/slurm/site.sh exports: GPUs per node, containers, Pythons, network. A container is one line:
options of srun if it begins with `--` (pyxis: `--container-image=... --container-mounts=...`), else words before the
command (`apptainer exec --nv IMAGE`). `job_size` decides which server runs on which node and how the GPUs of a node are
divided; `sbatch_options` makes the options.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gspo_mega.base.errors import ConfigError, GspoMegaError, PlanError
from gspo_mega.base.untrusted import printable_output
from gspo_mega.config import LoadedConfig, load_config
from gspo_mega.launcher.inputs import check_before_job, is_replay
from gspo_mega.launcher.kept_servers import refuse_in_job
from gspo_mega.plan import Estimate, estimate, plan_run, refuse_what_does_not_fit, render_report
from gspo_mega.plan.estimate import grace_seconds, signal_seconds
from gspo_mega.plan.fewer_nodes import fewer_nodes_lines, shrinks
from gspo_mega.plan.servers import RewardPlace, place_servers, reward_servers

_NUMBERS = {"GSPO_GPUS_PER_NODE": 0, "GSPO_CPUS_PER_TASK": 1, "GSPO_SIGNAL_SECONDS": 0, "GSPO_PREFLIGHT_SECONDS": 600}


@dataclass(frozen=True)
class Environment:
    """The environment of ranks or of servers: the words of its `container` in site.sh, and the `python` inside it."""

    container: tuple[str, ...]
    python: str

    @property
    def srun_options(self) -> list[str]:
        return list(self.container) if self._is_options else []

    def command(self, *words: str) -> list[str]:
        """`words` for this environment's Python, inside its container."""
        return [*([] if self._is_options else self.container), self.python, *words]

    @property
    def _is_options(self) -> bool:
        return bool(self.container) and self.container[0].startswith("--")


@dataclass(frozen=True)
class Site:
    """The settings of a cluster.

    `gpus_per_node`: 0 for none. `cpus_per_task`: CPUs of each rank and server. `network`: the interfaces of gloo and
    NCCL, or None for their own choice. `signal_seconds`: time from Slurm's signal to the time limit, 0 for the plan's
    value. `preflight`: whether the doctor runs on every node first; `preflight_seconds`: its time limit.
    """

    gpus_per_node: int
    cpus_per_task: int
    network: str | None
    signal_seconds: int
    preflight_seconds: int
    preflight: bool
    trainer: Environment
    server: Environment

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Site:
        """Read the settings from the environment. Raises ConfigError for a bad number or an open quote."""
        values = {name: environment.get(name) or str(default) for name, default in _NUMBERS.items()}
        wrong = [f"{name}={text}" for name, text in values.items() if not text.isdecimal()]
        if wrong:
            raise ConfigError(f"launch/slurm/site.sh: {', '.join(wrong)}: not a number")
        gpus, cpus, signal_seconds, preflight_seconds = (int(values[name]) for name in _NUMBERS)
        return cls(
            gpus,
            max(cpus, 1),
            environment.get("GSPO_NETWORK") or None,
            signal_seconds,
            preflight_seconds,
            environment.get("GSPO_PREFLIGHT", "1") != "0",
            trainer=_environment(environment, "TRAINER"),
            server=_environment(environment, "SERVER"),
        )

    @property
    def ranks_use_this_python(self) -> bool:
        """Whether ranks can import exactly what this process can: they have no container and no Python of their own."""
        return not self.trainer.container and Path(self.trainer.python).absolute() == Path(sys.executable).absolute()

    def with_server_python(self, python: str | None) -> Site:
        """The site with the Python of `server.python` instead of GSPO_SERVER_PYTHON, if that key is set."""
        return self if python is None else replace(self, server=replace(self.server, python=python))

    def with_preflight_seconds(self, seconds: float | None) -> Site:
        """The site with `cluster.preflight_seconds` instead of GSPO_PREFLIGHT_SECONDS, if that key is set."""
        return self if seconds is None else replace(self, preflight_seconds=math.ceil(seconds))

    def network_variables(self) -> dict[str, str]:
        return {} if self.network is None else {"GLOO_SOCKET_IFNAME": self.network, "NCCL_SOCKET_IFNAME": self.network}


def _environment(environment: Mapping[str, str], kind: str) -> Environment:
    container = words_of(environment, f"GSPO_{kind}_CONTAINER")
    return Environment(tuple(container), environment.get(f"GSPO_{kind}_PYTHON") or sys.executable)


def words_of(environment: Mapping[str, str], name: str) -> list[str]:
    """The words of a variable, quoted as in a shell. Raises ConfigError for an open quote."""
    text = environment.get(name, "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"launch/slurm/site.sh: {name}={text}: {error}; put words with spaces in one pair of quotes"
        ) from None


@dataclass(frozen=True)
class JobSize:
    """The nodes of a job, and what runs on each.

    `servers_by_node[n]`: indices of the servers on the n-th rollout node, or on the n-th trainer node if
    `num_rollout_nodes` is 0; all empty in a run on recorded rollouts. A server over several nodes is listed on each of
    them; its nodes are neighbours. `trainer_gpus`, `rollout_gpus`: GPUs in use on the fullest node of each kind.
    `colocated`: servers use the ranks' GPUs. `rewards`: the servers of reward models, which use the GPUs of the same
    nodes after those of the policy's servers.
    """

    num_trainer_nodes: int
    num_rollout_nodes: int
    ranks_per_node: int
    servers_by_node: tuple[tuple[int, ...], ...]
    trainer_gpus: int
    rollout_gpus: int
    colocated: bool = False
    rewards: tuple[RewardPlace, ...] = ()

    @property
    def num_servers(self) -> int:
        return len(set().union(*self.servers_by_node))

    @property
    def most_servers(self) -> int:
        """The largest number of servers on one node, those of reward models included."""
        on_node = [len(servers) for servers in self.servers_by_node]
        for place in self.rewards:
            on_node[place.node] += 1
        return max(on_node)

    def nodes_of(self, server: int) -> tuple[list[int], int]:
        """Returns (indices of the server's nodes in `servers_by_node`, number of servers before it on each of them)."""
        nodes = [node for node, servers in enumerate(self.servers_by_node) if server in servers]
        return nodes, self.servers_by_node[nodes[0]].index(server)


def job_size(loaded: LoadedConfig, site: Site, command: str = "train") -> JobSize:
    """Decide which server runs where (`place_servers`). A run on recorded rollouts has neither servers nor nodes for
    them.

    Raises PlanError if a node has too few GPUs or servers are to outlive an attempt, JournalError if the record is too
    short.
    """
    refuse_in_job(loaded)
    config = loaded.config
    cluster, server = config.cluster, config.server
    replays = is_replay(loaded, command)
    num_servers, num_rollout_nodes = (0, 0) if replays else (server.num_servers, cluster.num_rollout_nodes)
    shared = num_rollout_nodes == 0
    if replays:  # recorded responses have their rewards
        config = config.model_copy(update={"reward": config.reward.model_copy(update={"model": ()})})
    num_ranks = cluster.ranks_per_node if shared else 0
    places = place_servers(config, num_servers, num_rollout_nodes or cluster.num_nodes, num_ranks)
    server_gpus = max(places.gpus)
    trainer_gpus = server_gpus if shared else cluster.ranks_per_node
    if site.gpus_per_node:
        _check_gpus(loaded, "cluster.ranks_per_node", trainer_gpus, site.gpus_per_node, "a trainer node", shared)
        if not shared:
            _check_gpus(loaded, "server.num_servers", server_gpus, site.gpus_per_node, "a rollout node", False)
    return JobSize(
        cluster.num_nodes,
        num_rollout_nodes,
        cluster.ranks_per_node,
        places.by_node,
        trainer_gpus,
        0 if shared else server_gpus,
        cluster.colocated,
        places.rewards,
    )


def _check_gpus(loaded: LoadedConfig, key: str, needed: int, there: int, node: str, shared: bool) -> None:
    if needed > there:
        server = loaded.config.server
        servers = f"server.num_servers {server.num_servers} x server.tensor {server.tensor}"
        servers += f" / server.num_nodes {server.num_nodes}" if server.num_nodes > 1 else ""
        rewards = [model for model, index in reward_servers(loaded.config.reward) if index == 0]
        servers += "".join(f" and of reward model {m.name}, {m.num_servers} x tensor {m.tensor}" for m in rewards)
        what = (
            f"its ranks and its share of {servers}"
            if shared
            else (f"its share of {servers}" if key.startswith("server") else "its ranks")
        )
        raise PlanError(
            f"{loaded.where(key)}: {key}: {node} needs {needed} GPUs for {what}, and has {there} (GSPO_GPUS_PER_NODE of"
            " the site). Lower these keys, or use more nodes (cluster.num_nodes, cluster.num_rollout_nodes)"
        )


def node_options(site: Site, number: int, tasks: int, fewer: int = 0) -> list[str]:
    """The options of sbatch for `number` nodes with so many `tasks` each; the job may start with `fewer` fewer."""
    gpus = [f"--gres=gpu:{site.gpus_per_node}"] if site.gpus_per_node else []
    if fewer:
        # With a number of tasks per node Slurm gives the fewest nodes, however many are free. A node's tasks count as
        # one here; the steps say how many they have.
        nodes = [f"--nodes={number - fewer}-{number}", f"--cpus-per-task={tasks * site.cpus_per_task}"]
    else:
        nodes = [f"--nodes={number}", f"--ntasks-per-node={tasks}", f"--cpus-per-task={site.cpus_per_task}"]
    return [*nodes, "--no-kill", *gpus]


def sbatch_options(
    run_name: str, size: JobSize, site: Site, rollout_options: Sequence[str] = (), fewest_trainers: int | None = None
) -> list[str]:
    """The options of sbatch for a job of this size. `fewest_trainers`: the job may start with fewer trainer nodes, at
    least so many. With `rollout_options`, the site's options for nodes that hold only
    servers, the job is heterogeneous: it has two components, and the options of the second follow a `:`.
    """
    # --export=ALL overrides the site's default: without this environment the job would submit another job.
    common = [f"--job-name={run_name}", f"--signal=B:USR1@{site.signal_seconds}", "--export=ALL"]
    trainer_tasks = size.ranks_per_node + (size.most_servers if size.num_rollout_nodes == 0 else 0)
    rollout_tasks = size.most_servers if size.num_rollout_nodes else 0

    fewer = 0 if fewest_trainers is None else size.num_trainer_nodes - fewest_trainers

    if rollout_options and size.num_rollout_nodes:
        trainers = [*common, *node_options(site, size.num_trainer_nodes, trainer_tasks, fewer)]
        return [*trainers, ":", *node_options(site, size.num_rollout_nodes, rollout_tasks), *rollout_options]
    every = size.num_trainer_nodes + size.num_rollout_nodes
    return [*common, *node_options(site, every, max(trainer_tasks, rollout_tasks), fewer)]


def with_signal_time(site: Site, figures: Estimate) -> Site:
    """`site` with its `signal_seconds`, which come from the plan if the site leaves them open.

    Raises PlanError if, by estimate, the ranks could not end their step and save in that time.
    """
    needed = signal_seconds(figures.stop_seconds)
    if site.signal_seconds and grace_seconds(site.signal_seconds) < figures.stop_seconds:
        raise PlanError(
            f"launch/slurm/site.sh: GSPO_SIGNAL_SECONDS={site.signal_seconds} is too short: ending a step and saving"
            f" take {figures.stop_seconds:.0f} s by estimate. Set at least {needed}, or leave it open (0)"
        )
    return replace(site, signal_seconds=site.signal_seconds or needed)


@printable_output()
def main(arguments: Sequence[str]) -> int:
    """Write assignments of GSPO_NUM_NODES, GSPO_RUN_FOLDER and the array GSPO_SIZE to standard output, and the plan to
    standard error.
    """
    try:
        site = Site.read(os.environ)
        loaded = load_config(arguments[0], arguments[1:], "train")
        plan = plan_run(loaded, "gpu" if site.gpus_per_node else "cpu")
        figures = estimate(plan, loaded.where)
        sys.stderr.write(render_report(plan, figures) + "\n")
        refuse_what_does_not_fit(plan, figures, loaded.where)
        site = with_signal_time(site, figures)
        size = job_size(loaded, site)
        fewest = None
        if shrinks(loaded.config) and loaded.config.train is not None:
            fewest = loaded.config.train.min_nodes
            for line in fewer_nodes_lines(loaded, plan.device):
                sys.stderr.write(f"nodes    {line}\n")
        options = [
            *words_of(os.environ, "GSPO_SBATCH"),
            *sbatch_options(loaded.config.run.name, size, site, words_of(os.environ, "GSPO_ROLLOUT_SBATCH"), fewest),
        ]
        for notice in check_before_job(loaded, "train", in_ranks_python=site.ranks_use_this_python):
            sys.stderr.write(f"notice   {notice}\n")
    except GspoMegaError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    run = loaded.config.run
    sys.stdout.write(f"GSPO_NUM_NODES={size.num_trainer_nodes + size.num_rollout_nodes}\n")
    sys.stdout.write(f"GSPO_RUN_FOLDER={shlex.quote(str((Path(run.dir) / run.name).absolute()))}\n")
    sys.stdout.write(f"GSPO_SIZE=({shlex.join(options)})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
