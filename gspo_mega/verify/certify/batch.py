"""Make the recorded rollout batch, with the awkward shapes that a layout, a packing or a reduction gets wrong.

It has uneven groups, response lengths from 1 to the maximum, one trajectory without an active token, interior masked
tokens, advantages of both signs, and ratios that are clipped above, below and not at all. If `rollout.episode` is not
one_turn, it has episodes of several turns and branches (`trees.py`) instead of masks. It is deterministic: it depends
only on the configuration, the vocabulary size and the draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gspo_mega.base.episodes import Episode, Group, RolloutBatch, one_turn_row
from gspo_mega.base.records import Prompt
from gspo_mega.base.sampling_masks import SamplingMasks
from gspo_mega.base.served_scores import ServedScores
from gspo_mega.config.derived import has_sampling_masks, has_served_teacher, is_one_turn, num_served_top, teachers
from gspo_mega.config.schema import Batch, Config, Objective, Run
from gspo_mega.train.batches import fill_advantages
from gspo_mega.verify.certify.trees import recorded_tree

# Targets of log s_i, in clip widths; the trajectories are in turn inside the range, above it, inside, below it.
_INSIDE, _OUTSIDE = 0.4, 2.5


@dataclass
class Draws:
    """How often the tokens of each prompt and of each response were drawn again, in the order of the batch."""

    prompts: list[int]
    responses: list[int]

    @classmethod
    def first(cls, config: Config) -> Draws:
        sizes = _group_sizes(config.batch)
        return cls([0] * len(sizes), [0] * sum(sizes))


def _group_sizes(batch: Batch) -> list[int]:
    return [max(2, batch.group_size - g % 3) for g in range(batch.prompts_per_step)]


def recorded_batch(config: Config, vocab_size: int, draws: Draws | None = None) -> RolloutBatch:
    """Return groups of random tokens with advantages. `rollout_log_probs` are zeros until they are recorded."""
    draws, several_turns = draws or Draws.first(config), not is_one_turn(config.rollout)
    rng = np.random.default_rng((config.run.seed, 7))

    def tokens(kind: int, index: int, times: int, count: int) -> list[int]:
        return np.random.default_rng((config.run.seed, kind, index, times)).integers(0, vocab_size, count).tolist()

    sizes = _group_sizes(config.batch)
    num_trajectories = sum(sizes)
    # With teachers by source the groups belong to these in turn, and one of them to none.
    sources = [one.source for one in teachers(config.teacher) if one.source is not None] + ["recorded"]
    responses = np.geomspace(1, config.rollout.max_new_tokens, num_trajectories).round().astype(int)
    order = rng.permutation(num_trajectories)
    fully_masked = int(np.argsort(responses)[num_trajectories // 2])
    groups, index = [], 0
    for group_id, size in enumerate(sizes):
        rows = order[index : index + size]
        index += size
        longest = num_trajectories - 1 in rows
        num_prompt_tokens = (
            config.data.max_prompt_tokens if longest else int(rng.integers(1, config.data.max_prompt_tokens + 1))
        )
        prompt_tokens = tuple(tokens(0, group_id, draws.prompts[group_id], num_prompt_tokens))
        source = sources[group_id % len(sources)]
        prompt = Prompt(f"recorded:{group_id}", source, prompt_tokens, "")
        members: list[Episode] = []
        for place, row in enumerate(rows, index - size):
            length = int(responses[row])
            name = f"recorded:{group_id}:{row}"
            if several_turns:
                drawn = iter(tokens(1, place, draws.responses[place], 2 * length + 16))
                tree = recorded_tree(
                    name, group_id, prompt, place, length, lambda n, drawn=drawn: [next(drawn) for _ in range(n)]
                )
                tree.reward = float(rng.normal())
                members.append(tree)
                continue
            mask = np.ones(length, int)
            if row == fully_masked:
                mask[:] = 0
            elif length >= 4 and (row % 3 == 0 or row == num_trajectories - 1):
                mask[length // 3 : length // 3 + max(1, length // 8)] = 0
            recorded = one_turn_row(
                trajectory_id=name,
                group_id=group_id,
                prompt=prompt,
                response_token_ids=tokens(1, place, draws.responses[place], length),
                response_mask=mask.tolist(),
                rollout_log_probs=[0.0] * length,
                weight_versions=[0] * length,
                finish_reason="length",
                reward=float(rng.normal()),
            )
            members.append(Episode.from_row(recorded))
        groups.append(Group(group_id, prompt, members))
    batch = RolloutBatch(0, groups)
    if config.objective.scope == "turn":
        batch = batch.by_turn()
    if has_sampling_masks(config.rollout):
        _draw_masks(batch, config.run.seed, config.rollout.top_k, vocab_size)
    if has_served_teacher(config.teacher):
        _draw_scores(batch, config.run.seed, num_served_top(config.teacher), vocab_size)
    fill_advantages(batch, config, 0)
    return batch


def _draw_masks(batch: RolloutBatch, seed: int, top_k: int, vocab_size: int) -> None:
    """Give each active token a set of at most `top_k` random tokens, itself among them."""
    for index, row in enumerate(batch.trajectories):
        rng = np.random.default_rng((seed, 9, index))
        sets = []
        for token, is_active in zip(row.response_token_ids, row.response_mask, strict=True):
            others = rng.choice(vocab_size, int(rng.integers(0, min(top_k, vocab_size))), replace=False)
            sets.append([token, *others[others != token].tolist()] if is_active else [])
        row.sampling_masks = SamplingMasks.of(sets)


def _draw_scores(batch: RolloutBatch, seed: int, num_top: int, vocab_size: int) -> None:
    """Give each row what a teacher's server might have said of it: no server is there."""
    for index, row in enumerate(batch.trajectories):
        rng = np.random.default_rng((seed, 10, index))
        count = row.num_response_tokens
        top_ids = np.array([rng.permutation(vocab_size)[:num_top] for _ in range(count)], np.int32)
        masses = np.sort(rng.dirichlet(np.ones(num_top + 1), count), axis=1)[:, ::-1][:, :num_top]
        row.teacher = ServedScores(
            rng.uniform(-9, -1, count).astype(np.float32),
            top_ids.reshape(count, num_top),
            np.log(masses).astype(np.float32).reshape(count, num_top),
        )


def redraw(batch: RolloutBatch, unwanted: Sequence[np.ndarray], draws: Draws) -> bool:
    """Count one more draw of every prompt and response with an unwanted token. Returns False if there is none.

    `unwanted`: [prompt + response - 1] bool per trajectory, over the positions that predict a token.
    """
    prompts, responses = set(), set()
    rows = ((place, episode, row) for place, episode in enumerate(batch.episodes) for row in episode.rows())
    for (place, episode, trajectory), marks in zip(rows, unwanted, strict=True):
        num_prompt_tokens = len(episode.prompt.token_ids)
        if marks[:num_prompt_tokens].any():
            prompts.add(trajectory.group_id)
        if marks[num_prompt_tokens:].any():
            responses.add(place)
    for group_id in prompts:
        draws.prompts[group_id] += 1
    for place in responses:
        draws.responses[place] += 1
    return bool(prompts or responses)


def old_log_probs(
    batch: RolloutBatch, log_probs: Sequence[np.ndarray], objective: Objective, run: Run, on_edges: bool = False
) -> list[np.ndarray]:
    """Return the log-probs to record as sampled, [R] float32 per trajectory, so that the policy with `log_probs` has
    known ratios.

    log s_i, the mean over active tokens of log_probs - recorded, is in turn well inside the clip range, above it,
    inside, below it. With `on_edges` it is exactly on the upper or the lower edge, where rounding decides. Single
    tokens differ from the mean by up to a clip width.
    """
    high = np.log1p(objective.clip_high)
    open_below = objective.clip_low >= 1  # no lower edge: as far below as above
    low = high if open_below else -np.log1p(-objective.clip_low)
    rng = np.random.default_rng((run.seed, 8))
    targets = (high, -low) if on_edges else (_INSIDE * high, _OUTSIDE * high, -_INSIDE * low, -_OUTSIDE * low)
    recorded = []
    for index, (trajectory, values) in enumerate(zip(batch.trajectories, log_probs, strict=True)):
        active = np.array(trajectory.response_mask, bool)
        noise = rng.uniform(-high, high, len(values))
        if active.any():
            noise -= noise[active].mean()
        recorded.append((np.asarray(values, np.float64) - targets[index % len(targets)] - noise).astype(np.float32))
    return recorded


def set_old_log_probs(batch: RolloutBatch, recorded: np.ndarray) -> None:
    """Write the recorded log-probs, concatenated over trajectories [sum R], into the batch."""
    start = 0
    for trajectory in batch.trajectories:
        end = start + trajectory.num_response_tokens
        trajectory.rollout_log_probs = recorded[start:end].tolist()
        start = end
