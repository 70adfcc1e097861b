"""What an algorithm's clip range means for the difference of the two engines: one answer for a run and for `mismatch`.

The range is put around the servers' log-probs, as if they were used directly as the old ones and no update had been
made. With d = trainer - server in nats, the recipe decides what is compared with the range:

    gspo, gspo_token, luspo            log s of a response, the mean of d over it: log(1 - clip_low) to
                                       log(1 + clip_high)
    grpo, dapo, dr_grpo, ppo, minirl   d of each token, in the same range
    cispo                              d of each token; with clip_low 1 or more there is only the upper edge
    gmpo                               d of each token: -clip_low to clip_high
    dppo                               the difference of each token's probability: -clip_low to clip_high
    dppo_kl                            nothing: its range is of a divergence, not of d
    sapo, vespo                        nothing: they clip nothing
    custom                             follows objective.ratio

Nothing here imports torch or numpy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from gspo_mega.config.algorithms import RECIPES, AlgorithmName
from gspo_mega.config.schema import Objective


@dataclass(frozen=True)
class Band:
    """A clip range: `low` < 0 < `high`, in nats, or in probabilities with `of_probability`. `low` is -inf if the lower
    side is open. The methods take numbers, or arrays of torch or numpy.

    `per_token`: tokens are clipped instead of whole sequences. `bounds_weight`: outside the range a weight is bounded,
    no matter which sign A has, and no gradient is lost. `dual_edge`: above it the terms of A < 0 are bounded.
    """

    low: float
    high: float
    per_token: bool = False
    of_probability: bool = False
    bounds_weight: bool = False
    dual_edge: float = math.inf

    @property
    def width(self) -> float:
        """The distance between the edges; for an open range twice the distance of the upper edge from 0."""
        return max(self.high - self.low if math.isfinite(self.low) else 2 * self.high, 1e-12)

    @property
    def what(self) -> str:
        """What is compared with the range, in words."""
        if not self.per_token:
            return "mean |log s|"
        size = "difference of a token's probability" if self.of_probability else "|d| of a token"
        return f"mean {size}" if math.isfinite(self.low) else "mean rise of d over a token, doubled,"

    @property
    def units(self) -> Literal["tokens", "sequences"]:
        return "tokens" if self.per_token else "sequences"

    def widths(self, x: Any) -> Any:
        """Return how large the differences `x` are, in widths of the range. In an open range only what is above 0
        counts, and it counts double, so that noise to both sides is as large as in a range with two edges.
        """
        return abs(x) / self.width if math.isfinite(self.low) else 2 * x.clip(min=0) / self.width

    def is_clipped(self, x: Any, negative: bool) -> Any:
        """Return which differences `x` are clipped, for tokens or responses with A < 0 (`negative`) or A > 0."""
        if self.bounds_weight:
            return (x < self.low) | (x > self.high)
        return (x < self.low) | (x > self.dual_edge) if negative else x > self.high


def band_of(algorithm: AlgorithmName, objective: Objective) -> Band | None:
    """Return the clip range of these settings; None if they clip nothing, or if a function of the user decides."""
    if objective.function is not None:
        return None
    return make_band(algorithm, objective.ratio, objective.clip_low, objective.clip_high, objective.dual_clip)


def make_band(
    algorithm: str, ratio: str | None, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Band | None:
    """Return the clip range as `band_of` does, from the values of its keys. `ratio`: `objective.ratio`, for a recipe
    that leaves it open.
    """
    recipe = RECIPES[algorithm]
    bounded = recipe.facts.range_of
    if bounded in (None, "divergence"):
        return None
    if bounded in ("probability", "log_ratio"):
        return Band(-clip_low, clip_high, per_token=True, of_probability=bounded == "probability")
    return Band(
        math.log1p(-clip_low) if clip_low < 1 else -math.inf,
        math.log1p(clip_high),
        per_token=(recipe.ratio or ratio) == "token",
        bounds_weight=bounded == "weight",
        dual_edge=math.inf if dual_clip is None else math.log(dual_clip),
    )


# k3 in nats per token. No pair of precisions is known to cause more.
LARGE_MISMATCH = 0.02


def must_warn(old_log_probs: str | None, k3: float | None) -> bool:
    """Whether a mismatch above `mismatch.budget` is a warning. With the trainer's own old log-probs the ratio does not
    contain it, so it is only worth a notice, unless it is larger than precisions explain.
    """
    return old_log_probs == "rollout" or (k3 is not None and k3 > LARGE_MISMATCH)


def share_sentence(band: Band, share: str, budget: float) -> str:
    """Return the sentence about a mismatch of `share` widths of the range, which is a text with or without an error."""
    return f"the {band.what} is {share} widths of the clip range; mismatch.budget is {budget:g}"


def no_range_sentence(algorithm: str) -> str:
    """Return the sentence about the mismatch of an algorithm that clips nothing."""
    if RECIPES[algorithm].is_clipped:
        return f"{algorithm} has no range of log-probs that the mismatch is compared with; its k3 says how large it is"
    return (
        f"{algorithm} clips nothing, so the mismatch has no clip range to be compared with; its k3 says how large it is"
    )
