"""Advantages of responses, of turns and of tokens: rewards in, float64 tensors out.

Of responses (`group_advantages`): relative to the group (arXiv:2507.18071, Eq. 6), leave-one-out (RLOO,
arXiv:2402.14740) or relative to the batch (REINFORCE++, arXiv:2501.03262):

    group          A_i = r_i - mean_g
    leave_one_out  A_i = r_i - mean of the others of g = G / (G - 1) (r_i - mean_g)
    batch          A_i = r_i - mean of all

or of each reward function by itself (`decoupled_advantages`; GDPO, arXiv:2601.05242). The first three are
divided, unless switched off, by the standard deviation of the group's rewards or of the batch's A; the last always is.

Of turns (`turn_advantages`): one advantage per turn of an episode, for the token forms of the objective (GSPO-token,
arXiv:2507.18071, Eq. 13-14, and GRPO). Of tokens (`generalised_advantages`): generalised advantage estimation
(arXiv:1506.02438) from a critic's values, with whitening over a mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from gspo_mega.base.records import REWARD_TOLERANCE, are_equal_rewards

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
    population standard deviation, 1 the sample's. `divide_by_std=False` leaves r_i - baseline_i. With `std_over`
    `batch` the standard deviation is that of all A_i, whose mean is 0 with each baseline.

    A group whose rewards are all equal has no signal: its advantages are exactly 0. The rewards are compared to decide
    this, because normalising a rounding error would give values near 1. For the same reason rewards that differ
    by rounding only count as equal: max r - min r <= 1024 eps max |r| with float64's eps = 2^-52
    (`records.REWARD_TOLERANCE`), as 0.1 + 0.2 and 0.3 do. A group of at most `std_ddof` members has no signal either.
    With `batch` as baseline the group is the batch.

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


def decoupled_advantages(
    parts: Mapping[str, Tensor], weights: Mapping[str, float], group_ids: Tensor, std_ddof: int = 0
) -> Tensor:
    """GDPO (arXiv:2601.05242): [N] float64,

        a_i = sum_k w_k (r_ik - mean_g r_k) / std_g r_k,        A_i = a_i / std of all a of the batch,

    with the reward r_k of each function by itself, in the group of response i. A function whose values are all equal in
    a group adds nothing there, as in `group_advantages`. All a have the mean 0. If all are 0, so are the advantages.

    `parts`: for each function its values [N], NaN where it was not asked, which counts as 0, as in the sum of rewards.
    `weights`: of each. `group_ids: [N]`, `std_ddof` as in `group_advantages`. Raises ValueError for a function without
    values, and for what `group_advantages` refuses.
    """
    if missing := sorted(weights.keys() - parts.keys()):
        raise ValueError(f"no response has a value of {', '.join(missing)}")
    sums = torch.zeros(group_ids.shape, dtype=torch.float64)
    for name, weight in weights.items():
        values = parts[name].detach().double()
        sums += weight * group_advantages(torch.where(values.isnan(), 0.0, values), group_ids, std_ddof)
    if len(sums) <= std_ddof or not bool((sums != 0).any()):
        return torch.zeros_like(sums)
    return sums / _deviation(sums, std_ddof)


def _deviation(deviations: Tensor, ddof: int) -> Tensor:
    """The standard deviation of numbers whose mean is 0 and which are not all 0: a scalar."""
    scale = deviations.abs().max()  # squares of very small or large rewards would leave float64
    return scale * ((deviations / scale).square().sum() / (deviations.numel() - ddof)).sqrt()


def turn_returns(rewards: Tensor, parents: Tensor, num_tokens: Tensor, discount: float = 1.0) -> Tensor:
    """The return R of each of K turns: [K] float64, in the unit of `rewards`.

        R_k = r_k + gamma sum_c (T_c / sum_c' T_c') R_c,

    over the turns c that were sampled directly after turn k. If the episode did not branch there is one, so that R_k =
    sum_{j >= k} gamma^(j-k) r_j. If it did, each counts by T_c, the number of tokens sampled in c and in all turns that
    follow it. A reward of the whole episode belongs to the last turn of every branch.

    `rewards: [K]`; `parents: [K]` int64, the turn that each one follows on its path, -1 for a first turn; a parent
    precedes its children. `num_tokens: [K]` sampled tokens, at least 1. `discount`: gamma. Raises ValueError for a
    parent that does not precede its child, a turn without tokens, and a `discount` outside [0, 1].
    """
    if not 0 <= discount <= 1:
        raise ValueError(f"discount must be in [0, 1]; got {discount}")
    above, tokens, returns = parents.tolist(), num_tokens.tolist(), rewards.detach().double().tolist()
    for turn, parent in enumerate(above):
        if not -1 <= parent < turn:
            raise ValueError(f"turn {turn}: its parent {parent} does not precede it")
        if tokens[turn] < 1:
            raise ValueError(f"turn {turn}: {tokens[turn]} sampled tokens; a turn has at least one")
    # Bottom up, because parents precede: first the tokens in and after each turn, then the mean returns after it.
    subtree = list(tokens)
    after = [0] * len(above)
    for turn in reversed(range(len(above))):
        if above[turn] >= 0:
            subtree[above[turn]] += subtree[turn]
            after[above[turn]] += subtree[turn]
    for turn in reversed(range(len(above))):
        if above[turn] >= 0:
            returns[above[turn]] += discount * (subtree[turn] / after[above[turn]]) * returns[turn]
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
    """The advantage of each of K turns of any number of groups: [K] float64, in standard deviations of the group's
    returns.

    Episode i of a group of G has turns k with n_ik sampled tokens each, N_i together, and returns R_ik from
    `turn_returns`. With

        mu = (1/G) sum_i sum_k (n_ik / N_i) R_ik,     sigma^2 = (1/(G - ddof)) sum_i sum_k (n_ik / N_i) (R_ik - mu)^2,

    every token of turn k has A_it = (R_ik - mu) / sigma, or 0 if all returns of the group are equal. So an episode has
    the weight 1/G for any number of turns. At gamma = 1 a turn cut in two, with its reward on the second part, changes
    nothing. With one reward per episode and gamma = 1, A_it is the A_i of Eq. 6. As in Eq. 6,
    sum_i (1/N_i) sum_t A_it = 0.

    `rewards: [K]` finite; `parents`, `num_tokens` and `discount` as in `turn_returns`, over the whole batch;
    `episode_ids`, `group_ids: [K]` any integers, equal for the turns of an episode. `std_ddof` and `divide_by_std` as
    in `group_advantages`, and returns are equal by the same rule; a group of at most `std_ddof` episodes has no signal.

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
        raise ValueError("a turn follows a turn of another episode")
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


def token_rewards(num_tokens: int, ends: Sequence[int], rewards: Sequence[float]) -> Tensor:
    """The rewards of turns as rewards of the `num_tokens` active tokens of one sequence: [num_tokens] float64.

    `ends`: for each turn, the number of active tokens up to its end, above 0 and never decreasing. `rewards`: one per
    turn. The last token of a turn receives its reward, and rewards of turns with the same end add up. Raises ValueError
    for other ends, and for lists of different lengths.
    """
    if len(ends) != len(rewards):
        raise ValueError(f"{len(ends)} turns have {len(rewards)} rewards")
    result = torch.zeros(num_tokens, dtype=torch.float64)
    before = 1
    for end, reward in zip(ends, rewards, strict=True):
        if not before <= end <= num_tokens:
            raise ValueError(f"a turn ends after {end} active tokens; expected {before} to {num_tokens}")
        result[end - 1] += reward
        before = end
    return result


def penalised_rewards(rewards: Tensor, log_probs: Tensor, reference_log_probs: Tensor, coefficient: float) -> Tensor:
    """r_t - coefficient (log pi(t) - log pi_ref(t)): [T] float64, without gradient, in the unit of `rewards`.

    `rewards: [T]`; `log_probs`, `reference_log_probs: [T]`: nats, by the policy whose advantages are estimated and by
    the reference. This is the penalty of RLHF (arXiv:2203.02155): its expectation over tokens of the policy is the KL
    divergence, and single ones may be negative.
    """
    gap = log_probs.detach().double() - reference_log_probs.detach().double()
    return rewards.detach().double() - coefficient * gap


def generalised_advantages(
    rewards: Tensor,
    values: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    *,
    discount: float = 1.0,
    trace: float = 1.0,
    values_after: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns) of T active tokens of S whole sequences: two [T] float64, without gradient, in the unit of
    `rewards`.

    With r_t the reward of active token t, V_t the value of the state before it and n the number of active tokens,

        delta_t = r_t + gamma V_{t+1} - V_t,     A_t = sum_{l >= 0} (gamma lambda)^l delta_{t+l},     R_t = A_t + V_t,

    where V_{n+1} is 0 if the episode ended there, and the value after its last token if it was cut off and is
    bootstrapped. Active tokens are those that the policy sampled. The caller leaves out every other token, such as the
    text of an environment between two turns: the last token of a turn is followed by the first token of the next,
    without a discount for what stands in between.

    `rewards: [T]`; `values: [T]`, V of the state before each token; `sequence_ids: [T]` int64 in [0, S), never
    decreasing, the tokens of a sequence in their order; `discount`: gamma; `trace`: lambda; `values_after: [S]`: V of
    the state after each one's last token if it is bootstrapped, else 0; None: all 0.

    The sums are built from pairs, pairs of pairs and so on: log2(T) operations on whole tensors, in an order that only
    the lengths decide, without device synchronisation. Raises ValueError for shapes that differ, and for a `discount`
    or a `trace` outside [0, 1].
    """
    for name, number in (("discount", discount), ("trace", trace)):
        if not 0 <= number <= 1:
            raise ValueError(f"{name} must be in [0, 1]; got {number}")
    shapes = {tuple(tensor.shape) for tensor in (rewards, values, sequence_ids)}
    if rewards.ndim != 1 or len(shapes) != 1:
        raise ValueError(f"rewards, values and sequence_ids must be [T]; got shapes {sorted(shapes)}")
    old_values = values.detach().double()
    after = old_values.new_zeros(num_sequences) if values_after is None else values_after.detach().double()
    if after.shape != (num_sequences,):
        raise ValueError(f"values_after must be [{num_sequences}]; got {list(after.shape)}")

    following = torch.cat([old_values[1:], old_values.new_zeros(1)])[: len(old_values)]
    next_values = torch.where(_continues(sequence_ids, 1), following, after[sequence_ids])
    advantages = rewards.detach().double() + discount * next_values - old_values
    stride, factor = 1, discount * trace
    while stride < len(advantages) and factor > 0:
        ahead = torch.cat([advantages[stride:], advantages.new_zeros(stride)])
        advantages = advantages + torch.where(_continues(sequence_ids, stride), factor * ahead, 0.0)
        stride, factor = 2 * stride, factor * factor
    return advantages, advantages + old_values


def _continues(sequence_ids: Tensor, stride: int) -> Tensor:
    """Whether the token `stride` further on is of the same sequence: [T] bool."""
    return torch.cat([sequence_ids[stride:], sequence_ids.new_full((stride,), -1)])[: len(sequence_ids)] == sequence_ids


def whitened(
    advantages: Tensor, sum_over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums, *, std_ddof: int = 0
) -> Tensor:
    """(A_t - mean) / standard deviation over the active tokens of a mini-batch: [T] float64.

    `advantages: [T]` float64, those that this rank holds, each on one rank only; `sum_over_ranks`: from a float64
    tensor its sum over the ranks that share the mini-batch. It is called three times, also on a rank without tokens.
    `std_ddof`: 0 divides by n, 1 by n - 1. All are 0 if at most `std_ddof` tokens are active on all ranks, or if the
    advantages are equal but for rounding.
    """
    count = sum_over_ranks(advantages.new_full((1,), float(advantages.numel())))
    mean = sum_over_ranks(advantages.sum()[None]) / count.clamp(min=1.0)
    deviations = advantages - mean
    squares = sum_over_ranks(torch.stack([deviations.square().sum(), advantages.square().sum()]))
    variance = squares[0] / (count - std_ddof).clamp(min=1.0)
    # Rounding leaves deviations of the size of a rounding error of the numbers themselves.
    is_spread = (squares[0] > squares[1] * REWARD_TOLERANCE**2) & (count > std_ddof)
    scale = torch.where(is_spread, variance, 1.0).rsqrt()
    return torch.where(is_spread, deviations * scale, 0.0)
