"""Metrics as a person reads them: the progress line of a step, the table at the end. Returns text, prints nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_PROGRESS = (
    # label, metric, format
    ("loss", "sft/loss", "{:.4f}"),
    ("reward", "reward/mean", "{:.3f}"),
    ("accuracy", "eval/accuracy", "{:.3f}"),
    ("turns", "episode/turns_mean", "{:.1f}"),
    ("length", "response/length_mean", "{:.1f}"),
    ("truncated", "response/truncated_fraction", "{:.2f}"),
    ("constant", "groups/constant_fraction", "{:.2f}"),
    ("entropy", "policy/entropy", "{:.3f}"),
    ("clip", "policy/clip_fraction", "{:.3f}"),
    ("explained", "critic/explained_variance", "{:.3f}"),
    ("|grad|", "optimizer/grad_norm", "{:.3g}"),
    ("mismatch k3", "mismatch/k3", "{:.1e}"),
    ("tokens/s", "speed/tokens_per_second", "{:.0f}"),
)
_FAILURES = (
    ("retries", "rollout/num_retries"),
    ("servers given up", "rollout/num_servers_given_up"),
    ("reward failures", "rollout/num_reward_failures"),
    ("episode failures", "rollout/num_episode_failures"),
    ("held-out reward failures", "eval/num_reward_failures"),
    ("groups missing", "rollout/num_groups_missing"),
    ("skipped", "optimizer/num_skipped"),
    ("not finite", "metrics/num_non_finite"),
)
_PHASE_ORDER = ("rollout", "old_log_probs", "critic", "train", "publish", "eval", "checkpoint")

# Of which step the evaluation in a line is, where not of its own.
MEASURED_STEP = "eval/measured_step"

# Shown where the number is above this: it says nothing of episodes of one turn.
_ABOVE = {"episode/turns_mean": 1.0}


def progress_line(step: int, metrics: Mapping[str, float], num_steps: int | None = None) -> str:
    """One line for a step: the usual metrics that it has, its time with the phases over 0.05 s, and failures if any."""
    width = len(str(num_steps)) if num_steps is not None else 0
    parts = [f"step {step:>{width}}" + (f"/{num_steps}" if num_steps is not None else "")]
    for label, name, form in _PROGRESS:
        value = metrics.get(name)
        if name == "eval/accuracy" and MEASURED_STEP in metrics:
            label = f"accuracy of step {metrics[MEASURED_STEP]:.0f}"
        if value is not None and not value <= _ABOVE.get(name, -math.inf):
            parts.append(f"{label} {form.format(value) if math.isfinite(value) else value}")
    seconds = metrics.get("time/step_seconds")
    if seconds is not None:
        phases = [(phase, metrics.get(f"time/{phase}_seconds", 0.0)) for phase in _PHASE_ORDER]
        shown = " ".join(f"{phase} {value:.1f}" for phase, value in phases if value >= 0.05)
        parts.append(f"{seconds:.1f} s" + (f" ({shown})" if shown else ""))
    parts += [f"{label}: {metrics[name]:g}" for label, name in _FAILURES if metrics.get(name)]
    return "  ".join(parts)


def final_table(rows: Sequence[Sequence[str]], headers: Sequence[str] = ()) -> str:
    """Text cells in aligned columns, the first to the left, the others to the right; under `headers` when given.

    Raises ValueError for rows of different width.
    """
    lines = [list(row) for row in ([headers] if headers else []) + list(rows)]
    if len({len(line) for line in lines}) > 1:
        raise ValueError(f"rows of different width: {sorted({len(line) for line in lines})}")
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    if headers:
        text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)
