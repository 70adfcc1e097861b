"""The loss of a critic and how well its values explain the returns.

Owns the maths of PPO's value loss (arXiv:1707.06347; clipped as in arXiv:1811.02553, section 2) and of explained
variance. The values come from a critic's head, the returns from `gae.py`, the coefficients of sequences from
`aggregation.py`.

With V_t the value now, V'_t the value that the advantages were made with, R_t the return and eps the clip range,

    l_t = 1/2 max((V_t - R_t)^2, (V'_t + clip(V_t - V'_t, -eps, eps) - R_t)^2),

and without a clip range l_t = 1/2 (V_t - R_t)^2. The loss is the sum over sequences of c_i (1/L_i) sum_t l_it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gspo_mega.algorithm.ratio import segment_sum

# What explained variance is made of; each adds up over tokens, micro-batches and ranks.
VALUE_SUMS = (
    "value_tokens",
    "value_sum",
    "return_sum",
    "return_square_sum",
    "value_error_sum",
    "value_error_square_sum",
)


class ValueLoss(NamedTuple):
    """`loss`: this rank's part, a float64 scalar. `clipped: [T]` bool: whether the clipped term is the larger one, so
    that the token has no gradient."""

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
    """The critic's loss over the T active tokens that this rank holds.

    `values: [T]` with gradient; `old_values`, `returns: [T]`, in the unit of rewards; `sequence_ids: [T]` int64 in
    [0, S), local; `lengths: [S]` active tokens of each sequence, all ranks together; `coefficients: [S]` float64: c_i
    (`aggregation.sequence_coefficients`); `clip_range`: eps, None for no clipping. Raises ValueError for an eps that is
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
    """1 - Var(R - V) / Var(R) over all tokens of `VALUE_SUMS`: 1 for a perfect critic, 0 for one that says the mean,
    negative for a worse one. None where returns do not vary beyond rounding, or no token is active.
    """
    count = sums["value_tokens"]
    if count < 1:
        return None
    spread = sums["return_square_sum"] / count - (sums["return_sum"] / count) ** 2
    if spread <= 1e-12 * sums["return_square_sum"] / count:
        return None
    error = sums["value_error_square_sum"] / count - (sums["value_error_sum"] / count) ** 2
    return 1.0 - error / spread
