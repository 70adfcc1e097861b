"""Whether the correction of the engine gap acts: its metrics, and a notice to the user where it never does.

A bound that is never reached corrects nothing: the weights are then the ratios themselves, all close to 1. A run
shows whether it acts.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from gspo_mega.algorithm.mismatch import acted_on
from gspo_mega.config.schema import Config, Mismatch

# The notice comes after this many steps without effect, or at the end of a shorter run.
NOTICE_AFTER_STEPS = 100
_KEY = "mismatch_correction"


def is_on(config: Config) -> bool:
    """Whether the loss is weighed by the correction at all."""
    return config.mismatch.correction != "none" and config.old_log_probs == "trainer"


def correction_metrics(config: Config, mean_log_ratio: torch.Tensor) -> dict[str, float]:
    """Metrics of the sequences of a step. `mean_log_ratio` [N] float64 nats: trainer - server, the log of each
    sequence's weight before the bound. Empty where there is no correction.
    """
    if not is_on(config) or mean_log_ratio.numel() == 0:
        return {}
    acted = acted_on(mean_log_ratio, config.mismatch.correction, config.mismatch.cap)
    return {
        "mismatch/acted_fraction": float(acted.double().mean()),
        "mismatch/log_weight_abs_max": float(mean_log_ratio.abs().max()),
    }


def note_correction(summary: dict[str, Any], metrics: dict[str, float]) -> None:
    """Record in the summary, which every checkpoint of the run keeps, whether the correction ever acted."""
    if "mismatch/acted_fraction" not in metrics:
        return
    kept = summary.setdefault(_KEY, {"num_steps": 0, "num_steps_acted": 0, "log_weight_abs_max": 0.0, "is_said": False})
    kept["num_steps"] += 1
    kept["num_steps_acted"] += metrics["mismatch/acted_fraction"] > 0
    kept["log_weight_abs_max"] = max(kept["log_weight_abs_max"], metrics["mismatch/log_weight_abs_max"])


def correction_notice(mismatch: Mismatch, summary: dict[str, Any], at_end: bool = False) -> str | None:
    """The notice that the correction never acted: once per run, after `NOTICE_AFTER_STEPS` or `at_end`; else None."""
    kept = summary.get(_KEY)
    if (
        kept is None
        or kept["is_said"]
        or kept["num_steps_acted"]
        or not (at_end or kept["num_steps"] >= NOTICE_AFTER_STEPS)
    ):
        return None
    kept["is_said"] = True
    furthest = kept["log_weight_abs_max"]
    what = "no weight reached" if mismatch.correction == "truncate" else "no sequence was dropped by"
    return (
        f"notice   mismatch.correction {mismatch.correction} has not acted in {kept['num_steps']} steps: {what} the cap"
        f" {mismatch.cap:g}; all weights were between {math.exp(-furthest):.6g} and {math.exp(furthest):.6g}"
    )
