"""Which objective is computed: the settings of one policy objective, and how `algorithm` and `objective` give them.

Owns no formula: the clipped term is `objective.py`'s, the average `aggregation.py`'s, the algorithms' meanings are the
table `config/recipes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from gspo_mega.config.recipes import RECIPES, Aggregation, Ratio
from gspo_mega.config.schema import Objective


@dataclass(frozen=True)
class ObjectiveSettings:
    """What objective is meant. The defaults are the paper's GSPO.

    `ratio`: `sequence` (GSPO), `sequence_token` (GSPO-token), `token` (GRPO). A term is clipped where its ratio
    leaves [1 - clip_low, 1 + clip_high] in the direction its advantage rewards; equality is not outside.
    `dual_clip` c: for A < 0 a term is at least c * A. `norm_constant_tokens`: the constant of
    `sequence_mean_token_sum_norm`, tokens.

    Raises ValueError for values outside these meanings.
    """

    ratio: Ratio = "sequence"
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    dual_clip: float | None = None
    aggregation: Aggregation = "sequence_mean_token_mean"
    norm_constant_tokens: float | None = None

    def __post_init__(self) -> None:
        if self.ratio not in get_args(Ratio):
            raise ValueError(f"ratio {self.ratio!r}; valid: {', '.join(get_args(Ratio))}")
        if self.aggregation not in get_args(Aggregation):
            raise ValueError(f"aggregation {self.aggregation!r}; valid: {', '.join(get_args(Aggregation))}")
        if self.clip_low < 0 or self.clip_high < 0:
            raise ValueError(f"clip_low and clip_high must be >= 0; got {self.clip_low}, {self.clip_high}")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be > 1; got {self.dual_clip}")
        if self.aggregation == "sequence_mean_token_sum_norm" and not (self.norm_constant_tokens or 0) > 0:
            raise ValueError("aggregation sequence_mean_token_sum_norm needs norm_constant_tokens > 0")


def objective_settings(algorithm: str, objective: Objective) -> ObjectiveSettings:
    """The objective that the key `algorithm` and the section `objective` of a configuration mean.

    Raises ValueError for an algorithm without a ratio of its own when `objective.ratio` gives none.
    """
    ratio = RECIPES[algorithm].ratio or objective.ratio
    if ratio is None:
        raise ValueError(f"algorithm {algorithm} has no ratio of its own, and objective.ratio is absent")
    return ObjectiveSettings(
        ratio=ratio,
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        dual_clip=objective.dual_clip,
        aggregation=objective.aggregation,
        norm_constant_tokens=objective.norm_constant_tokens,
    )
