"""What one case computes on the recorded batch: log-probs, loss, gradient, optimizer steps, weights after them.

Runs on every rank of the case. Whole tensors are streamed one at a time, so that a large model's gradient is never held
twice; where they go, to disk as the reference or into a comparison, is the caller's `take`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from gspo_mega.algorithm.columns import LOG_S
from gspo_mega.algorithm.context_positions import local_rows
from gspo_mega.algorithm.diagnostics import POLICY_SUMS
from gspo_mega.algorithm.objective import ObjectiveSettings
from gspo_mega.base.records import MicroBatch
from gspo_mega.base.rollout_batch import RolloutBatch
from gspo_mega.checkpoint.adapter_tensors import AdapterTensors
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.config.schema import Config
from gspo_mega.data.expert_routes import ExpertRoutes
from gspo_mega.data.packing import response_values
from gspo_mega.engine.critic import CriticEngine
from gspo_mega.engine.megatron_optimizer import StepResult
from gspo_mega.engine.pass_report import PassReport
from gspo_mega.engine.policy import OldState, PolicyEngine
from gspo_mega.plan.layout import Layout
from gspo_mega.train.assemble import MiniBatch, assemble, plan_batch
from gspo_mega.verify.certify.batch import set_old_log_probs
from gspo_mega.verify.certify.gradients import complete_gradients
from gspo_mega.verify.certify.packings import packing
from gspo_mega.verify.certify.route_comparison import gather_routes
from gspo_mega.verify.certify.steps import Steps, StepWatch

Tensors = Iterator[tuple[str, torch.Tensor]]
Take = Callable[[Tensors], None]


@dataclass
class Numbers:
    """The same on every rank. `log_probs` [sum R] float64 nats, 0 at masked tokens; `log_s` [n] float64 by trajectory;
    `sums`: POLICY_SUMS of the mini-batch by name; `grad_norms` one per optimizer step; `routes`: of `gather_routes`."""

    log_probs: np.ndarray
    log_s: np.ndarray
    sums: dict[str, float]
    grad_norms: list[float]
    routes: np.ndarray | None


@dataclass
class Edges:
    """Decisions where rounding decides: `log_s` [n] float64, each on a clip edge of its sequence; `routes` of tied
    routers.
    """

    log_s: np.ndarray
    routes: np.ndarray | None


class Measurement:
    """One engine on the recorded batch in one packing. All methods are collective over all ranks."""

    def __init__(self, engine: PolicyEngine, config: Config, layout: Layout, batch: RolloutBatch, kind: str) -> None:
        self.engine, self.config, self.layout, self.batch, self.kind = engine, config, layout, batch, kind
        # Per micro-batch of `shard`, on last-stage ranks: a critic's advantages of tokens.
        self.token_advantages: list[np.ndarray | None] | None = None

    def shard(self) -> MiniBatch:
        """This rank's micro-batches of the one mini-batch, with the old log-probs that the batch holds now."""
        trajectories = self.batch.trajectories
        planned = plan_batch(self.batch, self.config, self.layout, 0)
        plans = packing(self.kind, len(trajectories), self.config.run.seed, self.layout, planned)
        mine = assemble(self.batch, self.config, self.layout, 0, plans)[self.engine.groups.data.rank][0]
        replays = self.config.moe.routing_replay == "R3"
        if (routes := ExpertRoutes.of(trajectories, self.engine.spec, replays)) is not None:
            routes.attach(mine.micro_batches)
        if self.token_advantages is not None:
            for pack, own in zip(mine.micro_batches, self.token_advantages, strict=True):
                pack.token_advantages = own
        return mine

    def log_probs(self) -> np.ndarray:
        """[sum R] float64: of every response token of the batch, 0 where it is masked."""
        mine = self.shard()
        return self._gather(mine.micro_batches, self.engine.old_pass(mine.micro_batches))

    def run(
        self,
        recorded: np.ndarray,
        settings: ObjectiveSettings,
        num_steps: int,
        take_gradient: Take,
        take_weights: Take | None,
    ) -> tuple[Numbers, Steps]:
        """All numbers with the recorded old log-probs [sum R]. `take_*` are given every Hugging Face tensor of the
        gradient (with `lora` only of the adapters'), and of the weights after `num_steps` optimizer steps, on rank 0;
        elsewhere an empty stream.
        """
        engine = self.engine
        set_old_log_probs(self.batch, recorded)
        mine = self.shard()
        old = engine.old_pass(mine.micro_batches)
        report = engine.policy_gradients(mine.micro_batches, settings, mine.denominator, old)
        complete_gradients(engine)
        own = (engine.spec, engine.groups, engine.chunks, _main_grad)
        lora = self.config.lora
        trained = PolicyTensors(*own) if lora is None else AdapterTensors(lora, *own)
        take_gradient(trained.stream(torch.float32))
        watch = StepWatch(engine, trained)
        for _ in range(num_steps):
            watch.after(*_result(engine.train_mini_batch(mine.micro_batches, settings, mine.denominator, None)))
        steps = watch.finish()
        if take_weights is not None:
            take_weights(PolicyTensors(engine.spec, engine.groups, engine.chunks).stream(torch.float32))
        numbers = Numbers(
            log_probs=self._gather(mine.micro_batches, old),
            log_s=self._sequence_log_ratios(report),
            sums=self._sums(report),
            grad_norms=steps.norms,
            routes=gather_routes(engine, self.batch, mine.micro_batches, old.routes),
        )
        return numbers, steps

    def on_edges(self, recorded: np.ndarray, settings: ObjectiveSettings) -> Edges:
        """With the weights that are loaded now, and old log-probs [sum R] that put every ratio on an edge."""
        engine = self.engine
        set_old_log_probs(self.batch, recorded)
        mine = self.shard()
        old = engine.old_pass(mine.micro_batches)
        report = engine.policy_gradients(mine.micro_batches, settings, mine.denominator, old)
        return Edges(
            self._sequence_log_ratios(report), gather_routes(engine, self.batch, mine.micro_batches, old.routes)
        )

    # --- from the ranks' parts to the whole -----------------------------------------------------------------

    def _gather(self, micro_batches: list[MicroBatch], old: OldState) -> np.ndarray:
        return gather_tokens(self.engine, self.batch, micro_batches, [part.log_probs for part in old.micro_batches])

    def _sequence_log_ratios(self, report: PassReport) -> np.ndarray:
        whole = torch.zeros(len(self.batch.trajectories), dtype=torch.float64)
        if report.columns:
            # Every context-parallel rank knows the whole sequence's ratio.
            shares = torch.from_numpy(report.columns[LOG_S.name] / self.engine.groups.context.size)
            whole.index_add_(0, torch.from_numpy(report.trajectory_index), shares)
        return self._sum(whole).numpy()

    def _sums(self, report: PassReport) -> dict[str, float]:
        whole = torch.zeros(len(POLICY_SUMS), dtype=torch.float64)
        if report.totals:
            whole += torch.from_numpy(report.totals["policy_sums"])
        return dict(zip(POLICY_SUMS, self._sum(whole).tolist(), strict=True))

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values, group=self.engine.groups.host.group)
        return values


def gather_tokens(
    engine: PolicyEngine | CriticEngine,
    batch: RolloutBatch,
    micro_batches: list[MicroBatch],
    values: Sequence[torch.Tensor],
) -> np.ndarray:
    """[sum R] float64 on every rank: one value per response token of `batch`, 0 where it is masked. Collective.

    `values`: on ranks of the last stage, for each micro-batch those of this rank's active tokens, [N] of any float
    dtype.
    """
    lengths = [t.num_response_tokens for t in batch.trajectories]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    whole = torch.zeros(int(starts[-1]), dtype=torch.float64)
    groups = engine.groups
    if groups.reports:
        for micro_batch, part in zip(micro_batches, values, strict=True):
            held = local_rows(
                torch.from_numpy(micro_batch.cu_seqlens), groups.context.size, groups.context.rank
            ).numpy()
            spread = np.zeros(micro_batch.num_tokens)
            spread[held[micro_batch.loss_mask[held] > 0]] = part.double().cpu().numpy()
            for row, tokens in response_values(micro_batch, spread).items():
                whole[starts[row] : starts[row + 1]] += torch.from_numpy(tokens)
    dist.all_reduce(whole, group=groups.host.group)
    return whole.numpy()


def _result(done: tuple[StepResult, PassReport]) -> tuple[StepResult, dict[str, float]]:
    return done[0], done[1].routing


def _main_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    return cast(Any, parameter).main_grad  # Megatron's data parallelism adds the attribute
