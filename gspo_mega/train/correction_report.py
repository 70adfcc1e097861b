"""Whether the correction of the engine gap acts: its metrics, and a notice to the user where it never does.

A bound that is never reached corrects nothing. A run shows whether it acts, and how far from acting it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gspo_mega.algorithm.columns import (
    CORRECTION_CENTRE,
    CORRECTION_DEVIATION,
    CORRECTION_SEGMENTS,
    CORRECTION_VETOES,
    CORRECTION_WEIGHT,
)
from gspo_mega.algorithm.correction import acted_on
from gspo_mega.config.old_pass import corrects
from gspo_mega.config.schema import Config, Mismatch

# The notice comes after this many steps without effect, or at the end of a shorter run.
NOTICE_AFTER_STEPS = 100
_KEY = "mismatch_correction"


def correction_metrics(config: Config, train: Mapping[str, np.ndarray], present: np.ndarray) -> dict[str, float]:
    """Metrics of the correction of a step. `train`: columns of all trajectories from the training passes; `present`
    [N] bool: with an active token. Empty where there is no correction.
    """
    if not corrects(config) or not present.any():
        return {}
    weights, deviations, vetoes = (
        train[column.name][present] for column in (CORRECTION_WEIGHT, CORRECTION_DEVIATION, CORRECTION_VETOES)
    )
    kept = weights > 0
    acted = acted_on(
        config.mismatch.correction,
        config.mismatch.bound_nats,
        torch.from_numpy(kept),
        torch.from_numpy(deviations),
    )
    metrics = {}
    if CORRECTION_SEGMENTS.name in train:
        segments = train[CORRECTION_SEGMENTS.name][present]
        metrics["mismatch/num_segments"] = float(segments[:, 0].sum())
        metrics["mismatch/num_segment_decisions"] = float(segments[:, 1].sum())
    return metrics | {
        "mismatch/acted_fraction": float(acted.double().mean()),
        "mismatch/weight_mean": float(weights[kept].mean()) if kept.any() else 0.0,
        "mismatch/centre": float(train[CORRECTION_CENTRE.name][present][0]),
        "mismatch/deviation_abs_max": float(np.abs(deviations).max()),
        "mismatch/num_token_vetoes": float(vetoes.sum()),
        "mismatch/num_vetoed_sequences": float((vetoes > 0).sum()),
    }


def note_correction(summary: dict[str, Any], metrics: dict[str, float]) -> None:
    """Record in the summary, which every checkpoint of the run keeps, whether the correction ever acted."""
    if "mismatch/acted_fraction" not in metrics:
        return
    kept = summary.setdefault(_KEY, {"num_steps": 0, "num_steps_acted": 0, "deviation_abs_max": 0.0, "is_said": False})
    kept["num_steps"] += 1
    kept["num_steps_acted"] += metrics["mismatch/acted_fraction"] > 0
    kept["deviation_abs_max"] = max(kept["deviation_abs_max"], metrics["mismatch/deviation_abs_max"])


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
    what = "no weight was cut" if mismatch.correction == "truncate" else "no response was dropped"
    return (
        f"notice   mismatch.correction {mismatch.correction} has not acted in {kept['num_steps']} steps: {what}; the"
        f" furthest response deviated by {kept['deviation_abs_max']:.2g} nats, mismatch.bound_nats is"
        f" {mismatch.bound_nats:g}"
    )
