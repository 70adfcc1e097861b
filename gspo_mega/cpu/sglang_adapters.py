"""Compute SGLang's adapters (LoRA) on a CPU with its backend `torch_native`: in plain host memory, and also those of
experts, for which SGLang has only Triton kernels.
"""

from __future__ import annotations

import types
from typing import Any, cast

import torch
from torch.nn.functional import linear, silu


class _PlainHostMemory:
    """Stands in for `torch` in a module of SGLang: no tensor that it makes is page-locked."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *values: Any, pin_memory: bool = False, **options: Any) -> Any:
        return torch.tensor(*values, **options)

    def zeros(self, *sizes: Any, pin_memory: bool = False, **options: Any) -> Any:
        return torch.zeros(*sizes, **options)


def use_plain_host_memory(module: types.ModuleType) -> None:
    """Have this module of SGLang make plain tensors, and keep plain those that it would page-lock."""
    vars(module)["torch"] = _PlainHostMemory()
    cast("Any", torch.Tensor).pin_memory = _as_it_is


def _as_it_is(tensor: Any, *_device: Any) -> Any:
    """Return the tensor itself: without an accelerator, nothing reads page-locked memory faster."""
    return tensor


class _PlainExperts:
    """Stands in for the runner of SGLang's `FusedMoEWithLoRA`: gated SiLU experts without biases."""

    def __init__(self, layer: Any) -> None:
        config = layer.moe_runner_config
        odd = [name for name in ("w13_weight_bias", "w2_weight_bias") if getattr(layer, name, None) is not None]
        odd += [name for name in ("gemm1_alpha", "apply_router_weight_on_input") if getattr(config, name)]
        if config.activation != "silu" or odd:
            said = ", ".join([f"activation {config.activation}", *odd])
            raise NotImplementedError(f"adapters of experts on a CPU: gated SiLU without biases, not {said}")
        self._layer = layer

    def run(self, dispatched: Any, _quant_info: object, lora_info: Any) -> Any:
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        scores, chosen, _ = dispatched.topk_output
        output = experts_with_adapters(
            dispatched.hidden_states,
            (scores, chosen),
            (self._layer.w13_weight, self._layer.w2_weight),
            lora_info.token_lora_mapping,
            (lora_info.gate_up_lora_a_weights, lora_info.gate_up_lora_b_weights),
            (lora_info.down_lora_a_weights, lora_info.down_lora_b_weights),
        )
        return StandardCombineInput(hidden_states=output)


def compute_experts(module: types.ModuleType) -> None:
    """Compute experts with adapters, `FusedMoEWithLoRA` of this module of SGLang, here."""
    stock = module.FusedMoEWithLoRA.__init__

    def start(self: Any, *parts: Any, **named: Any) -> None:
        stock(self, *parts, **named)
        self._lora_runner = _PlainExperts(self.base_layer)

    module.FusedMoEWithLoRA.__init__ = start


def count_whole_segments(module: types.ModuleType) -> None:
    """Let this module of SGLang map tokens to adapters even if `torch_native` has merged several requests into one
    segment. SGLang checks, by the longest request, that a kernel's grid covers all tokens; a CPU has no such grid.
    """
    stock = module._compute_moe_lora_info

    def compute(num_tokens: int, *parts: Any, max_len: int, **named: Any) -> Any:
        return stock(num_tokens, *parts, max_len=max(max_len, num_tokens), **named)

    vars(module)["_compute_moe_lora_info"] = compute


def experts_with_adapters(
    hidden: torch.Tensor,
    routes: tuple[torch.Tensor, torch.Tensor],
    weights: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return the weighted sum of this rank's experts, [tokens, hidden] as `hidden`.

    `routes`: scores and experts, [tokens, experts per token]; an expert of another rank is negative. `weights`: of gate
    and up [experts, 2 width, hidden], and down [experts, hidden, width]. `slots` [tokens]: each token's adapter,
    negative without one. `gate_up`: A [slots, experts, 2 rank, hidden] and B [slots, experts, 2 width, rank], gate
    before up; `down`: A [slots, experts, rank, width] and B [slots, experts, hidden, rank]. alpha / rank is in B.
    """
    scores, chosen = routes
    output = torch.zeros_like(hidden)
    for expert, (into, out_of) in enumerate(zip(*weights, strict=True)):
        tokens, places = torch.where(chosen == expert)
        if not len(tokens):
            continue
        part, own = hidden[tokens], slots[tokens]
        both = linear(part, into) + _added(part, own, gate_up[0][:, expert], gate_up[1][:, expert])
        gate, up = both.chunk(2, dim=-1)
        inner = silu(gate) * up
        result = linear(inner, out_of) + _added(inner, own, down[0][:, expert], down[1][:, expert])
        output.index_add_(0, tokens, result * scores[tokens, places, None].to(result.dtype))
    return output


def _added(inputs: torch.Tensor, slots: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return what each token's adapter adds, [tokens, out]. a [slots, matrices x rank, in], b [slots, out, rank]."""
    found = inputs.new_zeros(len(inputs), b.shape[1])
    num_matrices = a.shape[1] // b.shape[2]
    for slot in slots.unique().tolist():
        if slot >= 0:
            rows = slots == slot
            inner = linear(inputs[rows], a[slot]).chunk(num_matrices, dim=-1)
            outer = b[slot].chunk(num_matrices)
            found[rows] = torch.cat([linear(x, own) for x, own in zip(inner, outer, strict=True)], dim=-1)
    return found
