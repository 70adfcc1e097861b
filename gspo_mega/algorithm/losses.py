"""The losses besides the policy objective: the KL term, the value loss of a critic, and the supervised loss.

The KL term estimates the KL divergence to a frozen reference policy at each sampled token. With
d_it = log pi_ref(y_it) - log pi(y_it) at the active tokens of trajectory i, k_it is one of

    k1 = -d        k2 = d^2 / 2        k3 = exp(d) - 1 - d        (Schulman, "Approximating KL divergence")

and K = sum_i c_i w_i (1/L_i) sum_t k_it, with the c_i of the aggregation (`sequence_coefficients`) and the w_i of the
mismatch correction, 0 for a rejected sequence, exactly as in J. The loss is -J + coefficient x K. The gradient flows
through log pi(y_it) inside k_it only. For k1 it is 1, whose expectation under the policy vanishes, so k1 measures and
does not hold the policy back; for k2 it is -d; for k3 it is 1 - exp(d).

An entropy bonus adds coefficient x E to J, E = sum_i c_i w_i (1/L_i) sum_t H_it with the same coefficients, H_it the
entropy of the next-token distribution at token t. The gradient flows through H_it.

The value loss is PPO's (arXiv:1707.06347; clipped as in arXiv:1811.02553, section 2). With V_t the value now, V'_t the
value that the advantages were made with, R_t the return and eps the clip range,

    l_t = 1/2 max((V_t - R_t)^2, (V'_t + clip(V_t - V'_t, -eps, eps) - R_t)^2),

and without a clip range l_t = 1/2 (V_t - R_t)^2. The loss is the sum over sequences of c_i (1/L_i) sum_t l_it.

The supervised loss of a cold start is the cross-entropy of the demonstration's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gspo_mega.algorithm.objective import active_values, segment_sum, sequence_coefficients
from gspo_mega.algorithm.terms import ObjectiveSettings, exp_minus_linear, non_finite_log_prob, require_finite

KlEstimator = Literal["k1", "k2", "k3"]
KL_SUMS = ("k", "num_tokens")


@dataclass(frozen=True)
class ReferenceKl:
    """`value`: this rank's share of K, 0-d float64 with gradient; summed over data- and context-parallel ranks it is K.
    `sums` [len(KL_SUMS)] float64: sum of k_it and number of active tokens held here; divided, the KL per token in nats.
    """

    value: Tensor
    sums: Tensor


def token_kl(estimator: KlEstimator, d: Tensor) -> Tensor:
    """k of each `d` = log reference - log policy: both [T] float64 nats. Raises ValueError for an unknown estimator."""
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        return exp_minus_linear(d)
    raise ValueError(f"estimator {estimator!r}; valid: k1, k2, k3")


def reference_kl(
    settings: ObjectiveSettings,
    estimator: KlEstimator,
    *,
    log_probs: Tensor,
    reference_log_probs: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    num_sequences: int,
    lengths: Tensor,
    denominator: float,
    keep: Tensor | None = None,
    sequence_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    group_sizes: Tensor | None = None,
    branch_weights: Tensor | None = None,
) -> ReferenceKl:
    """This rank's share of K from one packed micro-batch.

    Local tokens, each [T]: `log_probs` (nats, with gradient), `reference_log_probs` (nats, no gradient), `mask`,
    `segment_ids`, `token_weights`; per sequence, each [S], the global values that `policy_objective` takes. A token's
    term needs no other token, so context-parallel ranks share nothing here. Raises NumericsError for a non-finite
    active log-prob, inside of `deferred_checks` at its end.
    """
    require_finite(mask, segment_ids, non_finite_log_prob, log_probs=log_probs, reference_log_probs=reference_log_probs)
    d = active_values(reference_log_probs.detach(), mask) - active_values(log_probs, mask)
    k = token_kl(estimator, d)
    value = token_average(
        settings,
        k if token_weights is None else k * active_values(token_weights.detach(), mask),
        segment_ids=segment_ids,
        num_sequences=num_sequences,
        lengths=lengths,
        denominator=denominator,
        keep=keep,
        sequence_weights=sequence_weights,
        group_sizes=group_sizes,
        branch_weights=branch_weights,
    )
    return ReferenceKl(value, torch.stack([k.detach().sum(), mask.bool().sum().double()]))


def token_average(
    settings: ObjectiveSettings,
    values: Tensor,
    *,
    segment_ids: Tensor,
    num_sequences: int,
    lengths: Tensor,
    denominator: float,
    keep: Tensor | None = None,
    sequence_weights: Tensor | None = None,
    group_sizes: Tensor | None = None,
    branch_weights: Tensor | None = None,
) -> Tensor:
    """This rank's share of sum_i c_i w_i (1/L_i) sum_t values_it: 0-d float64, with the gradient of `values`.

    `values: [T]` float64, 0 at masked tokens; the other arguments as in `policy_objective`. Summed over data- and
    context-parallel ranks it is the average that the objective takes of its own terms.
    """
    tokens = lengths.double()
    weights = sequence_coefficients(settings, lengths, denominator, group_sizes, branch_weights) / tokens.clamp(min=1.0)
    if sequence_weights is not None:
        weights = weights * sequence_weights.detach().double()
    if keep is not None:
        weights = torch.where(keep.bool(), weights, 0.0)
    return (weights * segment_sum(values, segment_ids, num_sequences)).sum()


# The sums from which `explained_variance` is computed. Each adds up over tokens, micro-batches and ranks.
VALUE_SUMS = (
    "value_tokens",
    "value_sum",
    "return_sum",
    "return_square_sum",
    "value_error_sum",
    "value_error_square_sum",
)


class ValueLoss(NamedTuple):
    """`loss`: this rank's part, a float64 scalar with gradient. `clipped: [T]` bool: whether the clipped term is the
    larger one, so that the token has no gradient.
    """

    loss: Tensor
    clipped: Tensor


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    sequence_ids: Tensor,
    lengths: Tensor,
    coefficients: Tensor,
    clip_range: float | None,
) -> ValueLoss:
    """The critic's loss over the T active tokens that this rank holds; ranks' losses add up.

    `values: [T]` with gradient; `old_values`, `returns: [T]`, in the unit of rewards; `sequence_ids: [T]` int64 in
    [0, S), local; `lengths: [S]` active tokens of each sequence, all ranks together; `coefficients: [S]` float64: c_i
    (`sequence_coefficients`); `clip_range`: eps, None for no clipping. Raises ValueError for an eps that is
    not above 0.
    """
    if clip_range is not None and not clip_range > 0:
        raise ValueError(f"clip_range must be above 0; got {clip_range}")
    new, old, target = values.double(), old_values.detach().double(), returns.detach().double()
    squares = (new - target).square()
    clipped = torch.zeros_like(squares, dtype=torch.bool)
    if clip_range is not None:
        near = old + (new - old).clamp(-clip_range, clip_range)
        near_squares = (near - target).square()
        clipped = (near_squares > squares).detach()
        squares = torch.where(clipped, near_squares, squares)
    sums = segment_sum(0.5 * squares, sequence_ids, lengths.numel())
    return ValueLoss((coefficients * sums / lengths.double().clamp(min=1.0)).sum(), clipped)


def value_sums(values: Tensor, returns: Tensor) -> dict[str, Tensor]:
    """The `VALUE_SUMS` of T active tokens: float64 scalars. `values`, `returns: [T]`, in the unit of rewards."""
    value, target = values.detach().double(), returns.detach().double()
    error = target - value
    parts = (
        value.new_full((), float(value.numel())),
        value.sum(),
        target.sum(),
        target.square().sum(),
        error.sum(),
        error.square().sum(),
    )
    return dict(zip(VALUE_SUMS, parts, strict=True))


def explained_variance(sums: dict[str, float]) -> float | None:
    """1 - Var(R - V) / Var(R) over all tokens of `VALUE_SUMS`: 1 for a perfect critic, 0 for one that always predicts
    the mean, negative for a worse one. None if returns do not vary beyond rounding, or if no token is active.
    """
    count = sums["value_tokens"]
    if count < 1:
        return None
    spread = sums["return_square_sum"] / count - (sums["return_sum"] / count) ** 2
    if spread <= 1e-12 * sums["return_square_sum"] / count:
        return None
    error = sums["value_error_square_sum"] / count - (sums["value_error_sum"] / count) ** 2
    return 1.0 - error / spread


def supervised_loss(log_probs: Tensor, mask: Tensor, denominator: float) -> Tensor:
    """This rank's share of the mean negative log-prob of a mini-batch: scalar float64, nats per token.

    `log_probs: [T]` with gradient; `mask: [T]`, non-zero at the demonstration's tokens, masked entries may hold
    anything. `denominator`: the number of such tokens in the whole mini-batch on all ranks, so that shares and
    gradients add up.

    Raises ValueError for a denominator that is not positive.
    """
    if not denominator > 0:
        raise ValueError(f"denominator {denominator}: must be the positive global number of demonstration tokens")
    return -active_values(log_probs, mask).sum() / denominator
