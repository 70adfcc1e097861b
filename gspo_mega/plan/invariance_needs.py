"""What `engine.batch_invariant` needs of the model and of the device. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from gspo_mega.base.errors import Violation
from gspo_mega.config.schema import Config
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.verification import is_on_gpu


def check_invariance(config: Config, spec: ModelSpec, device: Literal["cpu", "gpu"] | None) -> Iterator[Violation]:
    """Models and devices for which the operations were not written. `device`: the ranks', None if unknown."""
    if not config.engine.batch_invariant:
        return
    if is_on_gpu(config, device):
        yield Violation(
            "engine.batch_invariant", "true on GPUs: its operations are written and measured for CPUs", "false"
        )
    if spec.family != "qwen3":
        yield Violation(
            "engine.batch_invariant",
            f"true, and the model is {spec.family}: the servers' layers are written for dense qwen3",
            "false",
        )
    elif spec.rope_scaling is not None:
        yield Violation(
            "engine.batch_invariant", "true, and the model's rotary positions are stretched (rope_scaling)", "false"
        )
