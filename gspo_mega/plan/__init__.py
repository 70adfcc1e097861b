"""What is decided before a process starts: the layout, its checks, what it costs, and a report of it. No torch.

`plan_run` turns a loaded configuration into a `Plan`, or raises one error with every reason why there is none.
`estimate` adds the figures: state, memory, time, disk. `refuse_what_does_not_fit` compares them with the machines.
"""

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
