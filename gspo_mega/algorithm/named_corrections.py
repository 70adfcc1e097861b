"""The corrections of the mismatch that papers name: weights of tokens, and of whole responses by their product.

With d = trainer - server of a token's log-prob in nats, w = exp(d), p and q the token's probability by the trainer and
by the server, and D(p, q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)), each term of a token is multiplied by

    token_tis   min(w, upper)                                             truncated importance sampling
    icepop      w where lower <= w <= upper, else 0                       arXiv:2510.18855
    kpop        w where D(p, q) <= threshold and D(q, p) <= threshold, else 0
    m2po        1 where d^2 <= T, else 0; T the largest bound for which the kept tokens of the rollout batch have a mean
                d^2 of at most threshold                                   arXiv:2510.01161

and, with W = exp(sum of d over the response), each term of a response by

    sequence_mis   W where W <= upper, else 0                             masked importance sampling

Weights have no gradient. docs/mismatch.md says where each was read and when it is biased. `correction.py` has the
correction of whole responses by their mean, which is the default.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gspo_mega.algorithm.correction import CorrectionRule

# Squares of d on this grid are integers whose sums are the same in every order.
_SQUARES_PER_UNIT = 2.0**32
# A larger |d| is masked by every threshold, so that its size does not matter. The sum of 2^20 squares stays below 2^63.
_MOST_NATS = 32.0
_LARGEST = int(_MOST_NATS**2 * _SQUARES_PER_UNIT)


def binary_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """D(p, q) of two Bernoulli distributions: [T] float64 nats. `log_p`, `log_q`: [T] nats, at most 0.

    0 log 0 is 0, and the divergence from a q of 0 or 1 to another p is infinite.
    """
    log_p, log_q = log_p.double().clamp(max=0.0), log_q.double().clamp(max=0.0)
    p, others = log_p.exp(), -torch.expm1(log_p)
    log_others_p, log_others_q = (torch.log(-torch.expm1(one)) for one in (log_p, log_q))
    first = torch.where(p > 0, p * (log_p - log_q), 0.0)
    second = torch.where(others > 0, others * (log_others_p - log_others_q), 0.0)
    return (first + second).clamp(min=0.0)


def token_weights(rule: CorrectionRule, trainer: Tensor, server: Tensor) -> Tensor:
    """The weight of each token under `token_tis`, `icepop` or `kpop`: [T] float64, without gradient.

    `trainer`, `server`: [T] nats of active tokens. Raises ValueError for another mode.
    """
    trainer, server = trainer.detach().double(), server.detach().double()
    d = trainer - server
    if rule.mode == "token_tis":
        return d.clamp(max=math.log(rule.upper_limit)).exp()
    if rule.mode == "icepop":
        kept = (d >= math.log(rule.lower_limit)) & (d <= math.log(rule.upper_limit))
    elif rule.mode == "kpop":
        limit = rule.divergence_limit
        kept = (binary_divergence(trainer, server) <= limit) & (binary_divergence(server, trainer) <= limit)
    else:
        raise ValueError(f"correction {rule.mode!r} has no weight that a token has by itself")
    return torch.where(kept, torch.where(kept, d, 0.0).exp(), 0.0)


def squares(d: Tensor) -> Tensor:
    """d^2 of each token as an integer on the grid, [T] int64. `d: [T]` nats; what is not a number counts as largest."""
    sizes = d.double().abs().nan_to_num(nan=_MOST_NATS, posinf=_MOST_NATS).clamp(max=_MOST_NATS)
    return (sizes.square() * _SQUARES_PER_UNIT).round().long()


def second_moment_bound(
    threshold: float, own: Tensor, sum_over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums
) -> int:
    """T of `m2po`, on the grid of `squares`: the largest bound up to which the mean of all d^2 is at most `threshold`.

    `own: [T]` int64, the squares of the tokens that this rank holds, of the whole rollout batch; each token is on one
    rank. `sum_over_ranks`: from an [2] int64 tensor its sum over the ranks; it is called equally often on every rank.
    The mean of those up to a bound does not fall with the bound, so it is found by bisection, in whole numbers: no
    layout and no order changes it. If even the smallest squares have a larger mean, all are masked.
    """
    ordered = own.sort().values
    sums = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)])
    low, high = -1, _LARGEST
    while low < high:
        middle = (low + high + 1) // 2
        count = torch.searchsorted(ordered, middle, right=True)
        total = sum_over_ranks(torch.stack([sums[count], count]))
        square_sum, number = total.tolist()
        if square_sum <= threshold * _SQUARES_PER_UNIT * number:
            low = middle
        else:
            high = middle - 1
    return low
