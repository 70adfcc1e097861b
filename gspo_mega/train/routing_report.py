"""Metrics of a model with experts, from the sums over (token, layer) pairs that all ranks report."""

from __future__ import annotations

from collections.abc import Sequence

from gspo_mega.config.schema import Moe

Sums = dict[str, float]


def changed_routes(since: str, reports: Sequence[Sums]) -> dict[str, float]:
    """`routing/changed_since_<since>` (`rollout` or `old`); nothing where no rank compared."""
    compared = _total(f"compared_with_{since}", reports)
    return (
        {f"routing/changed_since_{since}": _total(f"changed_since_{since}", reports) / compared} if compared > 0 else {}
    )


def replaced_experts(reports: Sequence[Sums]) -> dict[str, float]:
    """`routing/layer/<layer>/replaced_since_old` of every layer whose routes were compared with the old pass."""
    names = {name for report in reports for name in report if name.startswith("choices/")}
    choices = {int(name.removeprefix("choices/")): _total(name, reports) for name in names}
    return {
        f"routing/layer/{layer}/replaced_since_old": _total(f"replaced/{layer}", reports) / choices[layer]
        for layer in sorted(choices)
        if choices[layer] > 0
    }


def router_losses(moe: Moe, reports: Sequence[Sums]) -> dict[str, float]:
    """`routing/load_balancing_loss` and `routing/z_loss`, each where it is part of the loss."""
    count = _total("num_router_losses", reports)
    names = {"load_balancing_loss": moe.load_balancing != "none", "z_loss": moe.z_loss_coefficient > 0}
    return {f"routing/{name}": _total(name, reports) / count for name, is_on in names.items() if is_on and count > 0}


def expert_loads(reports: Sequence[Sums]) -> dict[str, float]:
    """`routing/load_max_over_mean`, where the expert bias is moved."""
    count = _total("num_loads", reports)
    return {"routing/load_max_over_mean": _total("load_max_over_mean", reports) / count} if count > 0 else {}


def _total(name: str, reports: Sequence[Sums]) -> float:
    return sum(report.get(name, 0.0) for report in reports)
