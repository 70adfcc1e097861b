"""A budget for people (a table, the verdict, keys) and for programs (one JSON object)."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from gspo_mega.budget.advice import Advice
from gspo_mega.budget.attribution import Estimate, Row
from gspo_mega.budget.findings import Findings

_LEGEND = (
    "k3: mean(e^x - 1 - x) per token, nats, of the difference x that the cause adds to d = trainer - rollout;",
    "log s: mean of x over the first so many tokens of a sequence, mean +- sd; band: mean |log s| in widths of the",
    "clip range; A<0, A>0: share that the clip range would cut off with no update at all, had the cause acted alone;",
    "forward, backward: share of the squared mismatch, 100 % in each order. (+-): one standard error, from the spread",
    "between prompts.",
)


def render(findings: Findings, advice: Advice) -> str:
    """The whole report: table by cause, what was not measured, verdict, recommendation."""
    return "\n".join([*_table(findings), "", *_LEGEND, *_not_measured(findings), "", *_verdict(advice)])


def as_json(findings: Findings, advice: Advice) -> dict[str, Any]:
    """The same as one JSON object; infinite standard errors are null."""
    value = {
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
    width = max(len("all together"), *(len(name) for name in [*first, *findings.alternatives]))
    log_s = "  ".join(f"{f'log s at {length}':>17}" for length in findings.lengths)
    shares = "  ".join(f"{order:>8}" for order in orders)
    lines = [
        f"{findings.num_sequences} sequences of {findings.num_prompts} prompts, {findings.num_tokens} response tokens;"
        f" clip range of log s {findings.band.low:.1e} to {findings.band.high:+.1e}"
        + (" per token" if findings.band.per_token else ""),
        "",
        f"{'cause':<{width}}  {'k3 per token':>17}  {log_s}  {'band':>14}  {'A<0':>7}  {'A>0':>7}  {'max |x|':>7}  "
        + shares,
    ]
    for name, part in first.items():
        by_order = "  ".join(f"{findings.parts[order][name].share:8.1%}" for order in orders)
        lines.append(f"{name:<{width}}  {_numbers(part.row)}  {by_order}")
    lines.append(f"{'all together':<{width}}  {_numbers(findings.total)}  " + "  ".join(["  100.0%"] * len(orders)))
    for name, other in findings.alternatives.items():
        lines.append(f"{name:<{width}}  {_numbers(other.row)}  " + "  ".join([f"{'-':>8}"] * len(orders)))
    for order in orders[1:]:
        lines += [f"  {order}: {name} k3 {part.row.k3.value:.2e}" for name, part in _other(findings, order)]
    return lines


def _other(findings: Findings, order: str):
    """The causes whose k3 the order changes by more than two standard errors of it."""
    first = next(iter(findings.parts.values()))
    for name, part in findings.parts[order].items():
        if abs(part.row.k3.value - first[name].row.k3.value) > 2 * first[name].row.k3.error:
            yield name, part


def _numbers(row: Row) -> str:
    log_s = "  ".join(f"{f'{at.mean.value:+.1e}+-{at.sd:.1e}':>17}" for at in row.at_length)
    return (
        f"{f'{row.k3.value:.1e} (+-{_short(row.k3.error)})':>17}  {log_s}"
        f"  {_share(row.band_share):>14}  {_percent(row.negative):>7}  {_percent(row.positive):>7}  {row.maximum:7.1e}"
    )


def _short(value: float) -> str:
    return f"{value:.0e}" if math.isfinite(value) else "?"


def _share(estimate: Estimate) -> str:
    if estimate.value < 1e-2:
        return f"{estimate.value:.0e} (+-{_short(estimate.error)})"
    return f"{estimate.value:.2f} (+-{estimate.error:.2f})"


def _percent(estimate: Estimate) -> str:
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
