"""Group-relative advantages (arXiv:2507.18071, Eq. 6): rewards and group ids in, advantages out."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_mega.records import are_equal_rewards


def group_advantages(
    rewards: Tensor, group_ids: Tensor, std_ddof: int = 0, divide_by_std: bool = True, std_eps: float = 0.0
) -> Tensor:
    """A_i = (r_i - mean_g) / (std_g + std_eps) over the members of i's group: [N] float64.

    `rewards: [N]` finite; `group_ids: [N]`, any integers in any order, groups of any size. `std_ddof` 0 is the
    population standard deviation, 1 the sample's. `divide_by_std=False` leaves r_i - mean_g.

    A group whose rewards are all equal has no signal: exactly 0, decided by comparing the rewards, because (r - mean) /
    std of a rounding error is a number of size one. For the same reason rewards are equal that differ by rounding
    alone, max r - min r <= 1024 eps max |r| with float64's eps = 2^-52 (`records.REWARD_TOLERANCE`): 0.1 + 0.2 and 0.3
    are. A group of at most `std_ddof` members has no signal either.

    Raises ValueError for a non-finite reward or shapes that differ.
    """
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise ValueError(f"rewards and group_ids must be [N]; got {tuple(rewards.shape)} and {tuple(group_ids.shape)}")
    values = rewards.detach().double()
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"reward {int((~torch.isfinite(values)).to(torch.uint8).argmax())} is not finite")
    advantages = torch.zeros_like(values)
    for group_id in torch.unique(group_ids):
        members = group_ids == group_id
        group = values[members]
        if group.numel() <= std_ddof or are_equal_rewards((float(group.min()), float(group.max()))):
            continue
        # Moments about a member: a large common offset of the rewards costs no digits of their differences.
        shifted = group - group[0]
        deviations = shifted - shifted.mean()
        if divide_by_std:
            scale = deviations.abs().max()  # squares of very small or large rewards would leave float64
            std = scale * ((deviations / scale).square().sum() / (group.numel() - std_ddof)).sqrt()
            deviations = deviations / (std + std_eps)
        advantages[members] = deviations
    return advantages
