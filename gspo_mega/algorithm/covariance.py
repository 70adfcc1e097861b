"""Clip-Cov (arXiv:2505.22617): a few tokens whose advantage and log-prob vary together do not train.

Entropy falls where likely tokens have high advantages and unlikely ones low advantages. With means over the N active
tokens of a mini-batch,

    C_t = (log pi(y_t) - mean log pi) x (A_t - mean A)

and among the tokens with low < C_t < high, max(1, floor(share x N)) are chosen at random, fewer if there are fewer. The
term of a chosen token, and its gradient, are 0; denominators stay. The log-probs are those of pi_old, the policy at the
start of the rollout batch, so that the choice is made once, before the first gradient, over all ranks. The paper's are
the present policy's, which are the same in the first mini-batch.

The choice is reproducible: each token has a number that a hash makes of its trajectory's key and its position
(`token_draws`), and the candidates with the smallest numbers are chosen. No layout and no packing changes the numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Draws are below this, and keys of trajectories are whole numbers that float64 holds.
_MOST_DRAW = 2**62
_KEY_BITS = 48


@dataclass(frozen=True)
class CovarianceClip:
    """The keys `objective.covariance_low`, `covariance_high` and `covariance_share`."""

    low: float
    high: float
    share: float


@dataclass
class CovarianceChoice:
    """Of N tokens: `candidates` [N] bool, those with C_t in the range; `chosen` [N] bool, those that do not train."""

    candidates: Tensor
    chosen: Tensor


def trajectory_key(seed: int, step: int, trajectory_id: str) -> int:
    """The key of a trajectory, from which the draws of its tokens are made: in [0, 2^48)."""
    digest = hashlib.sha256(f"{seed}:{step}:{trajectory_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _KEY_BITS)


def token_draws(keys: Tensor, positions: Tensor) -> Tensor:
    """A number in [0, 2^62) for each token, [T] int64. `keys` [T]: its trajectory's; `positions` [T] int64: its place
    in the sequence. SplitMix64 of both, in arithmetic modulo 2^64.
    """
    mixed = keys.long() * _signed(0x9E3779B97F4A7C15) + positions.long() * _signed(0xD1B54A32D192ED03)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    return _shifted(mixed ^ _shifted(mixed, 31), 2)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shifted(values: Tensor, bits: int) -> Tensor:
    """The bits of int64 values, moved right, with zeros from the left."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def covariances(log_probs: Tensor, advantages: Tensor, sums: Tensor) -> Tensor:
    """C_t of these tokens, [T] float64. `log_probs`, `advantages`: [T]. `sums`: [3] float64, the number of active
    tokens of the mini-batch on all ranks and the sums of their log-probs and advantages (`covariance_sums`).
    """
    count = sums[0].clamp(min=1.0)
    return (log_probs.detach().double() - sums[1] / count) * (advantages.detach().double() - sums[2] / count)


def covariance_sums(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """This rank's part of the `sums` of `covariances`, [3] float64, of its active tokens."""
    values = log_probs.detach().double(), advantages.detach().double()
    return torch.stack([torch.full_like(values[0].sum(), log_probs.numel()), values[0].sum(), values[1].sum()])


def num_chosen(share: float, num_tokens: int) -> int:
    """How many of `num_tokens` are chosen, if there are as many candidates."""
    return max(1, math.floor(share * num_tokens)) if num_tokens else 0


def draw_bound(most: int, own: Tensor, sum_over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums) -> int:
    """The bound up to which candidates are chosen: at least the `most`-th smallest draw of all, and below the next one.

    `own` [C] int64: the draws of this rank's candidates; each is on one rank. `sum_over_ranks`: from a [1] int64 tensor
    its sum over the ranks; it is called equally often on every rank. Returns -1 if none may be chosen.
    """
    ordered = own.sort().values
    low, high = -1, _MOST_DRAW
    while low < high:
        middle = (low + high + 1) // 2
        count = torch.searchsorted(ordered, torch.tensor([middle], device=own.device), right=True)
        if int(sum_over_ranks(count)) <= most:
            low = middle
        else:
            high = middle - 1
    return low
