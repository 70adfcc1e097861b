"""Everything that one measurement of the mismatch finds: the rows of all causes in all orders, the alternatives, the
faults, and a verdict in words.

The sentences state nothing that the standard errors do not support. One cause is found by comparing layouts: which FP8
blocks are cut alike in trainer and servers. Transformer Engine cuts blocks of 128 x 128 from the first row and column
of each rank's shard of a fused parameter; published blocks start at those of each Hugging Face tensor. The quantizer is
the same on both sides (`algorithm/fp8.py`), so equal blocks mean equal bits. No I/O.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gspo_mega.config.clip_range import Band, band_of, must_warn, no_range_sentence, share_sentence
from gspo_mega.config.derived import critic_of
from gspo_mega.config.schema import Config
from gspo_mega.models import delta_net
from gspo_mega.models.block_fp8 import SERVED_BLOCK, is_quantizable, publishes_powers_of_two
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.tensors import TensorBlock, TensorEntry, hf_tensors, parameter_blocks, parameter_shape
from gspo_mega.verify.mismatch.attribution import (
    AttributionRow,
    PromptEstimate,
    TokenPlaces,
    explained_share,
    make_row,
    ratio_estimate,
    three_lengths,
)
from gspo_mega.verify.mismatch.causes import (
    ALTERNATIVES,
    CAUSES,
    ENGINES,
    R3,
    SAMPLING,
    STATES_DTYPE,
    Facts,
    Nothing,
    left_between,
    states_dtype,
    units_of,
)
from gspo_mega.verify.mismatch.faults import UNITS, EngineFault, Sequences, fault_bounds, find_faults
from gspo_mega.verify.mismatch.fixed_tokens import FixedTokens
from gspo_mega.verify.mismatch.walks import Point, Side, WalkPlan, contributions


def differing_blocks(config: Config, spec: ModelSpec) -> dict[str, str]:
    """Return, for each quantized tensor whose rounded values differ between servers and trainer, the reason; empty if
    there is none. Equal values are also equal bits, except with `fp8.parameters`: there FP8 values are rounded once
    more, so that a block may come out with half the scale and elements twice as large.

    For a trainer that computes in FP8 blocks, and servers with `fp8_block`; for any other pair every tensor has a
    reason.
    """
    whole = _pair_difference(config)
    entries = [entry for entry in hf_tensors(spec) if is_quantizable(entry)]
    if whole is not None:
        return {entry.name: whole for entry in entries}
    sizes = config.parallel
    seen: dict[tuple, str | None] = {}
    found = {}
    for entry in entries:
        size = sizes.tensor if entry.expert is None else (sizes.expert_tensor or sizes.tensor)
        key = (entry.role, entry.sharding, entry.shape, size)
        if key not in seen:
            seen[key] = block_difference(spec, entry, size)
        if (why := seen[key]) is not None:
            found[entry.name] = why
    return found


def _pair_difference(config: Config) -> str | None:
    if config.server.quantization != "fp8_block":
        return f"server.quantization {config.server.quantization}: servers do not hold FP8 blocks"
    if config.precision != "fp8":
        return f"precision {config.precision}: the trainer multiplies weights that are not rounded to FP8"
    if config.fp8.recipe != "blockwise":
        return f"fp8.recipe {config.fp8.recipe}: the trainer rounds with other scales than one per 128 x 128 block"
    if config.fp8.parameters and not publishes_powers_of_two(config.fp8, config.cluster):
        return (
            "fp8.parameters: what is published is rounded a second time from the trainer's FP8 values, whose float32"
            " scales do not come back to the bit (fp8.block_scales power_of_two gives the same values)"
        )
    return None


def block_difference(spec: ModelSpec, entry: TensorEntry, tensor_parallel: int) -> str | None:
    """Return why the tensor's blocks are cut differently in the trainer than in a published folder; None if they are
    equal.

    `tensor_parallel`: size of the group over which the tensor is sharded (for an expert, the expert-tensor group).
    """
    local = parameter_shape(spec, entry, tensor_parallel)
    if spec.delta is not None and entry.role in delta_net.ROLES:  # the trainer rounds the rows above betas and alphas
        local = (local[0] - 2 * spec.delta.value_heads // tensor_parallel, *local[1:])
    for rank in range(tensor_parallel if entry.sharding != "replicated" else 1):
        for block in parameter_blocks(spec, entry, tensor_parallel, rank):
            if not _is_on_the_grid(block, entry.shape[block.dim], local[block.dim]):
                return _reason(spec, entry, block, tensor_parallel)
    return None


def _is_on_the_grid(block: TensorBlock, whole: int, local: int) -> bool:
    """Return whether both cuts have the same edges here. The last block may be smaller if it is the last of both."""
    side = SERVED_BLOCK[block.dim]
    if block.start % side or block.local_start % side:
        return False
    ends_both = block.start + block.length == whole and block.local_start + block.length == local
    return block.length % side == 0 or ends_both


def _reason(spec: ModelSpec, entry: TensorEntry, block: TensorBlock, size: int) -> str:
    side = SERVED_BLOCK[block.dim]
    if entry.role in ("q", "k", "v") and (spec.head_dim % side or size <= spec.num_kv_heads):
        heads = spec.num_heads // spec.num_kv_heads
        return (
            f"Megatron interleaves q, k and v by key-value group ({heads} + 1 + 1 heads of {spec.head_dim}): a block of"
            f" {side} rows there has rows of more than one of them, or of other heads (head_dim {spec.head_dim} is no"
            f" multiple of {side})"
        )
    if entry.role in delta_net.ROLES:
        return (
            f"Megatron has a rank's queries, keys, values and gates of a gated delta net one after the other: a part of"
            f" {block.length} rows (heads of {entry.name} over {size}) begins or ends inside a block of {side}"
        )
    what = "columns" if block.dim == 1 else "rows"
    beside = " and gate lies above up in one parameter" if entry.role in ("gate", "up") else ""
    return (
        f"a tensor-parallel rank's share of {block.length} {what} (of {entry.shape[block.dim]} over {size}) is no"
        f" multiple of {side}{beside}"
    )


@dataclass(frozen=True)
class CauseRow:
    """One cause in one order: its row, and its share of the squared size of d = trainer - rollout."""

    row: AttributionRow
    share: PromptEstimate


@dataclass(frozen=True)
class Other:
    """An alternative: the settings in which it differs from the run, its row, and the change of k3 from the run,
    estimated token by token. `is_change`: the row has its difference from the run's trainer, not from the samples.
    """

    settings: Mapping[str, Any]
    row: AttributionRow
    k3_change: PromptEstimate
    is_change: bool = False


@dataclass(frozen=True)
class Findings:
    """Everything that was measured. `parts`: by order, then by cause. `residual`: largest |sum of the parts - d| in any
    order, nats. `num_prompts`, `num_sequences`, `num_tokens`: of the fixed tokens; `num_negative`, `num_positive`:
    sequences with A < 0 and A > 0. `unsigned`: why there are no such sequences, None if there are. `bounds`: by cause,
    the difference of a token below which no fault can be seen, nats. `moved`: by cause, its share in the other order
    less that in the first. `blocks`: if trainer and servers both compute in FP8 blocks, the tensors whose blocks
    differ, with the reasons; None otherwise.
    """

    num_prompts: int
    num_sequences: int
    num_tokens: int
    num_negative: int
    num_positive: int
    unsigned: str | None
    lengths: tuple[int, ...]
    band: Band | None
    total: AttributionRow
    parts: Mapping[str, Mapping[str, CauseRow]]
    bounds: Mapping[str, float]
    moved: Mapping[str, PromptEstimate]
    nothing: Mapping[str, Nothing]
    alternatives: Mapping[str, Other]
    faults: tuple[EngineFault, ...] = ()
    residual: float = 0.0
    blocks: Mapping[str, str] | None = None


def find(
    facts: Facts, plan: WalkPlan, fixed: FixedTokens, scored: Mapping[Point, np.ndarray], entropies: np.ndarray
) -> Findings:
    """Return the findings of all walks.

    `scored`: log-probs at every point of `plan`, prompts included, [sum (tokens - 1)] float64 nats. `entropies`: of the
    same tokens, the trainer's as the run computes them, nats.
    """
    tokens, band = fixed.tokens(), band_of(facts.config.algorithm, facts.config.objective)
    lengths = three_lengths(tokens.lengths)
    log_probs = {point: fixed.of_responses(values) for point, values in scored.items()}
    probabilities = {point: np.exp(values) for point, values in log_probs.items()}
    d = log_probs[plan.trained] - log_probs[plan.sampled]
    by_token = tokens.prompt[tokens.sequence]
    values_of: dict[str, dict[str, np.ndarray]] = {}
    parts: dict[str, dict[str, CauseRow]] = {}
    residual = 0.0
    for order, links in plan.walks.items():
        added = values_of[order] = contributions(links, log_probs)
        residual = max(residual, float(np.abs(sum(added.values()) - d).max()))
        moves = contributions(links, probabilities)
        parts[order] = {
            name: CauseRow(make_row(values, tokens, band, lengths, moves[name]), explained_share(values, d, by_token))
            for name, values in added.items()
        }
    first, *others = values_of.values()
    moved = {name: explained_share(x - first[name], d, by_token) for other in others for name, x in other.items()}
    alternatives = {}
    is_change = {alternative.name: alternative.is_change for alternative in ALTERNATIVES}
    for name, point in plan.alternatives.items():
        start = plan.trained if is_change[name] else plan.sampled
        moves = probabilities[point] - probabilities[start]
        row = make_row(log_probs[point] - log_probs[start], tokens, band, lengths, moves)
        change = _k3_change(log_probs[point] - log_probs[plan.sampled], d, tokens)
        alternatives[name] = Other(point.values, row, change, is_change[name])
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
    if critic_of(config.algorithm, config.critic) is not None:
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


def _units(facts: Facts, plan: WalkPlan) -> dict[str, float]:
    """Return the unit roundoff that each cause of the walks may show."""
    links = next(iter(plan.walks.values()))
    sides: dict[str, Side] = {link.cause: link.end.side for link in links if link.cause != ENGINES}
    sides[SAMPLING] = "server"
    return units_of(facts, sides, plan.nothing, UNITS)


def _k3_change(other: np.ndarray, d: np.ndarray, tokens: TokenPlaces) -> PromptEstimate:
    change = (np.expm1(other) - other) - (np.expm1(d) - d)
    return ratio_estimate(change, np.ones(len(change)), tokens.prompt[tokens.sequence])


def _faults(
    facts: Facts,
    plan: WalkPlan,
    fixed: FixedTokens,
    scored: Mapping[Point, np.ndarray],
    log_probs: Mapping[Point, np.ndarray],
    entropies: np.ndarray,
) -> list[EngineFault]:
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


# The share that a run can bear to have clipped by the engines' difference only, without an update.
BEARABLE = 0.05
# Shares of the squared mismatch from which a cause is worth a sentence, and differences from which an order matters.
_MAIN, _INTERACTION = 0.1, 0.1
# A mismatch below this many widths of the clip range is rounding that no decision depends on.
_NOTHING = 0.01
# If the range is not one of whole sequences: a k3 below this is rounding, in nats per token. A range of tokens may be
# so wide that differences far below it add up to a large one over a sequence.
_NOTHING_NATS = 1e-6


@dataclass
class Advice:
    """`sentences`: for a person. `keys`: recommended values of dotted keys, each with its reason."""

    sentences: list[str] = field(default_factory=list)
    keys: dict[str, tuple[Any, str]] = field(default_factory=dict)

    @property
    def yaml(self) -> str:
        """The keys as a block of YAML, with their reasons as comments."""
        lines: list[str] = []
        section = ""
        for key in sorted(self.keys):
            value, why = self.keys[key]
            outer, _, inner = key.rpartition(".")
            if outer != section and outer:
                lines.append(f"{outer}:")
            section = outer
            text = f"{'  ' if outer else ''}{inner}: {str(value).lower() if isinstance(value, bool) else value}"
            lines.append(f"{text:<36} # {why}")
        return "\n".join(lines)


def percent(estimate: PromptEstimate) -> str:
    """Format a share with its standard error."""
    error = f"{100 * estimate.error:.0f}" if math.isfinite(estimate.error) else "?"
    return f"{100 * estimate.value:.0f} % +- {error}"


def advise(facts: Facts, findings: Findings) -> Advice:
    """Return the verdict on `findings` for the run of `facts`."""
    advice = Advice()
    for fault in findings.faults:
        advice.sentences.append(f"NOT PRECISION ({fault.kind}, found in `{fault.cause}`): {fault.text}")
    if findings.faults:
        advice.sentences.append("Mend this first: the numbers below contain it, and no key recommended here cures it.")
    _direct_use(facts, findings, advice)
    _origin(findings, advice)
    _block_advice(findings, advice)
    _routing(facts, findings, advice)
    _states(facts, advice)
    _chunks(findings, advice)
    _budget(facts, findings, advice)
    _unseen(findings, advice)
    return advice


def _direct_use(facts: Facts, findings: Findings, advice: Advice) -> None:
    total, band = findings.total, findings.band
    negative, positive, below, above = total.negative, total.positive, total.below, total.above
    if band is None or negative is None or positive is None or below is None or above is None:
        advice.sentences.append(
            f"{_capital(no_range_sentence(facts.config.algorithm))}: {_plus_minus(total.k3)} nats per token."
        )
        return
    what = band.units
    verb = "bound the weight of" if band.bounds_weight else "clip"
    clipped = (
        f"used directly as old (`old_log_probs: rollout`), the servers' log-probs would {verb} {percent(negative)}"
        f" of the {what} with A < 0 and {percent(positive)} of those with A > 0, with no update at all"
        f" ({_from_which(findings)})"
    )
    both = (negative, positive)
    is_rounding = _is_rounding(findings)
    # A few responses of one sign show little; all responses together show more, unless the few contradict them.
    of_all = zip(both, (below, above), strict=True)
    if any(sign.above(BEARABLE) or (whole.above(BEARABLE) and not sign.below(BEARABLE)) for sign, whole in of_all):
        advice.sentences.append(f"{_capital(clipped)}: recompute them.")
        advice.keys["old_log_probs"] = ("trainer", f"the servers' would {verb} {percent(negative)} of A < 0")
    elif (is_rounding or all(share.below(BEARABLE) for share in both)) and not findings.faults:
        advice.sentences.append(f"{_capital(clipped)}: the clip range can bear that.")
        has_correction = facts.config.old_log_probs == "trainer" and facts.config.mismatch.correction != "none"
        if has_correction and (is_rounding or not band.per_token):
            advice.sentences.append("A correction of the mismatch has next to nothing to correct here.")
    else:
        advice.sentences.append(
            f"{_capital(clipped)}; {findings.num_prompts} prompts do not tell whether that is more than"
            f" {BEARABLE:.0%}. Sample more (budget.num_prompts), or recompute them."
        )
        advice.keys["old_log_probs"] = ("trainer", "safe where it is not known")


def _from_which(findings: Findings) -> str:
    """Say from which responses the shares were computed."""
    total = findings.total
    where = f"{_percent_of(total.below)} below the range, {_percent_of(total.above)} above it"
    if findings.unsigned is not None:
        return f"if A has no part in it; the shares are those of all, because {findings.unsigned}"
    return f"from {findings.num_negative} responses with A < 0 and {findings.num_positive} with A > 0; of all, {where}"


def _origin(findings: Findings, advice: Advice) -> None:
    if _is_rounding(findings):
        advice.sentences.append(
            f"What is left is rounding far below {_bound_of_rounding(findings)}; its parts say nothing more."
        )
        return
    orders = list(findings.parts.values())
    shares = {name: part.share for name, part in orders[0].items()}
    ranked = sorted(shares, key=lambda name: -abs(shares[name].value))
    main = [name for name in ranked if _is_beyond(shares[name], _MAIN)]
    if main:
        named = ", ".join(f"{name} {percent(shares[name])}" for name in main)
        advice.sentences.append(f"Of the squared mismatch: {named}. The shares of all causes add up to 100 %.")
    unknown = [name for name in ranked if abs(shares[name].value) >= _MAIN and name not in main]
    if unknown:
        named = ", ".join(f"{name} {percent(shares[name])}" for name in unknown)
        advice.sentences.append(
            f"{findings.num_prompts} prompts do not tell whether it is a tenth of the squared mismatch: {named}."
        )
    moved = [name for name in ranked if name in findings.moved and _is_beyond(findings.moved[name], _INTERACTION)]
    if moved:
        ranges = ", ".join(
            f"{name} {' or '.join(f'{parts[name].share.value:.0%}' for parts in orders)} (difference"
            f" {percent(findings.moved[name])})"
            for name in moved
        )
        advice.sentences.append(f"Some causes act on each other; by the order in which they are changed: {ranges}.")
    hidden = left_between(shares, findings.nothing)
    if hidden and ENGINES in [*main, *unknown]:
        advice.sentences.append(f"`{ENGINES}` contains what cannot be changed here: {', '.join(hidden)}.")


def _is_rounding(findings: Findings) -> bool:
    """Return whether the whole mismatch is too small for its parts to matter, judged by the clip range and, unless that
    is one of whole sequences, also by its k3.
    """
    share, band = findings.total.band_share, findings.band
    is_below = share is None or share.below(_NOTHING)
    return is_below and ((band is not None and not band.per_token) or findings.total.k3.below(_NOTHING_NATS))


def _is_beyond(share: PromptEstimate, bound: float) -> bool:
    return share.above(bound) or share.below(-bound)


def _block_advice(findings: Findings, advice: Advice) -> None:
    if findings.blocks is None:
        return
    if not findings.blocks:
        advice.sentences.append(
            "The blocks of all quantized weights coincide in trainer and servers: what their rounding adds in `server"
            " weights` the trainer's own takes away in `trainer FP8`."
        )
    for why in dict.fromkeys(findings.blocks.values()):
        alike = Counter(re.sub(r"\.\d+(?=\.)", ".*", name) for name, reason in findings.blocks.items() if reason == why)
        named = ", ".join(f"{name} ({count})" for name, count in sorted(alike.items()))
        advice.sentences.append(
            "Part of `server weights` and `trainer FP8`: other blocks of 128 x 128 in the trainer than in the servers,"
            f" in {named}: {why}."
        )


def _unseen(findings: Findings, advice: Advice) -> None:
    by_size: dict[str, list[str]] = {}
    for name, bound in findings.bounds.items():
        by_size.setdefault(f"{bound:.2g}", []).append(f"`{name}`")
    if by_size:
        text = ", ".join(f"{size} in {', '.join(names)}" for size, names in by_size.items())
        advice.sentences.append(f"No fault is seen below these differences of a token, in nats: {text}.")


def _routing(facts: Facts, findings: Findings, advice: Advice) -> None:
    other = findings.alternatives.get(R3)
    if other is None:
        return
    replays = facts.config.moe.routing_replay == "R3"
    with_it, without = (findings.total, other.row) if replays else (other.row, findings.total)
    change = other.k3_change if not replays else PromptEstimate(-other.k3_change.value, other.k3_change.error)
    figures = f"k3 {_plus_minus(without.k3)} without R3 and {_plus_minus(with_it.k3)} with it"
    keys = next(alternative.keys for alternative in ALTERNATIVES if alternative.name == R3)
    if change.below(0.0) and -change.value >= _MAIN * without.k3.value:
        advice.sentences.append(
            f"With R3 the routing part falls from {-change.value:.1e} nats per token to 0 ({figures}); of A < 0,"
            f" {_percent_of(with_it.negative)} would then be clipped, {_percent_of(without.negative)} without."
        )
        for key, value in keys.items():
            advice.keys[key] = (value, f"k3 falls from {without.k3.value:.1e} to {with_it.k3.value:.1e}")
    elif change.above(0.0) and change.value >= _MAIN * without.k3.value:
        advice.sentences.append(f"R3 makes the mismatch larger here ({figures}).")
        if replays:
            advice.keys["moe.routing_replay"] = ("none", "R3 makes the mismatch larger here")
    else:
        advice.sentences.append(f"R3 makes no difference that these prompts can show ({figures}).")


def _states(facts: Facts, advice: Advice) -> None:
    if (dtype := states_dtype(facts)) != "float32":
        advice.sentences.append(
            f"The servers round what gated delta nets remember to {dtype} after every sampled token. Tokens that are"
            " scored again in one prefill are not rounded so, so this is in `sampling` and hardly in `server states`: a"
            f" budget with server.options.{STATES_DTYPE}=float32 tells how much of `sampling` it is."
        )


def _chunks(findings: Findings, advice: Advice) -> None:
    changes = {name: other.row for name, other in findings.alternatives.items() if other.is_change}
    if changes:
        figures = ", ".join(
            f"{row.maximum:.1e} nats in {name} (k3 {row.k3.value:.0e})" for name, row in changes.items()
        )
        advice.sentences.append(
            f"With the delta rule in other chunks a token's log-prob in the trainer changes by at most {figures}."
        )


def _budget(facts: Facts, findings: Findings, advice: Advice) -> None:
    share, band, allowed = findings.total.band_share, findings.band, facts.config.mismatch.budget
    if share is None or band is None:
        return
    text = _capital(share_sentence(band, f"{share.value:.2g} +- {share.error:.1g}", allowed))
    if share.above(allowed):
        says = "warn of it" if must_warn(facts.config.old_log_probs, findings.total.k3.value) else "note it"
        advice.sentences.append(f"{text}: a run will {says}, once and then rarely.")
        parts = next(iter(findings.parts.values()))
        for cause in CAUSES:
            part = parts.get(cause.name)
            settings = cause.neutral(facts) if part is not None and cause.avoidable else None
            if part is None or settings is None or isinstance(settings, Nothing) or not part.share.above(_MAIN):
                continue
            for key, value in settings.items():
                if key == "model.path":  # a folder that this command made
                    continue
                advice.keys[key] = (value, f"takes away {percent(part.share)} of the squared mismatch, at its price")
    elif share.below(allowed):
        advice.sentences.append(f"{text}.")
    else:
        advice.sentences.append(f"{text}, which is within two standard errors.")


def _bound_of_rounding(findings: Findings) -> str:
    return "the clip range" if findings.band is not None else f"a k3 of {_NOTHING_NATS:g} nats per token"


def _percent_of(estimate: PromptEstimate | None) -> str:
    return "none" if estimate is None else percent(estimate)


def _plus_minus(estimate: PromptEstimate) -> str:
    return f"{estimate.value:.1e} +- {estimate.error:.0e}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
