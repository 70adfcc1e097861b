"""The objectives written out as in their papers: loops over responses and tokens, gradients by autograd.

Shares no code with the package, and no algebra: ratios are probabilities divided, clips are `min` and `max`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SAPO = {"positive": 1.0, "negative": 1.05}
VESPO = {"positive": (2.0, 3.0), "negative": (3.0, 2.0)}


@dataclass
class Row:
    """A response: active tokens' log-probs [L] of policy (with gradient), old policy and server, its advantage."""

    new: Tensor
    old: Tensor
    server: Tensor
    advantage: float
    keep: bool = True
    weight: float = 1.0
    group: int = 0


def ppo(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def token_terms(surrogate: str, row: Row, low: float, high: float) -> list[Tensor]:
    """The term of each token of a response; of a response alone divided by its length."""
    a, length = row.advantage, len(row.new)
    ratios = row.new.exp() / row.old.exp()
    sign = "positive" if a > 0 else "negative"
    terms = []
    for t in range(length):
        r, log_p = ratios[t], row.new[t]
        if surrogate == "gspo":
            terms.append(ppo(torch.prod(ratios) ** (1 / length), a, low, high))
        elif surrogate == "gspo_token":
            s = (torch.prod(ratios) ** (1 / length)).detach()
            terms.append(ppo(s * row.new[t].exp() / row.new[t].exp().detach(), a, low, high))
        elif surrogate in ("grpo", "ppo", "clip_cov"):  # with all tokens; which are left out is test_covariance.py
            terms.append(ppo(r, a, low, high))
        elif surrogate == "cispo":
            terms.append(r.clamp(1 - low, 1 + high).detach() * a * log_p)
        elif surrogate == "sapo":
            terms.append(4 / SAPO[sign] * torch.sigmoid(SAPO[sign] * (r - 1)) * a)
        elif surrogate == "dppo":
            moved = float((row.new[t].exp() - row.old[t].exp()).detach())
            masked = moved > high if a > 0 else moved < -low
            terms.append(r * a * (0.0 if masked else 1.0))
        elif surrogate == "dppo_kl":
            p, q = (min(float(one[t].detach().exp()), 1.0) for one in (row.new, row.old))
            others = math.inf if p == 1 else (1 - q) * math.log((1 - q) / (1 - p))
            far = q * math.log(q / p) + (0.0 if q == 1 else others)
            masked = (p > q and far > high) if a > 0 else (p < q and far > low)
            terms.append(r * a * (0.0 if masked else 1.0))
        elif surrogate == "minirl":
            ratio = float(r.detach())
            masked = ratio > 1 + high if a > 0 else ratio < 1 - low
            weight = min(float((row.new[t].exp() / row.server[t].exp()).detach()), 5.0)
            terms.append((0.0 if masked else weight) * a * log_p)
        elif surrogate == "vespo":
            power, decay = VESPO[sign]
            w = float(torch.prod(ratios).detach())
            terms.append(w**power * math.exp(decay * (1 - w)) * a * log_p)
        elif surrogate == "gmpo":
            product = torch.ones((), dtype=torch.float64)
            for one in ratios:
                limit = torch.tensor(high if a > 0 else -low, dtype=torch.float64).exp()
                product = product * (torch.minimum(one, limit) if a > 0 else torch.maximum(one, limit))
            terms.append(product ** (1 / length) * a)
        else:
            raise ValueError(surrogate)
    return terms


def objective(
    surrogate: str, rows: list[Row], low: float, high: float, aggregation: str, constant: float | None = None
) -> Tensor:
    """J of a mini-batch of rows, all of which count in the denominators."""
    total = torch.zeros((), dtype=torch.float64)
    num_tokens = sum(len(row.new) for row in rows)
    for row in rows:
        if not row.keep or row.advantage == 0:
            continue
        summed = row.weight * sum(token_terms(surrogate, row, low, high), torch.zeros((), dtype=torch.float64))
        if aggregation == "sequence_mean_token_mean":
            total = total + summed / len(row.new) / len(rows)
        elif aggregation == "token_mean":
            total = total + summed / num_tokens
        elif aggregation == "sequence_mean_token_sum":
            total = total + summed / len(rows)
        else:
            assert constant is not None
            total = total + summed / len(rows) / constant
    return total
