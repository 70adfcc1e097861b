"""The reverse KL of two distributions in plain PyTorch, from whole logits."""

from __future__ import annotations

import torch
from torch import Tensor


def divergence_of(ours: Tensor, theirs: Tensor, rule) -> Tensor:
    """KL(p || q) of each row over what `rule` (`DivergenceRule`) compares, [N]. ours, theirs: logits [N, v]."""
    p, q = ours.softmax(1), theirs.softmax(1)
    if rule.top_k is None:
        return (p * (p / q).log()).sum(1)
    chosen = theirs if rule.of_teacher else ours.detach()
    k = min(rule.top_k, chosen.size(1))
    among = chosen >= chosen.topk(k, dim=1).values[:, -1:]
    found = []
    for row in range(p.size(0)):
        inside, other = p[row][among[row]], q[row][among[row]]
        if rule.in_bucket and (~among[row]).any():
            inside = torch.cat([inside, p[row][~among[row]].sum()[None]])
            other = torch.cat([other, q[row][~among[row]].sum()[None]])
        inside, other = inside / inside.sum(), other / other.sum()
        found.append((inside * (inside / other).log()).sum())
    return torch.stack(found)
