"""The rows of `tolerance.py`: what is kept of a finished run, the file that they are appended to, and what is read off.

Owns the columns, the rule of collapse and the statistics. It starts nothing.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from statistics import fmean, stdev

NUM_MINI_BATCHES = 4
WINDOW = 10  # steps of a mean of rewards
NO_GAP = 1e-9  # k3 of two engines that compute alike: in fp32 they differ by rounding, some 1e-13


@dataclass(frozen=True)
class Row:
    """One finished run. Accuracies are of the held-out problems, each ± its standard error of sampling.

    `accuracy`: the exported weights on an fp32 server without quantization. `server_accuracy`: what the run itself
    measured after its last step, on its own server. `k3`: KL(server || trainer) per token in nats, of the first step,
    before any update, and the means over all and over the last ten steps. `clip_positive_m`, `clip_negative_m`: clipped
    sequences of mini-batch m with A > 0 and with A < 0, as shares of all with that sign, means over steps.
    `positive_left`, `negative_left`: the share of |A| by sign that has a gradient after clipping, first mini-batch.
    """

    protocol: int
    arm: str
    block: str
    seed: int
    num_steps: int
    before: float
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
_TYPES = {"int": int, "float": float, "str": str}


def read_rows(path: Path) -> list[Row]:
    """The rows of the file, none where there is no file. Raises ValueError for another header, or a row cut short."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path}: not the columns of this study")
        rows = []
        for line in reader:
            if None in line or None in line.values():
                raise ValueError(f"{path}:{reader.line_num}: {len(COLUMNS)} columns expected")
            rows.append(Row(**{field.name: _TYPES[str(field.type)](line[field.name]) for field in fields(Row)}))
        return rows


def append_row(path: Path, row: Row) -> None:
    """Append one row, and the header to a new file; on disk when it returns. Floats have six digits."""
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if file.tell() == 0:
            writer.writerow(COLUMNS)
        writer.writerow([format(value, ".6g") if isinstance(value, float) else value for value in astuple(row)])
        file.flush()
        os.fsync(file.fileno())


def finished(rows: Iterable[Row], protocol: int) -> set[tuple[str, int]]:
    """(arm, seed) of the runs that need not be made again."""
    return {(row.arm, row.seed) for row in rows if row.protocol == protocol}


def measured(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The columns that come from a run's metrics.jsonl: its lines in order of steps. A null counts as NaN."""
    lines = [line for line in steps if line.get("reward/mean") is not None]

    def values(name: str, of: Sequence[Mapping[str, float]] = lines) -> list[float]:
        found = [line.get(name, math.nan) for line in of]
        return [math.nan if value is None else float(value) for value in found]

    def mini_batch(sign: str) -> dict[str, float]:
        names = (f"policy/mini_batch/{m}/clip_fraction_{sign}" for m in range(NUM_MINI_BATCHES))
        return {f"clip_{sign}_{m}": fmean(values(name)) for m, name in enumerate(names)}

    rewards = values("reward/mean")
    windows = [fmean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1)] or [fmean(rewards)]
    return {
        "reward_best": max(windows),
        "reward_last": windows[-1],
        "k3_first": values("mismatch/k3")[0],
        "k3": fmean(values("mismatch/k3")),
        "k3_last": fmean(values("mismatch/k3")[-WINDOW:]),
        "abs_log_ratio_max": max(values("mismatch/abs_log_ratio_max")),
        # With the server's log-probs as old ones the run reports one log s; before the first update it is the gap.
        "log_s_mismatch_sd": values("policy/log_ratio/mismatch/sd", lines[:1])[0],
        "clip": fmean(values("policy/clip_fraction")),
        **mini_batch("positive"),
        **mini_batch("negative"),
        "positive_left": fmean(values("policy/mini_batch/0/positive_mass_left")),
        "negative_left": fmean(values("policy/mini_batch/0/negative_mass_left")),
        "kept": fmean(values("policy/kept_fraction")),
        "entropy_last": fmean(values("policy/entropy")[-WINDOW:]),
    }


def has_collapsed(before: float, accuracy: float, accuracy_se: float, best: float, last: float) -> bool:
    """The definition of the protocol: the trained weights solve fewer problems than the cold start, by two standard
    errors, or the reward of the last ten steps is under half of the best ten steps' of the run.
    """
    return accuracy < before - 2 * accuracy_se or last < best / 2


# --- statistics ---------------------------------------------------------------------------------------------------


def t_quantile(p: float, freedom: int) -> float:
    """The p quantile (1/2 <= p < 1) of Student's t with `freedom` degrees of freedom."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)

    def below(t: float, num_parts: int = 2000) -> float:
        width = t / num_parts
        heights = [(1 + (i * width) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(num_parts + 1)]
        return 0.5 + scale * width / 3 * (
            heights[0] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2]) + heights[-1]
        )

    low, high = 0.0, 1.0
    while below(high) < p:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < p else (low, middle)
    return (low + high) / 2


def pooled_spread(groups: Iterable[Sequence[float]]) -> tuple[float, int]:
    """The standard deviation within groups (arms over their seeds) and its degrees of freedom. Raises ValueError where
    no group has two values.
    """
    several = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in several)
    if freedom == 0:
        raise ValueError("no arm has two seeds: their spread is unknown")
    squares = sum((len(group) - 1) * stdev(group) ** 2 for group in several)
    return math.sqrt(squares / freedom), freedom


def smallest_detectable(spread: float, freedom: int, num_seeds: int, power: float = 0.8, level: float = 0.05) -> float:
    """The smallest true difference between two arms of `num_seeds` runs each that a two-sided t-test at `level` finds
    with probability `power`: (t(1 - level/2) + t(power)) spread sqrt(2 / num_seeds).
    """
    return (t_quantile(1 - level / 2, freedom) + t_quantile(power, freedom)) * spread * math.sqrt(2 / num_seeds)


def by_arm(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each arm, in order of the file."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.arm, []).append(row)
    return found


def spread_of(rows: Iterable[Row]) -> tuple[float, int]:
    """`pooled_spread` of the final accuracies, over arms of which no run has collapsed."""
    arms = by_arm(rows).values()
    return pooled_spread([row.accuracy for row in arm] for arm in arms if all(r.outcome == "trained" for r in arm))
