"""What an algorithm's clip range means for the difference of the two engines: one answer for a run and for `budget`.

The range is put around the servers' log-probs, as if they were used directly as the old ones and no update had been
made. What is measured follows from the recipe:

    gspo, gspo_token, luspo            log s of a response, the mean of d over it: log(1 - clip_low) to
                                       log(1 + clip_high)
    grpo, dapo, dr_grpo, ppo, minirl   d of each token, in the same range
    cispo                              d of each token; with clip_low 1 or more only the upper edge is there
    gmpo                               d of each token: -clip_low to clip_high
    dppo                               the difference of each token's probability: -clip_low to clip_high
    sapo, vespo                        nothing: they clip nothing
    custom                             by objective.ratio

with d = trainer - server, nats. Owns these meanings and the sentences about them. Imports no torch and no numpy: the
methods take numbers and arrays of either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from gspo_mega.config.recipes import RECIPES
from gspo_mega.config.schema import Config


@dataclass(frozen=True)
class Band:
    """`low` < 0 < `high`, nats, or probabilities with `of_probability`; `low` is -inf where the lower side is open.

    `per_token`: tokens are clipped, and not whole sequences. `bounds_weight`: outside, a weight is bounded whatever the
    sign of A, and no gradient is lost. `dual_edge`: above it the terms of A < 0 are bounded.
    """

    low: float
    high: float
    per_token: bool = False
    of_probability: bool = False
    bounds_weight: bool = False
    dual_edge: float = math.inf

    @property
    def width(self) -> float:
        """The distance of the edges; of an open range twice that of the upper edge from 0."""
        return max(self.high - self.low if math.isfinite(self.low) else 2 * self.high, 1e-12)

    @property
    def what(self) -> str:
        """What is compared with the range."""
        if not self.per_token:
            return "mean |log s|"
        size = "difference of a token's probability" if self.of_probability else "|d| of a token"
        return f"mean {size}" if math.isfinite(self.low) else "mean rise of d over a token, doubled,"

    @property
    def units(self) -> Literal["tokens", "sequences"]:
        return "tokens" if self.per_token else "sequences"

    def widths(self, x: Any) -> Any:
        """How large differences `x` are, in widths of the range; of an open range only what is above 0 counts, double,
        so that noise to both sides is as large as in a range with two edges.
        """
        return abs(x) / self.width if math.isfinite(self.low) else 2 * x.clip(min=0) / self.width

    def is_clipped(self, x: Any, negative: bool) -> Any:
        """Which of the differences `x` of tokens or responses with A < 0 (`negative`), or A > 0, are clipped."""
        if self.bounds_weight:
            return (x < self.low) | (x > self.high)
        return (x < self.low) | (x > self.dual_edge) if negative else x > self.high


def band_of(config: Config) -> Band | None:
    """The range of a configuration; None where it clips nothing."""
    objective = config.objective
    return make_band(config.algorithm, objective.ratio, objective.clip_low, objective.clip_high, objective.dual_clip)


def make_band(
    algorithm: str, ratio: str | None, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Band | None:
    """As `band_of`, from the values of its keys. `ratio`: of `objective`, for a recipe that leaves it open."""
    recipe = RECIPES[algorithm]
    if not recipe.is_clipped:
        return None
    if recipe.surrogate in ("dppo", "gmpo"):
        return Band(-clip_low, clip_high, per_token=True, of_probability=recipe.surrogate == "dppo")
    return Band(
        math.log1p(-clip_low) if clip_low < 1 else -math.inf,
        math.log1p(clip_high),
        per_token=(recipe.ratio or ratio) == "token",
        bounds_weight=recipe.surrogate == "cispo",
        dual_edge=math.inf if dual_clip is None else math.log(dual_clip),
    )


def share_sentence(band: Band, share: str, budget: float) -> str:
    """`share`: in widths of the range, with an error or without."""
    return f"the {band.what} is {share} widths of the clip range; mismatch.budget is {budget:g}"


def no_range_sentence(algorithm: str) -> str:
    return (
        f"{algorithm} clips nothing, so the mismatch has no clip range to be compared with; its k3 says how large it is"
    )
