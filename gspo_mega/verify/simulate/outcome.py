"""What a simulation found: the run, the division of its nodes, the interval of its saves.

Owns putting these together from a configuration; `sim_report.py` and `sim_chart.py` show them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from gspo_mega.base.errors import PlanError
from gspo_mega.plan.estimate import Estimate
from gspo_mega.plan.resolve import Plan
from gspo_mega.plan.shares import ModelShares
from gspo_mega.verify.simulate.checkpoint_interval import Costs, Intervals, best_interval
from gspo_mega.verify.simulate.fit_rates import Fit, Measured, fit
from gspo_mega.verify.simulate.job import Job, job_of
from gspo_mega.verify.simulate.lengths import Lengths
from gspo_mega.verify.simulate.node_split import Split, splits
from gspo_mega.verify.simulate.run_events import Record, RunEvents

_SPLIT_STEPS, _SKIPPED = 24, 4
_DAY = 86_400.0


@dataclass(frozen=True)
class Asked:
    """What the command line asks for. `num_nodes`: None for the configuration's. `mtbf_hours`: of one node; infinite
    for no failures.
    """

    days: float
    mtbf_hours: float
    num_nodes: int | None = None
    lengths: Lengths | None = None
    measured: Measured | None = None
    shared: bool = False
    seed: int = 1


@dataclass(frozen=True)
class SplitRow:
    """A division of the nodes: mean seconds of a step, tokens per second and GPU, the idle shares of both sides."""

    trainer_nodes: int
    server_nodes: int
    num_servers: int
    step: float
    rate: float
    trainer_idle: float
    servers_idle: float


@dataclass(frozen=True)
class Outcome:
    """`plan`: of the run that was simulated. `rows`: divisions, fastest first; empty where servers have no nodes of
    their own. `interval_every`: of the run's saves. `fitted`: None where the rates are the cost model's.
    """

    plan: Plan
    job: Job
    asked: Asked
    record: Record
    rows: tuple[SplitRow, ...]
    intervals: Intervals | None
    fitted: Fit | None

    @property
    def mean_step(self) -> float:
        return float(np.mean(self.record.steps))

    @property
    def mtbf_seconds(self) -> float:
        """Of the nodes whose failure ends the attempt."""
        return self.asked.mtbf_hours * 3600 / max(1, self.job.trainer_nodes)

    @property
    def effective(self) -> float:
        """Share of the time in steps that were trained for the first time."""
        return sum(self.record.steps) / self.record.elapsed

    @property
    def servers_idle(self) -> float:
        return 1 - self.record.servers_busy / (self.job.num_servers * self.record.elapsed)

    @property
    def staleness(self) -> list[float]:
        """Share of the trained tokens by versions that they lagged behind."""
        return (self.record.staleness / max(1.0, self.record.staleness.sum())).tolist()

    @property
    def rate(self) -> float:
        """Tokens trained per second and GPU, prompts included, over the whole time."""
        return self.record.tokens / self.record.elapsed / self.job.num_gpus


def simulate(plan: Plan, figures: Estimate, asked: Asked, where: Callable[[str], str]) -> Outcome:
    """Raises PlanError where the nodes cannot be divided."""
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
    return Outcome(plan, own, asked, record, tuple(rows), best_interval(costs, asked.seed), fitted)


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
