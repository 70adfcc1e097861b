"""Episodes with known trees, and the objective of episodes by plain loops in numpy: J and its derivative by log-prob.

Shares no code with what makes rows, packs, advantages and losses of them; float64 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gspo_mega.base.episodes import Episode, Group, Node, RolloutBatch
from gspo_mega.base.records import Prompt

# By episode and node, one number for each of the node's tokens.
ByToken = dict[tuple[int, int], np.ndarray]

# Each episode: (parent, tokens, reward) of its turns, each behind a message of two tokens; the parent is a turn, or -1.
TREES = (
    [(-1, 6, None)],
    [(-1, 5, 0.25), (0, 9, None), (1, 4, -0.5)],
    [(-1, 7, None), (0, 3, 0.5), (0, 8, None)],  # the second turn was replaced
    [(-1, 4, None), (-1, 10, 1.0)],  # nothing shared but the prompt
    [(-1, 12, None), (0, 2, None)],
    [(-1, 3, 0.125), (0, 6, None), (0, 5, 0.75), (2, 7, None), (1, 4, None)],
    [(-1, 1, None)],
)
GROUP_OF = (0, 0, 0, 1, 1, 2, 2)
FINALS = (0.0, 1.0, 0.5, -1.0, 1.0, 0.25, 1.5)


def recorded_episodes(vocab: int = 512, seed: int = 5) -> RolloutBatch:
    """Seven episodes in three groups. Log-probs are 0 until they are recorded."""
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        return rng.integers(3, vocab, count).tolist()

    prompts = [Prompt(f"t:{g}", "t", tuple(tokens(3 + 2 * g)), "") for g in range(3)]
    groups = [Group(g, prompt, []) for g, prompt in enumerate(prompts)]
    for number, (tree, group_id) in enumerate(zip(TREES, GROUP_OF, strict=True)):
        nodes = [Node(0, -1, "context", [{"role": "user"}], list(prompts[group_id].token_ids))]
        turn_nodes: list[int] = []
        for parent, count, reward in tree:
            above = 0
            if parent >= 0:
                above = len(nodes)
                nodes.append(Node(above, turn_nodes[parent], "context", [{"role": "tool"}], tokens(2)))
            place = len(nodes)
            turn_nodes.append(place)
            zeros, message = [0.0] * count, [{"role": "assistant"}]
            nodes.append(
                Node(place, above, "sampled", message, tokens(count), zeros, [0] * count, None, "stop", reward=reward)
            )
        total = FINALS[number] + sum(reward or 0.0 for _, _, reward in tree)
        groups[group_id].episodes.append(Episode(f"e{number}", group_id, prompts[group_id], nodes, reward=total))
    return RolloutBatch(0, groups)


def turn_above(episode: Episode, node_id: int) -> int:
    above = episode.nodes[node_id].parent
    while above >= 0 and not episode.nodes[above].is_sampled:
        above = episode.nodes[above].parent
    return above


def turns_below(episode: Episode, node_id: int) -> list[int]:
    return [node.node_id for node in episode.nodes if node.is_sampled and turn_above(episode, node.node_id) == node_id]


def group_members(batch: RolloutBatch) -> list[list[int]]:
    numbers = {episode.episode_id: i for i, episode in enumerate(batch.episodes)}
    return [[numbers[episode.episode_id] for episode in group.episodes] for group in batch.groups]


def turn_credit(batch: RolloutBatch, discount: float = 1.0) -> dict[tuple[int, int], float]:
    """The advantage of each turn: returns from the last turns up, moments in which an episode weighs 1/G."""
    returns: dict[tuple[int, int], float] = {}
    weight: dict[tuple[int, int], float] = {}
    for number, episode in enumerate(batch.episodes):

        def size(node_id: int, episode: Episode = episode) -> int:
            return len(episode.nodes[node_id].token_ids) + sum(size(c, episode) for c in turns_below(episode, node_id))

        def value(node_id: int, episode: Episode = episode) -> float:
            own, after = episode.nodes[node_id].reward or 0.0, turns_below(episode, node_id)
            if not after:
                return own + episode.reward - sum(node.reward or 0.0 for node in episode.nodes)
            total = sum(size(child, episode) for child in after)
            return own + discount * sum(size(child, episode) / total * value(child, episode) for child in after)

        for node in episode.nodes:
            if node.is_sampled:
                returns[number, node.node_id] = value(node.node_id)
                weight[number, node.node_id] = len(node.token_ids) / episode.num_sampled_tokens
    result = {}
    for members in group_members(batch):
        keys = [key for key in returns if key[0] in members]
        mean = sum(weight[key] * returns[key] for key in keys) / len(members)
        spread = sum(weight[key] * (returns[key] - mean) ** 2 for key in keys) / len(members)
        values = [returns[key] for key in keys]
        constant = max(values) - min(values) <= 1e-12 * max(abs(value) for value in values)
        for key in keys:
            result[key] = 0.0 if constant else (returns[key] - mean) / math.sqrt(spread)
    return result


def episode_credit(batch: RolloutBatch) -> dict[tuple[int, int], float]:
    """The advantage of each episode (arXiv:2507.18071, Eq. 6), for each of its turns."""
    result = {}
    for members in group_members(batch):
        rewards = np.array([batch.episodes[i].reward for i in members])
        for i, advantage in zip(members, (rewards - rewards.mean()) / rewards.std(), strict=True):
            for node in batch.episodes[i].turns:
                result[i, node.node_id] = float(advantage)
    return result


def branches(episode: Episode) -> list[list[int]]:
    """The turns that each branch trains: paths to the turns that nothing follows, what an earlier one has left out."""
    taken: set[int] = set()
    result = []
    for node in episode.nodes:
        if node.is_sampled and not turns_below(episode, node.node_id):
            path, at = [], node.node_id
            while at >= 0:
                path.append(at)
                at = turn_above(episode, at)
            result.append([turn for turn in reversed(path) if turn not in taken])
            taken.update(path)
    return result


def objective(
    batch: RolloutBatch,
    log_probs: ByToken,
    old: ByToken,
    *,
    ratio: str,
    scope: str,
    credit: str,
    clip_low: float,
    clip_high: float,
    discount: float = 1.0,
) -> tuple[float, ByToken, float, int]:
    """(J, dJ / d log-prob of every sampled token, the smallest distance of a log ratio from a clip edge, the number of
    ratios that are clipped).

    J is the mean over episodes of the mean over an episode's sampled tokens of min(rho A, clip(rho) A).
    """
    advantages = turn_credit(batch, discount) if credit == "return_to_go" else episode_credit(batch)
    edges = (math.log1p(-clip_low), math.log1p(clip_high))
    value, slopes, margin, clipped = 0.0, {}, math.inf, 0
    for number, episode in enumerate(batch.episodes):
        share = 1.0 / len(batch.episodes) / episode.num_sampled_tokens
        units = branches(episode) if scope == "trajectory" else [[node.node_id] for node in episode.turns]
        for unit in units:
            d = {turn: log_probs[number, turn] - old[number, turn] for turn in unit}
            mean = float(np.concatenate([d[turn] for turn in unit]).mean())
            for turn in unit:
                log_ratio = d[turn] if ratio == "token" else np.full(len(d[turn]), mean)
                a = advantages[number, turn]
                terms = np.exp(log_ratio) * a
                bounded = np.clip(np.exp(log_ratio), 1 - clip_low, 1 + clip_high) * a
                value += share * float(np.minimum(terms, bounded).sum())
                follows = terms <= bounded
                slopes[number, turn] = share * np.where(follows, terms, 0.0)
                margin = min(margin, *(float(np.abs(log_ratio - edge).min()) for edge in edges))
                clipped += int((~follows).sum())
    return value, slopes, margin, clipped


def drifted(batch: RolloutBatch, log_probs: ByToken, widths: Sequence[float], seed: int = 6) -> ByToken:
    """Old log-probs so that log ratios of turns are, in turn, about `widths`, and of tokens as much around that."""
    rng, result, place = np.random.default_rng(seed), {}, 0
    for number, episode in enumerate(batch.episodes):
        for node in episode.turns:
            noise = rng.uniform(-0.03, 0.03, len(node.token_ids))
            drift = widths[place % len(widths)] + noise
            result[number, node.node_id] = (log_probs[number, node.node_id] - drift).astype(np.float32).astype(float)
            place += 1
    return result
