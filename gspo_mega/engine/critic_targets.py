"""From a mini-batch's values and rewards to what both models train on: advantages of tokens, and returns.

Owns the order of the acts over the packs of one mini-batch and their sums over data ranks; `algorithm/gae.py` has the
maths. Runs on last-stage ranks: the advantages are written into the packs, where the policy's loss finds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from gspo_mega.algorithm.gae import generalised_advantages, penalised_rewards, whitened
from gspo_mega.base.records import MicroBatch
from gspo_mega.engine.critic import Values, own_part, whole_pack
from gspo_mega.engine.process_groups import ParallelGroups


@dataclass(frozen=True)
class Estimator:
    """How advantages are estimated. `discount`: gamma; `trace`: lambda; `bootstraps`: whether a sequence that was cut
    off goes on with the value behind its last token, else with 0; `whitens`: whether the advantages of a mini-batch
    get mean 0 and standard deviation 1, with `std_ddof` as in `whitened`; `kl_coefficient`: of the penalty in the
    reward, 0 for none."""

    discount: float
    trace: float
    bootstraps: bool
    whitens: bool
    kl_coefficient: float
    std_ddof: int


@dataclass
class TokenRewards:
    """The rewards of one micro-batch, whole and the same on all context ranks. `of_tokens` [M] float64: of its active
    tokens, in the pack's order; `is_truncated` [S] bool: whether the sequence was cut off."""

    of_tokens: torch.Tensor
    is_truncated: torch.Tensor

    @classmethod
    def of(cls, pack: MicroBatch) -> TokenRewards:
        """Those that a pack carries (`token_rewards`, `truncated`), on the host."""
        assert pack.token_rewards is not None
        of_tokens = torch.from_numpy(pack.token_rewards[pack.loss_mask > 0])
        return cls(of_tokens, torch.from_numpy(pack.sequence["truncated"] > 0))


@dataclass
class LogProbs:
    """The log-probs of the KL penalty for one micro-batch, [N] float32 nats of this rank's active tokens each: of the
    policy that the advantages are of, and of the reference."""

    old: torch.Tensor
    reference: torch.Tensor


def estimate_returns(
    micro_batches: list[MicroBatch],
    values: Sequence[Values],
    rewards: Sequence[TokenRewards],
    estimator: Estimator,
    groups: ParallelGroups,
    log_probs: Sequence[LogProbs] | None = None,
) -> list[torch.Tensor]:
    """Write `token_advantages` into the packs; returns the returns of this rank's active tokens, [N] float64 in the
    unit of rewards, before any whitening, one tensor per micro-batch.

    Call it on last-stage ranks with one of `values`, `rewards` and, for a KL penalty, `log_probs` per micro-batch.
    Raises ValueError if `log_probs` are given without a coefficient or the other way round. Collective over the data
    and context groups of those ranks.
    """
    if (estimator.kl_coefficient > 0) != (log_probs is not None):
        raise ValueError(
            f"the KL penalty's coefficient is {estimator.kl_coefficient:g}, but log-probs of the reference were"
            f" {'not ' if log_probs is None else ''}given"
        )
    advantages: list[torch.Tensor] = []
    returns: list[torch.Tensor] = []
    for place, (pack, value, reward) in enumerate(zip(micro_batches, values, rewards, strict=True)):
        before = whole_pack(pack, value.before, groups)
        of_tokens = reward.of_tokens.to(before.device)
        if log_probs is not None:
            old, reference = (
                whole_pack(pack, one, groups) for one in (log_probs[place].old, log_probs[place].reference)
            )
            of_tokens = penalised_rewards(of_tokens, old, reference, estimator.kl_coefficient)
        behind = value.behind * reward.is_truncated.to(before.device) if estimator.bootstraps else None
        ids = torch.from_numpy(pack.sequence_ids[pack.loss_mask > 0]).to(before.device)
        advantage, whole_returns = generalised_advantages(
            of_tokens,
            before,
            ids,
            pack.num_sequences,
            discount=estimator.discount,
            trace=estimator.trace,
            values_behind=behind,
        )
        advantages.append(advantage)
        returns.append(own_part(pack, whole_returns, groups))
    if estimator.whitens and advantages:
        # Every context rank has the whole packs, so that the sums are over data ranks alone.
        flat = whitened(torch.cat(advantages), lambda sums: _sum_over_data(sums, groups), std_ddof=estimator.std_ddof)
        advantages = list(flat.split([len(one) for one in advantages]))
    for pack, advantage in zip(micro_batches, advantages, strict=True):
        pack.token_advantages = np.zeros(pack.num_tokens, np.float64)
        pack.token_advantages[pack.loss_mask > 0] = advantage.cpu().numpy()
    return returns


def _sum_over_data(sums: torch.Tensor, groups: ParallelGroups) -> torch.Tensor:
    if groups.data.size > 1:
        dist.all_reduce(sums, group=groups.data.group)
    return sums
