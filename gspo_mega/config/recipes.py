"""What each `algorithm` means: one table of recipes, which configuration, training and certification read.

A recipe names its paper, its importance ratio, its defaults, and the settings that contradict it. A new algorithm is
one entry here and a file of reference vectors for `tools/check_vectors.py`; a new way to average is an entry of
`algorithm/aggregation.py` as well. Owns no formula, and imports no torch: a login node reads this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

Ratio = Literal["sequence", "sequence_token", "token"]
Aggregation = Literal[
    "sequence_mean_token_mean",
    "token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
    "group_mean_token_mean",
]


@dataclass(frozen=True)
class Recipe:
    """One algorithm.

    `ratio`: its importance ratio; None where `objective.ratio` chooses. `clip_low`, `clip_high`, `aggregation`:
    defaults of the keys of `objective`. `published_as`: the algorithm whose published clip range these are.

    What contradicts it, and is refused: a clip width above `largest_clip` (None: none is too wide), an aggregation
    other than its own where `fixes_aggregation`, and a KL term unless `takes_kl`.
    """

    name: str
    paper: str
    ratio: Ratio | None
    clip_low: float
    clip_high: float
    published_as: str
    aggregation: Aggregation = "sequence_mean_token_mean"
    largest_clip: float | None = None
    fixes_aggregation: bool = False
    takes_kl: bool = True

    @property
    def objective_defaults(self) -> Mapping[str, Any]:
        """Values of the keys of `objective` that a configuration leaves out."""
        return {"clip_low": self.clip_low, "clip_high": self.clip_high, "aggregation": self.aggregation}


# A sequence ratio is a mean over tokens: this width is already hundreds of times the paper's.
_LARGEST_SEQUENCE_CLIP = 0.05

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="gspo",
            paper="arXiv:2507.18071, Eq. 5",
            ratio="sequence",
            clip_low=3e-4,
            clip_high=4e-4,
            published_as="gspo",
            largest_clip=_LARGEST_SEQUENCE_CLIP,
            fixes_aggregation=True,
            takes_kl=False,
        ),
        Recipe(
            name="gspo_token",
            paper="arXiv:2507.18071, Eq. 13",
            ratio="sequence_token",
            clip_low=3e-4,
            clip_high=4e-4,
            published_as="gspo_token",
            largest_clip=_LARGEST_SEQUENCE_CLIP,
            fixes_aggregation=True,
            takes_kl=False,
        ),
        Recipe(
            name="grpo",
            paper="arXiv:2402.03300; the clip range is that of the baseline in arXiv:2507.18071, § 5.1",
            ratio="token",
            clip_low=0.2,
            clip_high=0.27,
            published_as="grpo",
        ),
        Recipe(
            name="custom",
            paper="none: any combination of ratio, clip range, aggregation and KL term",
            ratio=None,
            clip_low=3e-4,
            clip_high=4e-4,
            published_as="gspo",
        ),
    )
}

if TYPE_CHECKING:
    AlgorithmName = str
else:
    # The schema's choices are the names of the table.
    AlgorithmName = Literal[tuple(RECIPES)]
