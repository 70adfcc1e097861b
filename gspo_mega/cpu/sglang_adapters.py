"""SGLang's adapters (LoRA) on a CPU, computed by its backend `torch_native`: with plain host memory, and with adapters
of experts, for which SGLang has Triton kernels only.
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
    """The tensor: without an accelerator there is nothing that reads page-locked memory faster."""
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
    """Have experts with adapters, `FusedMoEWithLoRA` of this module of SGLang, computed here."""
    stock = module.FusedMoEWithLoRA.__init__

    def start(self: Any, *parts: Any, **named: Any) -> None:
        stock(self, *parts, **named)
        self._lora_runner = _PlainExperts(self.base_layer)

    module.FusedMoEWithLoRA.__init__ = start


def count_whole_segments(module: types.ModuleType) -> None:
    """Have this module of SGLang say which token has which adapter also where `torch_native` has made one segment of
    several requests. SGLang checks that a kernel's grid, which a CPU has not, covers all tokens by the longest request.
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
    """What the experts of this rank add up to, [tokens, hidden] as `hidden`.

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
    """[tokens, out]: what each token's adapter adds. a [slots, matrices x rank, in], b [slots, out, rank]."""
    found = inputs.new_zeros(len(inputs), b.shape[1])
    num_matrices = a.shape[1] // b.shape[2]
    for slot in slots.unique().tolist():
        if slot >= 0:
            rows = slots == slot
            inner = linear(inputs[rows], a[slot]).chunk(num_matrices, dim=-1)
            outer = b[slot].chunk(num_matrices)
            found[rows] = torch.cat([linear(x, own) for x, own in zip(inner, outer, strict=True)], dim=-1)
    return found
