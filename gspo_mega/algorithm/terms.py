"""The search for non-finite numbers at active tokens, and when a device is asked for its result.

Owns `deferred`: inside of it what was found is read once, at its end, by one device synchronisation for all searches. A
search alone reads its result at once.

Which tokens of a sequence each context-parallel rank holds.

Each sequence is cut into 2 x size equal chunks; rank r holds chunks r and 2 x size - 1 - r, so that causal
attention costs every rank the same. Transformer Engine uses the same layout.

Which objective is computed: the settings of one policy objective, and how `algorithm` and `objective` give them.

Owns no formula: the terms are `surrogates.py`'s, the average `objective.py`'s, the algorithms' meanings are the
table `config/algorithms.py`.

Sums over the sequences of a packed micro-batch, and the log importance ratio.

Owns the flat layout of this package: token tensors `[T]`, `segment_ids: [T] int64 in [0, S)` saying which
sequence a token belongs to, `mask: [T]`, non-zero where the token is active. Everything here is local to one
rank; the sum over context-parallel ranks is the caller's.

The per-sequence columns that a pass reports, and how the parts of several ranks become one row per trajectory.

One table for both sides: the losses produce these columns, the step's report merges them. Owns neither a column's
values nor a metric that is made of them.
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

from gspo_mega.base.errors import NumericsError
from gspo_mega.config.algorithms import PARAMETERS, RECIPES, Aggregation, Ratio, Surrogate
from gspo_mega.config.schema import Objective


def local_positions(length: int, size: int, rank: int) -> torch.Tensor:
    """Positions of one sequence that `rank` holds: [length / size] int64, on the host, local to the context rank.

    Raises ValueError unless 2 x size divides `length`, a number of tokens.
    """
    if size == 1:
        return torch.arange(length)
    if length % (2 * size):
        raise ValueError(f"a sequence of {length} padded tokens does not divide into 2 x {size} chunks")
    chunks = torch.arange(length).view(2 * size, -1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def local_rows(cu_seqlens: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """Rows of a pack that `rank` holds, in its own order: [T / size] int64, on the host, local to the context rank.

    cu_seqlens: [S+1] int32 or int64 offsets of the whole pack's sequences in tokens, the same on every rank.
    """
    if size == 1:
        return torch.arange(int(cu_seqlens[-1]))
    bounds = cu_seqlens.tolist()
    return torch.cat([start + local_positions(end - start, size, rank) for start, end in itertools.pairwise(bounds)])


@dataclass(frozen=True)
class ObjectiveSettings:
    """What objective is meant. The defaults are the paper's GSPO.

    `ratio`: `sequence` (GSPO), `sequence_token` (GSPO-token), `token` (GRPO). A term is clipped where its ratio
    leaves [1 - clip_low, 1 + clip_high] in the direction its advantage rewards; equality is not outside.
    `dual_clip` c: for A < 0 a term is at least c * A. `norm_constant_tokens`: the constant of
    `sequence_mean_token_sum_norm`, tokens. `surrogate`: the term of each unit; the parameters after it are those of
    `sapo` (temperatures), `minirl` (the limit of a weight; None: none) and `vespo` (powers and decays).

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

    @property
    def unit(self) -> Literal["sequence", "token"]:
        """What has a term of its own."""
        return "sequence" if self.ratio == "sequence" or self.surrogate == "gmpo" else "token"

    @property
    def flags_are_per_token(self) -> bool:
        """Whether it is tokens that are clipped, and not sequences."""
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
        surrogate=RECIPES[algorithm].surrogate,
        **{key: value for key in PARAMETERS if (value := getattr(objective, key)) is not None},
    )


BLOCK = 16


def segment_sum(values: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """Sum `values: [T]` by `segment_ids: [T] int64 in [0, num_segments)` into [num_segments], same dtype.

    The order of addition is fixed by the order of the tokens, on every device and in every run: a stable sort and
    contiguous segments instead of atomic adds. Blocks of 16 are added first, then blocks of their sums, so that the
    rounding error of a response of n tokens grows with log n. Segments without tokens are 0. Differentiable in
    `values`; no device synchronisation.
    """
    ordered_ids, order = torch.sort(segment_ids, stable=True)
    edges = torch.searchsorted(ordered_ids, torch.arange(num_segments + 1, device=segment_ids.device))
    values = values[order]
    while values.numel() > BLOCK * max(num_segments, 1):
        block_edges = torch.arange(0, values.numel(), BLOCK, device=edges.device)
        cuts = torch.sort(torch.cat([edges, block_edges])).values
        values = _sum_between(values, cuts)
        edges = torch.searchsorted(cuts, edges)
    return _sum_between(values, edges)


def _sum_between(values: Tensor, edges: Tensor) -> Tensor:
    return torch.segment_reduce(values, "sum", lengths=edges.diff(), initial=0, unsafe=True)


def active_values(values: Tensor, mask: Tensor) -> Tensor:
    """`values: [T]` as float64 with 0 where `mask` is 0, whatever stood there (NaN included), value and gradient."""
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device)).double()


def token_log_ratios(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """d_t = log_probs - old_log_probs, [T] float64 nats, 0 at masked tokens. `old_log_probs` gets no gradient.

    Both are widened before the subtraction, so that float32 inputs lose nothing in it.
    """
    return active_values(log_probs, mask) - active_values(old_log_probs.detach(), mask)


def exp_minus_linear(d: Tensor) -> Tensor:
    """exp(d) - 1 - d, elementwise, of the shape of `d` (float64 nats), precise also near 0, where it is d^2 / 2."""
    small = d.abs() < 0.02
    x = torch.where(small, d, 0.0)
    series = torch.zeros_like(x)
    for k in range(9, 1, -1):
        series = series * x + 1.0 / math.factorial(k)
    return torch.where(small, x * x * series, torch.expm1(d) - d)


def sequence_log_ratio_sums(
    log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, segment_ids: Tensor, num_sequences: int
) -> Tensor:
    """Sum over the active tokens held here of log_probs - old_log_probs: [S] float64, nats.

    `log_probs` (with gradient), `old_log_probs`: [T] nats; `mask`: [T]; `segment_ids`: [T] int64, all local.

    Divided by the global response length it is log s_i of arXiv:2507.18071, Eq. 7. No clamp: a clamped
    log-ratio has a zero gradient exactly where the policy moved furthest.
    """
    return segment_sum(token_log_ratios(log_probs, old_log_probs, mask), segment_ids, num_sequences)


@dataclass(frozen=True)
class SequenceColumn:
    """`reduction` of the parts that context-parallel ranks report of one sequence: `sum` adds them, `max` takes the
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
    "correction_deviation", "same", "[S] nats: sqrt(L) (mean d - m), what the bound bounds"
)
CORRECTION_VETOES = SequenceColumn("correction_vetoes", "same", "[S] tokens of the sequence with |d| above the veto")
CORRECTION_CENTRE = SequenceColumn(
    "correction_centre", "same", "[S] nats: m of the rollout batch, the same for each sequence"
)
CORRECTION_SEGMENTS = SequenceColumn(
    "correction_segments", "same", "[S, 2] version segments judged; 1 where a segment alone put the sequence outside"
)
STALENESS_SUMS = SequenceColumn(
    "staleness_sums", "sum", "[S, 2] nats: old - that of the token's own version, and that - server, over tokens here"
)
ENTROPY_SUM = SequenceColumn(
    "entropy_sum", "sum", "[S] nats: entropy of the next-token distribution at the tokens held here"
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
        STALENESS_SUMS,
        ENTROPY_SUM,
        LOG_S,
    )
}


def merge_columns(
    parts: Iterable[tuple[np.ndarray, Mapping[str, np.ndarray]]], num_trajectories: int
) -> dict[str, np.ndarray]:
    """Columns of all trajectories of a rollout batch, [num_trajectories] or [num_trajectories, K] float64 by name.

    `parts`: of every rank and mini-batch, `rows` [n] int64 in the rollout batch and its columns, [n] or [n, K] float64.
    A trajectory that no part names has 0, or -inf in a column of maxima. Raises KeyError for a column that the table
    lacks.
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


def not_finite(bad: NonFiniteToken) -> NumericsError:
    return NumericsError(f"{bad}; log-probs of active tokens must be finite")


def require_finite(mask: Tensor, segment_ids: Tensor, describe: Describe, **tensors: Tensor) -> None:
    """Raise `describe(token)` of the first active non-finite entry of the named `tensors`, each [T]: at once, with one
    device synchronisation, or inside of `deferred` at its end, without one here. Masked entries may hold anything.
    """
    searches = [_search(name, mask, segment_ids, values, describe) for name, values in tensors.items() if len(values)]
    if (pending := _pending.get()) is None:
        _settle(searches)
    else:
        pending.extend(searches)


@contextmanager
def deferred() -> Iterator[None]:
    """Read what all searches inside found when it ends, unless by an exception; the first one found raises. What is
    computed meanwhile from numbers that are not finite must not be kept before that.
    """
    searches: list[_Search] = []
    token = _pending.set(searches)
    try:
        yield
    finally:
        _pending.reset(token)
    _settle(searches)


def settle() -> None:
    """Inside of `deferred`: read what was found so far."""
    if pending := _pending.get():
        searches = list(pending)
        pending.clear()
        _settle(searches)


def _search(name: str, mask: Tensor, segment_ids: Tensor, values: Tensor, describe: Describe) -> _Search:
    values = values.detach()
    bad = mask.bool() & ~torch.isfinite(values)
    # An index that is a tensor without dimensions would be read by the host.
    token = bad.to(torch.uint8).argmax().view(1)
    parts = (bad.any().view(1), segment_ids.index_select(0, token), token, values.index_select(0, token))
    return _Search(name, torch.cat([part.double() for part in parts]), describe)


def _settle(searches: list[_Search]) -> None:
    if not searches:
        return
    rows = torch.stack([search.row for search in searches]).tolist()
    for search, (found, segment, token, value) in zip(searches, rows, strict=True):
        if found:
            raise search.describe(NonFiniteToken(search.tensor, int(segment), int(token), value))
