"""The mismatch in a step's metrics: as a whole, by response length and by sign of the advantage; and its warnings.

`gap_metrics` and `gap_warnings` are about d = trainer - server, measured before any update of the step, when only the
engines differ (and, for stale rollouts, the weights). `correction_metrics` and the
functions after it say whether the mismatch correction acts: a bound that is never reached corrects nothing, so a run
shows how far from acting it is, and tells the user if it never acts. `gspo_mega.algorithm` has the statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gspo_mega.algorithm.correction import MAXIMUM_NAMES, SUM_NAMES, changed_by_rule, mismatch_metrics
from gspo_mega.algorithm.diagnostics import log_ratio_summary
from gspo_mega.algorithm.terms import (
    CORRECTION_CENTRE,
    CORRECTION_DEVIATION,
    CORRECTION_SEGMENTS,
    CORRECTION_TOKENS,
    CORRECTION_VETOES,
    CORRECTION_WEIGHT,
    MISMATCH_MAXIMA,
    MISMATCH_SUMS,
    objective_settings,
)
from gspo_mega.config.clip_range import Band, band_of, must_warn, share_sentence
from gspo_mega.config.derived import corrects_engine_gap
from gspo_mega.config.precision import server_dtype
from gspo_mega.config.schema import Config, Engine, Mismatch, Model, Moe, OldLogProbs, Precision, Server
from gspo_mega.metrics.tables import rows_by_length

# A warning is repeated after this many steps if its reason still holds.
WARN_AGAIN_STEPS = 100
# Routing is named as a cause if at least this share of the (token, layer) pairs goes to other experts.
LEAST_CHANGED_ROUTES = 1e-4
# The notice that the correction never acted comes after this many steps, or at the end of a shorter run.
NOTICE_AFTER_STEPS = 100
# The key of the run's summary that keeps whether the correction acted.
_CORRECTION_KEY = "mismatch_correction"


@dataclass(frozen=True)
class GapRows:
    """The n responses of a step that have an active token and whose mismatch was measured before any update.

    `sums` [n, K] and `maxima` [n, M]: of `mismatch_sums`. `advantages` [n]. `is_stale` [n] bool: sampled, at least in
    part, by older weights. `weights` [n]: of the correction; None if there is no correction.
    """

    sums: np.ndarray
    maxima: np.ndarray
    advantages: np.ndarray
    is_stale: np.ndarray
    weights: np.ndarray | None

    @classmethod
    def measured(
        cls,
        old: Mapping[str, np.ndarray],
        train: Mapping[str, np.ndarray],
        rows: np.ndarray,
        advantages: np.ndarray,
        is_stale: np.ndarray,
    ) -> GapRows:
        """From the columns of all trajectories, [N] or [N, K]. `rows` [N] bool: measured before any update."""
        sums = old[MISMATCH_SUMS.name]
        chosen = rows & (sums[:, SUM_NAMES.index("tokens")] > 0)
        weights = train.get(CORRECTION_WEIGHT.name)
        return cls(
            sums[chosen],
            old[MISMATCH_MAXIMA.name][chosen],
            advantages[chosen],
            is_stale[chosen],
            None if weights is None else weights[chosen],
        )

    @property
    def lengths(self) -> np.ndarray:
        """[n] active tokens of each response."""
        return self.sums[:, SUM_NAMES.index("tokens")]

    @property
    def log_s(self) -> np.ndarray:
        """[n] nats: the mean over each response of trainer - server. It is log s if the old log-probs are the
        server's.
        """
        return self.sums[:, SUM_NAMES.index("log_ratio")] / np.maximum(self.lengths, 1.0)


def gap_metrics(band: Band | None, gap: GapRows) -> dict[str, float]:
    """The metrics `mismatch/...` of a step, except those of the correction. `band`: the clip range, if there is one."""
    metrics = {
        f"mismatch/{name}": value
        for name, value in mismatch_metrics(torch.from_numpy(gap.sums), torch.from_numpy(gap.maxima)).items()
    }
    everything = np.ones(len(gap.lengths), bool)
    metrics |= {f"mismatch/{name}": value for name, value in _range_metrics(band, gap, everything).items()}
    parts = {f"length/{name}": rows for name, rows in rows_by_length(gap.lengths).items()}
    for name, rows in (("positive", gap.advantages > 0), ("negative", gap.advantages < 0)):
        if rows.any():
            parts[f"advantage/{name}"] = rows
    for part, rows in parts.items():
        metrics |= {f"mismatch/{part}/{name}": value for name, value in _part_metrics(band, gap, rows).items()}
    return metrics


def _budget_share(band: Band | None, gap: GapRows, rows: np.ndarray) -> float | None:
    """The mean mismatch of the `rows` [n] bool in widths of the clip range, over tokens or responses as the ratio is
    defined. None without a clip range.
    """
    if band is None:
        return None
    if not rows.any():
        return 0.0
    if not band.per_token:
        return float(band.widths(gap.log_s[rows]).mean())
    return float(gap.sums[rows, SUM_NAMES.index("range_widths")].sum() / gap.lengths[rows].sum())


def _clip_fraction(band: Band, gap: GapRows, rows: np.ndarray) -> float:
    """The share of the tokens or responses of the `rows` [n] bool that would be clipped without any update if the
    servers' log-probs were the old ones. With A = 0 nothing is clipped.
    """
    if not rows.any():
        return 0.0
    negative, positive = rows & (gap.advantages < 0), rows & (gap.advantages > 0)
    if not band.per_token:
        clipped = [band.is_clipped(gap.log_s[negative], True).sum(), band.is_clipped(gap.log_s[positive], False).sum()]
        return float(sum(clipped) / rows.sum())
    below, above = (SUM_NAMES.index(f"clipped_if_{sign}") for sign in ("negative", "positive"))
    return float((gap.sums[negative, below].sum() + gap.sums[positive, above].sum()) / gap.lengths[rows].sum())


def _part_metrics(band: Band | None, gap: GapRows, rows: np.ndarray) -> dict[str, float]:
    summary = log_ratio_summary(torch.from_numpy(gap.log_s[rows]))
    k3 = gap.sums[rows, SUM_NAMES.index("k3")].sum() / gap.lengths[rows].sum()
    values = {
        "num_sequences": float(rows.sum()),
        "log_s_mean": summary["mean"],
        "log_s_sd": summary["sd"],
        "k3": float(k3),
        **_range_metrics(band, gap, rows),
    }
    if gap.weights is not None:
        values["kept_fraction"] = float((gap.weights[rows] > 0).mean())
    return values


def _range_metrics(band: Band | None, gap: GapRows, rows: np.ndarray) -> dict[str, float]:
    share = _budget_share(band, gap, rows)
    if band is None or share is None:
        return {}
    return {"budget_share": share, "clip_fraction": _clip_fraction(band, gap, rows)}


def gap_warnings(
    config: Config,
    config_file: Path,
    gap: GapRows,
    metrics: Mapping[str, float],
    summary: dict[str, Any],
    step: int,
    newest_export: Path | None = None,
) -> list[str]:
    """The warnings to show after a step. Each is shown once, and again after `WARN_AGAIN_STEPS` if its reason still
    holds.

    `summary`: remembers what was shown; every checkpoint keeps it. `newest_export`: the newest Hugging Face folder of
    the run's weights, or None if there is none.
    """
    told = summary.setdefault("mismatch_told", {})
    lines = []

    def is_due(what: str) -> bool:
        if what in told and step - told[what] < WARN_AGAIN_STEPS:
            return False
        told[what] = step
        return True

    if (line := _inexact_warning(config.engine, gap)) is not None and is_due("inexact"):
        lines.append(line)
    share, budget, band = (
        metrics.get("mismatch/budget_share"),
        config.mismatch.budget,
        band_of(config.algorithm, config.objective),
    )
    if band is not None and share is not None and share > budget and is_due("budget"):
        causes = (
            _staleness_sentence(band, budget, gap),
            _routing_sentence(config.moe, metrics),
            _formats_sentence(config.server, config.precision),
        )
        warns = must_warn(config.old_log_probs, metrics["mismatch/k3"])
        kept_out = "" if config.old_log_probs == "rollout" else " old_log_probs: trainer keeps this out of the ratio."
        lines.append(
            f"{'warning' if warns else 'notice '}  the engines' log-probs differ by {share:.2f} of the clip range "
            f"before any update: {share_sentence(band, f'{share:.2f}', budget)}; k3 {metrics['mismatch/k3']:.1e} nats"
            f" per token.{kept_out} "
            + (" ".join(filter(None, causes)) or "One step does not show its cause.")
            + _where_to_measure(config.model, config_file, newest_export)
        )
    first = {sign: metrics.get(f"policy/mini_batch/0/clip_fraction_{sign}") for sign in ("negative", "positive")}
    clips = any(share for share in first.values())
    if config.old_log_probs == "rollout" and first["negative"] is not None and clips and is_due("rollout"):
        by_token = objective_settings(config.algorithm, config.objective).ratio == "token"
        unit = "a response's tokens, in the mean over responses," if by_token else "the responses"
        lines.append(
            f"warning  old_log_probs: rollout clips {first['negative']:.2f} of {unit} with A < 0 and"
            f" {first['positive'] or 0.0:.2f} of those with A > 0 with no update at all (clip range"
            f" {config.objective.clip_low:g} / {config.objective.clip_high:g}): the engines' difference takes their"
            " gradient. `old_log_probs: trainer` does not"
        )
    kept = metrics.get("policy/kept_fraction", 1.0)
    if gap.weights is not None and kept < 0.9 and is_due("dropped"):
        lines.append(
            f"warning  mismatch.correction {config.mismatch.correction} dropped {1 - kept:.2f} of the responses:"
            " mismatch/length/... and mismatch/advantage/... say which (docs/mismatch.md)"
        )
    return lines


def _inexact_warning(engine: Engine, gap: GapRows) -> str | None:
    """The warning that log-probs of the same weights are not equal to the last bit, with `engine.batch_invariant`; None
    if they are equal.
    """
    fresh = ~gap.is_stale
    largest = gap.maxima[fresh, MAXIMUM_NAMES.index("abs_log_ratio")]
    if not engine.batch_invariant or not (largest > 0).any():
        return None
    return (
        f"warning  engine.batch_invariant: {(largest > 0).sum()} of {fresh.sum()} responses that these weights sampled"
        " have log-probs that are not the servers' to the last bit; the largest difference is"
        f" {largest.max():.1e} nats. tests/soak/on_policy_operations.py finds the operation on this machine"
        " (docs/studies/true_on_policy.md)"
    )


def _where_to_measure(model: Model, config_file: Path, newest_export: Path | None) -> str:
    if newest_export is None:
        return (
            f" `gspo-mega mismatch {config_file}` measures each cause separately, with the weights of the run's start"
        )
    others = "" if model.weights is None else " model.weights=null"
    return f" `gspo-mega mismatch {config_file} model.path={newest_export}{others}` measures each cause separately"


def _staleness_sentence(band: Band | None, budget: float, gap: GapRows) -> str | None:
    """What part older weights have in the mismatch; None if no response was sampled with them. `budget`:
    `mismatch.budget`.
    """
    stale = gap.is_stale
    if stale.all():
        return "Staleness is part of it: all responses were sampled with older weights."
    if not stale.any():
        return None
    fresh, older = (_budget_share(band, gap, rows) or 0.0 for rows in (~stale, stale))
    whose = "staleness" if fresh <= budget else "the engines, with staleness on top"
    return (
        f"The cause is {whose}: {fresh:.2f} for responses of the current weights,"
        f" {older:.2f} for the {stale.mean():.0%} that older ones sampled."
    )


def _routing_sentence(moe: Moe, metrics: Mapping[str, float]) -> str | None:
    changed = metrics.get("routing/changed_since_rollout")
    if changed is not None and changed >= LEAST_CHANGED_ROUTES:
        return (
            f"Routing is part of it: {changed:.2%} of (token, layer) pairs go to other experts than on the server"
            " (`moe.routing_replay: R3` removes that part)."
        )
    return "Routing is not: R3 replays the server's." if moe.routing_replay == "R3" else None


def _formats_sentence(server: Server, trainer: Precision) -> str | None:
    dtype = server_dtype(server, trainer)
    formats = [name for name in (server.quantization, server.kv_cache) if name not in ("none", "auto")]
    if not formats and dtype == trainer:
        return None
    return f"The trainer computes in {trainer}, the server in {', '.join([dtype, *formats])}."


def correction_metrics(
    mismatch: Mismatch,
    old_log_probs: OldLogProbs,
    train: Mapping[str, np.ndarray],
    present: np.ndarray,
) -> dict[str, float]:
    """The metrics of a step's mismatch correction; empty if there is no correction. `train`: the columns of all
    trajectories from the training passes. `present` [N] bool: the trajectory has an active token.
    """
    if not corrects_engine_gap(mismatch, old_log_probs) or not present.any():
        return {}
    weights, deviations, vetoes = (
        train[column.name][present] for column in (CORRECTION_WEIGHT, CORRECTION_DEVIATION, CORRECTION_VETOES)
    )
    kept = weights > 0
    acted = changed_by_rule(
        mismatch.correction,
        mismatch.bound_nats,
        torch.from_numpy(kept),
        torch.from_numpy(deviations),
    )
    metrics = {}
    if CORRECTION_TOKENS.name in train:
        counted, dropped, cut, weighed = train[CORRECTION_TOKENS.name][present].T
        acted = acted | torch.from_numpy((dropped > 0) | (cut > 0))
        num_tokens = max(float(counted.sum()), 1.0)
        metrics |= {
            "mismatch/token_dropped_fraction": float(dropped.sum()) / num_tokens,
            "mismatch/token_cut_fraction": float(cut.sum()) / num_tokens,
            "mismatch/token_weight_mean": float(weighed.sum()) / num_tokens,
        }
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


def record_correction(summary: dict[str, Any], metrics: dict[str, float]) -> None:
    """Record in the summary whether the correction ever acted. Every checkpoint of the run keeps the summary."""
    if "mismatch/acted_fraction" not in metrics:
        return
    kept = summary.setdefault(
        _CORRECTION_KEY, {"num_steps": 0, "num_steps_acted": 0, "deviation_abs_max": 0.0, "is_said": False}
    )
    kept["num_steps"] += 1
    kept["num_steps_acted"] += metrics["mismatch/acted_fraction"] > 0
    kept["deviation_abs_max"] = max(kept["deviation_abs_max"], metrics["mismatch/deviation_abs_max"])


def correction_notice(mismatch: Mismatch, summary: dict[str, Any], at_end: bool = False) -> str | None:
    """The notice that the correction never acted, else None. It is given once per run, after `NOTICE_AFTER_STEPS` or
    `at_end`.
    """
    kept = summary.get(_CORRECTION_KEY)
    if (
        kept is None
        or kept["is_said"]
        or kept["num_steps_acted"]
        or not (at_end or kept["num_steps"] >= NOTICE_AFTER_STEPS)
    ):
        return None
    kept["is_said"] = True
    if mismatch.correction not in ("truncate", "mask"):
        return (
            f"notice   mismatch.correction {mismatch.correction} has not acted in {kept['num_steps']} steps: nothing"
            " was dropped and no weight cut"
        )
    what = "no weight was cut" if mismatch.correction == "truncate" else "no response was dropped"
    return (
        f"notice   mismatch.correction {mismatch.correction} has not acted in {kept['num_steps']} steps: {what}; the"
        f" furthest response deviated by {kept['deviation_abs_max']:.2g} nats, mismatch.bound_nats is"
        f" {mismatch.bound_nats:g}"
    )
