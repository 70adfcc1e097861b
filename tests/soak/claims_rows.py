"""The rows of `claims.py`: what is kept of a finished run, and what is read off its metrics. It starts nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any

WINDOW = 10  # steps of a mean
_LAYER = re.compile(r"routing/layer/(\d+)/replaced_since_old")


@dataclass(frozen=True)
class Row:
    """One finished run. Accuracies are of the held-out problems, each ± its standard error of sampling.

    `accuracy`: the exported weights. `area`: the run's own held-out accuracy, measured every few steps, as a mean over
    the steps (trapezoids, the cold start's among them). `token_clip`, `sequence_clip`: the share of tokens, and of
    sequences, that give no gradient because they were clipped, mean over all steps; with GRPO and PPO a sequence counts
    by the share of its tokens. `changed`: the share of (token, layer) pairs that go to another set of experts in the
    last mini-batch than in the old pass, mean over all steps, NaN where routes are replayed; `changed_last`: over the
    last ten. `replaced`: the share of single choices of experts that are replaced in the same time; `replaced_layers`:
    of each layer from the first, in percent. `changed_from_rollout`: as `changed`, of trainer and server. `explained`: the critic's explained variance, mean
    of the last ten steps, NaN without a critic.

    Since the block `mini_batches`, NaN before: `share`, the mean reward of the held-out responses that `accuracy` is
    of; `reward`, the mean over all steps, `setback`, the largest fall of its ten-step mean from an earlier one;
    `response_tokens`, the mean length; `token_spread`, the root mean square of tokens' log-ratios of current to old
    policy, `sequence_spread`, the standard deviation of their means over a sequence, both over all mini-batches and
    steps; `grad_norm`, before clipping, mean over steps, and `grad_norm_max`, the largest of an optimizer step.

    `outcome`: trained, collapsed (as `tolerance.py` says it), not finite.
    """

    protocol: int
    arm: str
    block: str
    seed: int
    num_steps: int
    before: float
    before_se: float
    accuracy: float
    accuracy_se: float
    area: float
    reward_best: float
    reward_last: float
    token_clip: float
    sequence_clip: float
    changed: float
    changed_last: float
    replaced: float
    replaced_layers: str
    changed_from_rollout: float
    explained: float
    entropy_last: float
    share: float
    reward: float
    setback: float
    response_tokens: float
    token_spread: float
    sequence_spread: float
    grad_norm: float
    grad_norm_max: float
    minutes: float
    outcome: str
    date: str
    commit: str
    cold_start: str
    torch: str
    sglang: str
    megatron: str


def of_protocol(rows: Iterable[Row], protocol: Mapping[str, int]) -> list[Row]:
    """The rows of each block's present protocol."""
    return [row for row in rows if row.protocol == protocol[row.block]]


def finished(rows: Iterable[Row], protocol: Mapping[str, int]) -> set[tuple[str, str, int]]:
    """(block, arm, seed) of the runs that need not be made again."""
    return {(row.block, row.arm, row.seed) for row in of_protocol(rows, protocol)}


def area_under(measured: Sequence[tuple[int, float]]) -> float:
    """The mean of a curve over its steps: (step, value) in order of steps, at least two of them. Raises ValueError."""
    if len(measured) < 2:
        raise ValueError(f"{len(measured)} measurements; a curve has at least two")
    parts = [(b - a) * (left + right) / 2 for (a, left), (b, right) in pairwise(measured)]
    return math.fsum(parts) / (measured[-1][0] - measured[0][0])


def measured(lines: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The columns that come from a run's metrics.jsonl, its lines in order of steps."""
    trained = [line for line in lines if line.get("reward/mean") is not None]

    def values(name: str) -> list[float]:
        return [float(line[name]) for line in trained if line.get(name) is not None] or [math.nan]

    rewards = values("reward/mean")
    layers = sorted({int(found[1]) for line in trained for name in line if (found := _LAYER.fullmatch(name))})
    replaced = [fmean(values(f"routing/layer/{layer}/replaced_since_old")) for layer in layers]
    windows = [fmean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1)] or [fmean(rewards)]
    return {
        "area": area_under([(int(line["step"]), line["eval/accuracy"]) for line in lines if "eval/accuracy" in line]),
        "reward_best": max(windows),
        "reward_last": windows[-1],
        "token_clip": fmean(values("policy/token_clip_fraction")),
        "sequence_clip": fmean(values("policy/clip_fraction")),
        "changed": fmean(values("routing/changed_since_old")),
        "changed_last": fmean(values("routing/changed_since_old")[-WINDOW:]),
        "replaced": fmean(replaced) if replaced else math.nan,
        "replaced_layers": " ".join(f"{share:.3%}".removesuffix("%") for share in replaced) or "-",
        "changed_from_rollout": fmean(values("routing/changed_since_rollout")),
        "explained": fmean(values("critic/explained_variance")[-WINDOW:]),
        "entropy_last": fmean(values("policy/entropy")[-WINDOW:]),
        "reward": fmean(rewards),
        "setback": max(best - later for best, later in zip(accumulate(windows, max), windows, strict=True)),
        "response_tokens": fmean(values("response/length_mean")),
        "token_spread": math.sqrt(2 * fmean(values("policy/k2"))),
        "sequence_spread": fmean(values("policy/log_ratio/update/sd")),
        "grad_norm": fmean(values("optimizer/grad_norm")),
        "grad_norm_max": max(values("optimizer/grad_norm_max")),
    }
