"""The rows of `tolerance.py`: what is kept of a finished run, the file that they are appended to, and what is read off.

Owns the columns and the rule of collapse. It starts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean

from study_rows import (
    append_row,
    compared_spread,
    pooled_spread,
    read_table,
    smallest_detectable,
    start_effects,
    t_quantile,
)

from gspo_mega.metrics.tables import LENGTH_BINS

__all__ = ["append_row", "pooled_spread", "smallest_detectable", "t_quantile"]

NUM_MINI_BATCHES = 4
WINDOW = 10  # steps of a mean of rewards
NO_GAP = 1e-9  # k3 of two engines that compute alike: in fp32 they differ by rounding, some 1e-13


@dataclass(frozen=True)
class Row:
    """One finished run. Accuracies are of the held-out problems, each ± its standard error of sampling.

    `accuracy`: the exported weights on an fp32 server without quantization. `server_accuracy`: what the run itself
    measured after its last step, on its own server. `k3`: KL(server || trainer) per token in nats, of the first step,
    before any update, and the means over all and over the last ten steps. `log_s_mismatch_sd`: of trainer - server,
    each response's mean, at the first step before any update.

    `clip`, `clip_positive_m`, `clip_negative_m`: the clipped share of a mini-batch; the latter of mini-batch m, of those
    with A > 0 and with A < 0. With GSPO it is a share of sequences. With GRPO a sequence counts by the share of its
    tokens that are clipped, whatever its length: 1 of 10 tokens and 0 of 1000 are .05, not 1 of 1010.
    `positive_left`, `negative_left`: the share of |A| by sign that has a gradient after clipping, first mini-batch. What
    is by sign is a mean over the steps whose mini-batch has that sign, NaN where none has; the others over all steps.

    `outcome`: trained, collapsed, not finite, or ended: no longer finite before the first step was complete, so that
    nothing but the outcome is known, and every column that was to be measured is NaN.
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
    server_accuracy: float
    server_accuracy_se: float
    reward_best: float
    reward_last: float
    k3_first: float
    k3: float
    k3_last: float
    abs_log_ratio_max: float
    log_s_mismatch_sd: float
    clip: float
    clip_positive_0: float
    clip_positive_1: float
    clip_positive_2: float
    clip_positive_3: float
    clip_negative_0: float
    clip_negative_1: float
    clip_negative_2: float
    clip_negative_3: float
    positive_left: float
    negative_left: float
    kept: float
    entropy_last: float
    minutes: float
    outcome: str
    date: str
    commit: str
    cold_start: str
    torch: str
    sglang: str
    megatron: str
    transformer_engine: str


COLUMNS = tuple(field.name for field in fields(Row))


def read_rows(path: Path) -> list[Row]:
    """The rows of the file, none where there is no file. Raises ValueError for another header, or a row cut short."""
    return read_table(path, Row)


def finished(rows: Iterable[Row], protocol: int) -> set[tuple[str, int]]:
    """(arm, seed) of the runs that need not be made again."""
    return {(row.arm, row.seed) for row in rows if row.protocol == protocol}


def trained_steps(steps: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """The lines of a run's metrics.jsonl that are of training, which evaluations beside it are not."""
    return [line for line in steps if line.get("reward/mean") is not None]


def measured(
    steps: Sequence[Mapping[str, float]], window: int = WINDOW, num_mini_batches: int = NUM_MINI_BATCHES
) -> dict[str, float]:
    """The columns that come from a run's metrics.jsonl: its lines in order of steps. A null counts as NaN. Of no step
    at all, every column is NaN. `window`: steps of a mean.
    """
    lines = trained_steps(steps)

    def values(name: str, of: Sequence[Mapping[str, float]] = lines) -> list[float]:
        found = [line.get(name, math.nan) for line in of]
        return [math.nan if value is None else float(value) for value in found] or [math.nan]

    def by_sign(sign: str) -> dict[str, float]:
        """A mini-batch without that sign has no clip fraction, and counts as left what is nothing."""
        names = [f"policy/mini_batch/{m}/clip_fraction_{sign}" for m in range(num_mini_batches)]
        having = [[line for line in lines if name in line] for name in names]
        clipped = (fmean(values(name, found)) for name, found in zip(names, having, strict=True))
        left = fmean(values(f"policy/mini_batch/0/{sign}_mass_left", having[0]))
        return {f"clip_{sign}_{m}": value for m, value in enumerate(clipped)} | {f"{sign}_left": left}

    rewards = values("reward/mean")
    windows = [fmean(rewards[end - window : end]) for end in range(window, len(rewards) + 1)] or [fmean(rewards)]
    return {
        "reward_best": max(windows),
        "reward_last": windows[-1],
        "k3_first": values("mismatch/k3")[0],
        "k3": fmean(values("mismatch/k3")),
        "k3_last": fmean(values("mismatch/k3")[-window:]),
        "abs_log_ratio_max": max(values("mismatch/abs_log_ratio_max")),
        "log_s_mismatch_sd": _log_s_sd(lines[0]) if lines else math.nan,
        "clip": fmean(values("policy/clip_fraction")),
        **by_sign("positive"),
        **by_sign("negative"),
        "kept": fmean(values("policy/kept_fraction")),
        "entropy_last": fmean(values("policy/entropy")[-window:]),
    }


def _log_s_sd(line: Mapping[str, float]) -> float:
    """The standard deviation of trainer - server, each response's mean in nats, over the responses of all bins of
    lengths; NaN of none. `policy/log_ratio/gap` has it only where the trainer's log-probs are the old ones.
    """
    parts = ("num_sequences", "log_s_mean", "log_s_sd")
    bins = [[line.get(f"mismatch/length/{name}/{part}") for part in parts] for name in LENGTH_BINS]
    known = [[math.nan if value is None else value for value in found] for found in bins if found[0]]
    if not known:
        return math.nan
    whole = sum(count for count, _, _ in known)
    mean = sum(count * mean for count, mean, _ in known) / whole
    return math.sqrt(sum(count * (sd**2 + (of_bin - mean) ** 2) for count, of_bin, sd in known) / whole)


def has_collapsed(before: tuple[float, float], after: tuple[float, float], best: float, last: float) -> bool:
    """The definition of the protocol: the trained weights solve fewer problems than the cold start, by two standard
    errors of that difference, or the reward of the last ten steps is under half of the best ten steps' of the run.
    `before`, `after`: the two accuracies, each with its standard error.
    """
    return after[0] < before[0] - 2 * math.hypot(before[1], after[1]) or last < best / 2


def by_arm(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each arm, in order of the file."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.arm, []).append(row)
    return found


def final_accuracy(row: Row) -> float:
    return row.accuracy


def without_starts(rows: Sequence[Row]) -> list[Row]:
    """The rows with their final accuracies as arms are compared by: without what the cold starts of their seeds add, so
    that seeds are compared one by one where they have different ones. With one cold start, the rows themselves.
    """
    effects = start_effects(rows, final_accuracy)
    return [replace(row, accuracy=row.accuracy - effects[row.cold_start]) for row in rows]


def spread_of(rows: Sequence[Row]) -> tuple[float, int]:
    """`compared_spread` of the final accuracies, over arms of which no run has collapsed."""
    return compared_spread(rows, final_accuracy)
