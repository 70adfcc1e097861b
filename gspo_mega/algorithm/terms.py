"""What the objectives and the passes that compute them share: small parts, each of which several files use.

In this order: the settings of one policy objective; a term and the ratio inside it, from which `objective.py` and
`surrogates.py` make their terms; which tokens of a sequence each context-parallel rank holds; the per-sequence columns
that a pass reports, with the rule by which the parts of several ranks become one row per trajectory; and the search for
non-finite numbers at active tokens. Inside of `deferred_checks` all searches are read at its end by one device
synchronisation; outside of it each search reads its own result at once.

The flat layout of this package: token tensors are [T]; `segment_ids: [T] int64 in [0, S)` says which sequence a token
belongs to; `mask: [T]` is non-zero where the token is active.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from gspo_mega.algorithm.hooks import load_objective
from gspo_mega.base.errors import NumericsError
from gspo_mega.base.user_functions import LoadedHook
from gspo_mega.config.algorithms import PARAMETERS, RECIPES, SURROGATES, Aggregation, Ratio, Surrogate, SurrogateFacts
from gspo_mega.config.schema import Objective


@dataclass(frozen=True)
class ObjectiveSettings:
    """Which objective is computed. The defaults are the paper's GSPO.

    `ratio`: `sequence` (GSPO), `sequence_token` (GSPO-token), `token` (GRPO). A term is clipped where its ratio
    leaves [1 - clip_low, 1 + clip_high] in the direction its advantage rewards; equality is not outside.
    `dual_clip` c: for A < 0 a term is at least c * A. `norm_constant_tokens`: the constant of
    `sequence_mean_token_sum_norm`, tokens. `surrogate`: the term of each unit; the parameters after it are those of
    `sapo` (temperatures), `minirl` (the limit of a weight; None: none), `vespo` (powers and decays) and `clip_cov` (its
    range and share; None: no token is left out by its covariance). `function`: the user's own term, in place of the
    clipped one. `entropy_coefficient`: weight of the entropy bonus (`losses.py`).

    Raises ValueError for values outside these meanings.
    """

    ratio: Ratio = "sequence"
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    dual_clip: float | None = None
    aggregation: Aggregation = "sequence_mean_token_mean"
    norm_constant_tokens: float | None = None
    surrogate: Surrogate = "clip"
    temperature_positive: float = 1.0
    temperature_negative: float = 1.05
    weight_limit: float | None = 5.0
    power_positive: float = 2.0
    decay_positive: float = 3.0
    power_negative: float = 3.0
    decay_negative: float = 2.0
    covariance_low: float = 1.0
    covariance_high: float = 5.0
    covariance_share: float | None = None
    function: LoadedHook | None = None
    entropy_coefficient: float = 0.0

    @property
    def unit(self) -> Literal["sequence", "token"]:
        """Whether a sequence or a token has a term of its own."""
        return self.facts.unit or ("sequence" if self.ratio == "sequence" else "token")

    @property
    def facts(self) -> SurrogateFacts:
        """What is known about the term."""
        return SURROGATES[self.surrogate]

    @property
    def flags_are_per_token(self) -> bool:
        """Whether tokens are clipped, and not sequences."""
        return self.ratio != "sequence"

    def __post_init__(self) -> None:
        if self.ratio not in get_args(Ratio):
            raise ValueError(f"ratio {self.ratio!r}; valid: {', '.join(get_args(Ratio))}")
        if self.aggregation not in get_args(Aggregation):
            raise ValueError(f"aggregation {self.aggregation!r}; valid: {', '.join(get_args(Aggregation))}")
        if self.clip_low < 0 or self.clip_high < 0:
            raise ValueError(f"clip_low and clip_high must be >= 0; got {self.clip_low}, {self.clip_high}")
        if self.surrogate not in get_args(Surrogate):
            raise ValueError(f"surrogate {self.surrogate!r}; valid: {', '.join(get_args(Surrogate))}")
        if self.surrogate != "clip" and self.ratio != "token":
            raise ValueError(f"surrogate {self.surrogate} has a ratio of tokens; got ratio {self.ratio!r}")
        if self.surrogate != "clip" and self.dual_clip is not None:
            raise ValueError(f"surrogate {self.surrogate} has no dual clip")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be > 1; got {self.dual_clip}")
        if self.aggregation == "sequence_mean_token_sum_norm" and not (self.norm_constant_tokens or 0) > 0:
            raise ValueError("aggregation sequence_mean_token_sum_norm needs norm_constant_tokens > 0")
        if self.function is not None and (self.ratio == "sequence_token" or self.surrogate != "clip"):
            raise ValueError("a function of terms needs ratio sequence or token, and no surrogate")
        if self.entropy_coefficient < 0:
            raise ValueError(f"entropy_coefficient must be >= 0; got {self.entropy_coefficient}")


def objective_settings(algorithm: str, objective: Objective) -> ObjectiveSettings:
    """The settings that the key `algorithm` and the section `objective` of a configuration mean. The recipes of
    `config/algorithms.py` say what each algorithm is.

    Raises ValueError for an algorithm without a ratio of its own when `objective.ratio` gives none, and HookError if
    `objective.function` cannot be loaded.
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
        surrogate=RECIPES[algorithm].surrogate,
        function=None if objective.function is None else load_objective(objective.function),
        entropy_coefficient=objective.entropy_coefficient,
        **{key: value for key in PARAMETERS if (value := getattr(objective, key)) is not None},
    )


@dataclass(frozen=True)
class Terms:
    """The term of each unit, a sequence or a token, is advantages * (offset + excess); all of one shape.

    `advantages` is 0 where the unit does not count. `offset` is the factor of the term at ratio 1, `excess` the rest.
    A group's terms nearly cancel, and offset + excess would round away the digits that remain, so sum the parts with
    offsets and the parts with excesses separately. `high`, `low`, `dual`: bool, where the term was
    clipped, by which edge; for `gmpo` these are [T], and the rest is [S].
    """

    advantages: Tensor
    offset: Tensor
    excess: Tensor
    high: Tensor
    low: Tensor
    dual: Tensor


_NEAR_ONE = 0.5  # |log-ratio| up to which expm1 keeps more digits of the term than exp does


def ratio_parts(log_ratio: Tensor, decision: Tensor, follows_ratio: Tensor, otherwise: Tensor) -> tuple[Tensor, Tensor]:
    """(offset, excess), whose sum is exp(log_ratio) where `follows_ratio`, else 1 + `otherwise`; each float64.

    Near 1 they are 1 and expm1(log_ratio), far from it 0 and exp(log_ratio). `log_ratio`: nats, with gradient;
    `decision`: the same numbers without.
    """
    far = decision.abs() > _NEAR_ONE
    near_ratio, far_ratio = follows_ratio & ~far, follows_ratio & far
    excess = torch.where(near_ratio, torch.expm1(torch.where(near_ratio, log_ratio, 0.0)), otherwise)
    excess = torch.where(far_ratio, torch.exp(torch.where(far_ratio, log_ratio, 0.0)), excess)
    return (~far_ratio).double(), excess


def log_lower_edge(clip_low: float) -> float:
    """log(1 - clip_low), the lower edge of a log-ratio in nats; -inf, which is no edge, for a width of 1 or more."""
    return math.log1p(-clip_low) if clip_low < 1 else -math.inf


def exp_minus_linear(d: Tensor) -> Tensor:
    """exp(d) - 1 - d, elementwise, of the shape of `d` (float64 nats), precise also near 0, where it is d^2 / 2."""
    small = d.abs() < 0.02
    x = torch.where(small, d, 0.0)
    series = torch.zeros_like(x)
    for k in range(9, 1, -1):
        series = series * x + 1.0 / math.factorial(k)
    return torch.where(small, x * x * series, torch.expm1(d) - d)


def local_positions(length: int, size: int, rank: int) -> torch.Tensor:
    """Positions of one sequence that context rank `rank` of `size` holds: [length / size] int64, on the host.

    Each sequence is cut into 2 x size equal chunks. Rank r holds chunks r and 2 x size - 1 - r, so that causal
    attention costs every rank the same. Transformer Engine uses the same layout.

    Raises ValueError unless 2 x size divides `length`, a number of tokens.
    """
    if size == 1:
        return torch.arange(length)
    if length % (2 * size):
        raise ValueError(f"a sequence of {length} padded tokens does not divide into 2 x {size} chunks")
    chunks = torch.arange(length).view(2 * size, -1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def local_rows(cu_seqlens: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """Rows of a pack that context rank `rank` of `size` holds, in that rank's own order: [T / size] int64, on the host.

    cu_seqlens: [S+1] int32 or int64 offsets of the whole pack's sequences in tokens, the same on every rank.
    """
    if size == 1:
        return torch.arange(int(cu_seqlens[-1]))
    bounds = cu_seqlens.tolist()
    return torch.cat([start + local_positions(end - start, size, rank) for start, end in itertools.pairwise(bounds)])


@dataclass(frozen=True)
class SequenceColumn:
    """A column with one row per sequence. The losses fill it, and the report of the step merges the ranks' parts.

    `reduction` of the parts that context-parallel ranks report of one sequence: `sum` adds them, `max` takes the
    largest, `same` means that each rank reports the whole value.
    """

    name: str
    reduction: Literal["sum", "max", "same"]
    description: str


MISMATCH_SUMS = SequenceColumn(
    "mismatch_sums", "sum", "[S, len(SUM_NAMES)] of mismatch_sums: over the tokens held here"
)
MISMATCH_MAXIMA = SequenceColumn(
    "mismatch_maxima", "max", "[S, len(MAXIMUM_NAMES)] of mismatch_sums; -inf without a token"
)
CORRECTION_WEIGHT = SequenceColumn("correction_weight", "same", "[S] weight of the sequence; 0 where it was dropped")
CORRECTION_DEVIATION = SequenceColumn(
    "correction_deviation", "same", "[S] nats: sqrt(L) (mean d - m), which the bound limits"
)
CORRECTION_VETOES = SequenceColumn("correction_vetoes", "same", "[S] tokens of the sequence with |d| above the veto")
CORRECTION_CENTRE = SequenceColumn(
    "correction_centre", "same", "[S] nats: m of the rollout batch, the same for each sequence"
)
CORRECTION_SEGMENTS = SequenceColumn(
    "correction_segments", "same", "[S, 2] version segments judged; 1 where only a segment put the sequence outside"
)
CORRECTION_TOKENS = SequenceColumn(
    "correction_tokens", "sum", "[S, 4] of the tokens held here: their number, dropped, weight cut, sum of the weights"
)
STALENESS_SUMS = SequenceColumn(
    "staleness_sums", "sum", "[S, 2] nats over the tokens held here: old - own version's, and own version's - server's"
)
ENTROPY_SUM = SequenceColumn(
    "entropy_sum", "sum", "[S] nats: entropy of the next-token distribution at the tokens held here"
)
KEPT_MASS = SequenceColumn(
    "kept_mass", "sum", "[S] probability of the tokens held here to be in the set that the sampler kept"
)
LOG_S = SequenceColumn("log_s", "same", "[S] nats: log s_i of the whole sequence")

COLUMNS: dict[str, SequenceColumn] = {
    column.name: column
    for column in (
        MISMATCH_SUMS,
        MISMATCH_MAXIMA,
        CORRECTION_WEIGHT,
        CORRECTION_DEVIATION,
        CORRECTION_VETOES,
        CORRECTION_CENTRE,
        CORRECTION_SEGMENTS,
        CORRECTION_TOKENS,
        STALENESS_SUMS,
        ENTROPY_SUM,
        KEPT_MASS,
        LOG_S,
    )
}


def merge_columns(
    parts: Iterable[tuple[np.ndarray, Mapping[str, np.ndarray]]], num_trajectories: int
) -> dict[str, np.ndarray]:
    """The columns of all trajectories of a rollout batch by name, [num_trajectories] or [num_trajectories, K] float64.

    `parts`: for each rank and mini-batch, its rows [n] int64 of the rollout batch and its columns, [n] or [n, K]
    float64. A trajectory that no part names has 0, or -inf in a column of maxima. Raises KeyError for a column that
    `COLUMNS` lacks.
    """
    merged: dict[str, np.ndarray] = {}
    for rows, columns in parts:
        for name, values in columns.items():
            reduction = COLUMNS[name].reduction
            if name not in merged:
                merged[name] = np.full((num_trajectories, *values.shape[1:]), -np.inf if reduction == "max" else 0.0)
            if reduction == "sum":
                merged[name][rows] += values
            elif reduction == "max":
                merged[name][rows] = np.maximum(merged[name][rows], values)
            else:
                merged[name][rows] = values
    return merged


@dataclass(frozen=True)
class NonFiniteToken:
    """The first active token whose number is NaN or infinite: which tensor, which sequence, which place in [T]."""

    tensor: str
    segment: int
    token: int
    value: float

    def __str__(self) -> str:
        return f"{self.tensor} is {self.value} at active token {self.token}, sequence {self.segment} of the micro-batch"


Describe = Callable[[NonFiniteToken], Exception]


@dataclass(frozen=True)
class _Search:
    """`row`: [4] float64 on the device: whether there is such a token, its segment, its place in [T], its value."""

    tensor: str
    row: Tensor
    describe: Describe


_pending: ContextVar[list[_Search] | None] = ContextVar("pending searches", default=None)


def non_finite_log_prob(bad: NonFiniteToken) -> NumericsError:
    """The error for a log-prob that is not finite."""
    return NumericsError(f"{bad}; log-probs of active tokens must be finite")


def require_finite(mask: Tensor, segment_ids: Tensor, describe: Describe, **tensors: Tensor) -> None:
    """Raise `describe(token)` for the first active non-finite entry of the named `tensors`, each [T]. Masked entries
    may hold anything.

    Outside of `deferred_checks` it raises at once, with one device synchronisation. Inside, it waits for nothing, and
    the end of that context raises.
    """
    searches = [_search(name, mask, segment_ids, values, describe) for name, values in tensors.items() if len(values)]
    if (pending := _pending.get()) is None:
        _raise_first(searches)
    else:
        pending.extend(searches)


@contextmanager
def deferred_checks() -> Iterator[None]:
    """Read the results of all searches inside at the end, unless an exception ends it; the first one with a result
    raises. Do not keep anything computed inside before the end has passed: its numbers may not be finite.
    """
    searches: list[_Search] = []
    token = _pending.set(searches)
    try:
        yield
    finally:
        _pending.reset(token)
    _raise_first(searches)


def check_now() -> None:
    """Inside of `deferred_checks`: read the results of the searches so far, and raise for the first one with a result.
    Does nothing outside.
    """
    if pending := _pending.get():
        searches = list(pending)
        pending.clear()
        _raise_first(searches)


def _search(name: str, mask: Tensor, segment_ids: Tensor, values: Tensor, describe: Describe) -> _Search:
    values = values.detach()
    bad = mask.bool() & ~torch.isfinite(values)
    # The host would read an index that is a tensor without dimensions.
    token = bad.to(torch.uint8).argmax().view(1)
    parts = (bad.any().view(1), segment_ids.index_select(0, token), token, values.index_select(0, token))
    return _Search(name, torch.cat([part.double() for part in parts]), describe)


def _raise_first(searches: list[_Search]) -> None:
    if not searches:
        return
    rows = torch.stack([search.row for search in searches]).tolist()
    for search, (found, segment, token, value) in zip(searches, rows, strict=True):
        if found:
            raise search.describe(NonFiniteToken(search.tensor, int(segment), int(token), value))
