"""Transformer Engine's core attention on a CPU: its module, with this package's packed attention as its kernel.

cuDNN's kernels have no Python. Both take the same packed sequences and context-parallel layout, with fp32 softmax.
"""

from __future__ import annotations

from typing import Any

import torch


def replace_kernel() -> None:
    """Let Megatron's `TEDotProductAttention` compute with `packed_sdpa.attend`. Imports Megatron."""
    import megatron.core.extensions.transformer_engine as extensions

    attention: Any = extensions.TEDotProductAttention
    attention.forward = _forward


def _forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    attn_mask_type: object,
    attention_bias: torch.Tensor | None = None,
    packed_seq_params: Any = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Arguments, result and collectives as of `packed_sdpa.attend`.

    Raises ValueError without packed sequences, for a mask or bias of the caller's, and for another kind than causal.
    """
    from gspo_mega.cpu.packed_sdpa import attend

    is_causal = "causal" in str(getattr(attn_mask_type, "name", attn_mask_type))
    if packed_seq_params is None or attention_mask is not None or attention_bias is not None or not is_causal:
        raise ValueError("on a CPU Transformer Engine's attention takes packed causal sequences only")
    if module.softmax_type != "vanilla" or module.window_size not in (None, (-1, -1), (-1, 0)):
        raise ValueError("on a CPU Transformer Engine's attention has neither sinks nor windows")
    return attend(query, key, value, packed_seq_params, module.cp_group, module.softmax_scale)
