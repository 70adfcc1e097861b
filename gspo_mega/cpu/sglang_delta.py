"""Gated delta nets of SGLang's models without kernels (Qwen3-Next, Qwen3.5).

SGLang's backend for these layers, and its code for Qwen3.5, call functions that exist as kernels for GPUs and, for
CPUs, in a compiled package. `lend_kernels` puts stand-ins with the same arguments under the names that they are called
by. Those of the delta rule work on the pools in which SGLang keeps what a request's convolution and rule remember; the
arithmetic is `delta_rule.py`'s, which the trainer uses too. `gated_norm` replaces the norm's kernel.

Only a server process imports this file.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from gspo_mega.cpu.delta_rule import causal_conv1d, chunk_gated_delta_rule, gates, l2norm


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **unused: Any,
) -> torch.Tensor:
    """Convolve the new tokens of all requests: x [channels, t], weight [channels, width]; returns the shape of x.

    `conv_states` [slots, channels, width - 1] has the inputs before them, those of a request in the slot that
    `cache_indices` [requests] names, and gets the last ones. `has_initial_state` [requests]: false for a request that
    begins, whose slot may have anything. `query_start_loc` [requests + 1]: where each request's tokens begin.
    """
    slots = cache_indices.long()
    before = conv_states[slots].masked_fill(~has_initial_state[:, None, None], 0)
    out, after = causal_conv1d(
        x.T[None, : int(query_start_loc[-1])],
        weight,
        bias,
        activation=activation,
        initial_state=F.pad(before, (1, 0)),
        output_final_state=True,
        cu_seqlens=query_start_loc,
    )
    assert after is not None
    conv_states[slots] = after[:, :, 1:].to(conv_states.dtype)
    return out[0].T


def convolve_next(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: torch.Tensor,
    **unused: Any,
) -> torch.Tensor:
    """Convolve one more token of each request: x [requests, channels]; returns that shape. States as in `convolve`."""
    slots = conv_state_indices.long()
    seen = torch.cat([conv_states[slots].to(x.dtype), x[:, :, None]], dim=2)
    conv_states[slots] = seen[:, :, 1:].to(conv_states.dtype)
    out = (seen.float() * weight.float()).sum(dim=2)
    if bias is not None:
        out = out + bias.float()
    return (F.silu(out) if activation in ("silu", "swish") else out).to(x.dtype)


def prefill_gates(
    a_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the decay's logarithm and beta [1, t, heads] fp32 of a, b [t, heads]."""
    g, beta = gates(a_log, a, dt_bias, b)
    return g[None], beta[None]


def rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    **unused: Any,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Apply the rule to the new tokens of all requests; arguments as in `chunk_gated_delta_rule`.

    `initial_state` [slots, heads, value size, key size] is the pool, in which each request's matrix, at its slot of
    `initial_state_indices` [requests], is read and replaced. Returns the output, the new matrices, and None, for
    matrices after every chunk.
    """
    slots = initial_state_indices.long()
    out, after = chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state=initial_state[slots].mT,
        output_final_state=True,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )
    assert after is not None
    initial_state[slots] = after.mT.to(initial_state.dtype)
    return out, after, None


def rule_next(
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    **unused: Any,
) -> torch.Tensor:
    """Apply the rule to one more token of each request: q, k [1, requests, key heads, size], v [1, requests, heads,
    size], a, b [requests, heads]; returns the form of v. The pool is that of `rule`.
    """
    slots = initial_state_indices.long()
    g, beta = gates(A_log, a, dt_bias, b)
    shared = v.size(2) // k.size(2)
    query, key = (l2norm(x[0].float()).repeat_interleave(shared, dim=1) for x in (q, k))
    state = initial_state_source[slots].float() * g.exp()[..., None, None]
    written = beta[..., None] * (v[0].float() - (state @ key[..., None])[..., 0])
    state = state + written[..., None] * key[..., None, :]
    initial_state_source[slots] = state.to(initial_state_source.dtype)
    return ((state @ query[..., None])[..., 0] * q.size(-1) ** -0.5).to(v.dtype)[None]


def plus_one_norms(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm queries and keys [t, heads x head_dim], multiplied by 1 + weight: [t x heads, head_dim] each."""
    found = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        wide = x.reshape(-1, head_dim).float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight.float())
        found.append(normed.to(x.dtype))
    return found[0], found[1]


def plus_one_norms_and_gate(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same for `q_gate` [t, heads x 2 head_dim], in which each head's query is followed by its gate. Returns also
    the gates [t x heads, head_dim].
    """
    query, gate = q_gate.reshape(-1, num_heads, 2 * head_dim).chunk(2, dim=-1)
    normed = plus_one_norms(query.flatten(1), k, q_weight, k_weight, eps, head_dim)
    return *normed, gate.reshape(-1, head_dim).contiguous()


def multiply_by_gate(x: torch.Tensor, gate: torch.Tensor) -> None:
    """Multiply x by the sigmoid of as many gates, in place."""
    x.copy_(x.float() * torch.sigmoid(gate.reshape(x.shape).float()))


def split_projections(
    qkvz: torch.Tensor, ba: torch.Tensor, num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split [t, queries | keys | values | gates] and [t, betas | alphas]: what is convolved, gates [t, heads, size],
    betas and alphas [t, heads].
    """
    values = num_v_heads * head_v_dim
    convolved, z = qkvz.split([2 * num_k_heads * head_k_dim + values, values], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return convolved.contiguous(), z.reshape(-1, num_v_heads, head_v_dim), b.contiguous(), a.contiguous()


def gated_norm(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Replace `stock`, the `forward` of SGLang's norms that multiply by SiLU of a gate: FusedRMSNormGated, and RMSNorm
    if it norms a whole row and before the gate.
    """

    def forward(self: Any, x: torch.Tensor, g: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        is_other = getattr(self, "group_size", None) is not None or not getattr(self, "norm_before_gate", True)
        if rest or options or is_other or self.activation not in ("silu", "swish"):
            return stock(self, x, g, *rest, **options)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.float()
        return (normed * F.silu(g.float())).to(x.dtype)

    return forward


def lend_kernels() -> None:
    """Let SGLang import its kernels for a CPU, whose package is not installed."""
    module: Any = types.ModuleType("sgl_kernel.mamba")
    module.causal_conv1d_fn_cpu = convolve
    module.causal_conv1d_update_cpu = convolve_next
    module.chunk_gated_delta_rule_cpu = rule
    sys.modules.setdefault(module.__name__, module)
    operators: Any = torch.ops.sgl_kernel
    operators.fused_gdn_gating_cpu = prefill_gates
    operators.fused_sigmoid_gating_delta_rule_update_cpu = rule_next
    operators.fused_qk_gemma_rmsnorm_cpu = plus_one_norms
    operators.fused_qk_gemma_rmsnorm_with_gate_cpu = plus_one_norms_and_gate
    operators.fused_sigmoid_mul_cpu = multiply_by_gate
    operators.fused_qkvzba_split_reshape_cat_contiguous_cpu = split_projections
