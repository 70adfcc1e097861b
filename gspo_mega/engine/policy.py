"""The policy of one run on one rank: old pass, training step and supervised step, each with its report.

`PolicyEngine` owns the order of the passes. `forward_backward.py` runs one pass, `losses.py` defines the losses, and
higher layers load and save weights. A `PassReport` is this rank's part of what a pass reports: values per sequence,
sums, and the gap of each token if asked for. The train loop puts the parts of the ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import numpy as np
import torch
from megatron.core.distributed import finalize_model_grads

from gspo_mega.algorithm.correction import CorrectionRule
from gspo_mega.algorithm.objective import ObjectiveSettings
from gspo_mega.algorithm.terms import objective_settings
from gspo_mega.base.records import MicroBatch
from gspo_mega.config.clip_range import band_of
from gspo_mega.config.derived import (
    corrects_engine_gap,
    leaves_out_by_covariance,
    may_correct_in_training,
    old_is_current,
)
from gspo_mega.config.schema import Config, Teacher
from gspo_mega.engine.adapters import attach_adapters, start_adapters
from gspo_mega.engine.device_batch import held_rows
from gspo_mega.engine.forward_backward import Head, Pipeline
from gspo_mega.engine.log_probs import DivergenceRule
from gspo_mega.engine.losses import (
    KlTerm,
    OldLogProbs,
    OldPass,
    PassOutput,
    PolicyLoss,
    SupervisedLoss,
    TeacherScores,
    TeacherTerm,
    choose_by_covariance,
    correct_batch,
    max_packs,
)
from gspo_mega.engine.model import build_chunks, transformer_config
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
from gspo_mega.engine.precision import Fp8Scales, parameter_dtype
from gspo_mega.engine.process_groups import ParallelGroups
from gspo_mega.engine.routing import (
    ExpertBias,
    LoadBalancing,
    Routers,
    Routes,
    RoutingPass,
    changed_sums,
    count_changed,
    rank_loads,
)
from gspo_mega.models.spec import ModelSpec


@dataclass
class PassReport:
    """This rank's part of the report of one pass over a mini-batch; empty on ranks that report nothing.

    `trajectory_index` [n] int64: rows of the rollout batch; `columns` per sequence, [n] or [n, K] float64; `totals` [K]
    float64. Context-parallel ranks name the same rows, and their parts add up. `routing`, from every rank: sums over
    this rank's layers with experts and its positions; the sum over all ranks is complete. `tokens`, if the pass keeps
    gaps: for the N active tokens held here, `rows` [N] int32 of the rollout batch, `places` [N] int32 in the row's
    prompt and response, `gaps` [N] float16 nats: trainer - server.
    """

    trajectory_index: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    totals: dict[str, np.ndarray] = field(default_factory=dict)
    routing: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def collect(
        cls, micro_batches: Sequence[MicroBatch], outputs: Sequence[PassOutput], groups: ParallelGroups
    ) -> PassReport:
        """The report of a mini-batch from the outputs of its micro-batches, both in the same order."""
        if not groups.reports:
            return cls()
        index = np.concatenate([m.trajectory_index for m in micro_batches])
        real = index >= 0
        columns = {
            n: torch.cat([o.columns[n] for o in outputs]).double().cpu().numpy()[real] for n in outputs[0].columns
        }
        totals = {n: reduce(add, (o.totals[n] for o in outputs)).double().cpu().numpy() for n in outputs[0].totals}
        return cls(index[real], columns, totals, tokens=_token_gaps(micro_batches, outputs, groups))


def _token_gaps(
    micro_batches: Sequence[MicroBatch], outputs: Sequence[PassOutput], groups: ParallelGroups
) -> dict[str, np.ndarray]:
    if any(output.gaps is None for output in outputs):
        return {}
    rows, places = [], []
    for one in micro_batches:
        held, active = held_rows(one, groups)
        at = held[active].numpy()
        rows.append(one.trajectory_index[one.sequence_ids[at]].astype(np.int32))
        places.append((one.position_ids[at] + 1).astype(np.int32))  # a position predicts the token after it
    gaps = torch.cat([output.gaps for output in outputs if output.gaps is not None]).cpu().numpy()
    return {"rows": np.concatenate(rows), "places": np.concatenate(places), "gaps": gaps}


@dataclass
class OldState:
    """The old pass of one mini-batch, this rank's part. `micro_batches`: the inputs of their training passes, on
    last-stage ranks only. `routes`: those through this rank's layers, per micro-batch. Nothing is corrected until
    `PolicyEngine.correct` has been called with all old passes of the rollout batch.
    """

    micro_batches: list[OldLogProbs]
    routes: list[Routes]
    report: PassReport


class PolicyEngine:
    """A Megatron policy with optimizer and schedule on this rank.

    `chunks` are the bare model chunks, which the checkpoint room loads and exports; `wrapped` are the same chunks under
    data parallelism. Construction is collective over all ranks. Weights are untrained until loaded, and
    `after_weights_loaded` must follow every load.
    """

    def __init__(self, config: Config, spec: ModelSpec, groups: ParallelGroups, num_optimizer_steps: int) -> None:
        self.config, self.spec, self.groups = config, spec, groups
        self.before_step: Callable[[], None] | None = None  # `apply_gradients` calls it
        require_optimizer(config.optimizer)
        self.megatron_config = transformer_config(config, spec)
        self.chunks = build_chunks(self.megatron_config, spec, groups, separate_norms=config.lora is not None)
        if config.lora is not None:
            attach_adapters(self.chunks, spec, groups, config.lora, config.run.seed)
        self.wrapped = wrap_data_parallel(self.megatron_config, self.chunks, config.optimizer)
        self.scales = Fp8Scales(self.megatron_config, self.chunks)
        self.pipeline = Pipeline(
            spec,
            groups,
            self.megatron_config,
            self.chunks,
            self.wrapped,
            temperature=config.rollout.temperature,
            log_prob_chunk_tokens=config.batch.log_prob_chunk_tokens,
            before_pass=self.scales.require_known,
        )
        self.routers = Routers(
            self.chunks,
            spec.moe,
            groups,
            sequence_parallel=self.megatron_config.sequence_parallel,
            recompute=self.megatron_config.recompute_granularity == "full",
        )
        self.balancing = LoadBalancing(config.moe, self.megatron_config, groups, len(self.routers.all()))
        self.expert_bias = ExpertBias(config.moe.expert_bias_update_rate, self.routers, groups, spec.num_layers)
        self.optimizer = build_optimizer(config.optimizer, self.wrapped)
        self.scheduler = build_scheduler(config.optimizer, self.optimizer, num_optimizer_steps)
        self.megatron_config.grad_scale_func = self.optimizer.scale_loss
        # The loss carries its global denominator, so there are no token counts to divide by.
        self.megatron_config.finalize_model_grads_func = lambda model, _num_tokens, **kwargs: finalize_model_grads(
            model, None, **kwargs
        )

    def start_adapters(self) -> None:
        """Give the adapters of `lora` their initial values: A random by `run.seed`, B zero."""
        assert self.config.lora is not None
        start_adapters(self.chunks, self.spec, self.config.lora, self.config.run.seed)

    def after_weights_loaded(self) -> None:
        """Copy the loaded parameters into the optimizer's fp32 copies, and round FP8 parameters with scales of their
        own.
        """
        self.scales.fit_parameters()
        reload_parameters(self.optimizer)

    def after_optimizer_loaded(self) -> None:
        """Write FP8 parameters from the optimizer's fp32 copies, as after an optimizer step. Call it after weights and
        optimizer were loaded in a layout for which no checkpoint has the FP8 scales. Does nothing without FP8
        parameters. Collective.
        """
        if not self.megatron_config.fp8_param:
            return
        self.scales.fit_parameters()
        write_parameters(self.optimizer)

    def parameter_dtype(self) -> torch.dtype:
        return parameter_dtype(self.config.precision, self.config.certify)

    # --- passes --------------------------------------------------------------------------------------------

    def old_pass(self, micro_batches: list[MicroBatch]) -> OldState:
        """Compute the log-probs of one mini-batch's packs under the current weights, without gradients. Collective."""
        replay = self._replay(micro_batches, None) if self.config.moe.routing_replay == "R3" else None
        self._begin_step(micro_batches, replay)
        routing = RoutingPass(self.routers, len(micro_batches), replay)
        outputs = self.pipeline.run(micro_batches, self._old_pass(), forward_only=True, routing=routing)
        report = PassReport.collect(micro_batches, outputs, self.groups)
        if replay is None:
            report.routing = self._changed_since_rollout(micro_batches, routing.recorded)
        if leaves_out_by_covariance(self.config.algorithm) and self.groups.is_last_stage:
            settings = objective_settings(self.config.algorithm, self.config.objective)
            inputs = [output.covariance for output in outputs if output.covariance is not None]
            for output, choice in zip(outputs, choose_by_covariance(settings, inputs, self.groups), strict=True):
                assert output.old is not None
                output.old.covariance = choice
        return OldState([output.old for output in outputs if output.old is not None], routing.recorded, report)

    def score(self, micro_batches: list[MicroBatch], head: Head, replays_rollout: bool) -> list[PassOutput]:
        """Run a pass without gradients and with the caller's head, under the current weights. Returns the head's
        outputs in order, on last-stage ranks only. Collective.

        `replays_rollout`: the tokens take the routes of the rollout, for any configuration; else the routers choose.
        """
        replay = [self.routers.rollout_routes(m) for m in micro_batches] if replays_rollout else None
        self._begin_step(micro_batches, replay)
        routing = RoutingPass(self.routers, len(micro_batches), replay)
        return self.pipeline.run(micro_batches, head, forward_only=True, routing=routing)

    def can_correct_in_training(self, packs: list[list[MicroBatch]]) -> bool:
        """Whether the training pass of these mini-batches' packs can decide the correction, so that the step needs no
        old pass: no rank has more than one pack. Collective.
        """
        return may_correct_in_training(self.config) and max_packs(sum(map(len, packs)), self.groups) == 1

    def correct(self, old: Sequence[OldState]) -> None:
        """Decide the correction of the mismatch for a whole rollout batch, and write it into all its old passes.

        Does nothing with `mismatch.correction: none` or `old_log_probs: rollout`. Collective. Raises NumericsError
        naming a trajectory whose gap is not finite.
        """
        if not corrects_engine_gap(self.config.mismatch, self.config.old_log_probs) or not self.groups.is_last_stage:
            return
        passes = [micro_batch for state in old for micro_batch in state.micro_batches]
        decided = correct_batch(self._rule(), [p.gap for p in passes], self.groups)
        for one, correction in zip(passes, decided, strict=True):
            one.correction = correction

    def train_mini_batch(
        self,
        micro_batches: list[MicroBatch],
        settings: ObjectiveSettings,
        denominator: float,
        old: OldState | None,
        reference: list[torch.Tensor] | None = None,
        corrects: bool = False,
        teacher: list[TeacherScores] | None = None,
    ) -> tuple[StepResult, PassReport]:
        """Take one optimizer step of the policy objective on one mini-batch.

        `denominator`: the global count that the aggregation averages over. `old`: None if old is current. `reference`:
        what `ReferencePolicy.log_probs` returned for these packs, if there is a KL term: [N] float32 nats of this
        rank's active tokens per micro-batch. `corrects`: without `old`, decide the correction in this pass
        (`can_correct_in_training`). `teacher`: what `TeacherModel.score` returned for these packs, if there is a
        teacher. Raises ValueError if the correction was not decided, and NumericsError naming the
        trajectory with a non-finite active log-prob, or the layers that did not follow replayed routes. Collective.
        """
        report = self.policy_gradients(micro_batches, settings, denominator, old, reference, corrects, teacher)
        return self._apply(report), report

    def policy_gradients(
        self,
        micro_batches: list[MicroBatch],
        settings: ObjectiveSettings,
        denominator: float,
        old: OldState | None,
        reference: list[torch.Tensor] | None = None,
        corrects: bool = False,
        teacher: list[TeacherScores] | None = None,
    ) -> PassReport:
        """`train_mini_batch` without the step: leaves the reduced gradients in Megatron's buffers. Collective.

        `reference`, `teacher`: as in `train_mini_batch`.
        """
        replay = self._replay(micro_batches, old)
        if old is None:
            self._begin_step(micro_batches, replay)
        routing = RoutingPass(self.routers, len(micro_batches), replay)
        outputs = self.accumulate_gradients(
            micro_batches, self._policy_loss(settings, denominator, old, reference, corrects, teacher), routing
        )
        report = PassReport.collect(micro_batches, outputs, self.groups)
        report.routing = self.balancing.sums() | rank_loads(routing.taken, self.routers.moe, self.groups)
        if replay is None and old is not None:
            report.routing |= self._changed("old", micro_batches, old.routes, routing.recorded)
        elif replay is None:
            report.routing |= self._changed_since_rollout(micro_batches, routing.recorded)
            if corrects:  # this pass is the old one
                report.routing |= self._changed("old", micro_batches, routing.recorded, routing.recorded)
        return report

    def train_supervised(self, micro_batches: list[MicroBatch], denominator: float) -> tuple[StepResult, PassReport]:
        """Take one optimizer step of the mean negative log-prob of the demonstration tokens. `denominator`: their
        number in the mini-batch, on all ranks. Collective.
        """
        self._begin_step(micro_batches, None)
        outputs = self.accumulate_gradients(micro_batches, SupervisedLoss(denominator))
        report = PassReport.collect(micro_batches, outputs, self.groups)
        report.routing = self.balancing.sums()
        return self._apply(report), report

    def accumulate_gradients(
        self, micro_batches: list[MicroBatch], head: Head, routing: RoutingPass | None = None
    ) -> list[PassOutput]:
        """Run the forward and backward passes of a mini-batch, and leave the reduced gradients in Megatron's buffers.
        Collective.
        """
        routing = routing or RoutingPass(self.routers, len(micro_batches))
        self.scales.before_gradients(lambda: self._forward_backward(micro_batches, copy(head), routing.repeat()))
        outputs = self._forward_backward(micro_batches, head, routing)
        self.scales.after_gradients()
        self.expert_bias.count(micro_batches, routing.taken)
        return outputs

    def _forward_backward(self, micro_batches: list[MicroBatch], head: Head, routing: RoutingPass) -> list[PassOutput]:
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.balancing.start(micro_batches)
        return self.pipeline.run(micro_batches, head, forward_only=False, routing=routing)

    def _begin_step(self, micro_batches: list[MicroBatch], replay: list[Routes] | None) -> None:
        """Update the FP8 scales. Old passes and the training passes that are compared with them round with the same
        scales; without old passes each mini-batch has scales of its own. `replay`: the routes of the passes that
        follow, for which the scales are measured.
        """
        routing = RoutingPass(self.routers, len(micro_batches), replay)
        self.scales.begin_step(
            lambda: self.pipeline.run(micro_batches, self._old_pass(), forward_only=True, routing=routing)
        )

    # --- parts ---------------------------------------------------------------------------------------------

    def _policy_loss(
        self,
        settings: ObjectiveSettings,
        denominator: float,
        old: OldState | None,
        reference: list[torch.Tensor] | None,
        corrects: bool,
        scores: list[TeacherScores] | None,
    ) -> PolicyLoss:
        kl, teacher = self.config.kl, self.config.teacher
        if (kl.coefficient > 0) != (reference is not None):
            raise ValueError(
                f"kl.coefficient is {kl.coefficient:g}, but reference log-probs were"
                f" {'not ' if reference is None else ''}given"
            )
        if (teacher is not None) != (scores is not None):
            raise ValueError(f"section teacher is {'absent' if teacher is None else 'there'}, but scores are not alike")
        return PolicyLoss(
            groups=self.groups,
            settings=settings,
            denominator=denominator,
            old_pass=self._old_pass(),
            use_rollout=self.config.old_log_probs == "rollout",
            old=old.micro_batches if old is not None else None,
            kl=KlTerm(kl.coefficient, kl.estimator, reference) if reference is not None else None,
            teacher=teacher_term(teacher, scores) if teacher and scores else None,
            old_is_current=old_is_current(self.config.old_log_probs, self.config.batch),
            corrects=corrects and old is None,
        )

    def _old_pass(self) -> OldPass:
        config = self.config
        by_covariance = leaves_out_by_covariance(config.algorithm)
        return OldPass(
            self.groups,
            self._rule(),
            config.diagnostics.token_mismatch,
            band_of(config.algorithm, config.objective),
            by_covariance,
        )

    def _rule(self) -> CorrectionRule:
        mismatch = self.config.mismatch
        return CorrectionRule(
            mismatch.correction,
            mismatch.bound_nats,
            mismatch.token_veto_nats,
            mismatch.kept_weight,
            mismatch.segment_tokens,
            mismatch.upper,
            mismatch.lower,
            mismatch.threshold,
        )

    def _apply(self, report: PassReport | None = None) -> StepResult:
        """Take the optimizer step and, unless it was skipped, update the expert bias, which adds to the report."""
        result = apply_gradients(
            self.optimizer, self.scheduler, self.config.optimizer.clip_grad, self.groups, self.before_step
        )
        if not result.skipped:
            loads = self.expert_bias.update()
            if report is not None:
                report.routing |= loads
        return result

    def _replay(self, micro_batches: list[MicroBatch], old: OldState | None) -> list[Routes] | None:
        """The routes that this pass must take, or None if the routers choose."""
        mode = self.config.moe.routing_replay
        if mode == "R3":
            return [self.routers.rollout_routes(m) for m in micro_batches]
        if mode == "R2":
            if old is None:
                raise ValueError("moe.routing_replay: R2 replays the routes of the old pass, and there was no old pass")
            return old.routes
        return None

    def _changed_since_rollout(self, micro_batches: list[MicroBatch], recorded: list[Routes]) -> dict[str, float]:
        if not self.routers.all() or any(m.routed_experts is None for m in micro_batches):
            return {}
        return self._changed(
            "rollout", micro_batches, [self.routers.rollout_routes(m) for m in micro_batches], recorded
        )

    def _changed(
        self, since: str, micro_batches: list[MicroBatch], before: list[Routes], after: list[Routes]
    ) -> dict[str, float]:
        """The numbers of `count_changed` on this rank, summed over the micro-batches."""
        if not self.routers.all():
            return {}
        counts = [
            count_changed(b, a, self.routers.num_rows(m)) for m, b, a in zip(micro_batches, before, after, strict=True)
        ]
        return changed_sums(since, before[0], torch.stack(counts).sum(dim=0))


def teacher_term(teacher: Teacher, scores: list[TeacherScores]) -> TeacherTerm:
    """What section `teacher` adds to the objective of a mini-batch with these scores."""
    rule = None
    if teacher.divergence != "sampled_token":
        rule = DivergenceRule(teacher.top_k, teacher.top_k_of == "teacher", teacher.top_k_rest == "bucket")
    return TeacherTerm(teacher.coefficient, teacher.reward_weight, scores, rule)
