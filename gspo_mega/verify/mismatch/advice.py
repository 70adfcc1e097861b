"""What the numbers say in words, and which keys follow from it. Says nothing that the standard errors do not allow.

Owns the sentences and the recommended keys. No I/O.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from gspo_mega.config.mismatch_range import no_range_sentence, share_sentence
from gspo_mega.verify.mismatch.attribution import Estimate
from gspo_mega.verify.mismatch.budget_findings import Findings
from gspo_mega.verify.mismatch.causes import ALTERNATIVES, CAUSES, ENGINES, R3, Facts, Nothing, left_between

# Clipped by the engines alone, without an update: what a run can bear.
BEARABLE = 0.05
# A cause is worth a sentence from this share of the squared mismatch on; an order matters from this difference on.
_MAIN, _INTERACTION = 0.1, 0.1
# A mismatch below this many widths of the clip range is rounding that no decision depends on.
_NOTHING = 0.01
# Where it is no range of whole sequences: a k3 below this is rounding, in nats per token. A range of tokens may be so
# wide that a difference far below it adds up to much over a sequence.
_NOTHING_NATS = 1e-6


@dataclass
class Advice:
    """`sentences` for a person; `keys`: dotted keys with values and the reason of each."""

    sentences: list[str] = field(default_factory=list)
    keys: dict[str, tuple[Any, str]] = field(default_factory=dict)

    @property
    def yaml(self) -> str:
        """The keys as a block of the configuration, with their reasons as comments."""
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


def percent(estimate: Estimate) -> str:
    """A share with its standard error."""
    error = f"{100 * estimate.error:.0f}" if math.isfinite(estimate.error) else "?"
    return f"{100 * estimate.value:.0f} % +- {error}"


def advise(facts: Facts, findings: Findings) -> Advice:
    """The verdict on `findings` for the run of `facts`."""
    advice = Advice()
    for fault in findings.faults:
        advice.sentences.append(f"NOT PRECISION ({fault.kind}, found in `{fault.cause}`): {fault.text}")
    if findings.faults:
        advice.sentences.append("Mend this first: the numbers below contain it, and no key recommended here cures it.")
    _direct_use(facts, findings, advice)
    _origin(findings, advice)
    _blocks(findings, advice)
    _routing(facts, findings, advice)
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
    # A few responses of one sign tell little; all of them tell more, unless those few contradict.
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
    """Whose shares these are."""
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
    """Whether the whole mismatch is too small for its parts to matter: by the clip range, and where that is not of
    whole sequences by its k3, too.
    """
    share, band = findings.total.band_share, findings.band
    is_below = share is None or share.below(_NOTHING)
    return is_below and ((band is not None and not band.per_token) or findings.total.k3.below(_NOTHING_NATS))


def _is_beyond(share: Estimate, bound: float) -> bool:
    return share.above(bound) or share.below(-bound)


def _blocks(findings: Findings, advice: Advice) -> None:
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
    change = other.k3_change if not replays else Estimate(-other.k3_change.value, other.k3_change.error)
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


def _budget(facts: Facts, findings: Findings, advice: Advice) -> None:
    share, band, allowed = findings.total.band_share, findings.band, facts.config.mismatch.budget
    if share is None or band is None:
        return
    text = _capital(share_sentence(band, f"{share.value:.2g} +- {share.error:.1g}", allowed))
    if share.above(allowed):
        advice.sentences.append(f"{text}: a run will warn of it, once and then rarely.")
        parts = next(iter(findings.parts.values()))
        for cause in CAUSES:
            part = parts.get(cause.name)
            settings = cause.neutral(facts) if part is not None and cause.avoidable else None
            if part is None or settings is None or isinstance(settings, Nothing) or not part.share.above(_MAIN):
                continue
            for key, value in settings.items():
                if key == "model.path":  # a folder of the budget's own
                    continue
                advice.keys[key] = (value, f"takes away {percent(part.share)} of the squared mismatch, at its price")
    elif share.below(allowed):
        advice.sentences.append(f"{text}.")
    else:
        advice.sentences.append(f"{text}, which is within two standard errors.")


def _bound_of_rounding(findings: Findings) -> str:
    return "the clip range" if findings.band is not None else f"a k3 of {_NOTHING_NATS:g} nats per token"


def _percent_of(estimate: Estimate | None) -> str:
    return "none" if estimate is None else percent(estimate)


def _plus_minus(estimate: Estimate) -> str:
    return f"{estimate.value:.1e} +- {estimate.error:.0e}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
