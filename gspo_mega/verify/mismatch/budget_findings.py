"""Everything that one budget found: the rows of all causes in all orders, the alternatives, the faults.

Owns the step from log-probs at every point to these numbers. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gspo_mega.config.critic_config import critic_of
from gspo_mega.config.mismatch_range import Band, band_of
from gspo_mega.config.schema import Config
from gspo_mega.verify.mismatch.attribution import (
    Estimate,
    Row,
    Tokens,
    explained_share,
    make_row,
    ratio_estimate,
    three_lengths,
)
from gspo_mega.verify.mismatch.causes import ENGINES, SAMPLING, Facts, Nothing, units_of
from gspo_mega.verify.mismatch.coinciding_blocks import differing_blocks
from gspo_mega.verify.mismatch.faults import UNITS, Fault, Sequences, fault_bounds, find_faults
from gspo_mega.verify.mismatch.fixed_tokens import FixedTokens
from gspo_mega.verify.mismatch.walks import Plan, Point, Side, contributions


@dataclass(frozen=True)
class Part:
    """One cause in one order: its row, and its share of the squared size of d."""

    row: Row
    share: Estimate


@dataclass(frozen=True)
class Other:
    """An alternative as a whole: the settings in which it differs from the run, its row, and its k3 less the run's
    own, token by token.
    """

    settings: Mapping[str, Any]
    row: Row
    k3_change: Estimate


@dataclass(frozen=True)
class Findings:
    """Everything that was measured. `parts`: by order, then by cause. `residual`: largest |sum of the parts - d| of
    any order, nats. `num_prompts`, `num_sequences`, `num_tokens`: of the fixed tokens; `num_negative`, `num_positive`:
    sequences with A < 0 and A > 0. `unsigned`: why there are none; None where there are. `bounds`: by cause, the
    difference of a token below which no fault is seen, nats. `moved`: by cause, its share in the other order less that
    in the first. `blocks`: of a trainer and servers that both compute in FP8 blocks, the tensors whose blocks are not
    the same, with the reasons; None for any other pair.
    """

    num_prompts: int
    num_sequences: int
    num_tokens: int
    num_negative: int
    num_positive: int
    unsigned: str | None
    lengths: tuple[int, ...]
    band: Band | None
    total: Row
    parts: Mapping[str, Mapping[str, Part]]
    bounds: Mapping[str, float]
    moved: Mapping[str, Estimate]
    nothing: Mapping[str, Nothing]
    alternatives: Mapping[str, Other]
    faults: tuple[Fault, ...] = ()
    residual: float = 0.0
    blocks: Mapping[str, str] | None = None


def find(
    facts: Facts, plan: Plan, fixed: FixedTokens, scored: Mapping[Point, np.ndarray], entropies: np.ndarray
) -> Findings:
    """The numbers of all walks.

    `scored`: [sum (tokens - 1)] float64 nats at every point of `plan`, prompts included. `entropies`: the trainer's as
    the run computes them, of the same tokens, nats.
    """
    tokens, band = fixed.tokens(), band_of(facts.config)
    lengths = three_lengths(tokens.lengths)
    log_probs = {point: fixed.of_responses(values) for point, values in scored.items()}
    probabilities = {point: np.exp(values) for point, values in log_probs.items()}
    d = log_probs[plan.trained] - log_probs[plan.sampled]
    by_token = tokens.prompt[tokens.sequence]
    values_of: dict[str, dict[str, np.ndarray]] = {}
    parts: dict[str, dict[str, Part]] = {}
    residual = 0.0
    for order, links in plan.walks.items():
        added = values_of[order] = contributions(links, log_probs)
        residual = max(residual, float(np.abs(sum(added.values()) - d).max()))
        moves = contributions(links, probabilities)
        parts[order] = {
            name: Part(make_row(values, tokens, band, lengths, moves[name]), explained_share(values, d, by_token))
            for name, values in added.items()
        }
    first, *others = values_of.values()
    moved = {name: explained_share(x - first[name], d, by_token) for other in others for name, x in other.items()}
    alternatives = {}
    for name, point in plan.alternatives.items():
        other = log_probs[point] - log_probs[plan.sampled]
        moved_by = probabilities[point] - probabilities[plan.sampled]
        row = make_row(other, tokens, band, lengths, moved_by)
        alternatives[name] = Other(point.values, row, _k3_change(other, d, tokens))
    return Findings(
        num_prompts=len(set(tokens.prompt.tolist())),
        num_sequences=len(tokens.prompt),
        num_tokens=len(tokens.sequence),
        num_negative=int((tokens.signs < 0).sum()),
        num_positive=int((tokens.signs > 0).sum()),
        unsigned=None if tokens.signs.any() else _why_unsigned(facts.config),
        lengths=lengths,
        band=band,
        total=make_row(d, tokens, band, lengths, probabilities[plan.trained] - probabilities[plan.sampled]),
        parts=parts,
        bounds=fault_bounds(_units(facts, plan), facts.spec.num_layers, log_probs[plan.trained]),
        moved=moved,
        nothing=plan.nothing,
        alternatives=alternatives,
        faults=tuple(_faults(facts, plan, fixed, scored, log_probs, entropies)),
        residual=residual,
        blocks=_blocks(facts),
    )


def _why_unsigned(config: Config) -> str:
    if critic_of(config) is not None:
        return "advantages need the values of a critic"
    if config.advantage.turns == "return_to_go":
        return "the tokens of a response have advantages of their own"
    if config.budget.samples_per_prompt < 2:
        return "budget.samples_per_prompt is 1, so that a response has no other to be compared with"
    return "no prompt has two responses with different rewards"


def _blocks(facts: Facts) -> dict[str, str] | None:
    if facts.config.precision != "fp8" or facts.config.server.quantization != "fp8_block":
        return None
    return differing_blocks(facts.config, facts.spec)


def _units(facts: Facts, plan: Plan) -> dict[str, float]:
    """The unit roundoff that each cause of the walks may show."""
    links = next(iter(plan.walks.values()))
    sides: dict[str, Side] = {link.cause: link.end.side for link in links if link.cause != ENGINES}
    sides[SAMPLING] = "server"
    return units_of(facts, sides, plan.nothing, UNITS)


def _k3_change(other: np.ndarray, d: np.ndarray, tokens: Tokens) -> Estimate:
    change = (np.expm1(other) - other) - (np.expm1(d) - d)
    return ratio_estimate(change, np.ones(len(change)), tokens.prompt[tokens.sequence])


def _faults(
    facts: Facts,
    plan: Plan,
    fixed: FixedTokens,
    scored: Mapping[Point, np.ndarray],
    log_probs: Mapping[Point, np.ndarray],
    entropies: np.ndarray,
) -> list[Fault]:
    links = next(iter(plan.walks.values()))
    bridge = next(link for link in links if link.cause == ENGINES)
    reference = Sequences(
        [len(sequence.prompt) for sequence in fixed.sequences],
        fixed.split(scored[bridge.end] - scored[bridge.start]),
    )
    return find_faults(
        contributions(links, log_probs),
        log_probs[plan.trained],
        fixed.of_responses(entropies),
        fixed.tokens(),
        _units(facts, plan),
        facts.spec.num_layers,
        facts.config.rollout.temperature,
        reference,
        facts.spec.moe is not None,
    )
