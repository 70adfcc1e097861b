"""The job that is simulated: sizes, rules and seconds, taken from a configuration and its plan.

The seconds are the plan's (`timing.step_time`, `gpus.ASSUMPTIONS`). Response lengths are constant, log-normal, or read
from a journal or file. They are drawn independently, although real responses to one prompt have similar lengths.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np

from gspo_mega.base.errors import ConfigError, JournalError, PlanError
from gspo_mega.base.near_paths import did_you_mean
from gspo_mega.base.untrusted import MOST_BYTES, read_text
from gspo_mega.config.derived import mean_tokens, on_publish
from gspo_mega.config.schema import Config, Train
from gspo_mega.data.journal.journal import Journal
from gspo_mega.models.tensors import ParameterCounts
from gspo_mega.plan.gpus import DEFAULT_GPU, GPUS, STORAGE_BYTES_PER_SECOND
from gspo_mega.plan.layout import Layout
from gspo_mega.plan.memory import saved_bytes
from gspo_mega.plan.servers import reward_gpus, version_bytes
from gspo_mega.plan.sharing import step_positions
from gspo_mega.plan.state import ModelShares
from gspo_mega.plan.timing import StepTime, save_seconds, step_time
from gspo_mega.rollout.arrival_order import Order
from gspo_mega.verify.simulate.servers import Array, ServerCost, server_cost

DEFAULT_SIGMA = 0.7
_FORMS = "constant:TOKENS, lognormal:MEAN, lognormal:MEAN:SIGMA, a run's folder, or a file with one length per line"
_MOST_STEPS_READ = 20


@dataclass(frozen=True)
class Lengths:
    """A distribution of response lengths. `drawn`: the possible lengths, equally likely; None for a log-normal with
    `mu`, `sigma`. Responses are cut at `most` tokens.
    """

    described: str
    most: int
    mu: float = 0.0
    sigma: float = 0.0
    drawn: Array | None = None

    def sample(self, rng: np.random.Generator, number: int) -> Array:
        """Draw `number` lengths: whole tokens, at least 1."""
        if self.drawn is not None:
            return rng.choice(self.drawn, number)
        return np.clip(np.rint(np.exp(rng.normal(self.mu, self.sigma, number))), 1, self.most)

    def moments(self) -> tuple[float, float]:
        """Return (mean, mean square)."""
        if self.drawn is not None:
            return float(self.drawn.mean()), float(np.square(self.drawn).mean())
        # Integrate over the midpoints of 2000 equally likely intervals.
        normal = NormalDist(self.mu, self.sigma)
        values = np.clip([math.exp(normal.inv_cdf((i + 0.5) / 2000)) for i in range(2000)], 1, self.most)
        return float(values.mean()), float(np.square(values).mean())


def constant(tokens: int) -> Lengths:
    return Lengths(f"constant: {tokens} tokens", tokens, drawn=np.array([float(tokens)]))


def of_values(values: Array, described: str) -> Lengths:
    return Lengths(described, int(values.max()), drawn=np.asarray(values, float))


def log_normal(mean: float, sigma: float, most: int) -> Lengths:
    """Return a log-normal that is cut at `most` tokens and has this `mean` after the cut. Raises ConfigError."""
    if not 1 <= mean < most:
        raise ConfigError(
            f"--length-distribution: a mean of {mean:g} tokens with at most {most}; valid: 1 to {most - 1}"
        )
    low, high = 0.0, math.log(most) + 10 * sigma + 1
    described = f"log-normal: mean {mean:g} tokens, sigma {sigma:g}, at most {most}"
    for _ in range(60):
        middle = (low + high) / 2
        reached = Lengths(described, most, middle, sigma).moments()[0]
        low, high = (middle, high) if reached < mean else (low, middle)
    return Lengths(described, most, (low + high) / 2, sigma)


def read_lengths(text: str, most: int) -> Lengths:
    """Return the distribution that `--length-distribution` names. Raises ConfigError."""
    place = f"--length-distribution {text}"
    kind, _, rest = text.partition(":")
    if kind in ("constant", "lognormal"):
        try:
            numbers = [float(part) for part in rest.split(":")]
        except ValueError:
            raise ConfigError(f"{place}: not numbers; valid: {_FORMS}") from None
        if kind == "constant" and len(numbers) == 1 and numbers[0].is_integer() and 1 <= numbers[0] <= most:
            return constant(int(numbers[0]))
        if kind == "lognormal" and len(numbers) in (1, 2) and all(number > 0 for number in numbers):
            return log_normal(numbers[0], numbers[1] if len(numbers) == 2 else DEFAULT_SIGMA, most)
        raise ConfigError(f"{place}: not a length from 1 to rollout.max_new_tokens ({most}); valid: {_FORMS}")
    path = Path(text)
    if path.is_dir():
        return _of_journal(path, place)
    if not path.is_file():
        raise ConfigError(f"{place}: no such file or folder{did_you_mean(path)}; valid: {_FORMS}")
    return _of_file(path, place)


def _of_file(path: Path, place: str) -> Lengths:
    values = []
    try:
        lines = read_text(path, MOST_BYTES).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not line.strip().isdigit() or int(line) < 1:
            raise ConfigError(
                f"{path}:{number}: {line.strip()[:40]!r} is not a length; one whole number from 1 per line"
            )
        values.append(float(line))
    if not values:
        raise ConfigError(f"{place}: the file is empty; one length per line")
    return of_values(np.array(values), f"{len(values)} lengths of {path}")


def _of_journal(folder: Path, place: str) -> Lengths:
    journal = Journal(folder / "journal" if (folder / "journal").is_dir() else folder)
    steps, values = journal.steps(), []
    if not steps:
        raise ConfigError(f"{place}: the folder holds no journal; a run's folder, or its journal, has step_* files")
    read = steps[-_MOST_STEPS_READ:]
    for step in read:
        try:
            record = journal.read_alone(step)
        except JournalError as error:
            raise ConfigError(f"{place}: {error}") from None
        for group in record.groups.values() if record is not None else ():
            values += [episode.num_sampled_tokens for episode in group.episodes]
    if not values:
        raise ConfigError(f"{place}: the journal has no complete episode")
    return of_values(np.array(values, float), f"{len(values)} responses of steps {read[0]} to {read[-1]} of {folder}")


# To start processes, imports, process groups and CUDA graphs, before anything is read. Not measured on a GPU.
START_SECONDS = 180.0


@dataclass(frozen=True)
class Job:
    """Everything that the simulation reads. Durations are seconds per occurrence.

    `groups`, `group_size`: groups per batch, responses per group. Training a step takes `train_fixed`, plus
    `train_token` per token of the batch that is computed: all but `shared_tokens`, the tokens of prompts that packs do
    not compute again (`batch.share_prefixes`). `save`: pause for a checkpoint. `restart`: from the failure
    of a trainer node until training continues. `server_restart`: from the loss of a server to its first request.
    `trainer_nodes`: nodes whose failure ends the attempt. `server_nodes`: nodes with only servers, `servers_of` each.
    `shared`: servers and ranks share the cores of one machine, and each runs at half speed while both have work.
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
    shared_tokens: float = 0.0
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
        """Number of servers that have a part on one server node."""
        return math.ceil(self.num_servers * self.nodes_per_server / self.server_nodes) if self.server_nodes else 0

    @property
    def held_tokens(self) -> float:
        """Average number of tokens that a running request holds: its prompt and half of its response, each response
        weighted by how long it runs.
        """
        mean, square = self.lengths.moments()
        return self.prompt_tokens + square / (2 * mean)

    @property
    def slots(self) -> int:
        return self.server.slots(self.held_tokens)

    def train_seconds(self, tokens: float) -> float:
        """Return the seconds to train a batch of `tokens`, prompts of all rows included."""
        return self.train_fixed + self.train_token * max(0.0, tokens - self.shared_tokens)

    @property
    def mean_train(self) -> float:
        return self.train_seconds(self.mean_tokens)

    @property
    def mean_tokens(self) -> float:
        """Mean number of tokens of a batch's rows."""
        mean, _ = self.lengths.moments()
        return self.sequences * (self.prompt_tokens + mean)

    def scaled(self, decode: float = 1.0, train: float = 1.0) -> Job:
        """Return the job with the servers' seconds multiplied by `decode` and the trainer's by `train`."""
        return replace(
            self,
            server=self.server.scaled(decode),
            train_fixed=self.train_fixed * train,
            train_token=self.train_token * train,
        )


def default_lengths(response: int, max_new_tokens: int) -> Lengths:
    """Return a log-normal with the mean length `response` that the plan assumes, in tokens."""
    most = max_new_tokens
    if response >= most:  # several turns: the sum over all of them
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
    """Return the job that the configuration describes. `server_nodes`: number of machines with servers and no ranks,
    if the configuration does not give it.
    """
    gpu, spec = GPUS[config.cluster.gpu or DEFAULT_GPU], shares.spec
    time = step_time(config, layout, shares, gpu, counts.total)
    prompt, response = mean_tokens(config)
    step = step_positions(config, layout)
    fixed, token = _training(time, step.computed.tokens)
    weights = version_bytes(config, spec, counts.total) / STORAGE_BYTES_PER_SECOND
    saved = save_seconds(saved_bytes(config, spec, counts.total))
    cluster = config.cluster
    return Job(
        groups=config.batch.prompts_per_step,
        group_size=config.batch.group_size,
        num_servers=config.server.num_servers,
        server=server_cost(config, spec, gpu, counts),
        lengths=lengths or default_lengths(response, config.rollout.max_new_tokens),
        prompt_tokens=prompt,
        max_staleness=config.rollout.max_staleness,
        order=config.rollout.order,
        on_publish=on_publish(config.rollout),
        train_fixed=fixed,
        train_token=token,
        shared_tokens=step.rows.tokens - step.computed.tokens,
        publish=time.publish,
        save=0.0 if config.checkpoint.asynchronous else saved,
        save_every=config.checkpoint.every_steps,
        restart=START_SECONDS + saved + weights,
        server_restart=START_SECONDS + weights,
        trainer_nodes=cluster.num_nodes,
        server_nodes=cluster.num_rollout_nodes or server_nodes or 0,
        num_gpus=(max if cluster.colocated else operator.add)(
            cluster.num_nodes * cluster.ranks_per_node, config.server.num_servers * config.server.tensor
        )
        + reward_gpus(config.reward),
        nodes_per_server=config.server.num_nodes,
    )


def _training(time: StepTime, tokens: int) -> tuple[float, float]:
    """Return (seconds of a step that do not depend on its tokens, seconds per token). `tokens`: those that a step of
    mean lengths computes.
    """
    parts = time.train.training
    fixed = parts.get("gradients", 0.0) + parts.get("optimizer", 0.0)
    return fixed, (time.train.total - fixed) / tokens


def check_simulated(train: Train | None, where: Callable[[str], str]) -> None:
    """Raise PlanError if the run does not both sample and train, and so cannot be simulated."""
    if train is None:
        raise PlanError(
            f"{where('train')}: train: absent; the simulation is of a training run, so give train.num_steps"
        )
    if train.from_rollouts is not None or train.rollouts_only:
        key = "rollouts_only" if train.rollouts_only else "from_rollouts"
        raise PlanError(f"{where('train.' + key)}: train.{key}: the simulation is of a run that samples and trains")
