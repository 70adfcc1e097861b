"""SGLang on a CPU with operations that do not depend on the batch: the servers' side of `engine.batch_invariant`.

The layers of dense Qwen3, the LM head and the log-softmax here are those of the trainer (`gspo_mega.cpu`),
in the same order and with the same roundings, so that a sampled token's log-prob is the trainer's to the last bit. The
attention backend is the mark: a server that has `InvariantCpuAttention` of `sglang_invariant_attention.py` computes all
of it, and refuses a model that has other layers. Imported inside a server process only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import rms_norm

from gspo_mega.cpu import row_operations as rows


def is_on() -> bool:
    """Whether the forward pass under way is one of a batch-invariant server."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    from gspo_mega.cpu.sglang_invariant_attention import InvariantCpuAttention

    return isinstance(get_attn_backend(), InvariantCpuAttention)


def layers_forward(model: Any, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> torch.Tensor:
    """Hidden states [tokens, hidden] after the last norm, of all layers of a dense Qwen3 in fp32 or bf16."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    backend: Any = get_attn_backend()
    hidden = model.embed_tokens(input_ids)
    cache = model.layers[0].self_attn.rotary_emb.cos_sin_cache.index_select(0, positions.flatten())
    cos, sin = (torch.cat((half, half), -1)[:, None] for half in cache.to(hidden.dtype).chunk(2, dim=-1))
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        dim, heads = attention.head_dim, attention.num_heads
        normed = _norm(hidden, layer.input_layernorm)
        qkv = rows.linear(normed, attention.qkv_proj.weight, attention.qkv_proj.bias).view(len(hidden), -1, dim)
        last_key = heads + attention.num_kv_heads
        query = rows.rotate(_norm(qkv[:, :heads], attention.q_norm), cos, sin)
        key = rows.rotate(_norm(qkv[:, heads:last_key], attention.k_norm), cos, sin)
        attended = backend.attend_plain(query, key, qkv[:, last_key:], attention.attn, forward_batch)
        hidden = hidden + rows.linear(attended, attention.o_proj.weight)
        gate_up = rows.linear(_norm(hidden, layer.post_attention_layernorm), mlp.gate_up_proj.weight)
        gate, up = gate_up.chunk(2, dim=-1)
        hidden = hidden + rows.linear(rows.silu(gate) * up, mlp.down_proj.weight)
    return _norm(hidden, model.norm)


def _norm(x: torch.Tensor, norm: Any) -> torch.Tensor:
    return rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


def head_of(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`stock`, SGLang's `LogitsProcessor._compute_lm_head`, with the trainer's product where the server is one of
    these.
    """

    def compute(self: Any, hidden_states: torch.Tensor, lm_head: Any, *rest: Any, **options: Any) -> torch.Tensor:
        if is_on():
            return rows.logits(hidden_states, lm_head.weight)
        return stock(self, hidden_states, lm_head, *rest, **options)

    return compute


def log_softmax_of(stock: Callable[..., None], backend: str) -> Callable[..., None]:
    """`stock`, the `__init__` of SGLang's Sampler: with the attention `backend` it returns log-probs by log-softmax.

    By default they are the logarithms of a softmax; the other way is SGLang's own, for its deterministic inference.
    """

    def initialize(self: Any) -> None:
        from sglang.srt.runtime_context import get_server_args

        stock(self)
        arguments: Any = get_server_args()  # its fields are made by a decorator
        if arguments.attention_backend == backend:
            self.enable_deterministic = True

    return initialize
