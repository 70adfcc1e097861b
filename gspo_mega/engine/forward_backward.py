"""One pass of micro-batches through the pipeline: forward only, or forward and backward.

`Pipeline` connects Megatron's schedule with the log-prob function. A `Head` decides what to do with a micro-batch's
log-probs. The policy, the reference and, with values in place of log-probs, the critic all run through this module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from gspo_mega.algorithm.terms import deferred_checks
from gspo_mega.base import progress
from gspo_mega.base.records import MicroBatch
from gspo_mega.engine.device_batch import DeviceBatch, to_device
from gspo_mega.engine.invariant_layers import is_batch_invariant
from gspo_mega.engine.log_probs import DivergenceRule, divergence_from_top, token_divergence, token_log_probs
from gspo_mega.engine.losses import PassOutput, TaughtStates, TaughtTokens
from gspo_mega.engine.model import PolicyModel
from gspo_mega.engine.precision import held_scales
from gspo_mega.engine.process_groups import ParallelGroups
from gspo_mega.engine.routing import RoutingPass
from gspo_mega.models.spec import ModelSpec

# From a batch, its log-probs [N] float32 nats and, if the head's `wants_entropy` is true, its entropies [N] float32
# nats, all of this rank's active tokens.
Head = Callable[[DeviceBatch, torch.Tensor, torch.Tensor | None], PassOutput]


@dataclass
class Pipeline:
    """This rank's part of a model in Megatron's schedule. `chunks` are bare; `models` are the same chunks as the
    schedule calls them (wrapped in data parallelism if they are trained). `before_pass` raises if a pass may not run
    yet.
    """

    spec: ModelSpec
    groups: ParallelGroups
    megatron_config: TransformerConfig
    chunks: Sequence[PolicyModel]
    models: Sequence[torch.nn.Module]
    temperature: float
    log_prob_chunk_tokens: int
    before_pass: Callable[[], None] = lambda: None

    def run(
        self, micro_batches: list[MicroBatch], head: Head, forward_only: bool, routing: RoutingPass
    ) -> list[PassOutput]:
        """Run the micro-batches through the pipeline. Returns outputs in order, on last-stage ranks only. Collective.

        Without `forward_only` the gradients of the head's losses are left in Megatron's buffers. Finishes `routing`.
        Raises the error of the first check for non-finite numbers in the head that failed, with one device
        synchronisation for all of them.
        """
        self.before_pass()
        outputs: list[PassOutput] = []

        def finish(batch: DeviceBatch, hidden: torch.Tensor):
            read, more = self.read(batch, hidden, getattr(head, "wants_entropy", False))
            if (compare := getattr(head, "compare", None)) is not None:  # with a teacher's distributions
                compare(batch, functools.partial(self.diverge, batch, hidden))
            output = head(batch, read, more)
            outputs.append(output)
            loss = output.loss if output.loss is not None else read.new_zeros(())
            output.loss = None  # the schedule owns it now and frees its graph
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}

        def forward_step(batches: Iterator[tuple[int, DeviceBatch]], model: torch.nn.Module):
            index, batch = next(batches)
            with routing.forward(self._index_of(model), index, forward_only):
                hidden = model(batch.token_ids, batch.position_ids, None, packed_seq_params=batch.packed)
            progress.beat()
            return hidden, lambda out: finish(batch, out)

        for model in self.models:
            model.train(not forward_only)
        batches = [to_device(m, self.groups) for m in micro_batches]
        iterators: list[Iterator[tuple[int, DeviceBatch]]] = [iter(enumerate(batches)) for _ in self.models]
        with torch.set_grad_enabled(not forward_only), held_scales(self.megatron_config), deferred_checks():
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=list(self.models) if len(self.models) > 1 else self.models[0],
                num_microbatches=len(micro_batches),
                seq_length=max(m.num_computed for m in micro_batches),
                micro_batch_size=1,
                forward_only=forward_only,
            )
        routing.finish()
        return outputs

    def read(
        self, batch: DeviceBatch, hidden: torch.Tensor, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The numbers that the head receives from the last stage's `hidden`, [t, 1, H] of the model's dtype: log-probs
        and, on request, entropies, each [N] float32 nats of this rank's active tokens.
        """
        return token_log_probs(
            hidden,
            self.chunks[-1].head_weight(),
            batch.rows,
            batch.labels,
            vocab_size=self.spec.vocab_size,
            temperature=self.temperature,
            tensor_group=self.groups.tensor,
            sequence_parallel=self.megatron_config.sequence_parallel,
            chunk_rows=self.log_prob_chunk_tokens,
            with_entropy=with_entropy,
            batch_invariant=is_batch_invariant(self.megatron_config),
            kept=batch.kept,
        )

    def diverge(
        self,
        batch: DeviceBatch,
        hidden: torch.Tensor,
        taught: TaughtStates | TaughtTokens,
        rule: DivergenceRule,
    ) -> torch.Tensor:
        """KL(policy || teacher) at the M active tokens of this rank that `taught` has, [M] float32 nats with gradient.
        hidden: the last stage's, [t, 1, H].
        """
        weight = self.chunks[-1].head_weight()
        rows = batch.rows if taught.places is None else batch.rows[taught.places]
        shared: dict[str, Any] = dict(
            vocab_size=self.spec.vocab_size,
            temperature=self.temperature,
            tensor_group=self.groups.tensor,
            sequence_parallel=self.megatron_config.sequence_parallel,
            chunk_rows=self.log_prob_chunk_tokens,
        )
        if isinstance(taught, TaughtTokens):
            return divergence_from_top(
                hidden, weight, rows, taught.ids, taught.log_probs, in_bucket=rule.in_bucket, **shared
            )
        return token_divergence(hidden, weight, rows, taught.states, taught.head_weight, rule=rule, **shared)

    def _index_of(self, model: torch.nn.Module) -> int:
        return next(index for index, candidate in enumerate(self.models) if candidate is model)
