"""Advantages of responses: relative to the group (arXiv:2507.18071, Eq. 6), leave-one-out (RLOO,
arXiv:2402.14740) or normalised over the batch (REINFORCE++, arXiv:2501.03262). Rewards and group ids in.

    group          A_i = r_i - mean_g
    leave_one_out  A_i = r_i - mean of the others of g = G / (G - 1) (r_i - mean_g)
    batch          A_i = r_i - mean of all

Divided by the standard deviation of the group's rewards, or of the batch's A; or not.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gspo_mega.base.records import are_equal_rewards

Baseline = Literal["group", "leave_one_out", "batch"]


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    std_ddof: int = 0,
    divide_by_std: bool = True,
    std_eps: float = 0.0,
    baseline: Baseline = "group",
    std_over: Literal["group", "batch"] = "group",
) -> Tensor:
    """A_i = (r_i - baseline_i) / (std + std_eps) over the members of i's group, or of the batch: [N] float64.

    `rewards: [N]` finite; `group_ids: [N]`, any integers in any order, groups of any size. `std_ddof` 0 is the
    population standard deviation, 1 the sample's. `divide_by_std=False` leaves r_i - baseline_i. `std_over` `batch`:
    the deviation of all A_i, whose mean is 0 with each baseline.

    A group whose rewards are all equal has no signal: exactly 0, decided by comparing the rewards, because (r - mean) /
    std of a rounding error is a number of size one. For the same reason rewards are equal that differ by rounding
    alone, max r - min r <= 1024 eps max |r| with float64's eps = 2^-52 (`records.REWARD_TOLERANCE`): 0.1 + 0.2 and 0.3
    are. A group of at most `std_ddof` members has no signal either. With `batch` as baseline the group is the batch.

    Raises ValueError for a non-finite reward or shapes that differ.
    """
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise ValueError(f"rewards and group_ids must be [N]; got {tuple(rewards.shape)} and {tuple(group_ids.shape)}")
    values = rewards.detach().double()
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"reward {int((~torch.isfinite(values)).to(torch.uint8).argmax())} is not finite")
    by_group = divide_by_std and std_over == "group"
    advantages = torch.zeros_like(values)
    centred = torch.zeros_like(group_ids) if baseline == "batch" else group_ids
    for group_id in torch.unique(centred):
        members = centred == group_id
        group = values[members]
        if group.numel() <= (std_ddof if by_group else 0) or are_equal_rewards(
            (float(group.min()), float(group.max()))
        ):
            continue
        # Moments about a member: a large common offset of the rewards costs no digits of their differences.
        shifted = group - group[0]
        deviations = shifted - shifted.mean()
        if by_group:
            deviations = deviations / (_deviation(deviations, std_ddof) + std_eps)
        if baseline == "leave_one_out":
            deviations = deviations * (group.numel() / (group.numel() - 1))
        advantages[members] = deviations
    if divide_by_std and std_over == "batch" and len(values) > std_ddof and bool((advantages != 0).any()):
        advantages = advantages / (_deviation(advantages, std_ddof) + std_eps)
    return advantages


def _deviation(deviations: Tensor, ddof: int) -> Tensor:
    """The standard deviation of numbers whose mean is 0 and which are not all 0: a scalar."""
    scale = deviations.abs().max()  # squares of very small or large rewards would leave float64
    return scale * ((deviations / scale).square().sum() / (deviations.numel() - ddof)).sqrt()
