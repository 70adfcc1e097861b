"""Models computed in fp64: two implementations of one model then differ by a millionth of a logit at most, on every
processor. What is left is Megatron's angles of rotary embeddings, which are fp32.

In fp32 they differ by what each rounds, which depends on the processor's kernels. Models amplify it: two with gated
delta nets were 1.1e-5 apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def kept_in_fp64() -> Iterator[None]:
    """Let `x.float()` and `x.to(torch.float32)` leave a tensor in fp64: models name fp32 where bf16 would not do."""
    to_float, to = torch.Tensor.float, torch.Tensor.to

    def kept(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x if x.dtype == torch.float64 else to_float(x, *args, **kwargs)

    def kept_to(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x if x.dtype == torch.float64 and torch.float32 in (*args, *kwargs.values()) else to(x, *args, **kwargs)

    with mock.patch.multiple(torch.Tensor, float=kept, to=kept_to):
        yield


def exact_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """[t, vocabulary] float64 of a model of transformers, which is widened in place; tokens [t] int64."""
    model.double().eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others have no fp64
    with torch.no_grad(), kept_in_fp64():
        return model(tokens[None]).logits[0]


def _add_to_main_grad(parameter: Any) -> None:
    parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


@contextlib.contextmanager
def exact_engine(engine: Any) -> Iterator[None]:
    """Let a policy compute in fp64; gradients are added up in fp32. Its weights are widened in place, for good, so that
    its optimizer has lost them.
    """
    from gspo_mega.cpu.delta_rule import compute_in

    for chunk in engine.chunks:
        chunk.double()
        for parameter in (p for p in chunk.parameters() if p.requires_grad):  # which has lost Megatron's hook
            parameter.register_post_accumulate_grad_hook(_add_to_main_grad)
        configs = [engine.megatron_config, *(getattr(module, "config", None) for module in chunk.modules())]
        for config in configs:
            if hasattr(config, "pipeline_dtype"):
                config.params_dtype = config.pipeline_dtype = torch.float64
    compute_in(torch.float64)
    try:
        with kept_in_fp64():
            yield
    finally:
        compute_in(torch.float32)
