"""The critic of one run on one rank: a value model, its values of a mini-batch, the advantages from them, its step.

The value model is a second one in the policy's layout and packs, with an optimizer and a schedule of its own.
`ValueModel` owns a value head in place of an LM head. The head is whole on every tensor rank; all of them compute the
same values from the same gathered states, so its gradient needs no sum over them. `CriticEngine` runs the passes.
`estimate_returns` goes from values and rewards to what both models train on: it writes the advantages into the packs,
where the policy's loss finds them, on last-stage ranks. The maths is in `algorithm/advantages.py` and
`algorithm/losses.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch.autograd.function import once_differentiable

from gspo_mega.algorithm.advantages import generalised_advantages, penalised_rewards, whitened
from gspo_mega.algorithm.losses import value_loss, value_sums
from gspo_mega.base.records import MicroBatch
from gspo_mega.config.schema import Config
from gspo_mega.engine.device_batch import DeviceBatch, held_rows, sum_over_context
from gspo_mega.engine.forward_backward import Head, Pipeline
from gspo_mega.engine.losses import PassOutput, require_finite_tokens
from gspo_mega.engine.model import PolicyModel, build_chunks, transformer_config
from gspo_mega.engine.optimizer import (
    StepResult,
    apply_gradients,
    build_optimizer,
    build_scheduler,
    reload_parameters,
    require_optimizer,
    wrap_data_parallel,
    write_parameters,
)
from gspo_mega.engine.precision import Fp8Scales
from gspo_mega.engine.process_groups import ParallelGroups, RankGroup
from gspo_mega.engine.routing import ExpertBias, LoadBalancing, Routers, RoutingPass
from gspo_mega.models.spec import ModelSpec


class ValueModel(PolicyModel):
    """A `PolicyModel` whose last stage owns `value_head` [1, H] of the model's dtype, zero at the start, and no LM
    head. Embeddings are never tied.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"share_embeddings_and_output_weights": False})
        if self.post_process:
            del self.output_layer
            self.value_head = torch.nn.Linear(
                self.config.hidden_size, 1, bias=False, dtype=self.config.params_dtype, device="cpu"
            )
            torch.nn.init.zeros_(self.value_head.weight)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Megatron's sharded state of the backbone and, on the last stage, of the value head."""
        has_head, self.post_process = self.post_process, False  # Megatron would look for the LM head's tensor
        try:
            return super().sharded_state_dict(*args, **kwargs)
        finally:
            self.post_process = has_head

    def value_weight(self) -> torch.Tensor:
        """The head of the last stage: [1, H] of the model's dtype. Raises ValueError on other stages."""
        self.await_parameters()
        if not self.post_process:
            raise ValueError("this chunk holds no value head; only the last pipeline stage does")
        return self.value_head.weight


class _ChunkedValues(torch.autograd.Function):
    """h w^T for each row, widened chunk by chunk. hidden [N, H], weight [1, H] of one dtype. Returns [N] float32, or
    float64 if the inputs are float64.
    """

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor, chunk_rows: int) -> torch.Tensor:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        column = weight[0].to(wide)
        values = hidden.new_empty(hidden.size(0), dtype=wide)
        for start in range(0, hidden.size(0), chunk_rows):
            rows = slice(start, start + chunk_rows)
            values[rows] = hidden[rows].to(wide) @ column
        ctx.save_for_backward(hidden, weight)
        ctx.chunk_rows = chunk_rows
        return values

    @staticmethod
    @once_differentiable
    # `once_differentiable` makes `ctx` positional; autograd passes it so.
    def backward(ctx, *grad_outputs: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_values,) = grad_outputs
        hidden, weight = ctx.saved_tensors
        column = weight[0].to(grad_values.dtype)
        grad_hidden, grad_column = torch.empty_like(hidden), torch.zeros_like(column)
        for start in range(0, hidden.size(0), ctx.chunk_rows):
            rows = slice(start, start + ctx.chunk_rows)
            grad_hidden[rows] = (grad_values[rows, None] * column).to(hidden.dtype)
            grad_column += grad_values[rows] @ hidden[rows].to(grad_values.dtype)
        return grad_hidden, grad_column[None].to(weight.dtype), None


def token_values(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    rows: torch.Tensor,
    *,
    tensor_group: RankGroup,
    sequence_parallel: bool,
    chunk_rows: int,
) -> torch.Tensor:
    """The value of the state at each of `rows`: [N] float32 in the unit of rewards, the same on all tensor ranks.

    hidden_states: [t, 1, H] of the model's dtype, the last stage's output; with `sequence_parallel` t is this tensor
    rank's share. weight: [1, H] of that dtype, the same on all tensor ranks. rows: [N] int64, positions in this context
    rank's (gathered) pack. chunk_rows: rows that are widened at once. Differentiable with respect to hidden_states and
    weight. Collective over the tensor group with `sequence_parallel`.
    """
    hidden = hidden_states
    if tensor_group.size > 1 and sequence_parallel:
        # Every rank has the whole gradient of the gathered states, so each keeps its share of it and adds up nothing.
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=tensor_group.group
        )
    return _ChunkedValues.apply(hidden.squeeze(1).index_select(0, rows), weight, chunk_rows)


@dataclass
class Values:
    """The values of one micro-batch, on last-stage ranks. `before` [N] float32: of the state before each active token
    of this rank. `after` [S] float32: of the state after each sequence's last active token, the same on all context
    ranks; 0 if a sequence has none.
    """

    before: torch.Tensor
    after: torch.Tensor


class _ValuePipeline(Pipeline):
    """Feeds a head values instead of log-probs, and values after the last tokens instead of entropies."""

    def read(
        self, batch: DeviceBatch, hidden: torch.Tensor, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Values [N] float32 and, on request, this rank's part of the values after the last tokens, [S] float32."""
        rows = torch.cat([batch.rows, batch.end_rows]) if with_entropy else batch.rows
        values = token_values(
            hidden,
            cast(ValueModel, self.chunks[-1]).value_weight(),
            rows,
            tensor_group=self.groups.tensor,
            sequence_parallel=self.megatron_config.sequence_parallel,
            chunk_rows=self.log_prob_chunk_tokens,
        )
        if not with_entropy:
            return values, None
        before, ends = values.split([batch.rows.numel(), batch.end_rows.numel()])
        return before, ends.new_zeros(batch.num_sequences).index_copy(0, batch.end_sequences, ends)


@dataclass
class _CollectValues:
    """A head that returns the values of a micro-batch as columns."""

    groups: ParallelGroups
    wants_entropy: ClassVar[bool] = True  # here: the values after the last tokens

    def __call__(self, batch: DeviceBatch, values: torch.Tensor, after: torch.Tensor | None) -> PassOutput:
        require_finite_tokens(batch, values=values)
        assert after is not None
        whole = sum_over_context(after, self.groups.context)
        return PassOutput(columns={"values": values, "values_after": whole})


@dataclass
class _ValueLoss:
    """A head that computes the value loss. Per micro-batch one `old` and one `returns` [N], as `value_loss` takes them,
    and one `coefficients` [S] float64.
    """

    old: Sequence[torch.Tensor]
    returns: Sequence[torch.Tensor]
    coefficients: Sequence[torch.Tensor]
    clip_range: float | None
    place: int = 0

    def __call__(self, batch: DeviceBatch, values: torch.Tensor, _after: torch.Tensor | None) -> PassOutput:
        require_finite_tokens(batch, values=values)
        place, self.place = self.place, self.place + 1
        computed = value_loss(
            values,
            self.old[place],
            self.returns[place],
            sequence_ids=batch.sequence_ids,
            lengths=batch.sequence["length"],
            coefficients=self.coefficients[place],
            clip_range=self.clip_range,
        )
        sums = value_sums(values, self.returns[place])
        totals = torch.stack([*sums.values(), computed.clipped.double().sum(), computed.loss.detach()])
        return PassOutput(loss=computed.loss, totals={"value": totals})


@dataclass
class _WeightedScores:
    """A head whose loss is the sum over sequences of score times slope [S]. The score of a sequence is the value after
    its last active token.
    """

    slopes: Sequence[torch.Tensor]
    place: int = 0
    wants_entropy: ClassVar[bool] = True  # here: the values after the last tokens

    def __call__(self, batch: DeviceBatch, values: torch.Tensor, after: torch.Tensor | None) -> PassOutput:
        assert after is not None
        place, self.place = self.place, self.place + 1
        # This context rank has its own part of each score: the whole score, or zero.
        return PassOutput(loss=(after.double() * self.slopes[place].to(after.device)).sum())


class CriticEngine:
    """A Megatron value model with optimizer and schedule on this rank.

    `config`: the run's with the critic's precision, recompute and optimizer (`critic_config`). Construction is
    collective over all ranks. The backbone is untrained until loaded into `chunks`, and `after_weights_loaded` must
    follow every load; the head is zero.
    """

    def __init__(self, config: Config, spec: ModelSpec, groups: ParallelGroups, num_optimizer_steps: int) -> None:
        optimizer = config.optimizer
        require_optimizer(optimizer)
        self.config, self.spec, self.groups = config, spec, groups
        self.before_step: Callable[[], None] | None = None  # `apply_gradients` calls it
        self.megatron_config = transformer_config(config, spec)
        self.chunks = build_chunks(self.megatron_config, spec, groups, ValueModel)
        self.wrapped = wrap_data_parallel(self.megatron_config, self.chunks, optimizer)
        self.scales = Fp8Scales(self.megatron_config, self.chunks)
        self._pipeline = _ValuePipeline(
            spec,
            groups,
            self.megatron_config,
            self.chunks,
            self.wrapped,
            temperature=1.0,
            log_prob_chunk_tokens=config.batch.log_prob_chunk_tokens,
            before_pass=self.scales.require_known,
        )
        self._routers = Routers(
            self.chunks,
            spec.moe,
            groups,
            sequence_parallel=self.megatron_config.sequence_parallel,
            recompute=self.megatron_config.recompute_granularity == "full",
        )
        self._balancing = LoadBalancing(config.moe, self.megatron_config, groups, len(self._routers.all()))
        self._expert_bias = ExpertBias(config.moe.expert_bias_update_rate, self._routers, groups, spec.num_layers)
        self.optimizer = build_optimizer(optimizer, self.wrapped)
        self.scheduler = build_scheduler(optimizer, self.optimizer, num_optimizer_steps)
        self.megatron_config.grad_scale_func = self.optimizer.scale_loss
        self.megatron_config.finalize_model_grads_func = lambda model, _num_tokens, **kwargs: finalize_model_grads(
            model, None, **kwargs
        )

    def after_weights_loaded(self) -> None:
        """As `PolicyEngine.after_weights_loaded`."""
        self.scales.fit_parameters()
        reload_parameters(self.optimizer)

    def after_optimizer_loaded(self) -> None:
        """As `PolicyEngine.after_optimizer_loaded`. Collective."""
        if self.megatron_config.fp8_param:
            self.scales.fit_parameters()
            write_parameters(self.optimizer)

    def values(self, micro_batches: list[MicroBatch]) -> list[Values]:
        """The values of each micro-batch under the current weights, without gradients; empty except on last-stage
        ranks. Collective.

        Raises NumericsError naming the trajectory with a non-finite value.
        """
        self._begin_step(micro_batches)
        outputs = self._read(micro_batches)
        return [Values(output.columns["values"], output.columns["values_after"]) for output in outputs]

    def train_mini_batch(
        self,
        micro_batches: list[MicroBatch],
        old: Sequence[torch.Tensor],
        returns: Sequence[torch.Tensor],
        coefficients: Sequence[torch.Tensor],
        clip_range: float | None,
    ) -> tuple[StepResult, torch.Tensor]:
        """Take one optimizer step of the value loss on one mini-batch. Returns its result, and this rank's part of the
        sums: `VALUE_SUMS`, clipped tokens and the loss, [8] float64. Collective.

        The arguments have one tensor per micro-batch, on last-stage ranks: `old` values and `returns` [N] of this
        rank's active tokens, in the unit of rewards; `coefficients` [S] float64 (`sequence_coefficients`).
        """
        self._begin_step(micro_batches)
        sums = self.value_gradients(micro_batches, old, returns, coefficients, clip_range)
        return self._apply(), sums

    def value_gradients(
        self,
        micro_batches: list[MicroBatch],
        old: Sequence[torch.Tensor],
        returns: Sequence[torch.Tensor],
        coefficients: Sequence[torch.Tensor],
        clip_range: float | None,
    ) -> torch.Tensor:
        """`train_mini_batch` without the step: leaves the reduced gradients in Megatron's buffers. Collective."""

        def head() -> _ValueLoss:
            return _ValueLoss(old, returns, coefficients, clip_range)

        self.scales.before_gradients(lambda: self._forward_backward(micro_batches, head()))
        outputs, routing = self._forward_backward(micro_batches, head())
        self.scales.after_gradients()
        self._expert_bias.count(micro_batches, routing.taken)
        sums = [output.totals["value"].cpu() for output in outputs]
        return torch.stack(sums).sum(0) if sums and self.groups.tensor.rank == 0 else torch.zeros(8).double()

    def step_scores(self, micro_batches: list[MicroBatch], slopes: Sequence[torch.Tensor]) -> StepResult:
        """Take one optimizer step along the gradient of sum_s slopes_s score_s, where the score of a sequence is the
        value after its last active token.

        slopes: one [S] float64 per micro-batch, on last-stage ranks: the derivative of the whole batch's loss by the
        score of each of its sequences; 0 for filler. Collective.
        """
        self._begin_step(micro_batches)
        self.scales.before_gradients(lambda: self._forward_backward(micro_batches, _WeightedScores(slopes)))
        _, routing = self._forward_backward(micro_batches, _WeightedScores(slopes))
        self.scales.after_gradients()
        self._expert_bias.count(micro_batches, routing.taken)
        return self._apply()

    def _apply(self) -> StepResult:
        """Take the optimizer step and, unless it was skipped, update the expert bias."""
        result = apply_gradients(
            self.optimizer, self.scheduler, self.config.optimizer.clip_grad, self.groups, self.before_step
        )
        if not result.skipped:
            self._expert_bias.update()
        return result

    def _forward_backward(self, micro_batches: list[MicroBatch], head: Head) -> tuple[list[PassOutput], RoutingPass]:
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._balancing.start(micro_batches)
        routing = RoutingPass(self._routers, len(micro_batches))
        return self._pipeline.run(micro_batches, head, forward_only=False, routing=routing), routing

    def _begin_step(self, micro_batches: list[MicroBatch]) -> None:
        self.scales.begin_step(lambda: self._read(micro_batches))

    def _read(self, micro_batches: list[MicroBatch]) -> list[PassOutput]:
        routing = RoutingPass(self._routers, len(micro_batches))
        return self._pipeline.run(micro_batches, _CollectValues(self.groups), forward_only=True, routing=routing)


def gather_pack(micro_batch: MicroBatch, own: torch.Tensor, groups: ParallelGroups) -> torch.Tensor:
    """The numbers of the active tokens of the whole pack, in its order, from each context rank's `own` [N]: [M] of its
    dtype, the same on all context ranks. Collective over the context group if its size is above 1.
    """
    if groups.context.size == 1:
        return own
    whole = own.new_zeros(int((micro_batch.loss_mask > 0).sum()))
    whole[_places(micro_batch, groups).to(own.device)] = own
    dist.all_reduce(whole, group=groups.context.group)
    return whole


def own_part(micro_batch: MicroBatch, whole: torch.Tensor, groups: ParallelGroups) -> torch.Tensor:
    """The numbers of this context rank's active tokens, [N], from those of the whole pack, `whole` [M], in the order of
    `gather_pack`.
    """
    return whole if groups.context.size == 1 else whole[_places(micro_batch, groups).to(whole.device)]


def _places(micro_batch: MicroBatch, groups: ParallelGroups) -> torch.Tensor:
    held, rows = held_rows(micro_batch, groups)
    return (torch.from_numpy(micro_batch.loss_mask) > 0).cumsum(0)[held[rows]] - 1


@dataclass(frozen=True)
class AdvantageEstimator:
    """How advantages are estimated. `discount`: gamma; `trace`: lambda; `bootstraps`: whether a sequence that was cut
    off continues with the value after its last token, else with 0; `whitens`: whether the advantages of a mini-batch
    get mean 0 and standard deviation 1, with `std_ddof` as in `whitened`; `kl_coefficient`: that of the KL penalty in
    the reward, 0 for none.
    """

    discount: float
    trace: float
    bootstraps: bool
    whitens: bool
    kl_coefficient: float
    std_ddof: int


@dataclass
class TokenRewards:
    """The rewards of one micro-batch, whole and the same on all context ranks. `per_token` [M] float64: those of its
    active tokens, in the pack's order; `is_truncated` [S] bool: whether the sequence was cut off.
    """

    per_token: torch.Tensor
    is_truncated: torch.Tensor

    @classmethod
    def from_pack(cls, pack: MicroBatch) -> TokenRewards:
        """The rewards that a pack carries (`token_rewards`, `truncated`), on the host."""
        assert pack.token_rewards is not None
        per_token = torch.from_numpy(pack.token_rewards[pack.loss_mask > 0])
        return cls(per_token, torch.from_numpy(pack.sequence["truncated"] > 0))


@dataclass
class LogProbs:
    """The log-probs of the KL penalty for one micro-batch, each [N] float32 nats of this rank's active tokens. `old`:
    by the policy whose advantages are estimated. `reference`: by the reference.
    """

    old: torch.Tensor
    reference: torch.Tensor


def estimate_returns(
    micro_batches: list[MicroBatch],
    values: Sequence[Values],
    rewards: Sequence[TokenRewards],
    estimator: AdvantageEstimator,
    groups: ParallelGroups,
    log_probs: Sequence[LogProbs] | None = None,
) -> list[torch.Tensor]:
    """Write `token_advantages` into the packs. Returns one tensor per micro-batch: the returns (advantage + value) of
    this rank's active tokens, [N] float64 in the unit of rewards, before any whitening.

    Call it on last-stage ranks with one entry of `values`, `rewards` and, for a KL penalty, `log_probs` per
    micro-batch. Raises ValueError if `log_probs` are given without a coefficient or the other way round. Collective
    over the data and context groups of those ranks.
    """
    if (estimator.kl_coefficient > 0) != (log_probs is not None):
        raise ValueError(
            f"the KL penalty's coefficient is {estimator.kl_coefficient:g}, but log-probs of the reference were"
            f" {'not ' if log_probs is None else ''}given"
        )
    advantages: list[torch.Tensor] = []
    returns: list[torch.Tensor] = []
    for place, (pack, value, reward) in enumerate(zip(micro_batches, values, rewards, strict=True)):
        before = gather_pack(pack, value.before, groups)
        token_rewards = reward.per_token.to(before.device)
        if log_probs is not None:
            old, reference = (
                gather_pack(pack, one, groups) for one in (log_probs[place].old, log_probs[place].reference)
            )
            token_rewards = penalised_rewards(token_rewards, old, reference, estimator.kl_coefficient)
        after = value.after * reward.is_truncated.to(before.device) if estimator.bootstraps else None
        ids = torch.from_numpy(pack.sequence_ids[pack.loss_mask > 0]).to(before.device)
        advantage, whole_returns = generalised_advantages(
            token_rewards,
            before,
            ids,
            pack.num_sequences,
            discount=estimator.discount,
            trace=estimator.trace,
            values_after=after,
        )
        advantages.append(advantage)
        returns.append(own_part(pack, whole_returns, groups))
    if estimator.whitens and advantages:
        # Every context rank has the whole packs, so the sums are over data ranks only.
        flat = whitened(torch.cat(advantages), lambda sums: _sum_over_data(sums, groups), std_ddof=estimator.std_ddof)
        advantages = list(flat.split([len(one) for one in advantages]))
    for pack, advantage in zip(micro_batches, advantages, strict=True):
        pack.token_advantages = np.zeros(pack.num_tokens, np.float64)
        pack.token_advantages[pack.loss_mask > 0] = advantage.cpu().numpy()
    return returns


def _sum_over_data(sums: torch.Tensor, groups: ParallelGroups) -> torch.Tensor:
    if groups.data.size > 1:
        dist.all_reduce(sums, group=groups.data.group)
    return sums
