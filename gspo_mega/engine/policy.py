"""PolicyEngine: the policy of one run on one rank. Old pass, training step, supervised step.

Owns the schedule of micro-batches through Megatron's pipeline and the reports that come out of it. What a
micro-batch's log-probs mean is `losses.py`; loading and saving weights is above this layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from gspo_mega.algorithm.objective import ObjectiveSettings
from gspo_mega.config.schema import Config
from gspo_mega.engine.device_batch import DeviceBatch, to_device
from gspo_mega.engine.log_probs import token_log_probs
from gspo_mega.engine.losses import OldLogProbs, OldPass, PassOutput, PolicyLoss, SupervisedLoss
from gspo_mega.engine.model import build_chunks, transformer_config, wrap_data_parallel
from gspo_mega.engine.optimizer import StepResult, apply_gradients, build_optimizer, build_scheduler
from gspo_mega.engine.precision import DTYPES
from gspo_mega.engine.process_groups import ParallelGroups
from gspo_mega.model.spec import ModelSpec
from gspo_mega.records import MicroBatch

Head = Callable[[DeviceBatch, torch.Tensor, torch.Tensor], PassOutput]


@dataclass
class PassReport:
    """What one pass over a mini-batch has to tell, this rank's part; empty where the rank reports nothing.

    `trajectory_index` [n] int64 rows of the rollout batch; `columns` per sequence, [n] or [n, K] float64;
    `totals` [K] float64. Parts of context-parallel ranks name the same rows.
    """

    trajectory_index: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    totals: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass
class OldState:
    """The old pass of one mini-batch: for each micro-batch what its training pass needs (last stage only)."""

    micro_batches: list[OldLogProbs]
    report: PassReport


class PolicyEngine:
    """A Megatron policy with optimizer and schedule on this rank.

    `chunks` are the bare model chunks (weights layers load and export them), `wrapped` the same under data
    parallelism. Constructing it is collective over all ranks; weights are untrained until loaded, and
    `after_weights_loaded` must follow every load.
    """

    def __init__(self, config: Config, spec: ModelSpec, groups: ParallelGroups, num_optimizer_steps: int) -> None:
        self.config, self.spec, self.groups = config, spec, groups
        self.megatron_config = transformer_config(config, spec)
        self.chunks = build_chunks(self.megatron_config, spec, groups)
        self.wrapped = wrap_data_parallel(self.megatron_config, self.chunks, config.optimizer.distributed)
        self.optimizer = build_optimizer(config.optimizer, config.precision, self.wrapped)
        self.scheduler = build_scheduler(config.optimizer, self.optimizer, num_optimizer_steps)
        self.megatron_config.grad_scale_func = self.optimizer.scale_loss
        # The loss carries its global denominator, so there are no token counts to divide by.
        self.megatron_config.finalize_model_grads_func = lambda model, _num_tokens, **kwargs: finalize_model_grads(
            model, None, **kwargs
        )

    def after_weights_loaded(self) -> None:
        """Take the parameters just loaded into the optimizer's fp32 copies."""
        self.optimizer.reload_model_params()

    def parameter_dtype(self) -> torch.dtype:
        return DTYPES[self.config.precision]

    # --- passes --------------------------------------------------------------------------------------------

    def old_pass(self, micro_batches: list[MicroBatch]) -> OldState:
        """Log-probs of one mini-batch's packs under the current weights, no gradient. Collective."""
        head = self._old_pass()
        outputs = self._run(micro_batches, head, forward_only=True)
        return OldState([o.old for o in outputs], self._report(micro_batches, outputs))

    def train_mini_batch(
        self, micro_batches: list[MicroBatch], settings: ObjectiveSettings, denominator: float, old: OldState | None
    ) -> tuple[StepResult, PassReport]:
        """One optimizer step of the policy objective on one mini-batch.

        `denominator` is the global count the aggregation averages over; `old` is None when old is current.
        Raises NumericsError naming the trajectory with a non-finite active log-prob. Collective.
        """
        return self._step(micro_batches, self._policy_loss(settings, denominator, old))

    def policy_gradients(
        self, micro_batches: list[MicroBatch], settings: ObjectiveSettings, denominator: float, old: OldState | None
    ) -> PassReport:
        """As `train_mini_batch` without the step: leaves the reduced gradients in Megatron's buffers. Collective."""
        outputs = self.accumulate_gradients(micro_batches, self._policy_loss(settings, denominator, old))
        return self._report(micro_batches, outputs)

    def train_supervised(self, micro_batches: list[MicroBatch], denominator: float) -> tuple[StepResult, PassReport]:
        """One optimizer step of the mean negative log-prob over `denominator` demonstration tokens. Collective."""
        return self._step(micro_batches, SupervisedLoss(denominator))

    # --- parts ---------------------------------------------------------------------------------------------

    def _policy_loss(self, settings: ObjectiveSettings, denominator: float, old: OldState | None) -> PolicyLoss:
        return PolicyLoss(
            groups=self.groups,
            settings=settings,
            denominator=denominator,
            old_pass=self._old_pass(),
            use_rollout=self.config.old_log_probs == "rollout",
            old=old.micro_batches if old is not None else None,
        )

    def _old_pass(self) -> OldPass:
        return OldPass(self.groups, self.config.mismatch.correction, self.config.mismatch.cap)

    def _step(self, micro_batches: list[MicroBatch], head: Head) -> tuple[StepResult, PassReport]:
        outputs = self.accumulate_gradients(micro_batches, head)
        result = apply_gradients(self.optimizer, self.scheduler, self.config.optimizer.clip_grad)
        return result, self._report(micro_batches, outputs)

    def accumulate_gradients(self, micro_batches: list[MicroBatch], head: Head) -> list[PassOutput]:
        """Forward and backward of a mini-batch; leaves the reduced gradients in Megatron's buffers. Collective."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        return self._run(micro_batches, head, forward_only=False)

    def _run(self, micro_batches: list[MicroBatch], head: Head, forward_only: bool) -> list[PassOutput]:
        """Lead the micro-batches through the pipeline; outputs in order, on last-stage ranks only."""
        outputs: list[PassOutput] = []
        last_chunk = self.chunks[-1]

        def finish(batch: DeviceBatch, hidden: torch.Tensor):
            log_probs, entropies = token_log_probs(
                hidden,
                last_chunk.head_weight(),
                batch.rows,
                batch.labels,
                vocab_size=self.spec.vocab_size,
                temperature=self.config.rollout.temperature,
                tensor_group=self.groups.tensor,
                sequence_parallel=self.megatron_config.sequence_parallel,
            )
            output = head(batch, log_probs, entropies)
            outputs.append(output)
            loss = output.loss if output.loss is not None else log_probs.new_zeros(())
            output.loss = None  # the schedule owns it now and frees its graph
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}

        def forward_step(batches: Iterator[DeviceBatch], model: torch.nn.Module):
            batch = next(batches)
            hidden = model(batch.token_ids, batch.position_ids, None, packed_seq_params=batch.packed)
            return hidden, lambda out: finish(batch, out)

        for chunk in self.wrapped:
            chunk.train(not forward_only)
        batches = [to_device(m, self.groups) for m in micro_batches]
        iterators = [iter(batches) for _ in self.wrapped]
        with torch.set_grad_enabled(not forward_only):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.wrapped if len(self.wrapped) > 1 else self.wrapped[0],
                num_microbatches=len(micro_batches),
                seq_length=max(m.num_tokens for m in micro_batches),
                micro_batch_size=1,
                forward_only=forward_only,
            )
        return outputs

    def _report(self, micro_batches: list[MicroBatch], outputs: list[PassOutput]) -> PassReport:
        if not self.groups.reports:
            return PassReport()
        index = np.concatenate([m.trajectory_index for m in micro_batches])
        real = index >= 0
        columns = {n: torch.cat([o.columns[n] for o in outputs]).double().cpu().numpy()[real] for n in outputs[0].columns}
        totals = {n: sum(o.totals[n] for o in outputs).double().cpu().numpy() for n in outputs[0].totals}
        return PassReport(index[real], columns, totals)
