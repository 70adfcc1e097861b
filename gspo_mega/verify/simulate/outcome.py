"""The results of a simulation: the run, the best division of its nodes, and the best save interval. `report.py` shows
them.

- Fit: the factors by which a measured run's servers and trainer are slower than the cost model.
- Save interval: a long run at mean step times, with many failures at exponential gaps, the same failures for every
  interval tried. Young (1974) and Daly (2006) count all lost work at its full cost. Here lost steps are trained again
  on recorded rollouts, which takes less time, so the best interval is longer than theirs.
- Division of nodes: every division that the plan accepts is simulated for a few steps. The parallel sizes stay those of
  the configuration; data parallelism and the number of servers follow from the nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gspo_mega.base.errors import ConfigError, PlanError
from gspo_mega.base.near_paths import did_you_mean
from gspo_mega.base.untrusted import MOST_BYTES, parse_json, read_text
from gspo_mega.config.schema import Config
from gspo_mega.plan.estimate import Estimate
from gspo_mega.plan.layout import Layout
from gspo_mega.plan.memory import gpu_bytes, trainer_memory
from gspo_mega.plan.resolve import Plan, layout_of
from gspo_mega.plan.servers import place_servers, reward_gpus, reward_servers
from gspo_mega.plan.state import ModelShares
from gspo_mega.plan.validate import validate_layout
from gspo_mega.verify.simulate.events import Record, RunEvents
from gspo_mega.verify.simulate.job import Job, Lengths, job_of

# The first steps of a run include work that happens only once.
_SKIPPED_STEPS = 2
_SIMULATED = 30


@dataclass(frozen=True)
class MeasuredStep:
    """Mean seconds per step of a run that does not sample ahead. `shared_fraction`: the share of its rows' positions
    that it did not compute (`batch.share_prefixes`).
    """

    rollout: float
    training: float
    publish: float
    shared_fraction: float = 0.0


@dataclass(frozen=True)
class Fit:
    """Factors by which the cost model's seconds are multiplied."""

    decode: float
    train: float


def read_measured(path: Path) -> MeasuredStep:
    """Return the mean step of a run, from its folder or its metrics.jsonl. Raises ConfigError."""
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"--fit {path}: no such file; valid: the folder of a run, or its metrics.jsonl{did_you_mean(path)}"
        )
    rows = []
    for number, line in enumerate(read_text(file, MOST_BYTES).splitlines(), 1):
        try:
            row = parse_json(line)
        except ValueError:
            raise ConfigError(f"{file}:{number}: not a line of metrics.jsonl") from None
        if isinstance(row, dict) and "time/step_seconds" in row and "time/rollout_seconds" in row:
            rows.append(row)
    rows = rows[_SKIPPED_STEPS:] or rows
    if not rows:
        raise ConfigError(f"--fit {file}: no step with time/step_seconds and time/rollout_seconds")
    if max(row.get("rollout/staleness_max", 0) for row in rows) > 0:
        raise ConfigError(
            f"--fit {file}: the run sampled ahead, so that its rollouts' seconds are not measured; valid: a run with"
            " rollout.max_staleness: 0"
        )

    def mean(name: str) -> float:
        return sum(float(row.get(name, 0.0)) for row in rows) / len(rows)

    rollout, publish = mean("time/rollout_seconds"), mean("time/publish_seconds")
    # Saves and evaluations do not count as training.
    rest = mean("time/checkpoint_seconds") + mean("time/eval_seconds")
    training = max(1e-9, mean("time/step_seconds") - rollout - publish - rest)
    return MeasuredStep(rollout, training, publish, mean("speed/shared_prefix_fraction"))


def fit(job: Job, measured: MeasuredStep, seed: int = 1) -> tuple[Job, Fit]:
    """Return the job with its servers and its trainer as fast as measured, and the factors. The trainer is as fast per
    position that it computes: the job may share more or fewer than the run that was measured.
    """
    shared_tokens = measured.shared_fraction * job.mean_tokens
    alone = replace(job, max_staleness=0, publish=0.0, save_every=0, shared=False, shared_tokens=shared_tokens)
    record = RunEvents(alone, seed).run(num_steps=_SIMULATED)
    found = Fit(
        decode=measured.rollout * _SIMULATED / record.waiting, train=measured.training * _SIMULATED / record.training
    )
    return replace(job.scaled(found.decode, found.train), publish=measured.publish), found


_FAILURES = 4000
_TRIED = 25


@dataclass(frozen=True)
class Costs:
    """Seconds of a step, of the same step if it is trained again, of a save, from a failure until training continues,
    and between failures.
    """

    step: float
    redo: float
    save: float
    restart: float
    mtbf: float


@dataclass(frozen=True)
class Intervals:
    """Save intervals. `shares`: from the number of steps between saves to the share of time spent on steps that are
    trained for the first time. `best`: the number of steps with the largest share. `young`, `daly`: seconds of work
    between saves.
    """

    shares: dict[int, float]
    best: int
    young: float
    daly: float


def young_seconds(save: float, mtbf: float) -> float:
    """Return the seconds of work between two saves that lose the least time, to first order (Young 1974)."""
    return math.sqrt(2 * save * mtbf)


def daly_seconds(save: float, mtbf: float) -> float:
    """Return the same as `young_seconds`, to higher order (Daly 2006, equation 37)."""
    if save >= 2 * mtbf:
        return mtbf
    part = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - save


def effective_share(costs: Costs, every: int, gaps: list[float]) -> float:
    """Return the share of useful time with a save every `every` steps. `gaps`: seconds between successive failures."""
    step, redo, save = costs.step, costs.redo, costs.save
    cycle, done, behind, elapsed = every * step + save, 0, 0, 0.0
    for gap in gaps:  # `behind`: steps trained since the last save
        elapsed += gap
        left = gap - costs.restart - behind * redo
        if left < 0:
            continue
        first = (every - behind) * step + save
        if left < first:
            more = min(int(left / step), every - behind)
            behind += more
        else:
            cycles, rest = divmod(left - first, cycle)
            last = min(int(rest / step), every)
            more = every - behind + int(cycles) * every + last
            behind = last
        done += more
    return done * step / elapsed


def best_interval(costs: Costs, seed: int = 1) -> Intervals | None:
    """Return the save intervals; None if nothing fails (saves only cost time) or saving takes no time (save every
    step).
    """
    if not math.isfinite(costs.mtbf) or costs.save <= 0:
        return None
    rng = np.random.default_rng([seed, 2])
    gaps = rng.exponential(costs.mtbf, _FAILURES).tolist()
    middle = daly_seconds(costs.save, costs.mtbf) / costs.step
    tried = sorted({max(1, round(middle * 10 ** (place / 12 - 1))) for place in range(_TRIED)})
    shares = {every: effective_share(costs, every, gaps) for every in tried}
    best = max(tried, key=lambda every: shares[every])
    return Intervals(shares, best, young_seconds(costs.save, costs.mtbf), daly_seconds(costs.save, costs.mtbf))


_MOST_SIMULATED = 12


@dataclass(frozen=True)
class Split:
    """A division of the nodes that can run, as a configuration."""

    config: Config
    layout: Layout

    @property
    def trainer_nodes(self) -> int:
        return self.config.cluster.num_nodes

    @property
    def server_nodes(self) -> int:
        return self.config.cluster.num_rollout_nodes


def splits(plan: Plan, shares: ModelShares, num_nodes: int, where: Callable[[str], str]) -> list[Split]:
    """Return the divisions of `num_nodes` nodes that the plan accepts and whose trainer fits in memory by the estimate,
    those with the fewest trainer nodes first; if there are many, an even selection. Raises PlanError if there is none.
    """
    config, spec, limit = plan.config, plan.spec, gpu_bytes(plan.config.cluster)
    found: list[Split] = []
    reasons: dict[str, str] = {}
    gpus, tensor = config.cluster.gpus_per_node or config.cluster.ranks_per_node, config.server.tensor
    for trainer in range(1, num_nodes):
        groups, over = divmod(num_nodes - trainer, config.server.num_nodes)
        servers = groups * (gpus * config.server.num_nodes // tensor)
        # As many servers as leave room for those of reward models.
        while servers >= 1 and max(place_servers(config, servers, num_nodes - trainer).gpus) > gpus:
            servers -= 1
        if servers < 1 or over:
            scored = f" and {reward_gpus(config.reward)} GPUs of reward models" if reward_gpus(config.reward) else ""
            reasons["server.tensor"] = f"{num_nodes - trainer} nodes of {gpus} GPUs for servers of {tensor}{scored}"
            continue
        scorers = len(reward_servers(config.reward))
        used = min(num_nodes - trainer, servers * config.server.num_nodes + scorers)
        cluster = config.cluster.model_copy(update={"num_nodes": trainer, "num_rollout_nodes": used})
        server = config.server.model_copy(update={"num_servers": servers})
        candidate = config.model_copy(update={"cluster": cluster, "server": server})
        if problems := validate_layout(candidate, spec, "gpu"):
            reasons[problems[0].key] = f"{trainer} nodes: {problems[0].text}"
            continue
        layout = layout_of(candidate, spec, plan.layout.attention_crossover_tokens)
        if limit is not None and (memory := trainer_memory(candidate, layout, shares)).peak > limit:
            reasons["memory"] = f"{trainer} nodes need {memory.peak / 2**30:.0f} GiB per GPU of {limit / 2**30:.0f} GiB"
            continue
        found.append(Split(candidate, layout))
    if not found:
        told = "; ".join(f"{key}: {reason}" for key, reason in reasons.items()) or "one node cannot be divided"
        raise PlanError(
            f"{where('cluster.num_nodes')}: {num_nodes} nodes cannot be divided between trainer and servers: {told}"
        )
    if len(found) <= _MOST_SIMULATED:
        return found
    last = len(found) - 1
    return [found[round(place * last / (_MOST_SIMULATED - 1))] for place in range(_MOST_SIMULATED)]


_SPLIT_STEPS, _SKIPPED = 24, 4
_DAY = 86_400.0


@dataclass(frozen=True)
class SimulationRequest:
    """What the command line asks for. `num_nodes`: None for the configuration's. `mtbf_hours`: mean time between
    failures of one node; infinite for no failures.
    """

    days: float
    mtbf_hours: float
    num_nodes: int | None = None
    lengths: Lengths | None = None
    measured: MeasuredStep | None = None
    shared: bool = False
    seed: int = 1


@dataclass(frozen=True)
class SplitRow:
    """A division of the nodes: mean seconds per step, tokens per second per GPU, and the idle shares of both sides."""

    trainer_nodes: int
    server_nodes: int
    num_servers: int
    step: float
    rate: float
    trainer_idle: float
    servers_idle: float


@dataclass(frozen=True)
class SimulationResult:
    """`plan`: of the run that was simulated. `rows`: divisions of the nodes, fastest first; empty if servers have no
    nodes of their own and none were asked for. `fitted`: None if the speeds are the cost model's.
    """

    plan: Plan
    job: Job
    asked: SimulationRequest
    record: Record
    rows: tuple[SplitRow, ...]
    intervals: Intervals | None
    fitted: Fit | None

    @property
    def mean_step(self) -> float:
        return float(np.mean(self.record.steps))

    @property
    def mtbf_seconds(self) -> float:
        """Mean time between failures that end the attempt, over all trainer nodes."""
        return self.asked.mtbf_hours * 3600 / max(1, self.job.trainer_nodes)

    @property
    def effective(self) -> float:
        """Share of the time spent on steps that are trained for the first time."""
        return sum(self.record.steps) / self.record.elapsed

    @property
    def servers_idle(self) -> float:
        return 1 - self.record.servers_busy / (self.job.num_servers * self.record.elapsed)

    @property
    def staleness(self) -> list[float]:
        """Share of the trained tokens, indexed by how many versions they lagged behind."""
        return (self.record.staleness / max(1.0, self.record.staleness.sum())).tolist()

    @property
    def rate(self) -> float:
        """Tokens trained per second per GPU, prompts included, over the whole time."""
        return self.record.tokens / self.record.elapsed / self.job.num_gpus


def simulate(plan: Plan, figures: Estimate, asked: SimulationRequest, where: Callable[[str], str]) -> SimulationResult:
    """Simulate the planned run, and the divisions of its nodes. Raises PlanError if the nodes cannot be divided, or if
    a server's cache cannot hold the longest response.
    """
    config, shares, counts = plan.config, ModelShares(plan.spec), figures.counts
    nodes = config.cluster.num_nodes + config.cluster.num_rollout_nodes
    own = job_of(config, shares, plan.layout, counts, asked.lengths, figures.servers.nodes)
    own, fitted = replace(own, shared=asked.shared), None
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if own.server.cache_tokens < longest:
        raise PlanError(
            f"{where('server.tensor')}: server.tensor: beside the weights on {config.server.tensor} GPUs the cache of a"
            f" server holds {own.server.cache_tokens:.0f} tokens, and one response may take {longest}; use more GPUs"
            " per server, GPUs with more memory, server.quantization or a larger server.memory_fraction"
        )
    if asked.measured is not None:
        own, fitted = fit(own, asked.measured, asked.seed)
    rows = []
    if asked.num_nodes is not None or config.cluster.num_rollout_nodes:
        jobs: dict[int, tuple[Split, Job]] = {}
        for one in splits(plan, shares, asked.num_nodes or nodes, where):
            divided = job_of(one.config, shares, one.layout, counts, asked.lengths)
            if fitted is not None:
                divided = divided.scaled(fitted.decode, fitted.train)
            jobs[one.trainer_nodes] = one, divided
            rows.append(_row(one, divided, asked.seed))
        rows.sort(key=lambda row: row.step)
        if asked.num_nodes is not None and asked.num_nodes != nodes:
            best, own = jobs[rows[0].trainer_nodes]
            plan = replace(plan, config=best.config, layout=best.layout)
    record = RunEvents(own, asked.seed, asked.mtbf_hours * 3600).run(seconds=asked.days * _DAY)
    mtbf = asked.mtbf_hours * 3600 / max(1, own.trainer_nodes)
    costs = Costs(float(np.mean(record.steps)), float(np.mean(record.redo)), own.save, own.restart, mtbf)
    return SimulationResult(plan, own, asked, record, tuple(rows), best_interval(costs, asked.seed), fitted)


def _row(split: Split, job: Job, seed: int) -> SplitRow:
    record = RunEvents(replace(job, save_every=0), seed).run(num_steps=_SPLIT_STEPS)
    steps, waits = record.steps[_SKIPPED:], record.waits[_SKIPPED:]
    step = float(np.mean(steps))
    return SplitRow(
        trainer_nodes=split.trainer_nodes,
        server_nodes=split.server_nodes,
        num_servers=job.num_servers,
        step=step,
        rate=record.tokens / _SPLIT_STEPS / step / job.num_gpus,
        trainer_idle=float(np.sum(waits) / np.sum(steps)),
        servers_idle=1 - record.servers_busy / (job.num_servers * record.elapsed),
    )
