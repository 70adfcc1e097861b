"""A budget for people (a table, the verdict, keys) and for programs (one JSON object)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gspo_mega.config.mismatch_range import Band
from gspo_mega.verify.mismatch.advice import Advice
from gspo_mega.verify.mismatch.attribution import Estimate, Row
from gspo_mega.verify.mismatch.budget_findings import Findings

_LEGEND = (
    "k3: mean(e^x - 1 - x) per token, nats, of the difference x that the cause adds to d = trainer - rollout;",
    "band: mean |log s| in widths of the clip range, log s being the mean of x over a sequence (or over its first so",
    "many tokens), and where tokens are clipped the mean size of x of a token; below, above: share of all responses",
    "(tokens) below, above the clip range, had only this cause acted; - where the algorithm clips nothing;",
    "A<0: of the responses with A < 0 the share that is clipped, below it; A>0: of those with A > 0, above it: with no",
    "update at all, were the servers' log-probs used directly as old;",
    "bound: a token's difference that the row's rounding may reach, nats; what is smaller is not seen to be a fault;",
    "forward, backward: share of the squared mismatch in each order of changing the causes, 100 % together.",
    "(+-): one standard error, from the spread between prompts; of shares of responses: half the way to the farther",
    "end of Wilson's interval at two standard errors, each prompt counted as one trial.",
)


def render(findings: Findings, advice: Advice) -> str:
    """The whole report: table by cause, what was not measured, verdict, recommendation."""
    return "\n".join([*_table(findings), "", *_LEGEND, *_not_measured(findings), "", *_verdict(advice)])


def as_json(findings: Findings, advice: Advice, made: Mapping[str, Any]) -> dict[str, Any]:
    """The same as one JSON object; infinite standard errors are null. `made`: when, how long, by what software."""
    value = {
        "made": made,
        "sentences": advice.sentences,
        "recommended": {key: value for key, (value, _) in advice.keys.items()},
        **asdict(findings),
    }
    return _finite(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _table(findings: Findings) -> list[str]:
    orders = list(findings.parts)
    first = findings.parts[orders[0]]
    shares = {name: [_of_squares(findings.parts[order][name].share) for order in orders] for name in first}
    rows = {name: part.row for name, part in first.items()} | {"all together": findings.total}
    shares["all together"] = ["100.0%"] * len(orders)
    for other in findings.alternatives.values():
        rows["with " + ", ".join(f"{key}={value}" for key, value in other.settings.items())] = other.row
    width = max(map(len, rows))
    headings = "  ".join(f"{order:>11}" for order in orders)
    lines = [
        f"{findings.num_sequences} sequences of {findings.num_prompts} prompts, {findings.num_tokens} response tokens;"
        f" {_range(findings.band)}",
        f"A<0 and A>0 are those of all responses: {findings.unsigned}"
        if findings.unsigned is not None
        else f"{findings.num_negative} sequences have A < 0, {findings.num_positive} have A > 0",
        "",
        f"{'cause':<{width}}  {'k3 per token':>17}  {'band':>15}  {'A<0':>8}  {'A>0':>8}  {'max |x|':>7}"
        f"  {'bound':>7}  {headings}",
    ]
    for name, row in rows.items():
        by_order = "  ".join(f"{share:>11}" for share in shares.get(name, ["-"] * len(orders)))
        lines.append(f"{name:<{width}}  {_numbers(row)}  {_bound(findings, name)}  {by_order}")
    for order in orders[1:]:
        lines += [f"  {order}: {name} k3 {part.row.k3.value:.1e}" for name, part in _other(findings, order)]
    lengths = "  ".join(f"{f'log s at {length}':>26}" for length in findings.lengths)
    lines += ["", f"{'':<{width}}  {'below':>8}  {'above':>8}  {lengths}"]
    for name, row in rows.items():
        log_s = "  ".join(
            f"{f'{at.mean.value:+.1e} (+-{_short(at.mean.error)}) sd {at.sd:.1e}':>26}" for at in row.at_length
        )
        lines.append(f"{name:<{width}}  {_percent(row.below):>8}  {_percent(row.above):>8}  {log_s}")
    return lines


def _other(findings: Findings, order: str):
    """The causes whose k3 the order changes by more than two standard errors of it."""
    first = next(iter(findings.parts.values()))
    for name, part in findings.parts[order].items():
        if abs(part.row.k3.value - first[name].row.k3.value) > 2 * first[name].row.k3.error:
            yield name, part


def _range(band: Band | None) -> str:
    if band is None:
        return "no clip range"
    if not band.per_token:
        return f"clip range of log s {band.low:.1e} to {band.high:+.1e}"
    of = "of a token's probability" if band.of_probability else "of log s"
    low = "none below" if not math.isfinite(band.low) else f"{band.low:.1e}"
    return f"clip range {of} {low} to {band.high:+.1e} per token"


def _numbers(row: Row) -> str:
    return (
        f"{f'{row.k3.value:.1e} (+-{_short(row.k3.error)})':>17}  {_share(row.band_share):>15}"
        f"  {_percent(row.negative):>8}  {_percent(row.positive):>8}  {row.maximum:7.1e}"
    )


def _bound(findings: Findings, name: str) -> str:
    return f"{findings.bounds[name]:7.1e}" if name in findings.bounds else f"{'-':>7}"


def _of_squares(share: Estimate) -> str:
    error = f"{100 * share.error:.0f}" if math.isfinite(share.error) else "?"
    return f"{share.value:.1%}+-{error}"


def _short(value: float) -> str:
    return f"{value:.0e}" if math.isfinite(value) else "?"


def _share(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    if estimate.value < 1e-2:
        return f"{estimate.value:.0e} (+-{_short(estimate.error)})"
    return f"{estimate.value:.2f} (+-{estimate.error:.2f})"


def _percent(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    error = f"{100 * estimate.error:.0f}" if math.isfinite(estimate.error) else "?"
    return f"{100 * estimate.value:.0f}%+-{error}"


def _not_measured(findings: Findings) -> list[str]:
    zero = [f"{name} ({why.why})" for name, why in findings.nothing.items() if why.is_zero]
    hidden = [f"  {name}: {why.why}" for name, why in findings.nothing.items() if not why.is_zero]
    lines = ["", f"nothing to change: {'; '.join(zero)}"] if zero else []
    return [*lines, "not changed here, so in the rows beside it:", *hidden] if hidden else lines


def _verdict(advice: Advice) -> list[str]:
    lines = ["verdict", *(f"  {sentence}" for sentence in advice.sentences)]
    return [*lines, "", "recommended", *(f"  {line}" for line in advice.yaml.splitlines())] if advice.keys else lines
