"""Fused operations in a plan: what is fused and why, in words, and what cannot be fused for this model and device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from gspo_mega.base.errors import Violation
from gspo_mega.config.fused_operations import SETTINGS, describe_fusions, fused_operations, obstacle
from gspo_mega.config.schema import Config
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.verification import is_on_gpu


def check_fusions(config: Config, spec: ModelSpec, device: Literal["cpu", "gpu"] | None) -> Iterator[Violation]:
    """Every operation that is asked for and that this model cannot have, on the device or, unknown, on either kind.

    What a machine's libraries lack is found by its ranks.
    """
    on_gpu = is_on_gpu(config, device)
    for key in SETTINGS:
        if getattr(config.engine, key) is not True:
            continue
        reasons = [
            obstacle(config, key, has_experts=spec.moe is not None, has_gpu=place)
            for place in ((True, False) if on_gpu is None else (on_gpu,))
        ]
        if reasons[0] is not None and None not in reasons:
            yield Violation(
                f"engine.{key}",
                f"true, and there is no such operation in {reasons[0]}"
                if reasons[0] != "no experts"
                else f"true, but the model ({spec.family}) has no experts",
                "leave it out (null)",
            )


def describe_operations(config: Config, spec: ModelSpec, on_gpu: bool | None) -> tuple[str, ...]:
    """For the plan: what is fused where, as far as it is known, in whose order, and how experts' tokens travel."""
    places = (True, False) if on_gpu is None else (on_gpu,)
    lines = []
    for has_gpu in places:
        made = fused_operations(config, has_experts=spec.moe is not None, has_gpu=has_gpu)
        where = "" if on_gpu is not None else "on GPUs: " if has_gpu else "without GPUs: "
        lines.append(where + describe_fusions(made))
    if config.engine.batch_invariant:
        lines.append("products, attention and log-softmax in the servers' order (engine.batch_invariant)")
    if spec.moe is not None and config.parallel.expert * config.parallel.expert_tensor > 1:
        lines.append(f"experts' tokens by {config.parallel.expert_dispatcher} (parallel.expert_dispatcher)")
    return tuple(lines)
