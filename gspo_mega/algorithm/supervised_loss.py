"""The supervised loss of a cold start: cross-entropy of the demonstration's tokens."""

from __future__ import annotations

from torch import Tensor

from gspo_mega.algorithm.ratio import active_values


def supervised_loss(log_probs: Tensor, mask: Tensor, denominator: float) -> Tensor:
    """This rank's share of the mean negative log-prob of a mini-batch: scalar float64, nats per token.

    `log_probs: [T]` with gradient; `mask: [T]`, non-zero at the demonstration's tokens, masked entries may hold
    anything. `denominator`: such tokens of the whole mini-batch on all ranks, so that shares and gradients add up.

    Raises ValueError for a denominator that is not positive.
    """
    if not denominator > 0:
        raise ValueError(f"denominator {denominator}: must be the positive global number of tokens learnt from")
    return -active_values(log_probs, mask).sum() / denominator
