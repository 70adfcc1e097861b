"""Show a trace: as text, as one JSON object, and as an SVG of what each phase holds at its peak."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from gspo_mega.plan import Plan
from gspo_mega.verify.trace.compare import Difference, kept_between_steps

GIB = 2**30
# On every page.
NOT_MEASURED = (
    "traced, not measured: shapes only, on fake CUDA tensors. No fragmentation, library workspaces, NCCL buffers or"
    " CUDA context (the plan's reserve stands for them), and no time"
)
_MOST_HOLDERS, _MOST_WAITS, _MOST_KEPT = 8, 8, 4
_WORTH = 2**24
_WIDTH, _ROW, _LEFT, _TOP = 900, 34, 170, 56
_COLOURS = ("#4a6fa5", "#7aa6d8", "#a5c4e8", "#b3702a", "#d8a47a", "#7a9e7e", "#a8c5ab", "#999999")


def render(plan: Plan, traced: Sequence[Mapping[str, Any]], differences: Sequence[Difference]) -> str:
    """Return the text: each traced rank with its phases, then the comparison with the plan."""
    versions = ", ".join(f"{name} {version}" for name, version in traced[0]["versions"].items())
    lines = [
        f"trace    {plan.model}: {len(traced)} of {plan.layout.world_size} ranks, one of each kind; {NOT_MEASURED}",
        f"         {versions}; packs of {traced[0]['pack_tokens']} tokens, {traced[0]['packs']} of them",
    ]
    for one in traced:
        lines += ["", *_rank(plan, one)]
    lines += ["", *render_differences(differences)]
    return "\n".join(lines)


def _rank(plan: Plan, one: Mapping[str, Any]) -> list[str]:
    place = ", ".join(f"{name} {index}" for name, index in one["coordinates"].items() if "expert" not in name)
    lines = [
        f"rank {one['rank']:<4} {place}",
        "         phase               before      peak     after  TFLOP      host",
    ]
    for phase in one["phases"]:
        flops = sum(phase["flops"].values()) / 1e12
        lines.append(
            f"         {phase['name']:<18} {_gib(phase['before'])} {_gib(phase['peak'])} {_gib(phase['after'])}"
            f" {flops:6.1f} {_gib(phase['host_peak'])}"
        )
    peak = max(one["phases"], key=lambda phase: phase["peak"])
    lines.append(f"held     at the peak, in {peak['name']}:")
    lines += [
        f"         {_gib(entry['bytes'])}  {entry['tensors']:>5} x {entry['holder']} {entry['where']}".rstrip()
        for entry in peak["at_peak"][:_MOST_HOLDERS]
    ]
    on_host = max(one["phases"], key=lambda phase: phase["host_peak"])
    if on_host["host_peak"] >= _WORTH:
        lines.append(f"host     {_gib(on_host['host_peak']).strip()}iB at the peak, in {on_host['name']}:")
        lines += [
            f"         {_gib(entry['bytes'])}  {entry['tensors']:>5} x {entry['holder']} {entry['where']}"
            for entry in on_host["host_at_peak"][:_MOST_KEPT]
        ]
    kept, holders = kept_between_steps(one)
    lines.append(f"kept     between steps, besides the state: {_gib(kept).strip()}iB")
    lines += [
        f"         {_gib(entry['bytes'])}  {entry['tensors']:>5} x {entry['holder']} {entry['where']}"
        for entry in holders[:_MOST_KEPT]
        if entry["bytes"] >= _WORTH
    ]
    lines.append("sent     by phase: operation, group, calls, GB")
    for phase in one["phases"]:
        lines += [
            f"         {phase['name']:<18} {entry['operation']}, {entry['group'] or 'all'} of {entry['size']},"
            f" {entry['calls']}, {entry['bytes'] / 1e9:.3f}"
            for entry in phase["collectives"]
            if entry["bytes"] > 0
        ]
    waits = [(phase["name"], what, count) for phase in one["phases"] for what, count in phase["waits"].items()]
    lines.append(f"waits    of the host for the device: {sum(count for *_, count in waits)}")
    for name, what, count in sorted(waits, key=lambda wait: -wait[2])[:_MOST_WAITS]:
        lines.append(f"         {name:<18} {count} x {what}")
    return lines


def render_differences(differences: Sequence[Difference]) -> list[str]:
    """Return the comparison with the plan, a line for each figure."""
    lines = ["plan     planned, traced, difference (the plan without reserve and fragmentation)"]
    for one in differences:
        size, unit = (GIB, "GiB") if one.unit == "bytes" else (1e12, "T")
        verdict = "" if one.agrees else f"   more than {one.tolerance:.0%}: {one.formula}"
        lines.append(
            f"         {one.what:<40} {one.planned / size:9.2f} {one.traced / size:9.2f} {unit:<4}"
            f" {one.share:+.1%}{verdict}"
        )
    return lines


def trace_json(traced: Sequence[Mapping[str, Any]], differences: Sequence[Difference]) -> str:
    """Return everything as one JSON object."""
    compared = [asdict(one) | {"share": one.share, "agrees": one.agrees} for one in differences]
    return json.dumps({"note": NOT_MEASURED, "ranks": list(traced), "plan": compared}, indent=1)


def draw(traced: Sequence[Mapping[str, Any]], title: str) -> str:
    """Return the SVG: a bar for each phase of each rank, divided by who holds the memory at its peak."""
    bars = [(one["rank"], phase) for one in traced for phase in one["phases"] if phase["peak"]]
    widest = max((phase["peak"] for _, phase in bars), default=1)
    height = _TOP + _ROW * len(bars) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img"'
        ' font-family="sans-serif" font-size="11" fill="#444444">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="8" y="20" font-size="14">{escape(title)}</text>',
        f'<text x="8" y="38">{escape(NOT_MEASURED)}</text>',
    ]
    colours: dict[str, str] = {}
    for place, (rank, phase) in enumerate(bars):
        top, left = _TOP + place * _ROW, float(_LEFT)
        parts.append(f'<text x="8" y="{top + 14}">rank {rank}: {escape(phase["name"])}</text>')
        for entry in phase["at_peak"]:
            width = (_WIDTH - _LEFT - 70) * entry["bytes"] / widest
            if width < 0.5:
                continue
            name = entry["holder"]
            colour = colours.setdefault(name, _COLOURS[len(colours) % len(_COLOURS)])
            label = f"{name} {entry['where']}: {entry['bytes'] / GIB:.2f} GiB, {entry['tensors']} tensors"
            parts.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_ROW - 12}" fill="{colour}"'
                f' stroke="white" stroke-width="0.5"><title>{escape(label)}</title></rect>'
            )
            if width > 60:
                short = name.removeprefix("state: ").rpartition("*.")[2]
                parts.append(
                    f'<text x="{left + 4:.1f}" y="{top + 15}" fill="white">{escape(short[: int(width / 7)])}</text>'
                )
            left += width
        parts.append(f'<text x="{left + 6:.1f}" y="{top + 15}">{phase["peak"] / GIB:.1f} GiB</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _gib(size: float) -> str:
    return f"{size / GIB:8.2f}G"
