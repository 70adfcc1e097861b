"""Functions of your own in place of built-in parts: an advantage, a term, a filter of groups and an order of prompts.

    advantage: examples.hooks:maxrl

    algorithm: custom
    objective: {ratio: sequence, function: {function: "examples.hooks:sspo", options: {tau_negative: 1.2}}}

    rollout: {group_filter: {function: "examples.hooks:keep_between", options: {lowest: 0.1, highest: 0.9}}}

    data: {source: {function: "examples.hooks:Curriculum", options: {difficulty_key: level}}}

docs/hooks.md describes what each of them gets and returns.

    python examples/hooks.py          from the repository's root

calls all four on small examples and prints what they return.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from gspo_mega.algorithm.hooks import AdvantageInputs, ObjectiveInputs
from gspo_mega.base.group_results import GroupResult, ResponseResult
from gspo_mega.data.chosen_rows import RowInfo
from gspo_mega.data.stream import epoch_order


def maxrl(inputs: AdvantageInputs) -> torch.Tensor:
    """MaxRL (arXiv:2602.02710): A_i = (r_i - mean_g) / mean_g, 0 for a group whose mean is 0. Rewards must be 0 or 1.

    A success among many failures counts more than in GRPO: sqrt((1 - p) / p) becomes (1 - p) / p for a share p of
    successes.
    """
    if not bool(((inputs.rewards == 0) | (inputs.rewards == 1)).all()):
        raise ValueError("MaxRL is derived for rewards of 0 and 1 only")
    _, rows = torch.unique(inputs.group_ids, return_inverse=True)
    sums = torch.zeros(int(rows.max()) + 1, dtype=torch.float64).index_add(0, rows, inputs.rewards)
    means = (sums / torch.bincount(rows))[rows]
    return torch.where(means > 0, (inputs.rewards - means) / means.clamp(min=1e-300), 0.0)


def sspo(inputs: ObjectiveInputs, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> torch.Tensor:
    """Soft Sequence Policy Optimization (arXiv:2602.19327): w_i A_i, w_i the geometric mean of a soft gate of each
    token's ratio. With d the log-ratio of a token, the gate here is exp(arctan(tau d) / tau): 1 with slope 1 at d = 0,
    and never further from 0 in log than pi / (2 tau). With tau towards 0 it is the ratio itself, and w_i is GSPO's s_i.
    """
    advantages = inputs.sequence_advantages
    tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)[inputs.segment_ids]
    gate = torch.atan(tau * inputs.log_ratio) / tau
    return advantages * inputs.sequence_mean(gate).exp()


def keep_between(group: GroupResult, *, lowest: float = 0.0, highest: float = 1.0) -> bool:
    """Keep groups whose mean reward is above `lowest` and below `highest`. With rewards of 0 and 1 and these defaults
    that is `filter_constant_groups`.
    """
    return lowest < group.mean_reward < highest


class Curriculum:
    """Easy rows first. Rows are cut into levels of about equal size by the number under `difficulty_key`. Once the last
    `window` groups of a level have a mean reward of `promote_at` or more, the next level begins; after the last level
    all rows are drawn. Within a level every row comes once before one comes again.

    Rows without the key are easiest. Without `difficulty_key`, the order of one file is that of a run without a source.
    """

    def __init__(
        self,
        rows: Sequence[RowInfo],
        *,
        seed: int,
        difficulty_key: str | None = None,
        num_levels: int = 3,
        window: int = 64,
        promote_at: float = 0.7,
    ) -> None:
        levels = num_levels if difficulty_key is not None else 1
        order = list(range(len(rows)))
        if difficulty_key is not None:
            difficulty = [float(row.values.get(difficulty_key, 0.0)) for row in rows]
            order.sort(key=lambda number: difficulty[number])  # stable: equal rows keep the file's order
        bounds = [len(order) * k // levels for k in range(levels + 1)]
        self._levels = [order[start:end] for start, end in itertools.pairwise(bounds)]
        if levels > 1:
            self._levels.append(list(range(len(rows))))
        self._name = rows[0].source
        self._seed, self._window, self._promote_at = seed, window, promote_at
        self._level, self._epoch, self._position = 0, 0, 0
        self._recent: list[float] = []

    def next(self) -> int:
        level = self._levels[self._level]
        number = level[self._order(len(level))[self._position]]
        self._position += 1
        if self._position == len(level):
            self._epoch, self._position = self._epoch + 1, 0
        return number

    def _order(self, size: int) -> list[int]:
        name = self._name if self._level == 0 else f"{self._name}/{self._level}"
        return epoch_order(size, seed=self._seed, source=name, epoch=self._epoch).tolist()

    def observe(self, results: Sequence[GroupResult]) -> None:
        self._recent = [*self._recent, *(result.mean_reward for result in results)][-self._window :]
        is_learnt = len(self._recent) == self._window and sum(self._recent) / self._window >= self._promote_at
        if is_learnt and self._level + 1 < len(self._levels):
            self._level, self._epoch, self._position, self._recent = self._level + 1, 0, 0, []

    def state(self) -> dict[str, Any]:
        return {"level": self._level, "epoch": self._epoch, "position": self._position, "recent": self._recent}

    def restore(self, state: dict[str, Any]) -> None:
        self._level, self._epoch, self._position = state["level"], state["epoch"], state["position"]
        self._recent = list(state["recent"])


def main() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    batch = AdvantageInputs(rewards, torch.tensor([0, 0, 0, 0, 1, 1]), {}, {}, torch.ones(6, dtype=torch.int64))
    print("maxrl       ", maxrl(batch).tolist())

    d = torch.tensor([0.5, -0.5, 0.0], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    sequence = ObjectiveInputs(
        log_probs=d,
        old_log_probs=torch.zeros(3, dtype=torch.float64),
        log_ratio=d,
        advantages=torch.ones(3, dtype=torch.float64),
        counts=torch.ones(3, dtype=torch.bool),
        segment_ids=torch.zeros(3, dtype=torch.int64),
        lengths=3 * one,
        sequence_log_ratio=d.mean()[None],
        sequence_advantages=one,
        sequence_counts=torch.ones(1, dtype=torch.bool),
        sequence_mean=lambda values: values.mean()[None],
    )
    print("sspo        ", sspo(sequence).tolist())

    responses = tuple(ResponseResult(reward, {}, None, 10, False) for reward in (1.0, 0.0, 0.0))
    print("keep_between", keep_between(GroupResult("train:0", "train", "1+1=", "2", {}, responses)))

    rows = [RowInfo(k, f"train:{k}", "train", {"level": k % 3}) for k in range(9)]
    order = Curriculum(rows, seed=1, difficulty_key="level")
    print("Curriculum  ", [order.next() for _ in range(6)])


if __name__ == "__main__":
    main()
