"""On-policy distillation: a frozen teacher scores the tokens that the policy, its student, sampled.

At the active tokens of trajectory i, with the policy at the start of the rollout batch (pi_old) as the student,

    k_it = log pi_old(y_it) - log pi_teacher(y_it)          one sample of the reverse KL(student || teacher), nats
    D_it = -coefficient x k_it                              the teacher's advantage of the token, detached

A token answers for its own k only: the discount of later tokens is gamma = 0, as in Thinking Machines' "On-Policy
Distillation" (2025). The rewards' advantage of the token, times `reward_weight` w, and the teacher's go into the
objective in one of two ways.

- An objective with a term per token (GSPO-token, GRPO and others) takes A_it = w A_i + D_it in that term.
- GSPO's term belongs to a whole sequence and takes no advantage of a token. It keeps w A_i, and J gets a second term:
  that of GSPO-token (arXiv:2507.18071, Eq. 13) with A_it = D_it, which has the same ratio and the same clip range.

Instead of D_it, whole distributions can be compared: f_it = KL(pi || pi_teacher) of the next token at each position of
the policy's own samples, over the vocabulary or its most likely tokens. It is a loss besides -J, with gradient,

    F = sum_i c_i w_i (1/L_i) sum_t f_it            the loss is -J + coefficient x F

with the c_i and w_i of J, as in the KL term of `losses.py`. What the policy samples is not differentiated, as in GKD
(arXiv:2306.13649, section 3).

`TEACHER_SUMS` are sums over the active tokens of a micro-batch, from which the metrics are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_mega.algorithm.objective import active_values
from gspo_mega.algorithm.terms import ObjectiveSettings

TEACHER_SUMS = ("tokens", "reverse_kl", "teacher_size", "reward_size", "clipped", "divergence", "all_tokens")


@dataclass(frozen=True)
class TokenGuidance:
    """The advantages of T tokens, each [T] float64, 0 at masked tokens: `teacher` is D_it, `rewards` is w A_i."""

    teacher: Tensor
    rewards: Tensor

    @property
    def total(self) -> Tensor:
        """w A_i + D_it, [T] float64."""
        return self.rewards + self.teacher


def token_guidance(
    coefficient: float,
    reward_weight: float,
    *,
    student_log_probs: Tensor,
    teacher_log_probs: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    advantages: Tensor,
    token_advantages: Tensor | None = None,
) -> TokenGuidance:
    """The advantages of T local tokens, detached.

    `student_log_probs`, `teacher_log_probs`: [T] nats, pi_old's and the teacher's; `mask`: [T], non-zero where the
    token is active, masked entries may hold anything; `segment_ids`: [T] int64 in [0, S). `advantages`: [S], those of
    the rewards; `token_advantages`: [T], which take their place, or None.
    """
    k = active_values(student_log_probs.detach(), mask) - active_values(teacher_log_probs.detach(), mask)
    own = advantages.detach().double()[segment_ids] if token_advantages is None else token_advantages.detach()
    return TokenGuidance(teacher=-coefficient * k, rewards=reward_weight * active_values(own, mask))


def has_token_terms(settings: ObjectiveSettings) -> bool:
    """Whether the objective's terms take advantages of tokens, so that no second term is needed."""
    return settings.unit == "token"


def teacher_sums(
    guidance: TokenGuidance,
    *,
    student_log_probs: Tensor,
    teacher_log_probs: Tensor,
    mask: Tensor,
    clipped: Tensor | None = None,
    divergence: Tensor | None = None,
    taught: Tensor | None = None,
) -> Tensor:
    """The TEACHER_SUMS of T local tokens, [len(TEACHER_SUMS)] float64. Arguments as in `token_guidance`. `clipped`: [T]
    bool, the tokens that the second term clipped; None without one. `divergence`: [T] nats of active tokens, if whole
    distributions are compared. `taught`: [T] bool, the tokens that have a teacher, over which all sums but the last
    are; None for all.
    """
    active = mask.bool()
    mine = active if taught is None else active & taught
    k = active_values(student_log_probs.detach(), mine) - active_values(teacher_log_probs.detach(), mine)
    parts = (
        mine.sum(),
        k.sum(),
        guidance.teacher.abs()[mine].sum(),
        guidance.rewards.abs()[mine].sum(),
        active.new_zeros(()) if clipped is None else (clipped & mine).sum(),
        k.new_zeros(()) if divergence is None else active_values(divergence.detach(), mine).sum(),
        active.sum(),
    )
    return torch.stack([part.double() for part in parts])


def teacher_metrics(
    sums: Sequence[float], *, has_second_term: bool, has_divergence: bool = False, by_source: bool = False
) -> Mapping[str, float]:
    """The metrics of TEACHER_SUMS of a whole step. `has_divergence`: whole distributions are compared, and no token has
    an advantage from the teacher. `by_source`: tokens may have no teacher, and enter only `token_fraction`, the share
    of tokens that have one. `advantage_share`: the mean |D_it| over the mean of |D_it| and |w A_i| together, 0 if both
    are 0.
    """
    found = dict(zip(TEACHER_SUMS, map(float, sums), strict=True))
    tokens, size = max(found["tokens"], 1.0), found["teacher_size"] + found["reward_size"]
    share = {"token_fraction": found["tokens"] / max(found["all_tokens"], 1.0)} if by_source else {}
    if has_divergence:
        return {"reverse_kl": found["reverse_kl"] / tokens, "divergence": found["divergence"] / tokens} | share
    metrics = share | {
        "reverse_kl": found["reverse_kl"] / tokens,
        "advantage_size": found["teacher_size"] / tokens,
        "advantage_share": found["teacher_size"] / size if size > 0 else 0.0,
    }
    return metrics | ({"clip_fraction": found["clipped"] / tokens} if has_second_term else {})
