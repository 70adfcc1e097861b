"""What each `algorithm` means: one table of recipes, which configuration, training and certification read.

A recipe names its paper, its term and importance ratio, its defaults, and the settings that contradict it. A new
algorithm is one entry of `RECIPES`, and cases in a file of reference vectors (`tools/check_vectors.py`). A new term
also needs an entry of `SURROGATES`, which says what the rest of the program must know about it, and its formula in
`algorithm/surrogates.py`. A new average is an entry of `AGGREGATIONS` in `algorithm/objective.py`. docs/objectives.md
has the equations and their sources. The tables hold no formula and import no torch, so a login node can read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

Ratio = Literal["sequence", "sequence_token", "token"]
Surrogate = Literal["clip", "cispo", "sapo", "dppo", "dppo_kl", "minirl", "vespo", "gmpo"]
Aggregation = Literal[
    "sequence_mean_token_mean",
    "token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
    "group_mean_token_mean",
]


@dataclass(frozen=True)
class SurrogateFacts:
    """What others need to know about a term, apart from its formula.

    `range_of`: what `clip_low` and `clip_high` bound: a `ratio`, the `weight` of a term (for either sign of A), a
    `log_ratio`, a difference of a token's `probability`, a `divergence`; None if the term clips nothing. `unit`:
    whether a sequence or a token has a term; None: as the ratio has it. `has_one_advantage`: whether a term covers a
    whole sequence. `reads_server`: whether the term needs the server's log-probs.
    """

    range_of: Literal["ratio", "weight", "log_ratio", "probability", "divergence"] | None = "ratio"
    unit: Literal["sequence", "token"] | None = "token"
    has_one_advantage: bool = False
    reads_server: bool = False


SURROGATES: Mapping[Surrogate, SurrogateFacts] = {
    "clip": SurrogateFacts(unit=None),
    "cispo": SurrogateFacts(range_of="weight"),
    "sapo": SurrogateFacts(range_of=None),
    "dppo": SurrogateFacts(range_of="probability"),
    "dppo_kl": SurrogateFacts(range_of="divergence"),
    "minirl": SurrogateFacts(reads_server=True),
    "vespo": SurrogateFacts(range_of=None, has_one_advantage=True),
    "gmpo": SurrogateFacts(range_of="log_ratio", unit="sequence", has_one_advantage=True),
}


@dataclass(frozen=True)
class Recipe:
    """One algorithm.

    `ratio`: its importance ratio; None if `objective.ratio` chooses. `surrogate`: the term of each unit. `clip_low`,
    `clip_high`, `aggregation`, and the further `parameters`: defaults of the keys of `objective`. `published_as`: the
    algorithm whose published clip range these are. `settings`: defaults of other keys, by section; "" stands for keys
    at the top.

    These contradict it and are refused: a clip width above `largest_clip` (None: no width is too large), an aggregation
    other than its own if `fixes_aggregation` is set, a KL term unless `takes_kl` is set, and for each key of `fixes`
    another value than that of `settings`, for the reason given there. A term of whole sequences does not take
    advantages of tokens, and a term that does not clip does not take a dual clip.

    `has_critic`: whether its advantages are estimated from a critic's values, instead of relative to a group.
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
    surrogate: Surrogate = "clip"
    parameters: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fixes: Mapping[tuple[str, str], str] = field(default_factory=dict)
    has_critic: bool = False

    @property
    def is_clipped(self) -> bool:
        """Whether the recipe clips anything. Otherwise the clip range has no effect."""
        return self.facts.range_of is not None

    @property
    def facts(self) -> SurrogateFacts:
        """What is known about the recipe's term."""
        return SURROGATES[self.surrogate]

    @property
    def has_one_advantage(self) -> bool:
        """Whether a term covers a whole sequence, which then has one advantage."""
        return self.ratio == "sequence" or self.facts.has_one_advantage

    @property
    def objective_defaults(self) -> Mapping[str, Any]:
        """The values of the keys of `objective` that a configuration leaves out."""
        return {
            "clip_low": self.clip_low,
            "clip_high": self.clip_high,
            "aggregation": self.aggregation,
            **self.parameters,
        }


# A sequence ratio is a mean over tokens: this width is already more than a hundred times the paper's.
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
            name="dapo",
            paper="arXiv:2503.14476, Eq. 10; § 4.1",
            ratio="token",
            clip_low=0.2,
            clip_high=0.28,
            published_as="dapo",
            aggregation="token_mean",
            fixes_aggregation=True,
            takes_kl=False,
        ),
        Recipe(
            name="dr_grpo",
            paper="arXiv:2503.20783, § 3.2; App. G",
            ratio="token",
            clip_low=0.2,
            clip_high=0.2,
            published_as="dr_grpo",
            aggregation="sequence_mean_token_sum_norm",
            fixes_aggregation=True,
            takes_kl=False,
            settings={"advantage": {"divide_by_std": False}},
            fixes={("advantage", "divide_by_std"): "which removes the division by the group's standard deviation"},
        ),
        Recipe(
            name="luspo",
            paper="arXiv:2602.05261, Eq. 7; § 5.1",
            ratio="sequence",
            clip_low=2e-3,
            clip_high=2.5e-3,
            published_as="luspo",
            aggregation="sequence_mean_token_sum",
            largest_clip=_LARGEST_SEQUENCE_CLIP,
            fixes_aggregation=True,
            takes_kl=False,
        ),
        Recipe(
            name="cispo",
            paper="arXiv:2506.13585, Eq. 4-5; clip_high is that of arXiv:2510.13786",
            ratio="token",
            surrogate="cispo",
            clip_low=1.0,
            clip_high=4.0,
            published_as="cispo",
            aggregation="token_mean",
            fixes_aggregation=True,
            takes_kl=False,
        ),
        Recipe(
            name="sapo",
            paper="arXiv:2511.20347, Eq. 5-6; clips nothing: clip_low, clip_high, which are GRPO's, have no effect",
            ratio="token",
            surrogate="sapo",
            clip_low=0.2,
            clip_high=0.27,
            published_as="grpo",
            parameters={"temperature_positive": 1.0, "temperature_negative": 1.05},
            fixes_aggregation=True,
            takes_kl=False,
        ),
        Recipe(
            name="dppo",
            paper="arXiv:2602.04879, Eq. 12-13, Binary-TV, App. C.1; the range is of probabilities, not of ratios",
            ratio="token",
            surrogate="dppo",
            clip_low=0.15,
            clip_high=0.15,
            published_as="dppo",
            aggregation="sequence_mean_token_sum_norm",
            takes_kl=False,
            settings={"": {"old_log_probs": "rollout"}, "advantage": {"divide_by_std": False}},
        ),
        Recipe(
            name="dppo_kl",
            paper="arXiv:2602.04879, Eq. 11, 14, Binary-KL; the range is of divergences, nats",
            ratio="token",
            surrogate="dppo_kl",
            clip_low=0.05,
            clip_high=0.05,
            published_as="dppo_kl",
            aggregation="sequence_mean_token_sum_norm",
            takes_kl=False,
            settings={"": {"old_log_probs": "rollout"}, "advantage": {"divide_by_std": False}},
        ),
        Recipe(
            name="minirl",
            paper="arXiv:2512.01374, Eq. 7; § 4.2",
            ratio="token",
            surrogate="minirl",
            clip_low=0.2,
            clip_high=0.27,
            published_as="minirl",
            aggregation="sequence_mean_token_sum",
            parameters={"weight_limit": 5.0},
            fixes_aggregation=True,
            takes_kl=False,
            settings={
                "": {"old_log_probs": "trainer"},
                "advantage": {"divide_by_std": False},
                "mismatch": {"correction": "none"},
            },
            fixes={
                ("", "old_log_probs"): "which clips by the trainer's own old log-probs",
                ("advantage", "divide_by_std"): "whose advantage is R - E[R]",
                ("mismatch", "correction"): "which weighs every token by its ratio to the server's log-prob",
            },
        ),
        Recipe(
            name="vespo",
            paper="arXiv:2602.10693, Eq. 20; clips nothing: clip_low, clip_high, which are GRPO's, have no effect",
            ratio="token",
            surrogate="vespo",
            clip_low=0.2,
            clip_high=0.27,
            published_as="grpo",
            aggregation="token_mean",
            parameters={
                "power_positive": 2.0,
                "decay_positive": 3.0,
                "power_negative": 3.0,
                "decay_negative": 2.0,
            },
            takes_kl=False,
            settings={"advantage": {"divide_by_std": False}},
        ),
        Recipe(
            name="gmpo",
            paper="arXiv:2507.20673, Eq. 4, Algorithm 1; the range is of log ratios, nats",
            ratio="token",
            surrogate="gmpo",
            clip_low=0.4,
            clip_high=0.4,
            published_as="gmpo",
            fixes_aggregation=True,
            takes_kl=False,
        ),
        Recipe(
            name="clip_cov",
            paper="arXiv:2505.22617, § 4; the clip range, the average and the defaults are the authors' script's",
            ratio="token",
            clip_low=1.0,
            clip_high=1.0,
            published_as="clip_cov",
            aggregation="token_mean",
            parameters={"covariance_low": 1.0, "covariance_high": 5.0, "covariance_share": 2e-4},
            takes_kl=False,
            settings={"": {"old_log_probs": "trainer"}},
            fixes={("", "old_log_probs"): "which chooses tokens by the trainer's own old log-probs"},
        ),
        Recipe(
            name="ppo",
            paper="arXiv:1707.06347, Eq. 7, § 6.1; advantages: arXiv:1506.02438",
            ratio="token",
            clip_low=0.2,
            clip_high=0.2,
            published_as="ppo",
            aggregation="token_mean",
            takes_kl=False,
            has_critic=True,
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

# The keys of `objective` that belong to single recipes.
PARAMETERS = tuple(sorted({key for recipe in RECIPES.values() for key in recipe.parameters}))

# The keys of `mismatch` that each named correction reads, with its default (docs/mismatch.md).
CORRECTION_LIMITS: dict[str, dict[str, float]] = {
    "token_tis": {"upper": 2.0},
    "icepop": {"lower": 0.5, "upper": 5.0},
    "kpop": {"threshold": 0.1},
    "sequence_mis": {"upper": 2.0},
    "m2po": {"threshold": 0.04},
}

if TYPE_CHECKING:
    AlgorithmName = str
else:
    # The schema's choices are the names of the table.
    AlgorithmName = Literal[tuple(RECIPES)]
