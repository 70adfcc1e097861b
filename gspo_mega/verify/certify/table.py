"""The certificate as a table for people, and whether it holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gspo_mega.verify.certify.cases import Case
from gspo_mega.verify.certify.kinds import CRITIC_KINDS, STEP_KINDS

KINDS = ("log_prob", "loss", "gradient", "weights", *STEP_KINDS)
_HEADINGS = ("log-prob", "loss", "gradient", "weights", *STEP_KINDS)
_CRITIC_HEADINGS = ("values", "v. grad", "v. weight", *(f"v. {kind}" for kind in STEP_KINDS))

_LEGEND = (
    "log-prob: nats per token; loss: relative to mean |s A|; gradient: relative L2 of the tensor where it is largest;",
    "weights: relative L2 of the update. norm: that of each step's gradient, relative, and what each kind of parameter",
    "counts in it. steps: each step's clipped gradient, and Adam's moments, relative L2 of the tensor where it is",
    "largest, and routers' sums. state: rates, decay, zeros, skipped steps, buffers, copies that are not the same.",
    "flips: sequences clipped differently than in the reference, and tokens (times layers) that go to other experts.",
    "on edges: the same in a second batch, whose ratios and routers are on an edge on purpose, so that rounding",
    "decides; it is counted, not judged.",
)
_REACHED_LEGEND = (
    "reached: the share of tokens with a number that FP8 rounds otherwise; the others differ by fp32's rounding."
)
_CRITIC_LEGEND = (
    "values, v. grad, v. weight, v. norm ...: the critic's values, in the unit of rewards; the others as the policy's."
)


@dataclass(frozen=True)
class Row:
    """A case and its outcome. `result`: of `Comparison.result`, None when there is none; `failed`: kinds outside
    the tolerance; `error`: why there is no result.
    """

    case: Case
    result: dict[str, Any] | None
    failed: tuple[str, ...] = ()
    error: str = ""

    @property
    def passed(self) -> bool:
        if self.case.spec.refused:
            return self.case.refusal is not None
        return self.result is not None and not self.failed


def render_batch(name: str, batch: dict[str, Any]) -> str:
    """One line about a reference's recorded batch."""
    low, high = batch["response_lengths"]
    return (
        f"{name}: {batch['num_trajectories']} trajectories, {batch['num_tokens']} tokens, groups of"
        f" {' and '.join(map(str, batch['group_sizes']))}, responses of {low} to {high}, {batch['num_fully_masked']}"
        f" fully masked; {batch['num_clipped_high']} clipped above, {batch['num_clipped_low']} below,"
        f" {batch['num_positive']} with A > 0, {batch['num_negative']} with A < 0; nearest clip edge"
        f" {batch['clip_margin']:.1e} away"
        + (
            f", {batch['num_routes']} routes, nearest tie {batch['router_margin'] or math.nan:.1e} away"
            if batch["num_routes"]
            else ""
        )
        + f"; |grad| {', '.join(f'{norm:.6f}' for norm in batch['grad_norms'])}"
    )


def render_table(rows: Sequence[Row]) -> str:
    """Largest differences by case, the worst tensor, and pass or FAIL; reasons of refusals and errors below.

    Flips are sequences clipped otherwise than in the reference, and tokens of a layer with other experts; `on edges`
    the same where ratios and routers were put on the edge on purpose, and nothing is compared but counted.
    """
    has_critic = any(row.result is not None and "values" in row.result for row in rows)
    has_reached = any(row.result is not None and "reached" in row.result for row in rows)
    kinds, headings = (*KINDS, *CRITIC_KINDS) if has_critic else KINDS, _HEADINGS
    if has_critic:
        headings = (*_HEADINGS, *_CRITIC_HEADINGS)
    if has_reached:
        kinds, headings = ("reached", *kinds), ("reached", *headings)
    width = max(len("case"), *(len(row.case.name) for row in rows))
    lines = [
        f"{'case':<{width}}  ranks  "
        + "  ".join(f"{heading:>8}" for heading in headings)
        + "  flips  on edges  verdict   largest gradient difference in"
    ]
    notes = []
    for row in rows:
        begin = f"{row.case.name:<{width}}  {row.case.spec.ranks:>5}  "
        blank = "  ".join(f"{'-':>8}" for _ in kinds) + "      -         -"
        if row.case.refusal is not None:
            lines.append(f"{begin}{blank}  {'refused' if row.passed else 'REFUSED'}")
            notes.append(f"{row.case.name}: refused: {row.case.refusal}")
        elif row.result is None:
            lines.append(f"{begin}{blank}  FAILED")
            notes.append(f"{row.case.name}: {row.error}")
        elif row.case.spec.refused:
            lines.append(f"{begin}{_numbers(row, kinds)}  NOT REFUSED")
        else:
            place = row.result["gradient"]["place"]
            lines.append(f"{begin}{_numbers(row, kinds)}  {'pass' if row.passed else 'FAIL':<8}  {place}")
            notes += [
                f"{row.case.name}: {kind} differs by {row.result[kind]['value']:.3g}, at most in"
                f" {row.result[kind]['place']}"
                for kind in row.failed
            ]
    legend = (*_LEGEND, *([_CRITIC_LEGEND] if has_critic else []), *([_REACHED_LEGEND] if has_reached else []))
    return "\n".join([*lines, "", *legend, *([""] if notes else []), *notes])


def _numbers(row: Row, kinds: Sequence[str]) -> str:
    assert row.result is not None
    edges = row.result.get("edges")
    on_edges = f"{edges['num_clip_flips']}, {edges['num_route_flips']}" if edges is not None else "-"
    flips = f"{row.result['num_clip_flips']}, {row.result['num_route_flips']}"
    found = [row.result.get(kind) for kind in kinds]
    numbers = [f"{one['value']:8.1e}" if one is not None else f"{'-':>8}" for one in found]
    return "  ".join(numbers) + f"  {flips:>5}  {on_edges:>8}"
