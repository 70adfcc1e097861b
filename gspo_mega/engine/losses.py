"""The losses of the last pipeline stage: the old pass, the policy loss, the supervised loss.

Each is a callable from (batch, log-probs, entropies) to a `PassOutput`. Entropies are computed only for a callable
whose `wants_entropy` is true, and are None otherwise. `gspo_mega.algorithm` has the maths; this module adds the
context-parallel group and the report. A report is this rank's part: sums over the tokens that it holds, which the train
loop adds up over context- and data-parallel ranks.

`correct_batch` decides the correction of the mismatch once for a whole rollout batch, the same on all ranks: it
brings the sums of all old passes together over the data-parallel ranks, applies `algorithm/correction.py` to them in
the batch's order, and returns the weight of each response for its training pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from gspo_mega.algorithm import terms
from gspo_mega.algorithm.correction import (
    SUM_NAMES,
    CorrectionRule,
    correct,
    correct_segments,
    exact_sums,
    mismatch_sums,
)
from gspo_mega.algorithm.covariance import (
    CovarianceChoice,
    covariance_sums,
    covariances,
    draw_bound,
    num_chosen,
    token_draws,
)
from gspo_mega.algorithm.diagnostics import policy_sums
from gspo_mega.algorithm.distillation import (
    TokenGuidance,
    has_token_terms,
    teacher_sums,
    token_guidance,
)
from gspo_mega.algorithm.losses import KlEstimator, reference_kl, supervised_loss, token_average
from gspo_mega.algorithm.named_corrections import second_moment_bound, squares, token_weights
from gspo_mega.algorithm.objective import ObjectiveSettings, policy_objective, segment_sum, token_log_ratios
from gspo_mega.algorithm.terms import (
    CORRECTION_CENTRE,
    CORRECTION_DEVIATION,
    CORRECTION_SEGMENTS,
    CORRECTION_TOKENS,
    CORRECTION_VETOES,
    CORRECTION_WEIGHT,
    ENTROPY_SUM,
    KEPT_MASS,
    LOG_S,
    MISMATCH_MAXIMA,
    MISMATCH_SUMS,
)
from gspo_mega.base.errors import NumericsError
from gspo_mega.config.clip_range import Band
from gspo_mega.engine.device_batch import DeviceBatch, sum_over_context, with_known_sum
from gspo_mega.engine.log_probs import DivergenceRule
from gspo_mega.engine.process_groups import ParallelGroups, device


@dataclass
class GapSums:
    """The input of the correction from the S sequences of one micro-batch: whole sequences, the same on all context
    ranks.

    `rows` [S] int64: trajectory of the rollout batch, -1 for filler. `sums` [S] float64 nats, from `exact_sums`;
    `lengths` [S] float64 active tokens; `num_vetoes` [S] float64 tokens above the veto. `segments` [S, 2 V] float64:
    `sums` and then `lengths` of the tokens of each of the V weight versions of the rollout batch; None if V = 1.
    `tokens` [N], of this rank's active tokens: float64 weights, or with `m2po` int64 `squares`; None if tokens have no
    weights.
    """

    rows: torch.Tensor
    sums: torch.Tensor
    lengths: torch.Tensor
    num_vetoes: torch.Tensor
    segments: torch.Tensor | None = None
    tokens: torch.Tensor | None = None


@dataclass
class SequenceCorrection:
    """The correction of the S sequences of one micro-batch. `weights` [S] float64 and `keep` [S] bool as in
    `CorrectionResult`; `deviations`, `centre` [S] float64 nats, the centre being one number for the whole batch.
    `segments` [S, 2] float64: how many segments were judged, and 1 where only a segment put the sequence outside; None
    with one version. `token_weights` [N] float64 of this rank's active tokens; None if tokens have none.
    """

    weights: torch.Tensor
    keep: torch.Tensor
    deviations: torch.Tensor
    centre: torch.Tensor
    segments: torch.Tensor | None = None
    token_weights: torch.Tensor | None = None


def max_packs(num_packs: int, groups: ParallelGroups) -> int:
    """The largest `num_packs` of any data-parallel rank. Collective over the data group."""
    most = torch.tensor(num_packs, device=device())
    if groups.data.size > 1:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=groups.data.group)
    return int(most)


def correct_batch(rule: CorrectionRule, gaps: Sequence[GapSums], groups: ParallelGroups) -> list[SequenceCorrection]:
    """Decide the correction of the rollout batch; returns it for each micro-batch of `gaps`, which are all those of
    this rank.

    Every row's numbers come from one data-parallel rank and are added to zeros, so the decision is bit for bit the same
    in every layout that gives the same log-probs. Collective over the data group. Raises NumericsError naming a
    trajectory whose sum is not finite.
    """
    num_rows = torch.tensor(max((int(gap.rows.max()) for gap in gaps), default=-1) + 1, device=device())
    if groups.data.size > 1:
        dist.all_reduce(num_rows, op=dist.ReduceOp.MAX, group=groups.data.group)
    width = 0 if not gaps or gaps[0].segments is None else gaps[0].segments.shape[1]  # the same on all ranks
    table = torch.zeros(3 + width, int(num_rows), dtype=torch.float64, device=device())
    for gap in gaps:
        real = gap.rows >= 0
        parts = [gap.sums, gap.lengths, gap.num_vetoes, *(() if gap.segments is None else gap.segments.unbind(dim=1))]
        table[:, gap.rows[real]] = torch.stack(parts)[:, real]
    if groups.data.size > 1:
        dist.all_reduce(table, group=groups.data.group)
    # On the host: the centre is found by bisection, and the table is small.
    sums, lengths, num_vetoes, *by_version = table.cpu().unbind()
    of_segments = None
    bound = None
    if rule.mode == "m2po":
        bound = second_moment_bound(
            rule.divergence_limit,
            torch.cat([gap.tokens for gap in gaps if gap.tokens is not None])
            if gaps
            else torch.zeros(0, dtype=torch.int64, device=device()),
            lambda sums: _sum_over_tokens(sums, groups),
        )
    if by_version and rule.mode in ("truncate", "mask"):
        half = width // 2
        segments = correct_segments(
            rule, torch.stack(by_version[:half], dim=1), torch.stack(by_version[half:], dim=1), num_vetoes
        )
        result = segments.result
        of_segments = torch.stack([segments.num_judged, segments.by_segment.double()], dim=1)
    else:
        result = correct(rule, sums, lengths, num_vetoes)
    corrections = []
    for gap in gaps:
        real, rows = gap.rows >= 0, gap.rows.clamp(min=0)
        weights, keep, deviations = (
            values.to(gap.sums.device)[rows] for values in (result.weights, result.keep, result.deviations)
        )
        corrections.append(
            SequenceCorrection(
                weights=torch.where(real, weights, 1.0),
                keep=keep | ~real,
                deviations=torch.where(real, deviations, 0.0),
                centre=torch.full_like(gap.sums, result.centre),
                segments=None
                if of_segments is None
                else torch.where(real[:, None], of_segments.to(gap.sums.device)[rows], 0.0),
                token_weights=gap.tokens if bound is None or gap.tokens is None else (gap.tokens <= bound).double(),
            )
        )
    return corrections


def _sum_over_tokens(sums: torch.Tensor, groups: ParallelGroups) -> torch.Tensor:
    """`sums` [K] int64, added up over the ranks that hold different tokens. Collective over context and data group."""
    sums = sums.to(device())
    for group in (groups.context, groups.data):
        if group.size > 1:
            dist.all_reduce(sums, group=group.group)
    return sums


def choose_by_covariance(
    settings: ObjectiveSettings, inputs: Sequence[CovarianceInputs], groups: ParallelGroups
) -> list[CovarianceChoice]:
    """Choose the tokens of a mini-batch that Clip-Cov leaves out (`algorithm/covariance.py`), for each micro-batch of
    `inputs`, which are all those of this rank. Collective over context and data group.
    """
    assert settings.covariance_share is not None
    none = torch.zeros(0, dtype=torch.float64, device=device())
    log_probs, advantages = (
        torch.cat([none, *(part.to(torch.float64) for part in parts)])
        for parts in ([one.log_probs for one in inputs], [one.advantages for one in inputs])
    )
    sums = _sum_over_tokens(covariance_sums(log_probs, advantages), groups)
    values = covariances(log_probs, advantages, sums)
    candidates = (values > settings.covariance_low) & (values < settings.covariance_high)
    draws = torch.cat([none.long(), *(one.draws for one in inputs)])
    most = num_chosen(settings.covariance_share, int(sums[0]))
    bound = draw_bound(most, draws[candidates], lambda counts: _sum_over_tokens(counts, groups))
    chosen = candidates & (draws <= bound)
    sizes = [len(one.draws) for one in inputs]
    return [CovarianceChoice(*parts) for parts in zip(candidates.split(sizes), chosen.split(sizes), strict=True)]


@dataclass
class CovarianceInputs:
    """What Clip-Cov chooses by, of this rank's N active tokens in one micro-batch: `log_probs` [N] float32 nats,
    `advantages` [N] float64, `draws` [N] int64.
    """

    log_probs: torch.Tensor
    advantages: torch.Tensor
    draws: torch.Tensor

    @classmethod
    def of(cls, batch: DeviceBatch, log_probs: torch.Tensor) -> CovarianceInputs:
        own = batch.token_advantages
        advantages = batch.sequence["advantage"].double()[batch.sequence_ids] if own is None else own
        keys = batch.sequence["draw"].long()[batch.sequence_ids]
        return cls(log_probs.detach(), advantages, token_draws(keys, batch.position_ids[0, batch.rows]))


@dataclass
class OldLogProbs:
    """The result of the old pass for the training passes of one micro-batch, on last-stage ranks.

    `log_probs` [N] float32 nats for this rank's active tokens. `gap_sums` [S] float64 nats: the gap between the two
    engines, trainer - rollout, summed over each whole sequence, the same on all context ranks. `gap`: the input of its
    correction. `correction`: the decision over the whole rollout batch; None if nothing corrects the gap, and until
    `PolicyEngine.correct` has been called. `covariance`: which tokens Clip-Cov leaves out; None with other algorithms.
    """

    log_probs: torch.Tensor
    gap_sums: torch.Tensor
    gap: GapSums
    correction: SequenceCorrection | None = None
    covariance: CovarianceChoice | None = None


@dataclass
class PassOutput:
    """The output of one micro-batch, this rank's part.

    `loss`: the 0-d float64 tensor that this rank back-propagates, None in a forward-only pass. `columns`:
    per-sequence parts, [S] or [S, K] float64; reference log-probs are [N] float32 nats. `totals`: parts of sums over
    the mini-batch, [K] float64. `old`: the result of the old pass. `gaps`: [N] float16 nats of this rank's active
    tokens, trainer - server, from a pass that keeps them. `covariance`: what Clip-Cov chooses by.
    """

    loss: torch.Tensor | None = None
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    totals: dict[str, torch.Tensor] = field(default_factory=dict)
    old: OldLogProbs | None = None
    gaps: torch.Tensor | None = None
    covariance: CovarianceInputs | None = None


def require_finite_tokens(batch: DeviceBatch, **tensors: torch.Tensor) -> None:
    """Raise NumericsError naming the trajectory of the first non-finite active token, at the end of the pass
    (`deferred_checks`).

    tensors: [N] of a float dtype, one value per active token of this rank, in nats.
    """

    def describe(bad: terms.NonFiniteToken) -> NumericsError:
        return NumericsError(
            f"{bad.tensor} is {bad.value} at an active token of trajectory {int(batch.trajectory_index[bad.segment])} "
            f"of the rollout batch (token id {int(batch.labels[bad.token])}); training on it would spoil the weights"
        )

    terms.require_finite(torch.ones_like(batch.sequence_ids), batch.sequence_ids, describe, **tensors)


def _require_entropies(entropies: torch.Tensor | None) -> torch.Tensor:
    if entropies is None:
        raise ValueError("the entropies were not computed; set `wants_entropy` on this loss")
    return entropies


@dataclass
class OldPass:
    """The trainer's log-probs at the start of a rollout batch, and their gap to the server's. `rule`: corrects that gap
    later. `keeps_gaps`: the output has the gap of each token, for a person to look at. `band`: the clip range that the
    gap is compared with, None if nothing is clipped. `by_covariance`: the output has what Clip-Cov chooses by.

    Called with a batch, `log_probs` [N] float32 nats and `entropies` [N] float32 nats of this rank's active tokens.
    """

    groups: ParallelGroups
    rule: CorrectionRule
    keeps_gaps: bool = False
    band: Band | None = None
    by_covariance: bool = False
    wants_entropy: ClassVar[bool] = True

    def __call__(self, batch: DeviceBatch, log_probs: torch.Tensor, entropies: torch.Tensor | None) -> PassOutput:
        columns, old = self.measure(batch, log_probs, entropies)
        inputs = CovarianceInputs.of(batch, log_probs) if self.by_covariance else None
        return PassOutput(columns=columns, old=old, gaps=self.gaps(batch, log_probs), covariance=inputs)

    def gaps(self, batch: DeviceBatch, log_probs: torch.Tensor) -> torch.Tensor | None:
        """The gap of each token, [N] float16 nats; None unless gaps are kept. log_probs: [N] float32 nats."""
        return (log_probs.detach() - batch.rollout_log_probs).half() if self.keeps_gaps else None

    def measure(
        self, batch: DeviceBatch, log_probs: torch.Tensor, entropies: torch.Tensor | None
    ) -> tuple[dict[str, torch.Tensor], OldLogProbs]:
        """Returns the columns of the report, and the input of the training passes. Collective over the context group.

        log_probs, entropies: [N] float32 nats of this rank's active tokens. Columns: [S] or [S, K] float64, this rank's
        parts. Raises NumericsError for a non-finite active token.
        """
        require_finite_tokens(batch, old_log_probs=log_probs, rollout_log_probs=batch.rollout_log_probs)
        active = torch.ones_like(batch.sequence_ids)
        sums, maxima = mismatch_sums(
            log_probs, batch.rollout_log_probs, active, batch.sequence_ids, batch.num_sequences, band=self.band
        )
        d = token_log_ratios(log_probs.detach(), batch.rollout_log_probs, active)
        parts = torch.stack(
            [
                sums[:, SUM_NAMES.index("log_ratio")],
                exact_sums(d, batch.sequence_ids, batch.num_sequences),
                segment_sum((d.abs() > self.rule.veto_limit).double(), batch.sequence_ids, batch.num_sequences),
            ],
            dim=1,
        )
        if batch.num_versions > 1:
            assert batch.version_index is not None
            segments = batch.sequence_ids * batch.num_versions + batch.version_index
            shape = (batch.num_sequences, batch.num_versions)
            by_version = [
                exact_sums(d, segments, shape[0] * shape[1]).view(shape),
                segment_sum(torch.ones_like(d), segments, shape[0] * shape[1]).view(shape),
            ]
            parts = torch.cat([parts, *by_version], dim=1)
        whole = sum_over_context(parts, self.groups.context)
        gap_sums, exact, num_vetoes = whole[:, :3].unbind(dim=1)
        columns = {
            MISMATCH_SUMS.name: sums,
            MISMATCH_MAXIMA.name: maxima,
            ENTROPY_SUM.name: segment_sum(
                _require_entropies(entropies).detach().double(), batch.sequence_ids, batch.num_sequences
            ),
        }
        if batch.kept is not None and batch.kept.log_mass is not None:
            mass = batch.kept.log_mass.double().exp()
            columns[KEPT_MASS.name] = segment_sum(mass, batch.sequence_ids, batch.num_sequences)
        gap = GapSums(
            rows=torch.from_numpy(batch.trajectory_index).to(exact.device),
            sums=exact,
            lengths=batch.sequence["length"].double(),
            num_vetoes=num_vetoes,
            segments=whole[:, 3:] if batch.num_versions > 1 else None,
            tokens=squares(d)
            if self.rule.mode == "m2po"
            else token_weights(self.rule, log_probs, batch.rollout_log_probs)
            if self.rule.is_of_tokens
            else None,
        )
        return columns, OldLogProbs(log_probs, gap_sums, gap)


@dataclass
class KlTerm:
    """A KL term to a reference policy, added to the loss. `reference`: for each micro-batch the log-probs of this
    rank's active tokens under that policy, [N] float32 nats."""

    coefficient: float
    estimator: KlEstimator
    reference: list[torch.Tensor]


@dataclass
class TaughtStates:
    """A teacher's whole distributions at M of this rank's active tokens. `places` [M] int64: which of them, None for
    all; `states` [M, H'] of the teacher's dtype, and `head_weight`: its head, [padded vocabulary / tensor, H'].
    """

    places: torch.Tensor | None
    states: torch.Tensor
    head_weight: torch.Tensor


@dataclass
class TaughtTokens:
    """A teacher's K most likely tokens at M of this rank's active tokens. `places`: as in `TaughtStates`; `ids` [M, K]
    int64, `log_probs` [M, K] float32 nats.
    """

    places: torch.Tensor | None
    ids: torch.Tensor
    log_probs: torch.Tensor


@dataclass
class TeacherScores:
    """What teachers say of one micro-batch. `log_probs`: of this rank's active tokens, [N] float32 nats. `taught` [N]
    bool: which tokens have a teacher, None for all; the others' log-probs have no meaning. `distributions`: what whole
    distributions are compared with; each token is in at most one of them.
    """

    log_probs: torch.Tensor
    taught: torch.Tensor | None = None
    distributions: Sequence[TaughtStates | TaughtTokens] = ()

    def beside(self, student_log_probs: torch.Tensor) -> torch.Tensor:
        """The teacher's log-probs, and the student's where a token has no teacher, which makes its k 0."""
        if self.taught is None:
            return self.log_probs
        return torch.where(self.taught, self.log_probs, student_log_probs.detach().to(self.log_probs.dtype))


@dataclass
class TeacherTerm:
    """What a teacher adds to the objective (`algorithm/distillation.py`). `coefficient`, `reward_weight`: the keys of
    section `teacher`. `scores`: one item per micro-batch. `rule`: over what whole distributions are compared, which is
    a loss; None if only the sampled token is, which is an advantage.
    """

    coefficient: float
    reward_weight: float
    scores: list[TeacherScores]
    rule: DivergenceRule | None = None

    def guidance(self, index: int, batch: DeviceBatch, student_log_probs: torch.Tensor) -> TokenGuidance:
        """The advantages of the active tokens of micro-batch `index`. student_log_probs: [N] float nats, pi_old's."""
        theirs = self.scores[index].beside(student_log_probs)
        require_finite_tokens(batch, teacher_log_probs=theirs)
        return token_guidance(
            self.coefficient if self.rule is None else 0.0,
            self.reward_weight,
            student_log_probs=student_log_probs,
            teacher_log_probs=theirs,
            mask=torch.ones_like(batch.sequence_ids),
            segment_ids=batch.sequence_ids,
            advantages=batch.sequence["advantage"],
            token_advantages=batch.token_advantages,
        )


@dataclass
class PolicyLoss:
    """The policy objective of one mini-batch, with the KL term to a reference policy and a teacher's part if there are
    any.

    `old` has the old pass of its micro-batches in order. It is None if the old pass was skipped because old is current
    (one optimizer step per rollout batch, and no correction). With `old_is_current` the loss takes only the correction
    from it: the ratio compares the current log-probs with themselves, so it is 1 even if kernels are not deterministic.
    With `use_rollout` the server's log-probs serve as old ones, and the mismatch is part of the ratio instead of
    being corrected. With `corrects`, which needs `old` to be None, each rank's part of the rollout batch is one
    micro-batch, and the correction is decided here, between its forward and its backward pass: collective over the data
    group as well.

    Raises ValueError if `old_pass.rule` corrects but no correction was or will be decided. A loss without a correction
    has a rule of mode `none`, or uses the server's log-probs.

    Called with the micro-batches in order: a batch, `log_probs` [N] float32 nats and, if `wants_entropy`, `entropies`
    [N] float32 nats of this rank's active tokens. Collective over the context group.
    """

    groups: ParallelGroups
    settings: ObjectiveSettings
    denominator: float
    old_pass: OldPass
    use_rollout: bool
    old: list[OldLogProbs] | None
    kl: KlTerm | None = None
    teacher: TeacherTerm | None = None
    old_is_current: bool = False
    corrects: bool = False
    next_index: int = 0
    divergence: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.settings.covariance_share is not None and (
            self.old is None or any(old.covariance is None for old in self.old)
        ):
            raise ValueError(
                "algorithm clip_cov chooses tokens of a whole mini-batch before its gradients: train with the"
                " mini-batch's old pass"
            )
        mode = self.old_pass.rule.mode
        if mode == "none" or self.use_rollout or self.corrects:
            return
        if self.old is None or any(old.correction is None for old in self.old):
            raise ValueError(
                f"mismatch.correction is {mode}, and the correction was not decided: call `PolicyEngine.correct` with"
                " the old passes of the whole rollout batch, or train with `corrects`; to train without a correction,"
                " set mismatch.correction to none"
            )

    @property
    def wants_entropy(self) -> bool:
        """Whether this loss needs entropies: it reports the metrics of the old pass if that was skipped, and an entropy
        bonus has a gradient in them.
        """
        return self.old is None or self.settings.entropy_coefficient > 0

    def compare(self, batch: DeviceBatch, diverge: Callable[..., torch.Tensor]) -> None:
        """Compare the distributions of the next micro-batch with the teacher's by `Pipeline.diverge`, if this loss
        does.
        """
        if self.teacher is None or self.teacher.rule is None:
            return
        whole: torch.Tensor | None = None
        for part in self.teacher.scores[self.next_index].distributions:
            found = diverge(part, self.teacher.rule)
            if part.places is not None:
                blank = found.new_zeros(len(batch.rows)) if whole is None else whole
                found = blank.index_put((part.places,), found)
            whole = found
        self.divergence = whole if whole is not None else torch.zeros(len(batch.rows), device=batch.rows.device)
        require_finite_tokens(batch, divergence=self.divergence)

    def __call__(self, batch: DeviceBatch, log_probs: torch.Tensor, entropies: torch.Tensor | None) -> PassOutput:
        require_finite_tokens(batch, log_probs=log_probs)
        columns: dict[str, torch.Tensor] = {}
        index, self.next_index = self.next_index, self.next_index + 1
        if self.old is not None:
            old = self.old[index]
            known = torch.zeros_like(old.gap_sums) if self.old_is_current else None
        else:
            columns, old = self.old_pass.measure(batch, log_probs.detach(), entropies)
            if self.corrects:
                terms.check_now()  # the host decides on these numbers now
                (old.correction,) = correct_batch(self.old_pass.rule, [old.gap], self.groups)
            # Old is current or the server's, so the log-ratio sums to 0, or to the gap that `measure` has just summed
            # over the context ranks.
            known = old.gap_sums if self.use_rollout else torch.zeros_like(old.gap_sums)
        correction = None if self.use_rollout else old.correction
        if correction is not None:
            columns |= {
                CORRECTION_WEIGHT.name: correction.weights,
                CORRECTION_DEVIATION.name: correction.deviations,
                CORRECTION_VETOES.name: old.gap.num_vetoes,
                CORRECTION_CENTRE.name: correction.centre,
            }
            if correction.segments is not None:
                columns[CORRECTION_SEGMENTS.name] = correction.segments
            if (of_tokens := correction.token_weights) is not None:
                limit = self.old_pass.rule.upper_limit if self.old_pass.rule.mode == "token_tis" else None
                cut = of_tokens >= limit if limit is not None else torch.zeros_like(of_tokens)
                parts = (torch.ones_like(of_tokens), (of_tokens == 0).double(), cut.double(), of_tokens)
                columns[CORRECTION_TOKENS.name] = torch.stack(
                    [segment_sum(part, batch.sequence_ids, batch.num_sequences) for part in parts], dim=1
                )

        def reduce_sequences(sums: torch.Tensor) -> torch.Tensor:
            """One all-reduce over the context ranks per micro-batch, with or without an old pass."""
            if sums.ndim == 2:  # gmpo's, which also has the sums of its clipped log-ratios
                return sum_over_context(sums, self.groups.context)
            return sum_over_context(sums, self.groups.context) if known is None else with_known_sum(sums, known)

        shared: dict[str, Any] = dict(
            mask=torch.ones_like(batch.sequence_ids),
            segment_ids=batch.sequence_ids,
            advantages=batch.sequence["advantage"],
            lengths=batch.sequence["length"],
            token_advantages=batch.token_advantages,
            branch_weights=batch.sequence.get("weight"),
        )
        keep, weights = (None, None) if correction is None else (correction.keep, correction.weights)
        by_token = None if correction is None else correction.token_weights
        old_log_probs = log_probs.detach() if self.old_is_current else old.log_probs
        both: dict[str, Any] = dict(
            log_probs=log_probs,
            old_log_probs=batch.rollout_log_probs if self.use_rollout else old_log_probs,
            num_sequences=batch.num_sequences,
            denominator=self.denominator,
            keep=keep,
            sequence_weights=weights,
            group_sizes=batch.sequence["group_size"],
        )
        averaged: dict[str, Any] = dict(
            segment_ids=batch.sequence_ids,
            num_sequences=batch.num_sequences,
            lengths=batch.sequence["length"],
            denominator=self.denominator,
            keep=keep,
            sequence_weights=weights,
            group_sizes=batch.sequence["group_size"],
            branch_weights=batch.sequence.get("weight"),
        )

        def average(values: torch.Tensor) -> torch.Tensor:
            """This rank's share of the mean of `values` [N], as J averages its terms and with the tokens' weights."""
            weighed = values.double() if by_token is None else values.double() * by_token
            return token_average(self.settings, weighed, **averaged)

        guidance = None
        if self.teacher is not None:
            guidance = self.teacher.guidance(index, batch, both["old_log_probs"])
            shared["advantages"] = self.teacher.reward_weight * shared["advantages"]
            if has_token_terms(self.settings):
                shared["token_advantages"] = guidance.total
        of_terms, choice = by_token, old.covariance
        if self.settings.covariance_share is not None and choice is not None:
            kept = (~choice.chosen).double()
            of_terms = kept if by_token is None else by_token * kept
        out = policy_objective(
            self.settings,
            rollout_log_probs=batch.rollout_log_probs if self.settings.facts.reads_server else None,
            token_weights=of_terms,
            reduce_sequences=reduce_sequences,
            **both,
            **shared,
        )
        loss, totals = out.loss, {"policy_sums": policy_sums(out, **shared, keep=keep)}
        if choice is not None:
            counts = (
                choice.chosen.sum(),
                choice.candidates.sum(),
                choice.chosen.new_full((), 1).long() * len(choice.chosen),
            )
            totals["covariance_sums"] = torch.stack([count.double() for count in counts])
        if self.teacher is not None and guidance is not None:
            second = None
            if self.divergence is not None:
                value = average(self.divergence)
                loss = loss + self.teacher.coefficient * value
            elif not has_token_terms(self.settings):
                own: dict[str, Any] = shared | {"token_advantages": guidance.teacher}
                known = out.sequence_log_ratio * batch.sequence["length"]  # the context ranks have shared these sums
                second = policy_objective(
                    replace(self.settings, ratio="sequence_token", function=None),
                    token_weights=by_token,
                    reduce_sequences=lambda _: known,
                    **both,
                    **own,
                )
                loss = loss + second.loss
            scores = self.teacher.scores[index]
            totals["teacher_sums"] = teacher_sums(
                guidance,
                student_log_probs=both["old_log_probs"],
                teacher_log_probs=scores.beside(both["old_log_probs"]),
                mask=shared["mask"],
                taught=scores.taught,
                clipped=None if second is None else second.clipped_high | second.clipped_low | second.dual_clipped,
                divergence=self.divergence,
            )
            self.divergence = None
        if self.kl is not None:
            kl = reference_kl(
                self.settings,
                self.kl.estimator,
                log_probs=log_probs,
                reference_log_probs=self.kl.reference[index],
                mask=shared["mask"],
                token_weights=by_token,
                **averaged,
            )
            loss = loss + self.kl.coefficient * kl.value
            totals["kl_sums"] = kl.sums
        if self.settings.entropy_coefficient > 0:
            found = _require_entropies(entropies)
            require_finite_tokens(batch, entropy=found)
            bonus = average(found)
            loss = loss - self.settings.entropy_coefficient * bonus
            totals["entropy_sums"] = bonus.detach()[None]
        gaps = self.old_pass.gaps(batch, log_probs) if self.old is None else None
        return PassOutput(loss, columns | {LOG_S.name: out.sequence_log_ratio}, totals, gaps=gaps)


@dataclass
class SupervisedLoss:
    """The mean negative log-prob of the demonstration tokens of one mini-batch. `denominator`: their global number.

    Called with a batch, `log_probs` [N] float32 nats and `entropies` [N] float32 nats of this rank's active tokens.
    """

    denominator: float
    wants_entropy: ClassVar[bool] = True

    def __call__(self, batch: DeviceBatch, log_probs: torch.Tensor, entropies: torch.Tensor | None) -> PassOutput:
        require_finite_tokens(batch, log_probs=log_probs)
        loss = supervised_loss(log_probs, torch.ones_like(batch.sequence_ids), self.denominator)
        totals = torch.stack([log_probs.detach().double().sum(), _require_entropies(entropies).detach().double().sum()])
        return PassOutput(loss=loss, totals={"supervised_sums": totals})
