"""Rows and lines of metrics.jsonl for tests of the tolerance study."""

import dataclasses

import tolerance
from tolerance_rows import Row

# The columns that `measured` fills.
WRITTEN = {
    *("reward_best", "reward_last", "k3_first", "k3", "k3_last", "abs_log_ratio_max", "log_s_mismatch_sd"),
    *("clip", "positive_left", "negative_left", "kept", "entropy_last"),
    *(f"clip_{sign}_{m}" for sign in ("positive", "negative") for m in range(4)),
}


def row(arm="gspo-fp32-same-old_trainer", seed=1, accuracy=0.6, **changes):
    values = {
        field.name: {"int": 1, "float": 0.25, "str": "x"}[str(field.type)] for field in dataclasses.fields(Row)
    } | dict(protocol=tolerance.PROTOCOL, arm=arm, seed=seed, accuracy=accuracy, accuracy_se=0.015, outcome="trained")
    return Row(**(values | changes))


def line_of(**metrics):
    """A line of metrics.jsonl with everything that is read; `None` takes a metric out."""
    names = ["reward/mean", "mismatch/k3", "mismatch/abs_log_ratio_max"]
    names += [f"policy/{name}" for name in ("clip_fraction", "kept_fraction", "entropy")]
    names += [f"policy/mini_batch/0/{sign}_mass_left" for sign in ("positive", "negative")]
    names += [f"policy/mini_batch/{m}/clip_fraction_{sign}" for m in range(4) for sign in ("positive", "negative")]
    return {name: value for name, value in (dict.fromkeys(names, 0.5) | metrics).items() if value is not None}
