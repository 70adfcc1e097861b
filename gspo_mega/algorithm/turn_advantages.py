"""Advantages of turns: rewards within an episode in, one advantage a turn out, for the token forms of the objective
(GSPO-token, arXiv:2507.18071, Eq. 13-14, and GRPO).

Owns the return of a turn and its normalisation within the group; which reward a turn has and where its advantage goes
in the batch are the caller's.

Episode i of a group of G has turns k with n_ik sampled tokens each, N_i together, and rewards r_ik. A turn's return is

    R_ik = r_ik + gamma sum_c (T_c / sum_c' T_c') R_ic,

over the turns c that were sampled next behind it. There is one where the episode did not branch, so that R_ik =
sum_{j >= k} gamma^(j-k) r_ij; where it did, each counts by T_c, the tokens sampled in c and in all that follows it. A
reward of the whole episode belongs to the last turn of every branch. With

    mu = (1/G) sum_i sum_k (n_ik / N_i) R_ik,     sigma^2 = (1/(G - ddof)) sum_i sum_k (n_ik / N_i) (R_ik - mu)^2,

every token of turn k has A_it = (R_ik - mu) / sigma; 0 where all returns of the group are equal. So an episode has the
weight 1/G whatever its number of turns; a turn cut in two, with its reward on the second part, changes nothing at gamma
= 1; with one reward an episode and gamma = 1, A_it is the A_i of Eq. 6; and sum_i (1/N_i) sum_t A_it = 0, as of Eq. 6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_mega.base.records import are_equal_rewards


def turn_returns(rewards: Tensor, parents: Tensor, num_tokens: Tensor, discount: float = 1.0) -> Tensor:
    """R of each of K turns: [K] float64, in the unit of `rewards`.

    `rewards: [K]`; `parents: [K]` int64, the turn that each one follows on its path, -1 where it is the first, always
    one that stands before it; `num_tokens: [K]` sampled tokens, at least 1. Raises ValueError for a parent that does
    not precede, a turn without tokens, and a `discount` outside [0, 1].
    """
    if not 0 <= discount <= 1:
        raise ValueError(f"discount must be in [0, 1]; got {discount}")
    above, tokens, returns = parents.tolist(), num_tokens.tolist(), rewards.detach().double().tolist()
    for turn, parent in enumerate(above):
        if not -1 <= parent < turn:
            raise ValueError(f"turn {turn}: its parent {parent} does not precede it")
        if tokens[turn] < 1:
            raise ValueError(f"turn {turn}: {tokens[turn]} sampled tokens; a turn has at least one")
    # Bottom up, as parents precede: first the tokens below each turn, then the means of the returns behind it.
    subtree = list(tokens)
    behind = [0] * len(above)
    for turn in reversed(range(len(above))):
        if above[turn] >= 0:
            subtree[above[turn]] += subtree[turn]
            behind[above[turn]] += subtree[turn]
    for turn in reversed(range(len(above))):
        if above[turn] >= 0:
            returns[above[turn]] += discount * (subtree[turn] / behind[above[turn]]) * returns[turn]
    return torch.tensor(returns, dtype=torch.float64)


def turn_advantages(
    rewards: Tensor,
    *,
    parents: Tensor,
    episode_ids: Tensor,
    group_ids: Tensor,
    num_tokens: Tensor,
    discount: float = 1.0,
    std_ddof: int = 0,
    divide_by_std: bool = True,
) -> Tensor:
    """A of each of K turns of any number of groups: [K] float64, in standard deviations of the group's returns.

    `rewards: [K]` finite; `parents`, `num_tokens` and `discount` as in `turn_returns`, over the whole batch;
    `episode_ids`, `group_ids: [K]` any integers, equal for the turns of an episode. `std_ddof` and `divide_by_std` as
    in `group_advantages`, and so is when returns are equal; a group of at most `std_ddof` episodes has no signal.

    Raises ValueError for a non-finite reward, shapes that differ, an episode in two groups, a path that leaves its
    episode, and what `turn_returns` refuses.
    """
    shapes = {tuple(values.shape) for values in (rewards, parents, episode_ids, group_ids, num_tokens)}
    if rewards.ndim != 1 or len(shapes) != 1:
        raise ValueError(f"all arguments must be [K]; got shapes {sorted(shapes)}")
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError(f"the reward of turn {int((~torch.isfinite(rewards)).to(torch.uint8).argmax())} is not finite")
    returns = turn_returns(rewards, parents, num_tokens, discount)
    follows = parents >= 0
    if not torch.equal(episode_ids[follows], episode_ids[parents[follows]]):
        raise ValueError("a turn follows one of another episode")
    episodes, rows = torch.unique(episode_ids, return_inverse=True)
    group_of = torch.zeros(len(episodes), dtype=group_ids.dtype).scatter(0, rows, group_ids)
    if not torch.equal(group_of[rows], group_ids):
        raise ValueError("an episode has turns in two groups")
    tokens = num_tokens.double()
    weights = tokens / torch.zeros(len(episodes), dtype=torch.float64).index_add(0, rows, tokens)[rows]

    advantages = torch.zeros_like(returns)
    for group_id in torch.unique(group_ids):
        members = group_ids == group_id
        group, weight = returns[members], weights[members]
        _, own_rows = torch.unique(rows[members], return_inverse=True)
        num_episodes = int(own_rows.max()) + 1
        if num_episodes <= std_ddof or are_equal_rewards((float(group.min()), float(group.max()))):
            continue

        def by_episode(values: Tensor, rows: Tensor = own_rows, count: int = num_episodes) -> Tensor:
            return torch.zeros(count, dtype=torch.float64).index_add(0, rows, values)

        # As `group_advantages` does: moments about a member, and squares of numbers of size one.
        shifted = group - group[0]
        deviations = shifted - by_episode(weight * shifted).mean()
        if divide_by_std:
            scale = deviations.abs().max()
            variance = by_episode(weight * (deviations / scale).square()).sum() / (num_episodes - std_ddof)
            deviations = deviations / (scale * variance.sqrt())
        advantages[members] = deviations
    return advantages
