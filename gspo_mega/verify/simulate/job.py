"""The job that is simulated: sizes, rules and seconds, taken from a configuration and its plan.

Owns the translation. What the seconds follow from is the plan's: `timing.step_time`, `gpus.ASSUMPTIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from gspo_mega.base.errors import PlanError
from gspo_mega.config.episode_lengths import mean_tokens
from gspo_mega.config.on_publish import on_publish
from gspo_mega.config.schema import Config
from gspo_mega.models.sizes import ParameterCounts
from gspo_mega.plan.critic_needs import saved_bytes
from gspo_mega.plan.gpus import DEFAULT_GPU, GPUS, STORAGE_BYTES_PER_SECOND
from gspo_mega.plan.layout import Layout
from gspo_mega.plan.published_bytes import version_bytes
from gspo_mega.plan.server_places import reward_gpus
from gspo_mega.plan.shares import ModelShares
from gspo_mega.plan.timing import StepTime, save_seconds, step_time
from gspo_mega.rollout.arrival_order import Order
from gspo_mega.verify.simulate.lengths import Lengths, log_normal
from gspo_mega.verify.simulate.server_costs import ServerCost, server_cost

# Processes, imports, process groups, graphs: before anything is read. Not measured on a GPU.
START_SECONDS = 180.0


@dataclass(frozen=True)
class Job:
    """Everything that the simulation reads. Seconds are of one occurrence.

    `groups`, `group_size`: of a batch. `train_fixed`, `train_token`: a step's training is the first plus the second per
    token of the batch, prompts included. `save`: a checkpoint's pause. `restart`: from the failure of a trainer's node
    to training on. `server_restart`: from a server's loss to its first request. `trainer_nodes`: whose failure ends the
    attempt. `server_nodes`: that have servers alone, `servers_of` each. `shared`: servers and ranks share the cores of
    one machine, and each goes at half its speed while both have work.
    """

    groups: int
    group_size: int
    num_servers: int
    server: ServerCost
    lengths: Lengths
    prompt_tokens: int
    max_staleness: int
    order: Order
    on_publish: str
    train_fixed: float
    train_token: float
    publish: float
    save: float = 0.0
    save_every: int = 0
    restart: float = 0.0
    server_restart: float = 0.0
    trainer_nodes: int = 1
    server_nodes: int = 0
    num_gpus: int = 1
    nodes_per_server: int = 1
    shared: bool = False

    @property
    def sequences(self) -> int:
        return self.groups * self.group_size

    @property
    def servers_of(self) -> int:
        """Servers that have a part on the same node of their own."""
        return math.ceil(self.num_servers * self.nodes_per_server / self.server_nodes) if self.server_nodes else 0

    @property
    def held_tokens(self) -> float:
        """Tokens that a running request holds on average: its prompt, and half of its response, where a long response
        counts for as long as it runs.
        """
        mean, square = self.lengths.moments()
        return self.prompt_tokens + square / (2 * mean)

    @property
    def slots(self) -> int:
        return self.server.slots(self.held_tokens)

    def train_seconds(self, tokens: float) -> float:
        return self.train_fixed + self.train_token * tokens

    @property
    def mean_train(self) -> float:
        mean, _ = self.lengths.moments()
        return self.train_seconds(self.sequences * (self.prompt_tokens + mean))

    def scaled(self, decode: float = 1.0, train: float = 1.0) -> Job:
        """With the servers' seconds and the trainer's seconds multiplied."""
        return replace(
            self,
            server=self.server.scaled(decode),
            train_fixed=self.train_fixed * train,
            train_token=self.train_token * train,
        )


def default_lengths(config: Config) -> Lengths:
    """A log-normal with the mean that the plan assumes."""
    _, response = mean_tokens(config)
    most = config.rollout.max_new_tokens
    if response >= most:  # several turns: what they sample together
        most = 2 * response
    return log_normal(float(max(1, response)), 0.7, most) if most > 1 else log_normal(1.0, 0.7, 2)


def job_of(
    config: Config,
    shares: ModelShares,
    layout: Layout,
    counts: ParameterCounts,
    lengths: Lengths | None = None,
    server_nodes: int | None = None,
) -> Job:
    """The job that the configuration describes. `server_nodes`: machines that have servers and no ranks, where the
    configuration does not say it.
    """
    gpu, spec = GPUS[config.cluster.gpu or DEFAULT_GPU], shares.spec
    time = step_time(config, layout, shares, gpu, counts.total)
    fixed, token = _training(config, time)
    weights = version_bytes(config, spec, counts.total) / STORAGE_BYTES_PER_SECOND
    saved = save_seconds(saved_bytes(config, spec, counts.total))
    cluster = config.cluster
    return Job(
        groups=config.batch.prompts_per_step,
        group_size=config.batch.group_size,
        num_servers=config.server.num_servers,
        server=server_cost(config, spec, gpu, counts),
        lengths=lengths or default_lengths(config),
        prompt_tokens=mean_tokens(config)[0],
        max_staleness=config.rollout.max_staleness,
        order=config.rollout.order,
        on_publish=on_publish(config.rollout),
        train_fixed=fixed,
        train_token=token,
        publish=time.publish,
        save=0.0 if config.checkpoint.asynchronous else saved,
        save_every=config.checkpoint.every_steps,
        restart=START_SECONDS + saved + weights,
        server_restart=START_SECONDS + weights,
        trainer_nodes=cluster.num_nodes,
        server_nodes=cluster.num_rollout_nodes or server_nodes or 0,
        num_gpus=cluster.num_nodes * cluster.ranks_per_node
        + config.server.num_servers * config.server.tensor
        + reward_gpus(config),
        nodes_per_server=config.server.num_nodes,
    )


def _training(config: Config, time: StepTime) -> tuple[float, float]:
    """(seconds of a step whatever its tokens are, seconds per token)."""
    parts = time.train.training
    fixed = parts.get("gradients", 0.0) + parts.get("optimizer", 0.0)
    tokens = config.batch.prompts_per_step * config.batch.group_size * sum(mean_tokens(config))
    return fixed, (time.train.total - fixed) / tokens


def check_simulated(config: Config, where: Callable[[str], str]) -> None:
    """Raises PlanError where the configuration is nothing that can be simulated."""
    if config.train is None:
        raise PlanError(
            f"{where('train')}: train: absent; the simulation is of a training run, so give train.num_steps"
        )
    if config.train.from_rollouts is not None or config.train.rollouts_only:
        key = "rollouts_only" if config.train.rollouts_only else "from_rollouts"
        raise PlanError(f"{where('train.' + key)}: train.{key}: the simulation is of a run that samples and trains")
