"""The GSPO loss in plain PyTorch (arXiv:2507.18071, Eq. 5-7): padded responses of one mini-batch on one rank.

    python examples/gspo_loss.py

A test compares its value and gradient with those of `policy_objective`, which computes the same on packed sequences and
in every parallel layout.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gspo_loss(
    log_probs: Tensor,  # [N, T] nats under the policy that is trained, with gradient
    old_log_probs: Tensor,  # [N, T] nats under the policy at the start of the step
    mask: Tensor,  # [N, T] 1 at sampled tokens, 0 at padding
    rewards: Tensor,  # [N] the responses of one prompt follow each other
    group_size: int,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """-J, a float64 scalar. Every response has a sampled token; N is a multiple of `group_size`."""
    # Eq. 6: a reward relative to those of its group. A group whose rewards are all equal has no signal.
    groups = rewards.double().view(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    deviation = centred.square().mean(dim=1, keepdim=True).sqrt()
    is_constant = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)
    advantages = torch.where(is_constant, 0.0, centred / deviation).flatten()

    # Eq. 7: one ratio for the whole response, the geometric mean of its tokens' ratios.
    active = mask.bool()
    log_ratios = torch.where(active, log_probs.double() - old_log_probs.double(), 0.0)
    ratio = (log_ratios.sum(dim=1) / active.sum(dim=1).clamp(min=1)).exp()

    # Eq. 5: clipped where the ratio leaves the range in the direction that the advantage rewards.
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    terms = torch.minimum(ratio * advantages, clipped * advantages)
    return -terms.mean()


def main() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([5, 3, 4, 6])  # two prompts with two responses each
    mask = (torch.arange(6) < lengths[:, None]).long()
    old_log_probs = -torch.rand(4, 6)
    log_probs = (old_log_probs + 2e-4 * torch.randn(4, 6)).requires_grad_()
    loss = gspo_loss(log_probs, old_log_probs, mask, torch.tensor([1.0, 0.0, 0.5, 1.0]), group_size=2)
    loss.backward()
    assert log_probs.grad is not None
    print(f"loss {loss.item():+.3e}")
    for response, row in enumerate(log_probs.grad):
        print(f"response {response}: gradient of each token", " ".join(f"{value:+.4f}" for value in row.tolist()))


if __name__ == "__main__":
    main()
