"""What is decided before a process starts: the layout, its checks, what it costs, a report. No torch."""

from gspo_mega.plan.estimate import Estimate, estimate, refuse_what_does_not_fit
from gspo_mega.plan.layout import Coordinates, Layout
from gspo_mega.plan.report import render_report
from gspo_mega.plan.resolve import Plan, plan_run, resolve_layout

__all__ = [
    "Coordinates",
    "Estimate",
    "Layout",
    "Plan",
    "estimate",
    "plan_run",
    "refuse_what_does_not_fit",
    "render_report",
    "resolve_layout",
]
