"""A function that torch.compile compiles for many kinds of arguments: `main(["ours" or "torch", RECOMPILE_LIMIT])`, in a
fork (`forked_workers.py`) of a process in which torch.compile is not switched off.
"""

from __future__ import annotations

import sys

import torch
from run_configs import make_config

from gspo_mega.engine.precision import fusion_choices, fusion_settings


def main(words: list[str]) -> None:
    # As a rank's model is built; without the key, nothing is fused on a CPU.
    config = make_config(engine=dict(fuse_activation=True) if words[0] == "ours" else {})
    fusion_settings(fusion_choices(config, has_experts=True), has_experts=True)
    if len(words) > 1:
        torch._dynamo.config.recompile_limit = int(words[1])
    inside = []

    @torch.compile(backend="eager")
    def activation(x):
        inside.append(torch.compiler.is_compiling())
        return torch.nn.functional.silu(x) * 2

    for width in range(2, 14):
        for gradient in (False, True):
            activation(
                torch.ones(3, width, dtype=torch.bfloat16, requires_grad=gradient)
                if width % 2
                else torch.ones(3, 3, width, requires_grad=gradient)
            )
            activation(torch.ones([1] * width, requires_grad=gradient))
    # A compiled function's Python runs while it is traced, and never again: what is False ran uncompiled.
    sys.stdout.write(f"uncompiled calls: {inside.count(False)}\n")
