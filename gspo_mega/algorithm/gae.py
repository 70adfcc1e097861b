"""Generalised advantage estimation (arXiv:1506.02438) over the tokens of a response: rewards of tokens and values in,
advantages and returns out, and their whitening over a mini-batch.

Owns the maths over active tokens, which are those that the policy sampled. The caller leaves out every other token,
such as what an environment said between two turns: a turn's last token is followed by the next turn's first, without a
discount for what stands in between. Where the values come from, and the sums over ranks, are the caller's.

With r_t the reward of active token t, V_t the value of the state before it and n the number of active tokens,

    delta_t = r_t + gamma V_{t+1} - V_t,     A_t = sum_{l >= 0} (gamma lambda)^l delta_{t+l},     R_t = A_t + V_t,

where V_{n+1} is 0 if the episode ended there, and the value after its last token if it was cut off and is bootstrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gspo_mega.base.records import REWARD_TOLERANCE


def token_rewards(num_tokens: int, ends: Sequence[int], rewards: Sequence[float]) -> Tensor:
    """Rewards of turns as rewards of the `num_tokens` active tokens of one sequence: [num_tokens] float64.

    `ends`: for each turn, the number of active tokens up to its end, above 0 and not falling; `rewards`: one per turn,
    each of which its last token receives, so that turns with one end add up. Raises ValueError for other ends, and for
    lists of two lengths.
    """
    if len(ends) != len(rewards):
        raise ValueError(f"{len(ends)} turns have {len(rewards)} rewards")
    result = torch.zeros(num_tokens, dtype=torch.float64)
    before = 1
    for end, reward in zip(ends, rewards, strict=True):
        if not before <= end <= num_tokens:
            raise ValueError(f"a turn ends behind {end} active tokens; expected {before} to {num_tokens}")
        result[end - 1] += reward
        before = end
    return result


def penalised_rewards(rewards: Tensor, log_probs: Tensor, reference_log_probs: Tensor, coefficient: float) -> Tensor:
    """r_t - coefficient (log pi(t) - log pi_ref(t)): [T] float64, without gradient, in the unit of `rewards`.

    `rewards: [T]`; `log_probs`, `reference_log_probs: [T]` nats of the policy that advantages are of and of the
    reference. This is the penalty of RLHF (arXiv:2203.02155): its expectation over tokens of the policy is the KL
    divergence, and single ones may be negative.
    """
    gap = log_probs.detach().double() - reference_log_probs.detach().double()
    return rewards.detach().double() - coefficient * gap


def generalised_advantages(
    rewards: Tensor,
    values: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    *,
    discount: float = 1.0,
    trace: float = 1.0,
    values_behind: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(A, R) of T active tokens of S whole sequences: two [T] float64, without gradient, in the unit of `rewards`.

    `rewards: [T]`; `values: [T]`, V of the state before each token; `sequence_ids: [T]` int64 in [0, S), not falling,
    the tokens of a sequence in their order; `discount`: gamma; `trace`: lambda; `values_behind: [S]`: V of the state
    after each one's last token where it is bootstrapped, 0 elsewhere; None: all 0.

    The sums are made of pairs, pairs of pairs and so on: log2(T) operations on whole tensors, in an order that only the
    lengths decide, and no device synchronisation. Raises ValueError for shapes that differ, and for a `discount` or a
    `trace` outside [0, 1].
    """
    for name, number in (("discount", discount), ("trace", trace)):
        if not 0 <= number <= 1:
            raise ValueError(f"{name} must be in [0, 1]; got {number}")
    shapes = {tuple(tensor.shape) for tensor in (rewards, values, sequence_ids)}
    if rewards.ndim != 1 or len(shapes) != 1:
        raise ValueError(f"rewards, values and sequence_ids must be [T]; got shapes {sorted(shapes)}")
    old_values = values.detach().double()
    behind = old_values.new_zeros(num_sequences) if values_behind is None else values_behind.detach().double()
    if behind.shape != (num_sequences,):
        raise ValueError(f"values_behind must be [{num_sequences}]; got {list(behind.shape)}")

    following = torch.cat([old_values[1:], old_values.new_zeros(1)])[: len(old_values)]
    next_values = torch.where(_continues(sequence_ids, 1), following, behind[sequence_ids])
    advantages = rewards.detach().double() + discount * next_values - old_values
    stride, factor = 1, discount * trace
    while stride < len(advantages) and factor > 0:
        ahead = torch.cat([advantages[stride:], advantages.new_zeros(stride)])
        advantages = advantages + torch.where(_continues(sequence_ids, stride), factor * ahead, 0.0)
        stride, factor = 2 * stride, factor * factor
    return advantages, advantages + old_values


def _continues(sequence_ids: Tensor, stride: int) -> Tensor:
    """Whether the token `stride` further on is of the same sequence: [T] bool."""
    return torch.cat([sequence_ids[stride:], sequence_ids.new_full((stride,), -1)])[: len(sequence_ids)] == sequence_ids


def whitened(
    advantages: Tensor, sum_over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums, *, std_ddof: int = 0
) -> Tensor:
    """(A_t - mean) / standard deviation over the active tokens of a mini-batch: [T] float64.

    `advantages: [T]` float64, those that this rank holds, each on one rank only; `sum_over_ranks`: from a float64
    tensor its sum over the ranks that share the mini-batch. It is called three times, also where a rank has no token.
    `std_ddof`: 0 divides by n, 1 by n - 1. All 0 where at most `std_ddof` tokens are active on all ranks, or where all
    advantages are equal but for rounding.
    """
    count = sum_over_ranks(advantages.new_full((1,), float(advantages.numel())))
    mean = sum_over_ranks(advantages.sum()[None]) / count.clamp(min=1.0)
    deviations = advantages - mean
    squares = sum_over_ranks(torch.stack([deviations.square().sum(), advantages.square().sum()]))
    variance = squares[0] / (count - std_ddof).clamp(min=1.0)
    # Rounding leaves deviations of the size of a rounding error of the numbers themselves.
    is_spread = (squares[0] > squares[1] * REWARD_TOLERANCE**2) & (count > std_ddof)
    scale = torch.where(is_spread, variance, 1.0).rsqrt()
    return torch.where(is_spread, deviations * scale, 0.0)
